"""The HTML page: its words are those of --price-ratio, it loads nothing, and what comes out of a log stays text."""

import functools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import harness.report
from harness import records
from harness.report import decision
from harness.report.verdict_text import Page
from tests import boxes
from tests.conftest import ROOT
from tests.handmade import upgrade

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<script>alert(1)</script>"
ERROR = "</script><img src=x onerror=alert(2)> & so on"
FLEET = ["RTX PRO 6000", "B200", "--fleet", "7+1:3+1", "--fleet-base", "3+1=8.8"]
KINDS = ["named", "logs", "published", "measured", "projected", "fleet", "hostile", "refused", "lone"]
PRICES = (0.8, 1.2, 1.7, 1.95, 2.0, 2.05, 2.4)
REFUSED = ["refused", "lone"]  # with exit code 3, and no price changes that
LIVE = [kind for kind in KINDS if kind not in REFUSED]


class Document(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open) and data.strip():
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> dict[str, list[str]]:
    """By kind of input, the command line without its price."""
    folder = tmp_path_factory.mktemp("boxes")
    gpus = {"a": boxes.H200, "b": boxes.B200, "c": records.Gpu(device="cuda", name=HOSTILE, count=8)}
    gpus |= {"d": boxes.CPU, "e": boxes.B200}
    rates = {"a": {8192: 100, 131072: 400}, "b": {8192: 140, 131072: 805, 262144: 820}, "c": {8192: 140}}
    rates |= {"d": {8192: 1}, "e": {65536: 700}}
    for name, gpu in gpus.items():
        boxes.sweep(folder / name, gpu, rates[name], {} if name == "b" else {196608: "crashed"}, seed=len(rates[name]))
    for name, speed in (("a", 1.0), ("b", 1.8)):
        boxes.decomposed(folder / name, gpus[name], speed)
    text = (folder / "c" / "sweep_1.jsonl").read_text().replace('"boom"', json.dumps(ERROR))
    hostile = folder / HOSTILE.replace("/", "")
    hostile.mkdir()
    for name in ("sweep_1.jsonl", "<b>copy.jsonl"):
        (hostile / name).write_text(text)
    a = str(folder / "a")
    return {
        "published": [str(ROOT / "results/published/h200"), str(ROOT / "results/published/b200")],
        "measured": [a, str(folder / "b")],
        "named": ["H100", "B200"],
        "logs": [str(ROOT / f"tests/data/logs/mlperf_8x_{gpu}_llama31_8b.log") for gpu in ("gb200", "gb300")],
        "projected": [str(ROOT / "results/published/h200"), "--project-to", "B300"],
        "fleet": FLEET,
        "hostile": [a, str(hostile), "--allow-mismatch"],
        "refused": [a, str(folder / "d")],
        "lone": [a, str(folder / "e")],
    }


@pytest.fixture(scope="module")
def pages(arguments, tmp_path_factory):
    """By kind, the file with the page at twice the price."""
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for kind, words in arguments.items():
        found[kind] = folder / f"{kind}.html"
        code, out, err = upgrade(*words, "--price-ratio", "2", "--html", str(found[kind]))
        assert (code, out) == (3 if kind in REFUSED else 0, str(found[kind])), err
    return found


@pytest.fixture(scope="module")
def printed(arguments):
    """What the command prints of a kind at a price, its blanks folded."""

    @functools.cache
    def run(kind: str, price: float) -> str:
        code, out, err = upgrade(*arguments[kind], "--price-ratio", str(price))
        assert code == 0, err
        return out

    return run


def steps(path) -> list[dict]:
    script = re.search(r'<script id="by-price" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(script[1])["steps"]


def answers(found: list[dict]) -> set[str]:
    return {step["parts"]["answer"] for step in found}


def verdict(printed: str) -> str:
    return printed.partition(" Verdict ")[2].replace("* ", "")


@pytest.mark.parametrize("kind", KINDS)
def test_structure(pages, kind):
    text = pages[kind].read_text()
    page = Document(text)
    assert len(text.encode()) < 2e6
    assert not [a for _, a in page.tags for name in ("src", "href", "action", "style", "xlink:href") if name in a]
    assert not set(re.findall(r"https?://[^\"' <]*", text)) - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "url(" not in text and "@import" not in text
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert len(page.all("caption")) == len(page.all("table")) > 0
    assert {a["scope"] for a in page.all("th")} == {"col", "row"}
    assert all(a["aria-labelledby"] in ids for a in page.all("section"))
    assert all(a.get("aria-hidden") == "true" for a in page.all("div") if a.get("class") == "chart")
    assert len(page.all("figcaption")) == len(page.all("figure"))
    assert "aria-live" in next(a for _, a in page.tags if a.get("id") == "answer")
    if kind in LIVE:
        assert {a["for"] for a in page.all("label")} == {a["id"] for a in page.all("input")} == {"ratio"}


def test_question_and_answer_come_first(pages):
    page = Document(pages["published"].read_text())
    assert page.texts[1:3] == [
        "Is B200 SXM worth 2.00x the price of H200 SXM?",
        "It costs the same per token for long context; it costs more per token for lengths in between and short or "
        "packed data.",
    ]
    sections = [a["id"] for a in page.all("section")]
    assert sections[:4] == ["verdict", "money", "speed", "gate"] and sections[-1] == "facts"
    assert answers(steps(pages["published"])) >= {"It costs less per token for every length."}
    refused = Document(pages["refused"].read_text())
    assert refused.texts[2] == "They are not comparable: device: cuda and cpu." and not refused.all("input")
    lone = Document(pages["lone"].read_text())
    assert lone.texts[2] == "No length was measured on both boxes, so nothing can be said."
    fleet = Document(pages["fleet"].read_text())
    assert fleet.texts[2] == (
        "The job costs the same if one B200 SXM does 2.33x the work of one RTX PRO 6000 Workstation; its peaks allow "
        "4.47x by compute and 4.47x by bandwidth."
    )


def test_the_answer_is_that_of_your_documents_and_a_need_comes_before_it(tmp_path, arguments):
    path = tmp_path / "page.html"
    words = [*arguments["published"], "--price-ratio", "2", "--doc-len", "8192", "--html", str(path)]
    upgrade(*words)
    assert Document(path.read_text()).texts[2] == "It costs more per token for short or packed data."
    upgrade(*words, "--needs", "memory=170GiB,fp4")
    assert Document(path.read_text()).texts[2] == (
        "You need memory 170 GiB: H200 SXM cannot do it at all and B200 SXM can (nothing to install). You need fp4: "
        "only B200 SXM's silicon can, but its software: not measured. Do not pay for it yet."
    )


@pytest.mark.parametrize("kind", LIVE)
def test_every_price_has_the_words_of_the_command(pages, printed, kind):
    found = {step["price"]: step["parts"] for step in steps(pages[kind])}
    assert len(found) >= 50
    for price in PRICES:
        parts, said = found[f"{price:.2f}"], printed(kind, price)
        if kind != "fleet":
            assert " ".join(Document(parts["verdict"]).texts) == verdict(said) != ""
        for name in set(parts) - {"title", "answer"}:  # the command prints no captions, and wraps the heads of columns
            part = re.sub("<(caption|thead)>.*?</\\1>", "", parts[name], flags=re.DOTALL)
            assert not [text for text in Document(part).texts if text not in said]
        assert f"{price:.2f}x" in parts["title"]


def test_a_price_between_the_steps_is_one_too(tmp_path, arguments):
    path = tmp_path / "page.html"
    upgrade(*arguments["published"], "--price-old", "2.5", "--price-new", "4.93", "--html", str(path))
    _, printed, _ = upgrade(*arguments["published"], "--price-old", "2.5", "--price-new", "4.93")
    page = Document(path.read_text())
    (slider,) = page.all("input")
    assert slider["aria-valuetext"] == steps(path)[int(slider["value"])]["price"] == "1.97"
    assert " ".join(Document(steps(path)[int(slider["value"])]["parts"]["verdict"]).texts) == verdict(printed)
    assert "price units" in steps(path)[0]["parts"]["money"]


def test_without_a_price_it_says_up_to_which(tmp_path, arguments):
    path = tmp_path / "page.html"
    upgrade(*arguments["published"], "--html", str(path))
    _, printed, _ = upgrade(*arguments["published"])
    first = steps(path)[0]
    assert (first["price"], first["x"]) == ("no price given", None)
    assert " ".join(Document(first["parts"]["verdict"]).texts) == verdict(printed)
    assert "pays up to 1.99-2.03x the price for long context" in first["parts"]["answer"]


def test_what_comes_out_of_a_log_is_text(pages):
    text = pages["hostile"].read_text()
    page = Document(text)
    assert len(page.all("script")) == 2 and not page.all("img") and not page.all("b")
    assert any(HOSTILE in x for x in page.texts) and any(ERROR in x for x in page.texts)
    assert any("<b>copy.jsonl" in x for x in page.texts) and "question" in [a["id"] for a in page.all("section")]
    assert any(HOSTILE in x for x in Document(steps(pages["hostile"])[0]["parts"]["money"]).texts)
    for step in steps(pages["hostile"]):
        for part in step["parts"].values():
            assert {tag for tag, _ in Document(part).tags} <= {
                *["div", "table", "caption", "span", "thead", "tbody", "tr", "th", "td", "p"]
            }


def test_the_line_is_where_its_price_is(pages):
    """Vega put the marks there, page.py the line: both are on one scale."""
    text = pages["published"].read_text()
    layer = re.search(r'<g class="mark-symbol role-mark.*?</g>', text.partition('id="speed"')[2], re.DOTALL)[0]
    marks = re.findall(r'transform="translate\(([\d.]+),', layer)
    guide = [1.184, 1.617, 1.839, 1.990, 2.019, 2.033]
    assert len(marks) == 6
    by_price = {step["price"]: step["x"] for step in steps(pages["published"])}
    assert [float(x) / by_price["2.00"] * 2 for x in marks] == pytest.approx(guide, abs=0.003)
    assert by_price["1.00"] == pytest.approx(by_price["2.00"] / 2, abs=0.1)


def test_a_section_it_does_not_know_is_shown_before_the_facts(monkeypatch, tmp_path):
    def news(page, section):
        page.head("News")
        page.say(section["text"])
        page.table(["figure"], [["7"]])

    decide = decision.decide
    monkeypatch.setattr(decision, "decide", lambda *words: decide(*words) | {"news": {"text": HOSTILE}})
    monkeypatch.setattr(Page, "news", news, raising=False)
    path = tmp_path / "page.html"
    assert upgrade("--html", str(path))[0] == 0
    page = Document(path.read_text())
    assert [a["id"] for a in page.all("section")][-2:] == ["news", "facts"]
    at = page.texts.index("News")
    assert page.texts[at + 1 : at + 5] == [HOSTILE, "News", "figure", "7"]


@pytest.mark.parametrize("package", ["jinja2", "vl_convert"])
def test_a_missing_package_is_one_line(monkeypatch, tmp_path, package):
    for module in ("page", "charts"):
        monkeypatch.delitem(sys.modules, f"harness.report.{module}", raising=False)
        monkeypatch.delattr(harness.report, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = upgrade("--html", str(tmp_path / "page.html"))
    assert (code, out, err.count("\n"), list(tmp_path.iterdir())) == (2, "", 1, [])
    assert package in err and "pip install -r requirements/report.txt" in err


def test_a_file_that_cannot_be_written_is_one_line_and_the_old_one_stays(tmp_path, python):
    for path in (tmp_path / "no" / "page.html", tmp_path, "/dev/full"):
        code, out, err = upgrade("--html", str(path))
        assert (code, out) == (1, "") and err.count("\n") == 1 and err.startswith(f"{path}: "), err
    old = tmp_path / "page.html"
    old.write_text("the old one")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999)); import should_upgrade;"
    words = [python, "-c", f"{limit} sys.exit(should_upgrade.main(['--html', {str(old)!r}]))"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert old.read_text() == "the old one" and list(tmp_path.iterdir()) == [old]
    assert upgrade("--html", str(old))[0] == 0
    assert old.read_text().startswith("<!doctype html>") and list(tmp_path.iterdir()) == [old]


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as play:  # root, as in a container, has no sandbox
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, pages):
    """A function that opens a kind of page. At the end nothing was complained about and nothing left the page."""
    seen, contexts = [], []

    def load(kind: str, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: seen.append(message.text))
        page.on("pageerror", lambda error: seen.append(str(error)))
        page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: seen.append(request.url) if request.url != pages[kind].as_uri() else None)
        page.goto(pages[kind].as_uri())
        return page

    yield load
    for context in contexts:
        context.close()
    assert seen == []


@pytest.mark.parametrize("kind", LIVE)
def test_the_slider_says_what_the_command_says(opened, pages, printed, kind):
    page, prices = opened(kind), [step["price"] for step in steps(pages[kind])]
    slider = page.get_by_role("slider", name="Price of a new GPU over the price of an old one")
    section = "#fleet" if kind == "fleet" else "#verdict"
    for price in PRICES:
        slider.fill(str(prices.index(f"{price:.2f}")))
        said = printed(kind, price)
        paragraphs = [" ".join(text.split()) for text in page.locator(f"{section} p").all_inner_texts()]
        if kind == "fleet":
            assert paragraphs and all(text in said for text in paragraphs)
        else:
            assert " ".join(paragraphs) == verdict(said)
        assert slider.get_attribute("aria-valuetext") == f"{price:.2f}" == page.locator("#shown").inner_text()
        assert f"{price:.2f}x" in page.get_by_role("heading", level=1).inner_text()


def test_keys_move_it_and_the_line_follows(opened):
    page = opened("measured")
    line = page.locator(".price_marks line")
    before = line.bounding_box()["x"]
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#shown").inner_text() == "2.05"
    assert page.get_by_role("status").inner_text()
    assert 0 < line.bounding_box()["x"] - before < 20
    page.keyboard.press("Home")
    assert page.locator("#shown").inner_text() == "0.50"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_wider_than_the_window(opened, kind, width):
    page = opened(kind, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_dark_print_and_without_a_script(opened):
    def background(page):
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    page = opened("published", color_scheme="dark")
    assert background(page) < 150
    axis = page.locator("#speed svg text").first.evaluate("text => getComputedStyle(text).fill")
    assert sum(map(int, re.findall(r"\d+", axis))) > 600
    page.emulate_media(media="print", color_scheme="dark")
    assert background(page) == 3 * 255 and not page.get_by_role("slider").is_visible()
    page = opened("published", java_script_enabled=False)
    assert not page.locator("#slider").is_visible()
    assert page.locator("#speed svg").is_visible() and "break-even" in page.locator("#verdict").inner_text()


def test_what_comes_out_of_a_log_is_text_in_a_browser_too(opened):
    page = opened("hostile")
    page.get_by_role("slider").fill("3")
    assert page.locator("img, b").count() == 0
    assert HOSTILE in page.locator("h1").inner_text()
    assert ERROR in page.locator("#speed").inner_text()
