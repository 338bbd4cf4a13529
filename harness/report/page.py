"""The decision as one HTML file: verdict and price first, nothing loaded from elsewhere.

    page.write(Path("upgrade.html"), ask, options)      # ask(options) -> tables.View, from boxes read once

The words are those of verdict_text.Page, which here collects what it prints elsewhere. The slider does not compute:
the whole decision is made here once for every price ratio, and what differs between them is in the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.report import charts, cost, tables
from harness.report.charts import HTML
from harness.report.decision import Options
from harness.report.table import Table
from harness.report.tables import View
from harness.report.verdict import between
from harness.report.verdict_text import Page

STEP, MOST_STEPS = 0.05, 120  # of the price ratio; a wide range gets wider steps
OWN = {  # sections of the page alone: heading, tables
    "steps": ("Where the time of a step goes", ("decomposition", "liger", "attention", "stacks")),
    "facts": ("Facts of both boxes", ("specifications", "environment", "ceilings")),
}
LENGTHS = {"long": "long context", "mixed": "lengths in between", "short": "short or packed data"}
LENGTHS |= {"unknown": "the lengths there are"}
OUTCOMES = {cost.WINS: "costs less per token", cost.EVEN: "costs the same per token"}
OUTCOMES |= {cost.LOSES: "costs more per token", "depends": "sometimes costs less per token"}


class Sections(Page):
    """The page's sections by name: a heading, and blocks (kind, text or Table) in their order."""

    def __init__(self, view: View):
        super().__init__(view.result, None)
        self.sections: dict[str, dict] = {}
        self.name = "question"
        if self.result["question"]["problems"]:
            self.head("What could not be read")
            self.bullets(self.result["question"]["problems"])
        for name, section in self.result.items():
            if name != "question":
                self.name = name
                getattr(self, name)(section)
        made = tables.make(view)
        for name, (head, members) in OWN.items():
            if shown := [made[member] for member in members if member in made]:
                self.name = name
                self.head(head)
                for table in shown:
                    self.show_table(table)

    def head(self, text: str) -> None:
        self.sections[self.name] = {"name": self.name, "head": text, "blocks": []}

    def say(self, text: str, style: str = "") -> None:
        kind = "item" if text.startswith("* ") else "more" if text.startswith("  ") else "say"
        self.add(kind, text.removeprefix("* ").strip())

    def bullets(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.add("warning", text)

    def show_table(self, table: Table) -> None:
        if table.rows:
            self.add("table", table)
        for note in table.notes:
            self.add("note", note.replace("**", ""))

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        if rows:
            self.add("table", Table(self.sections[self.name]["head"], header, rows))

    def add(self, kind: str, content: str | Table) -> None:
        self.sections[self.name]["blocks"].append((kind, content))

    def question(self) -> str:
        price = self.result["question"]["price_ratio"]
        if price:
            return f"Is {self.new} worth {price:.2f}x the price of {self.old}?"
        return f"How much more than {self.old} may {self.new} cost?"

    def answer(self) -> str:
        """One sentence: of the verdicts (of yours, if said which), else what stands against any, else the bounds."""
        compared = self.result.get("comparable", {"never": [], "differences": []})
        differ = "; ".join(compared["never"] + compared["differences"])
        said = [v for v in self.result.get("verdict", ()) if v["decided_by"]]
        whole = [v for v in said if v["about"] == "need"] or [v for v in said if v["about"] == "renting"][:1]
        if whole:  # these decide whatever is trained
            return " ".join(v["sentence"].partition("; ")[0].rstrip(".") + "." for v in whole)
        groups: dict[str, list[str]] = {}
        for v in [v for v in said if v.get("yours")] or said:
            up_to = f"pays up to {between(v['decided_by']['low'], v['decided_by']['high'])} the price"
            groups.setdefault(OUTCOMES.get(v["outcome"], up_to), []).append(
                LENGTHS.get(v["about"]) or _trained(v["about"])
            )
        if groups:
            texts = "; it ".join(f"{what} for {' and '.join(names)}" for what, names in groups.items())
            texts = texts.replace(" and ".join([*LENGTHS.values()][:3]), "every length")
            return f"It {texts}{', if one may compare them at all' if differ else ''}."
        if fleet := self.result.get("fleet"):
            peaks = " and ".join([f"{r:.2f}x by {name}" for name, r in fleet["peak_ratios"].items()])
            need = f"{fleet['needed']['equal_spend']:.2f}x the work of one {self.old}"
            return (
                f"The job costs the same if one {self.new} does {need}; its peaks allow {peaks or 'nobody knows what'}."
            )
        ordered = sorted(self.sections.values(), key=lambda section: section["name"] != "money")
        blocks = [block for section in ordered for block in section["blocks"]]
        first = next((text for kind, text in blocks if kind == "say"), "Nothing is known that decides it.")
        return f"They are not comparable: {differ}." if differ else first


def write(path: Path, ask: Callable[[Options], View], options: Options) -> None:
    """Whole or not at all. Raises OSError."""
    text, path = render(ask, options), path.resolve()
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def render(ask: Callable[[Options], View], options: Options) -> str:
    """The page as text."""
    env = Environment(
        loader=FileSystemLoader(HTML), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    view = ask(options)
    top, ratios = _ratios(view, options.ratio)
    blocks = env.get_template("blocks.html")
    steps = []
    for ratio in ratios:
        new = ratio and options.price_old and options.price_old * ratio
        found = Sections(ask(replace(options, price_new=new, price_ratio=ratio)))
        texts = {s["name"]: blocks.render(s, words=_words) for s in found.sections.values()}
        texts |= {"title": str(Markup.escape(found.question())), "answer": str(Markup.escape(found.answer()))}
        said = f"{ratio:.2f}" if ratio else "no price given"
        steps.append({"price": said, "x": ratio and round(charts.WIDTH * ratio / top, 1), "parts": texts})
    at, speed = ratios.index(options.ratio), next((n for n in charts.SECTIONS if n in view.result), "")
    drawn = {speed: charts.speedups(view, top), "steps": charts.steps(view)}
    parts = steps[at]["parts"].copy()
    fixed = {name for name in parts if all(step["parts"].get(name) == parts[name] for step in steps)}
    if fixed >= parts.keys() - {"title"}:  # a price changes nothing but the question
        fixed = set(parts)
    for step in steps:
        step["parts"] = {name: text for name, text in step["parts"].items() if name not in fixed}
    script = (HTML / "page.js").read_text(encoding="utf-8")
    data = json.dumps({"steps": steps}, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return env.get_template("page.html").render(
        sections=Sections(view).sections, parts={name: Markup(text) for name, text in parts.items()}, fixed=fixed,
        charts={name: Markup(svg) for name, svg in drawn.items() if svg}, steps=steps, at=at,
        style=Markup((HTML / "page.css").read_text(encoding="utf-8")), script=Markup(script), data=Markup(data),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


def _ratios(view: View, given: float | None) -> tuple[float, list[float | None]]:
    """The end of the slider, and its price ratios: from a half (or less) to where every speedup is passed."""
    passed = [row["end"] for row in charts.rows_of(view.result)]
    passed += view.result.get("fleet", {}).get("peak_ratios", {}).values()
    top = 1.25 * max(2.4, given or 0, *passed)
    step, low = max(STEP, round(top / MOST_STEPS, 2)), min(0.5, given or 0.5)
    ratios = [round(step * i, 2) for i in range(1, int(top / step) + 1) if step * i >= low]
    return top, sorted([r for r in ratios if abs(r - given) > 0.005] + [given]) if given else [None, *ratios]


def _words(table: Table) -> list[bool]:
    """Which columns are words: they stand at the left, figures at the right."""
    columns = zip(*table.rows, strict=True)
    return [2 * sum(cell[:1].isalpha() for cell in cells) > len(cells) for cells in columns]


def _trained(work: str) -> str:
    """dense, fp8 -> fp8 in words: dense models trained in FP8 on both."""
    models, _, precisions = work.replace("experts", "mixture-of-experts").partition(", ")
    old, _, new = precisions.upper().partition(" -> ")
    return f"{models} models trained in {f'{old} on both' if old == new else f'{old} on the old, {new} on the new'}"
