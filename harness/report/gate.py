"""The gate: is there something the old GPU cannot do at all, and does the new box really do it today?

A dtype the silicon lacks or a memory size it does not have settles the question without a benchmark; but silicon that
the installed software cannot use is money spent on nothing, so what was measured on NEW is part of it: a training step
in that dtype, or else what bench_ceilings.py found.
"""

from __future__ import annotations

import re

from harness.gpus import DTYPES, MATMUL
from harness.report.box import Box, Sweep

GIB_PER_GB = 1e9 / 2**30
NO_SOFTWARE = "nothing to install"  # what memory needs of it


def parse_need(text: str) -> tuple[str, float | None]:
    """("fp4", None) or ("memory", GiB). Raises ValueError with what is allowed."""
    if match := re.fullmatch(r"memory=(\d+(?:\.\d+)?)(GiB|GB)?", text, re.IGNORECASE):
        return "memory", float(match[1]) * (GIB_PER_GB if (match[2] or "").lower() == "gb" else 1)
    if text not in DTYPES:
        raise ValueError(f'"{text}" is not a need: one of {", ".join(DTYPES)}, or memory=200GiB')
    return text, None


def answer(old: Box, new: Box, needs: tuple[str, ...]) -> dict:
    """What OLD cannot do at all. `decides`: upgrade, beware (silicon only, so far), neither, or no (speed decides)."""
    answers = []
    for need, gib in map(parse_need, needs):
        old_can, new_can = _can(old, need, gib), _can(new, need, gib)
        stack = NO_SOFTWARE if gib else _stack_runs(new, need)
        if old_can is not False or new_can is None:
            decides = "no"
        elif not new_can:
            decides = "neither"
        else:
            decides = "upgrade" if gib or stack.startswith("runs") else "beware"
        name = f"memory {gib:.0f} GiB" if gib else need
        answers.append({"need": name, "old_can": old_can, "new_can": new_can, "new_stack": stack, "decides": decides})
    only_new = [d for d in DTYPES if _can(old, d) is False and _can(new, d)]
    return {"only_new": only_new, "needs": answers}


def _can(box: Box, need: str, gib: float | None = None) -> bool | None:
    """Whether the silicon does; null when its kind or its memory is not known."""
    if gib:
        capacity, _ = capacity_gib(box)
        return None if capacity is None else gib <= capacity
    return None if box.gpu is None else need not in box.gpu.unsupported


def _stack_runs(box: Box, dtype: str) -> str:
    """A training step measured in it says more than a matmul; one that was emulated says nothing."""
    real = [s for s in box.sweeps if MATMUL.get(s.run.dtype) == dtype and not (s.run.format and s.run.format.emulated)]
    for sweep in reversed(real):
        if measured := [n for n, p in sweep.points.items() if p.outcome == "measured"]:
            return f"runs, a training step measured with DTYPE={sweep.run.dtype} at {measured[-1]} tokens"
    found = [c for _, c in box.ceilings if c.what == "matmul" and c.name == dtype]
    if not found:
        return "not measured"
    best = max(found, key=lambda c: c.value or 0)
    return (
        f"runs, {best.value:.0f} TFLOPS measured" if best.value else f"does not run: {best.reason or 'no reason given'}"
    )


def capacity_gib(box: Box, sweep: Sweep | None = None) -> tuple[float | None, bool]:
    """(A GPU's memory or null, whether it is only the seller's figure: see gpus.py for what devices report of it)."""
    reported = [r.gpu.memory_gib for r in ([sweep.run] if sweep else [s.run for s in box.sweeps]) if r.gpu.memory_gib]
    sold = (box.gpu.memory_gb, True) if box.gpu else (None, False)
    return (reported[0], False) if reported else sold


def ceilings(old: Box, new: Box) -> dict:
    """bf16 matmul ceilings, TFLOPS: measured on the box, else published for its GPU, else null."""
    found = {}
    for side, box in (("old", old), ("new", new)):
        own = [c.value for _, c in box.ceilings if c.what == "matmul" and c.name == "bf16" and c.value]
        published = box.gpu.ceilings.get("bf16") if box.gpu else None
        found[side] = max(own) if own else published.tflops if published else None
    return found | {"ratio": found["new"] / found["old"] if all(found.values()) else None}
