// Shows the texts that were made for the price ratio the slider is at. Nothing is computed here.
const { steps } = JSON.parse(document.getElementById("by-price").textContent);
const slider = document.getElementById("ratio");

function show() {
  const step = steps[slider.value];
  document.getElementById("shown").textContent = step.price;
  slider.setAttribute("aria-valuetext", step.price);
  for (const part of document.querySelectorAll("[data-live]")) part.innerHTML = step.parts[part.dataset.live] ?? "";
  for (const line of document.querySelectorAll(".price_marks line")) {
    line.style.display = step.x === null ? "none" : "";
    line.setAttribute("transform", `translate(${step.x ?? 0},0)`);
  }
}

slider.addEventListener("input", show);
document.getElementById("slider").hidden = false;
show();
