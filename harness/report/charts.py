"""The charts of the HTML page as SVG: speedups beside the price ratio, and where the time of a step goes.

    charts.speedups(view, top=4.0)      # SVG text, or None where there is nothing to draw
    charts.steps(view)

html/speedups.json and html/steps.json are their Vega-Lite, html/charts.json is the look of both. They are drawn when
the page is made, so a mail program shows them without running a script. Text has the colour of the page around it, so
it reads in dark too; buckets have Okabe and Ito's colours, told apart by the colour-blind. Vega escapes what it writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import vl_convert

from harness.report.table import names, setup_name, work_name
from harness.report.tables import View

HTML = Path(__file__).with_name("html")
SECTIONS = ("speed", "published", "projection")  # that have speedups; a result has one of them
VEGA_LITE = "5.21"  # the newest of the 5 series in the pinned vl-convert
WIDTH = json.loads((HTML / "speedups.json").read_text())["width"]  # pixels of the plot; with labels it fits a phone


def speedups(v: View, top: float) -> str | None:
    """A mark a speedup, with its range, on an axis from 0 to `top`; a line of class price_marks at the price ratio."""
    return _svg("speedups", rows_of(v.result), top=top, price=v.result["question"]["price_ratio"] or 0)


def rows_of(result: dict) -> list[dict]:
    """Every speedup of the result: label, value (or null: only a range is known), low, high, and its text."""
    rows = []
    for p in result.get("speed", {}).get("points", ()):
        if s := p["speedup"]:
            label = "unknown" if p["seq_len"] is None else str(p["seq_len"])
            rows.append((label, s["value"], s["low"], s["high"], "~" if s["significant"] is False else ""))
    for line in (line for name in SECTIONS for line in result.get(name, {}).get("lines", ())):
        label = work_name(line)
        rows.append((label, line.get("median") or line.get("middle"), line["low"], line["high"], ""))
    return [
        {"label": label, "value": value, "low": low, "high": high, "end": high or value}
        | {"text": equal or (f"{value:.2f}x" if value else f"{low:.2f}-{high:.2f}x")}
        for label, value, low, high, equal in rows
    ]


def steps(v: View) -> str | None:
    """Two bars a pair of decomposed steps, ms by bucket."""
    rows, called = [], names(v.result)
    for step in v.result.get("speed", {}).get("buckets", ()):
        for place, (name, part) in enumerate(step["share_of_new_step"].items()):
            new_ms, ratio = part * step["new_ms"], step["ratios"].get(name)
            for side, ms in (("old", ratio and new_ms * ratio), ("new", new_ms)):
                label = f"{called[side]}, {step['seq_len']}\n{setup_name(step)}"
                rows += [{"step": label, "bucket": name.replace("_", " "), "ms": ms, "place": place}] if ms else []
    return _svg("steps", rows)


def _svg(name: str, rows: list[dict], **values: float) -> str | None:
    if not rows:
        return None
    spec, look = (json.loads((HTML / f"{part}.json").read_text(encoding="utf-8")) for part in (name, "charts"))
    spec |= {"data": {"values": rows}, "params": [{"name": k, "value": v} for k, v in values.items()]}
    return vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=look)
