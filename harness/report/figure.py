"""The figure: what the two boxes do by sequence length, one panel a question.

    from harness.report import figure
    figure.save(figure.draw(view), "results_plot.png")          # the ending decides: .png, .svg, .pdf

matplotlib is imported when something is drawn, without pyplot: no display and no setting of a notebook matters. Colours
are Okabe and Ito's, told apart by the colour-blind; marks, dashes and hatches tell the boxes apart without colour.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report import companions, comparing, tables
from harness.report.table import WORDS, names, recipe_name
from harness.report.tables import View
from harness.report.verdict import ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, GREEN = "#595959", "#009E73"
LOOKS = {
    "old": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "new": {"color": "#D55E00", "marker": "s", "linestyle": "--", "markerfacecolor": "none", "markersize": 8},
}
BUCKETS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#BBBBBB"]
HATCHES = ["", "//", "..", "\\\\", "xx", "++", ""]
PANEL_INCHES = (5.4, 3.9)
LOOK = {"font.size": 9, "lines.markersize": 5, "hatch.linewidth": 0.6, "hatch.color": "white", "svg.hashsalt": "1"}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def draw(v: View) -> Figure:
    """Every panel there is data for, two a row. Raises ImportError without matplotlib."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's name in it would stop the import
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels(v)
    rows = max(1, math.ceil(len(panels) / 2))
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(2 * PANEL_INCHES[0], rows * PANEL_INCHES[1]), layout="constrained")
        grid = list(figure.subplots(rows, 2, squeeze=False).flat)
        for axes, (title, y_label, panel) in zip(grid, panels, strict=False):
            axes.set_title(title, loc="left", fontweight="bold")
            axes.set_ylabel(y_label)
            axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
            axes.set_axisbelow(True)
            panel(axes, v)
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.suptitle(_title(v), fontsize=10)
        figure.canvas.draw()  # what cannot be drawn fails here, not halfway into a file
    return figure


def draw_pairs(result: dict) -> Figure:
    """Published pairs of two GPUs: a column a kind of work and two precisions, a mark a pair, against break-even."""
    import matplotlib
    from matplotlib.figure import Figure

    found, question, labels = result["published"], result["question"], []
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(2 * PANEL_INCHES[0], PANEL_INCHES[1]), layout="constrained")
        axes = figure.subplots()
        for x, line in enumerate(found["lines"]):
            kind = tuple(line[k] for k in ("work", "old_precision", "new_precision"))
            pairs = [p for p in found["pairs"] if (p["work"], p["old"]["precision"], p["new"]["precision"]) == kind]
            look = LOOKS["new" if kind[0].startswith("experts") else "old"] | {"linestyle": ""}
            places = [x + 0.5 * (i + 0.5) / len(pairs) - 0.25 for i in range(len(pairs))]
            axes.plot(places, [p["speedup"] for p in pairs], **look)
            axes.hlines(line["median"], x - 0.35, x + 0.35, color=look["color"])
            _note(axes, f"{line['median']:.2f}", x + 0.42, line["median"], -3)
            labels.append(f"{kind[0]}, {kind[1]} to {kind[2]}\n{line['pairs']} pairs, {len(line['models'])} models")
        if price := question["price_ratio"]:
            axes.axhline(price, color=GREEN, linestyle="--", label=f"break-even at price ratio {price:g}")
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.set_xticks(range(len(labels)), labels)
        axes.set(
            ylim=(0, 1.05 * axes.get_ylim()[1]), ylabel=f"{question['new']} over {question['old']}, tokens/s per GPU"
        )
        sources = ", ".join(sorted({p["source"] for p in found["pairs"]}))
        figure.suptitle(f"{question['old']} and {question['new']}: published pairs and their medians ({sources})")
        _finish(axes)
        figure.canvas.draw()
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Raises OSError, and ValueError for an ending matplotlib does not write."""
    figure.savefig(path, dpi=160, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _title(v: View) -> str:
    lines = [" and ".join(names(v.result).values())]
    if "speed" in v.result:
        table = tables.make(v)["speedup"]
        lines[0] += ": " + table.title.partition("(")[2].rstrip(")")
        lines += [note.replace("**", "") for note in table.notes if not note.startswith("bandwidth")]
        lines += ["published figures"] * (v.pair.new.run.source == "published")
    return "\n".join(textwrap.fill(line, 130) for line in lines)


def _panels(v: View) -> list[tuple]:
    """(title, label of the y axis, function that draws it)."""
    found: list[tuple] = []
    old, new = names(v.result).values()
    if "speed" in v.result:
        per = f"{v.result['speed']['points'][0]['old']['per']}s/s"
        rate = {"tflops": "model TFLOPS per GPU", "tokens_per_s_per_gpu": "tokens/s per GPU"}.get(_quantity(v), per)
        found += [("Throughput", rate, _throughput), ("Speedup", f"{new} over {old}", _speedup)]
        if any(p["attention_share"] for p in v.result["speed"]["points"]):
            found.append(("Attention share of the work", "% of a step's model FLOPs", _share))
        if any(p.peak_mem_gib for s in (v.pair.old, v.pair.new) for p in s.points.values()):
            found.append(("Peak memory", "GiB, worst GPU", _memory))
        if price := v.result["money"]["price_ratio"]:
            found.append((f"Cost of a million tokens at price ratio {price:g}", v.result["money"]["unit"], _cost))
    if comparing.matched(v.old, v.new):
        found.append(("Where the time of a step goes", "ms", _buckets))
    if v.old.attention or v.new.attention:
        found.append(("Attention alone, forward + backward", "TFLOPS, kernel count", _attention))
    return found


def _quantity(v: View) -> str:
    """What throughput is shown in: TFLOPS, or tokens where the model's FLOPs are not known."""
    rows = [p[side] for p in v.result["speed"]["points"] for side in ("old", "new")]
    rows = [r for r in rows if r["median_ms"]]
    return next((key for key in ("tflops", "tokens_per_s_per_gpu") if any(r[key] for r in rows)), "rate")


def _sides(v: View) -> list[tuple[str, str, dict]]:
    """(side, name, look) of the two boxes."""
    return [(side, name, LOOKS[side]) for side, name in names(v.result).items()]


def _at(seq_len: int | None) -> int:
    """Where a length stands on its axis; an unknown one is alone there."""
    return 1 if seq_len is None else seq_len


def _finish(axes: Axes, lengths: Iterable[int | None] = (), **legend) -> None:
    """The axis of lengths, where a label that would touch the one right of it is left out, and the legend."""
    if lengths := sorted(map(_at, lengths), reverse=True):
        labels, right = [], math.inf
        for n in lengths:
            text = "unknown" if n == 1 else f"{n // 1024}k" if n % 1024 == 0 else str(n)
            labels.append(text if right >= 1.4 * n else "")
            right = n if labels[-1] else right
        axes.set_xlabel("sequence length, tokens")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels)
        axes.set_xticks([], minor=True)
        axes.set_xlim(lengths[-1] / 1.3, lengths[0] * 1.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**legend)


def _lengths(v: View) -> list[int]:
    return [p["seq_len"] for p in v.result["speed"]["points"]]


def _line(axes: Axes, values: dict[int, float | None], label: str, look: dict, errors: list[tuple] = ()) -> None:
    """A line over lengths that breaks where there is no value. errors: (below, above) of each value, or none."""
    if any(y is not None for y in values.values()):
        ys = [math.nan if y is None else y for y in values.values()]
        bars = list(zip(*errors, strict=True)) if any(map(any, errors)) else None
        axes.errorbar([*map(_at, values)], ys, bars, label=label, linewidth=1.6, capsize=3, **look)


def _gaps(axes: Axes, v: View) -> None:
    """The word for why a box has no figure, in its colour, over the axis."""
    for x, (side, _, look) in zip((-5, 5), _sides(v), strict=True):
        at = {"xytext": (x, 4), "textcoords": "offset points", "rotation": 90, "ha": "center"}
        for p in v.result["speed"]["points"]:
            if word := WORDS.get(p[side]["outcome"]):
                axes.annotate(word, (_at(p["seq_len"]), 0), color=look["color"], fontsize=8, fontweight="bold", **at)


def _note(axes: Axes, text: str, x: float, y: float, up: float, **style) -> None:
    axes.annotate(text, (_at(x), y), (0, up), "data", "offset points", fontsize=8, ha="center", **style)


def _rate(point: dict, key: str) -> float | None:
    """The quantity that is shown; of a log that knows no more, steps or samples a second of all GPUs."""
    return point[key] if key in point else point["median_ms"] and 1e3 / point["median_ms"]


def _throughput(axes: Axes, v: View) -> None:
    points, key = v.result["speed"]["points"], _quantity(v)
    for side, name, look in _sides(v):
        errors = []
        for p in (p[side] for p in points):
            fast, slow = (p["median_ms"] / ms for ms in p["ci_ms"]) if p["ci_ms"] else (1, 1)
            value = _rate(p, key) or 0
            errors.append((value * max(0, 1 - slow), value * max(0, fast - 1)))
        _line(axes, {p["seq_len"]: _rate(p[side], key) for p in points}, name, look, errors)
    _gaps(axes, v)
    _finish(axes, _lengths(v))


def _speedup(axes: Axes, v: View) -> None:
    found = {p["seq_len"]: p["speedup"] and ratio(p["speedup"]) for p in v.result["speed"]["points"]}
    errors = [(r.value - r.low, r.high - r.value) if r and r.low is not None else (0, 0) for r in found.values()]
    look = {"color": "black", "marker": "D", "linestyle": "-"}
    _line(axes, {n: r and r.value for n, r in found.items()}, "tokens per second", look, errors)
    for key, name, dash in (("compute", f"peak {v.pair.new.run.dtype}", "--"), ("bandwidth", "memory bandwidth", ":")):
        if promised := v.result["speed"]["ratios"].get(key):
            axes.axhline(promised, color=GREY, linestyle=dash, linewidth=1.2, label=f"{name}, {promised:.2f}")
    axes.axhline(1, color=GREY, linewidth=0.8)
    for n, r in found.items():
        if r:
            _note(axes, "~" if r.significant is False else f"{r.value:.2f}", n, r.value, -15)
    _finish(axes, found, loc="lower right")


def _share(axes: Axes, v: View) -> None:
    shares = {p["seq_len"]: p["attention_share"] and 100 * p["attention_share"] for p in v.result["speed"]["points"]}
    _line(axes, shares, "attention", {"color": GREEN, "marker": "^", "linestyle": "-"})
    for n, value in shares.items():
        if value is not None:
            _note(axes, f"{value:.0f}", n, value, 7)
    _finish(axes, shares)
    axes.set_ylim(0, 95)


def _memory(axes: Axes, v: View) -> None:
    for (side, name, look), sweep in zip(_sides(v), (v.pair.old, v.pair.new), strict=True):
        peaks = {n: p.peak_mem_gib for n, p in sweep.points.items()}
        _line(axes, {n: peaks.get(n) for n in _lengths(v)}, name, look)
        if limit := v.result["memory"][side]["capacity_gib"]:
            axes.axhline(limit, color=look["color"], linestyle=look["linestyle"], linewidth=1)
            at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(f"{name}: {limit:g}", (0.02, limit), (0, 2), color=look["color"], fontsize=8, **at)
    _gaps(axes, v)
    _finish(axes, _lengths(v), loc="center left")


def _cost(axes: Axes, v: View) -> None:
    points = v.result["money"]["points"]
    for side, name, look in _sides(v):
        _line(axes, {p["seq_len"]: p[f"{side}_per_mtoken"] for p in points}, name, look)
    _finish(axes, [p["seq_len"] for p in points])


def _buckets(axes: Axes, v: View) -> None:
    """Two bars a pair of decomposed steps; a bucket has the same look in all of them."""
    labels: dict[float, str] = {}
    looks: dict[str, dict] = {}
    for i, pair in enumerate(comparing.matched(v.old, v.new)):
        split = "full" if all(step.full for _, step in pair) else "two"
        for j, ((run, step), (_, name, _)) in enumerate(zip(pair, _sides(v), strict=True)):
            bottom, x = 0.0, 2.6 * i + j
            for bucket in getattr(step, split):
                label = None if bucket.name in looks else bucket.name.replace("_", " ")
                k = len(looks) % len(BUCKETS)
                look = looks.setdefault(bucket.name, {"color": BUCKETS[k], "hatch": HATCHES[k]})
                axes.bar(x, bucket.ms, 0.8, bottom, label=label, **look)
                if bucket.ms > 0.06 * step.step_ms:
                    frame = {"boxstyle": "round,pad=0.15", "color": "white"}
                    _note(axes, f"{bucket.ms:.0f}", x, bottom + bucket.ms / 2, -3, bbox=frame)
                bottom += bucket.ms
            recipe = recipe_name(run.recipe) if run.recipe else ""
            labels[x] = f"{name}\n{step.seq_len} tokens\n{textwrap.fill(recipe, 18)}"
    axes.set_xticks(list(labels), list(labels.values()), fontsize=8)
    axes.set_xlim(-0.7, max(labels) + 2)  # room for the legend
    _finish(axes, loc="upper right", fontsize=8)


def _attention(axes: Axes, v: View) -> None:
    lengths: set[int] = set()
    for (_, name, look), box in zip(_sides(v), (v.old, v.new), strict=True):
        best = companions.fastest(box)
        lengths |= {key[0] for key in best}
        for shape in sorted({key[1:] for key in best}):
            times = {key[0]: best[key] for key in sorted(best) if key[1:] == shape}
            label = f"{name} {next(iter(times.values())).backend}, {shape[0]}"
            faint = {"alpha": 0.5} if shape[0] == "sustained" else {}
            _line(axes, {n: t.fwd_bwd_tflops for n, t in times.items()}, label, look | faint)
    _finish(axes, lengths, fontsize=8)
