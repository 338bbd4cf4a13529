"""What a sweep says between and beyond its lengths: peak memory as a line, step time as a sum of three parts.

    memory = memory_line(sweep)          # GiB = floor + slope * seqlen, least squares
    memory.largest(180)                  # the seqlen that fits in 180 GiB, by the fit
    model = step_time(sweep)             # ms = fixed + dense work / dense rate + attention work / attention rate

Both are fits with their error beside them, never a measurement; the report says so wherever it prints one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness import flops
from harness.report.box import Sweep

# The H200 of the published sweep: about 130 GiB of 141 could be used (the rest is the CUDA context, NCCL buffers and
# what the allocator loses to fragments). Other GPUs are given the same share, which is an assumption and is called one.
USABLE_SHARE = 130 / 141


@dataclass(frozen=True)
class MemoryLine:
    """Peak GiB = floor_gib + gib_per_token * seqlen, at the sweep's batch; the errors are of the fitted points, GiB."""

    floor_gib: float
    gib_per_token: float
    rms_error_gib: float
    worst_error_gib: float
    points: int

    def largest(self, budget_gib: float) -> int | None:
        """The seqlen that fits in the budget by the line; null when the line does not rise or its floor is over it."""
        if self.gib_per_token <= 0 or budget_gib <= self.floor_gib:
            return None
        return int((budget_gib - self.floor_gib) / self.gib_per_token)


@dataclass(frozen=True)
class StepTime:
    """Step ms = fixed_ms + dense_tflop / dense_tflops + attention_tflop / attention_tflops (work and rates per GPU).

    Fixed is what does not grow with the length: host optimizer, launches. A rate is null where the fit found no time
    for that part. worst_error is the largest relative error at a fitted length.
    """

    fixed_ms: float
    dense_tflops: float | None
    attention_tflops: float | None
    worst_error: float

    def parts_ms(self, work: flops.Count) -> dict[str, float]:
        """fixed, dense and attention ms of a step with this work."""
        dense = 1e3 * work.dense_tflop / self.dense_tflops if self.dense_tflops else 0.0
        attention = 1e3 * work.attention_tflop / self.attention_tflops if self.attention_tflops else 0.0
        return {"fixed": self.fixed_ms, "dense": dense, "attention": attention}


def memory_line(sweep: Sweep) -> MemoryLine | None:
    """Least squares over the lengths with a peak; null under three of them."""
    found = [(p.seq_len, p.peak_mem_gib) for p in sweep.points.values() if p.peak_mem_gib]
    if len(found) < 3:
        return None
    x, y = np.array(found, dtype=float).T
    slope, floor = np.polyfit(x, y, 1)
    error = y - (floor + slope * x)
    rms = float(np.sqrt(np.mean(error**2)))
    return MemoryLine(float(floor), float(slope), rms, float(np.abs(error).max()), len(x))


def step_time(sweep: Sweep) -> StepTime | None:
    """Relative least squares over the measured lengths, no part negative; null under four of them (three unknowns)."""
    rows, times = [], []
    for point in sweep.points.values():
        ms, done = point.median_ms, flops.step_work(sweep.run, point.seq_len)
        if point.outcome == "measured" and ms and done:
            rows.append([1.0, 1e3 * done.dense_tflop, 1e3 * done.attention_tflop])
            times.append(ms)
    if len(rows) < 4:
        return None
    a = np.array(rows) / np.array(times)[:, None]
    kept = list(range(3))
    while True:  # drop the most negative part and fit the others again: three unknowns need no solver
        found = np.linalg.lstsq(a[:, kept], np.ones(len(a)), rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    coefficients = np.zeros(3)
    coefficients[kept] = np.maximum(found, 0)
    worst = float(np.abs(a @ coefficients - 1).max())
    fixed, dense, attention = (float(c) for c in coefficients)
    return StepTime(fixed, 1 / dense if dense else None, 1 / attention if attention else None, worst)
