"""The charts of the HTML page as SVG: speedups beside the price ratio, and where the time of a step goes.

    charts.speedups(view, top=4.0)      # SVG text, or None where there is nothing to draw
    charts.steps(view)

Vega-Lite draws them when the page is made, so a reader's mail program shows them without running a script. Text has the
colour of the page around it (currentColor), so they read in dark too. Vega escapes what it writes.
"""

from __future__ import annotations

import vl_convert

from harness.report import tables
from harness.report.tables import View

SECTIONS = ("speed", "published", "projection")  # that have speedups; a result has one of them
VEGA_LITE = "5.21"  # the newest of the 5 series in the pinned vl-convert
WIDTH = 240  # pixels of the plot; with its labels it fits a phone unscaled
SPEEDUP, PRICE = "#e07b39", "#c2410c"
# Okabe and Ito's, told apart by the colour-blind; yellow is left out, it is faint on white.
BUCKETS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999"]
NAMES = {"type": "nominal", "sort": None, "title": None}  # of rows, in the order they come
AXIS = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), "currentColor")
CONFIG = {
    "background": None,
    "padding": {"left": 20, "right": 8, "top": 4, "bottom": 4},  # fonts here and there are not equally wide
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": AXIS | {"gridColor": "#8884", "labelFontSize": 12, "titleFontSize": 12, "labelLimit": 150},
    "legend": {"labelColor": "currentColor", "labelFontSize": 12, "orient": "top", "title": None, "columns": 2},
    "text": {"color": "currentColor", "fontSize": 12},
    "aria": False,
}


def speedups(v: View, top: float) -> str | None:
    """A mark a speedup, with its range, on an axis from 0 to `top`; a line of class price_marks at the price ratio."""
    rows = rows_of(v.result)
    if not rows:
        return None
    price = {"datum": v.result["question"]["price_ratio"] or 0, "type": "quantitative"}
    x = {"type": "quantitative", "scale": {"domain": [0, top], "nice": False}, "title": "times the old speed"}
    x["axis"] = {"tickCount": 5, "labelFlush": False}
    label = {"y": NAMES | {"field": "label", "axis": {"labelExpr": "split(datum.label, ', ')"}}}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 4, "color": SPEEDUP, "opacity": 0.5},
         "encoding": label | {"x": x | {"field": "low"}, "x2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 70, "color": SPEEDUP, "opacity": 1},
         "transform": [{"filter": "datum.value != null"}], "encoding": label | {"x": x | {"field": "value"}}},
        {"mark": {"type": "text", "align": "left"},
         "encoding": label | {"x": {"value": WIDTH + 8}, "text": {"field": "text"}}},
        {"name": "price", "data": {"values": [{}]}, "mark": {"type": "rule", "strokeDash": [5, 3], "color": PRICE,
         "strokeWidth": 2}, "encoding": {"x": price}},
    ]  # fmt: skip
    return _svg({"data": {"values": rows}, "height": {"step": 34}, "layer": layers})


def rows_of(result: dict) -> list[dict]:
    """Every speedup of the result: label, value (or null: only a range is known), low, high, and its text."""
    rows = []
    for p in result.get("speed", {}).get("points", ()):
        if s := p["speedup"]:
            label = "unknown" if p["seq_len"] is None else str(p["seq_len"])
            rows.append((label, s["value"], s["low"], s["high"], "~" if s["significant"] is False else ""))
    for s in result.get("projection", {}).get("steps", ()):
        rows.append((s["label"], None, s["low"], s["high"], ""))
    for line in (line for name in SECTIONS for line in result.get(name, {}).get("lines", ())):
        label = f"{line['work'] or 'unknown'}, {line['old_precision']} -> {line['new_precision']}"
        rows.append((label, line.get("median") or line.get("middle"), line["low"], line["high"], ""))
    return [
        {"label": label, "value": value, "low": low, "high": high, "end": high or value}
        | {"text": equal or (f"{value:.2f}x" if value else f"{low:.2f}-{high:.2f}x")}
        for label, value, low, high, equal in rows
    ]


def steps(v: View) -> str | None:
    """Two bars a pair of decomposed steps, ms by bucket."""
    rows, names = [], tables.names(v.result)
    for step in v.result.get("speed", {}).get("buckets", ()):
        for place, (name, part) in enumerate(step["share_of_new_step"].items()):
            new_ms, ratio = part * step["new_ms"], step["ratios"].get(name)
            for side, ms in (("old", ratio and new_ms * ratio), ("new", new_ms)):
                label = f"{names[side]}, {step['seq_len']}\n{tables.setup_name(step)}"
                rows += [{"step": label, "bucket": name.replace("_", " "), "ms": ms, "place": place}] if ms else []
    if not rows:
        return None
    y = NAMES | {"field": "step", "axis": {"labelExpr": "split(datum.label, '\\n')"}}
    x = {"field": "ms", "type": "quantitative", "title": "ms", "axis": {"tickCount": 4}}
    color = NAMES | {"field": "bucket", "scale": {"range": BUCKETS}}
    encoding = {"y": y, "x": x, "color": color, "order": {"field": "place", "type": "quantitative"}}
    return _svg({"data": {"values": rows}, "height": {"step": 38}, "mark": "bar", "encoding": encoding})


def _svg(spec: dict) -> str:
    return vl_convert.vegalite_to_svg(spec | {"width": WIDTH, "config": CONFIG}, vl_version=VEGA_LITE)
