"""The old box's steps on a GPU nobody measured here: a range, by what each part of a step waits for. A projection.

    steps = projection.project(box, sweep, target, seen)     # harness.gpus.Gpu; seen = projection.seen_ratios(...)
    table = projection.back_test(old_box, new_box, seen)     # the same, against a box that was measured

The high end has every part at the ratio of the specifications that it follows. The low end has compute at what
published pairs reached of it: a ratio r of the peaks became r**k, k = log(measured) / log(peaks), one k for attention
and one for everything else, so that equal peaks stay equal.
"""

from __future__ import annotations

import math

from harness import flops
from harness.gpus import Gpu
from harness.report import comparing, fits
from harness.report.box import Box, NothingUsable, Sweep

# Dense peaks of the step's format, memory bandwidths, NVLink rates. The rest stays: copies (no host link is known),
# idle, fixed time.
FOLLOWS = dict.fromkeys(("attention", "matmul", "dense", "everything else"), "compute")
FOLLOWS |= {"other_compute": "bandwidth", "optimizer": "bandwidth", "exposed_communication": "link"}


def spec_ratios(old: Gpu | None, new: Gpu, step: str = "bf16") -> dict[str, float | None]:
    """New over old: compute (dense, of the step's format), bandwidth, link (NVLink); null where one is not known."""
    names = {"bandwidth": "bandwidth_tb_s", "link": "nvlink_gb_s"}
    figures = {"compute": (old and old.dense(step), new.dense(step))}
    figures |= {k: (getattr(old, name, None), getattr(new, name)) for k, name in names.items()}
    return {k: b / a if a and b else None for k, (a, b) in figures.items()}


def seen_ratios(old: Box, new: Box) -> dict | None:
    """k of attention and of everything_else and their source: the first step both boxes have decomposed, if any."""
    compute = spec_ratios(old.gpu, new.gpu)["compute"] if new.gpu else None
    steps = comparing.matched(old, new)
    if not steps or not compute or compute == 1:
        return None
    before, after = ({x.name: x.ms for x in step.two} for _, step in steps[0])
    k = {name.replace(" ", "_"): math.log(before[name] / after[name]) / math.log(compute) for name in before}
    return k | {"source": f"{old.name} to {new.name} at {steps[0][0][1].seq_len}"}


def project(box: Box, sweep: Sweep | None, target: Gpu, seen: dict | None) -> list[dict]:
    """Every measured length of the sweep, then every decomposed step of the box; low and high are speedups over it.

    Raises NothingUsable when the compute or bandwidth ratio is not known: there is nothing to project with.
    """
    dtype = sweep.run.dtype if sweep else "bf16"
    ratios = spec_ratios(box.gpu, target, dtype)
    if missing := [name for name in ("compute", "bandwidth") if ratios[name] is None]:
        raise NothingUsable(
            f"{' and '.join(missing)} of {box.name} or {target.label} not known: nothing to project with"
        )
    steps = []
    for n in comparing.lengths(sweep, "measured") if sweep else ():
        parts, basis = _split(box, sweep, n)
        if parts:
            step = {"what": "sweep", "seq_len": n, "label": str(n), "basis": basis}
            steps.append(step | _range(sweep.points[n].median_ms, parts, ratios, seen))
    for d in (d for run, d in box.decompositions if run.dtype == dtype):
        step = {"what": "decomposed step", "seq_len": d.seq_len, "label": f"{d.seq_len} (decomposed)"}
        step |= {"basis": "its buckets" if d.full else "two buckets"}
        steps.append(step | _range(d.step_ms, {x.name: x.ms for x in d.full or d.two}, ratios, seen))
    return steps


def _split(box: Box, sweep: Sweep, seq_len: int) -> tuple[dict[str, float], str]:
    """The step's ms by part, by the best source there is, and which one it is; no parts without any."""
    done, fit = flops.step_work(sweep.run, seq_len), fits.step_time(sweep)
    same = [d for r, d in box.decompositions if r.recipe == sweep.run.recipe and d.seq_len == seq_len and d.full]
    if same:
        parts, basis = {x.name: x.ms for x in same[0].full}, "its decomposition"
    elif not done:
        return {}, "the model's FLOPs are not known"
    elif fit:
        parts, basis = fit.parts_ms(done), "a fit: fixed, dense, attention"
    else:
        parts = {"attention": done.attention_tflop, "dense": done.dense_tflop}
        basis = "FLOP shares, nothing fixed"
    scale = sweep.points[seq_len].median_ms / sum(parts.values())
    return {name: value * scale for name, value in parts.items()}, basis


def _range(old_ms: float, parts_ms: dict, ratios: dict[str, float | None], seen: dict | None) -> dict:
    """The step and its parts with the speedups low and high of each: slowest expectation first."""
    parts = []
    for name, ms in parts_ms.items():
        follows = FOLLOWS.get(name)
        ratio = reached = (ratios[follows] if follows else None) or 1.0
        if follows == "compute" and seen:
            reached = ratio ** seen["attention" if name == "attention" else "everything_else"]
        low, high = sorted((ratio, reached))
        parts.append({"name": name, "old_ms": ms, "follows": follows, "low": low, "high": high})
    whole = {end: old_ms / sum(p["old_ms"] / p[end] for p in parts) for end in ("low", "high")}
    return {"old_ms": old_ms, "parts": parts} | whole


def back_test(old: Box, new: Box, seen: dict | None) -> list[dict]:
    """Projection of the old box to the new one's GPU beside what was measured there, one row a step both have.

    `seen` comes from a decomposed step of the published pair: for the published pair its row only shows the
    arithmetic, and the other rows borrow two exponents from it. error: of the range's (geometric) middle, relative.
    """
    pair = comparing.pair(old, new)
    measured_ms = {str(n): pair.new.points[n].median_ms for n in pair.common} if pair else {}
    for _, (_, step) in comparing.matched(old, new):
        measured_ms.setdefault(f"{step.seq_len} (decomposed)", step.step_ms)
    rows = []
    for step in project(old, pair.old if pair else None, new.gpu, seen):
        if new_ms := measured_ms.pop(step["label"], None):
            low, high, measured = step["low"], step["high"], step["old_ms"] / new_ms
            row = {"label": step["label"], "low": low, "high": high, "measured": measured}
            row["inside"] = low - 1e-4 <= measured <= high + 1e-4
            rows.append(row | {"error": math.sqrt(low * high) / measured - 1})
    return rows


def advice(steps: list[dict], price_ratio: float) -> tuple[str, dict[str, list[str]]]:
    """("rent", "not worth renting" or "likely buy", labels of steps under, around and over break-even).

    Break-even is a speedup equal to the price ratio: inside a range it takes a measurement to tell.
    """
    sides: dict[str, list[str]] = {"under": [], "around": [], "over": []}
    for s in steps:
        side = "under" if s["high"] < price_ratio else "over" if s["low"] > price_ratio else "around"
        sides[side].append(s["label"])
    return "rent" if sides["around"] else "likely buy" if sides["over"] else "not worth renting", sides
