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
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.report import charts, cost, tables
from harness.report.decision import Options
from harness.report.tables import Table, View
from harness.report.verdict import between
from harness.report.verdict_text import Page

HTML = Path(__file__).with_name("html")
STEP = 0.05  # of the price ratio, unless that makes more than MOST_STEPS
MOST_STEPS = 120
# In the order a person who pays reads; a section not named here comes before the facts.
ORDER = ["verdict", "money", "speed", "pairs", "projection", "fleet", "documents", "gate", "memory", "steps",
         "comparable", "question"]  # fmt: skip
TABLES = {"steps": ("decomposition", "liger", "attention", "stacks"), "facts": ("specifications", "environment",
          "ceilings")}  # fmt: skip
LENGTHS = {
    "long": "long context",
    "mixed": "lengths in between",
    "short": "short or packed data",
    "unknown": "all lengths",
}
OUTCOMES = {
    cost.WINS: "costs less per token",
    cost.EVEN: "costs the same per token",
    cost.LOSES: "costs more per token",
    "depends": "pays at some lengths only",
}


class Sections(Page):
    """The page's sections by name: a heading, and blocks (kind, text or Table) in their order."""

    def __init__(self, view: View):
        super().__init__(view.result, None)
        self.found: dict[str, dict] = {}
        self.name = "question"
        if self.result["question"]["problems"]:
            self.head("What could not be read")
            self.bullets(self.result["question"]["problems"])
        for name, section in self.result.items():
            if name != "question":
                self.name = name
                getattr(self, name)(section)
        made = tables.make(view)
        for name, head in (("steps", "Where the time of a step goes"), ("facts", "Facts of both boxes")):
            self.name, shown = name, [made[each] for each in TABLES[name] if each in made]
            if shown:
                self.head(head)
            for table in shown:
                self.show_table(table)

    def head(self, text: str) -> None:
        self.found[self.name] = {"name": self.name, "head": text, "blocks": []}

    def say(self, text: str, style: str = "") -> None:
        kind = "item" if text.startswith("* ") else "more" if text.startswith("  ") else "say"
        self.add(kind, text.removeprefix("* ").strip())

    def bullets(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.add("warning", text)

    def show_table(self, table: Table) -> None:
        self.add("table", table)
        for note in table.notes:
            self.add("note", note.replace("**", ""))

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        if rows:
            section = self.found[self.name]
            kind, before = section["blocks"][-1] if section["blocks"] else ("", "")
            title = before if kind == "say" and before.endswith(":") else section["head"]
            self.add("table", Table(title, header, rows))

    def add(self, kind: str, content: str | Table) -> None:
        self.found[self.name]["blocks"].append((kind, content))

    def ordered(self) -> list[dict]:
        places = {name: i for i, name in enumerate(ORDER)} | {"facts": len(ORDER) + 1}
        return sorted(self.found.values(), key=lambda section: places.get(section["name"], len(ORDER)))

    def question(self) -> str:
        price = self.result["question"]["price_ratio"]
        if price:
            return f"Is {self.new} worth {price:.2f}x the price of {self.old}?"
        return f"Up to which price is {self.new} worth it over {self.old}?"

    def answer(self) -> str:
        """One sentence: of the verdicts (of yours, if said which), else what stands against any, else the bounds."""
        compared, fleet = self.result.get("comparable"), self.result.get("fleet")
        differ = "; ".join(compared["never"] + compared["differences"]) if compared else ""
        verdicts = self.result.get("verdict", [])
        verdicts = [v for v in verdicts if v.get("yours")] or [v for v in verdicts if v["outcome"] or v["decided_by"]]
        groups: dict[str, list[str]] = {}
        for v in verdicts:
            if v["about"] not in LENGTHS:  # a need, or renting: that sentence is the answer
                return v["sentence"].partition("; ")[0].rstrip(".") + "."
            did = v["decided_by"] or {}
            outcome = OUTCOMES.get(v["outcome"]) or f"pays up to {between(did['low'], did['high'])} the price"
            groups.setdefault(outcome, []).append(LENGTHS[v["about"]])
        if groups:
            said = "; it ".join(f"{what} for {_and(names)}" for what, names in groups.items())
            return f"It {said}{', if one may compare them at all' if differ else ''}."
        if differ:
            return f"They are not comparable: {differ}."
        if fleet:
            peaks = " and ".join(f"{r:.2f}x by {name}" for name, r in fleet["peak_ratios"].items())
            need = f"{fleet['needed']['equal_spend']:.2f}x the work of one {self.old}"
            return f"The job costs the same if one {self.new} does {need}; its peaks allow {peaks}."
        blocks = [block for section in self.ordered() for block in section["blocks"]]
        return next((text for kind, text in blocks if kind in ("say", "item")), "Nothing is known that decides it.")


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
        found = Sections(view if ratio == options.ratio else ask(_at(options, ratio)))
        texts = {s["name"]: blocks.render(s, words=_words) for s in found.ordered()}
        texts |= {"title": str(Markup.escape(found.question())), "answer": str(Markup.escape(found.answer()))}
        said = f"{ratio:.2f}" if ratio else "no price given"
        steps.append({"price": said, "x": ratio and round(charts.WIDTH * ratio / top, 1), "parts": texts})
    at = ratios.index(options.ratio)
    parts = steps[at]["parts"].copy()
    fixed = {name for name in parts if all(step["parts"].get(name) == parts[name] for step in steps)}
    if fixed >= parts.keys() - {"title"}:  # a price changes nothing but the question
        fixed = set(parts)
    for step in steps:
        step["parts"] = {name: text for name, text in step["parts"].items() if name not in fixed}
    script = (HTML / "page.js").read_text(encoding="utf-8")
    data = json.dumps({"steps": steps}, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return env.get_template("page.html").render(
        sections=Sections(view).ordered(), parts={name: Markup(text) for name, text in parts.items()}, fixed=fixed,
        charts={name: Markup(svg) for name, svg in _charts(view, top).items() if svg}, steps=steps, at=at,
        style=Markup((HTML / "page.css").read_text(encoding="utf-8")), script=Markup(script), data=Markup(data),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


def _charts(view: View, top: float) -> dict[str, str | None]:
    name = "projection" if "projection" in view.result else "speed"
    return {name: charts.speedups(view, top), "steps": charts.steps(view)}


def _ratios(view: View, given: float | None) -> tuple[float, list[float | None]]:
    """The end of the slider, and its price ratios: from a half (or less) to where every speedup is passed."""
    top = 1.25 * max([2.4, given or 0, *(row["end"] for row in charts.rows_of(view.result))])
    step = max(STEP, round(top / MOST_STEPS, 2))
    low = min(0.5, given or 0.5)
    ratios = {round(step * i, 2) for i in range(1, int(top / step) + 1) if step * i >= low}
    return top, [*([] if given else [None]), *sorted(ratios | ({given} if given else set()))]


def _at(options: Options, ratio: float | None) -> Options:
    if options.price_old:
        return replace(options, price_new=ratio and options.price_old * ratio)
    return replace(options, price_ratio=ratio)


def _words(table: Table) -> list[bool]:
    """Which columns are words: they stand at the left, figures at the right."""
    return [
        sum(bool(re.match(r"[^\W\d]", cell)) for cell in cells) * 2 > len(cells)
        for cells in zip(*table.rows, strict=True)
    ]


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
