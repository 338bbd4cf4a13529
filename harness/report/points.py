"""Launches as they were read -> the points of a sweep: which repeat counts, which steps are steady, what is sound."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness import flops, gpus, records, stats
from harness.report import lines
from harness.report.box import Point, Sweep, specification

RATE_TOLERANCE = 0.01  # a logged rate further than this from work / time is said ...
FOREIGN = 2.0  # ... and further than this factor it is no other convention but another length, or damage
LEAST_SHARE = 0.01  # of the peak; less is a wrong unit
ROUNDING = 0.006  # of a rate written with two decimals


@dataclass(eq=False)
class Attempt:
    """One length of one launch while it is read."""

    seq_len: int | None
    run: records.Run | None = None  # of our own records; a log's is made from its headers
    env: dict | None = None
    gpu: dict | None = None
    times: array = field(default_factory=lambda: array("d"))  # ms; neither warm-up nor retried
    rates: array = field(default_factory=lambda: array("d"))  # as logged; nan where there is none
    seen: int = 0  # steps, with warm-up
    last: tuple[int, float, bool] = (-1, 0.0, False)  # number, time, whether it is in `times`
    retried: int = 0
    peaks: dict[str, float] = field(default_factory=dict)
    outcome: records.Summary | records.Failure | records.NotRun | None = None
    error: str | None = None
    oom: bool = False

    def retry_last(self) -> None:
        if self.last[2]:
            self.times.pop(), self.rates.pop()
            self.last = (*self.last[:2], False)
            self.retried += 1


def sweeps(
    path: Path, attempts: list[Attempt], last_run: records.Run | None, planned: list[int], skipped: Counter[str]
) -> list[Sweep]:
    """The attempts of one file, grouped by configuration; of several at one length the last complete one counts."""
    groups: dict[str, tuple[records.Run, dict[int, list[Attempt]]]] = {}
    for index, attempt in enumerate(attempts):
        run = attempt.run or last_run
        if attempt.gpu is not None:
            try:
                run = lines.guide_run(attempt.env or {}, attempt.gpu, f"{path.stem}-{index}")
            except ValueError as error:
                skipped[f"sections with {error}"] += 1
                continue
        if run is None or attempt.seq_len is None:
            what = getattr(attempt.outcome, "kind", None) or attempt.error
            skipped["launches that never said on what GPU, or of what length" + (f" ({what})" if what else "")] += 1
            continue
        parts = {"gpu": {"name", "count"}, "stack": True, "attention": {"backend"}, "recipe": True, "world_size": True}
        parts["model"] = {"name", "weights", "num_layers"}
        key = json.dumps(run.model_dump(mode="json", include=parts), sort_keys=True)
        groups.setdefault(key, (run, {}))[1].setdefault(attempt.seq_len, []).append(attempt)

    made = []
    for run, lengths in groups.values():
        expected = max(a.seen for found in lengths.values() for a in found)
        sweep = Sweep(path, run, {})
        for seq_len, found in sorted(lengths.items()):
            chosen = _choose(found, expected)
            sweep.points[seq_len] = _point(chosen, run, expected)
            if len(found) > 1:
                sweep.notes.append(
                    f"{seq_len}: {len(found)} runs in {path.name}, number {found.index(chosen) + 1} is used"
                )
        made.append(sweep)
    for seq_len in planned if made else ():
        made[-1].points.setdefault(seq_len, Point(seq_len, "not_run", error="planned, never reached"))
        made[-1].points = dict(sorted(made[-1].points.items()))
    return made


def _choose(found: list[Attempt], expected: int) -> Attempt:
    """The last complete one: with an outcome record, or in a log with all steps; else the last that has enough."""

    def worth(a: Attempt) -> tuple[bool, bool]:
        complete = bool(a.outcome) or (a.run is None and a.seen >= expected)
        return complete, complete or len(a.times) >= stats.MIN_STEPS

    return max(reversed(found), key=worth)


def _point(attempt: Attempt, run: records.Run, expected: int) -> Point:
    point = Point(attempt.seq_len, "measured", error=attempt.error)
    outcome = attempt.outcome
    if isinstance(outcome, records.Failure):
        point.outcome = "oom" if outcome.kind == "gpu_oom" else "failed"
        point.failure_kind, point.error = outcome.kind, outcome.error
        return point
    if isinstance(outcome, records.NotRun):
        point.outcome, point.error = "not_run", outcome.reason
        return point
    done = flops.step_work(run, attempt.seq_len)
    if done is None and run.model:
        point.warnings.append(
            f"the work of a step is not known ({run.model.uncounted}): the rate is as logged, unchecked"
        )
    times, factor = _agreeing(attempt, done.total_tflop if done else None, point.warnings)
    if attempt.retried:
        point.warnings.append(f"{attempt.retried} steps left out: the allocator had to free and retry")
    point.times_ms, point.n = tuple(times.tolist()), len(times)
    if len(times):
        median, low, high = stats.median_interval(times)
        point.median_ms, point.ci_ms = median, None if low is None else (low, high)
    point.peak_mem_gib, point.peak_allocated_gib = map(attempt.peaks.get, ("peak_mem_gib", "peak_allocated_gib"))
    if summary := outcome:
        for name in ("peak_mem_gib", "peak_allocated_gib", "joules_per_token", "steady", "throttled"):
            setattr(point, name, getattr(summary, name))
        if not attempt.seen:
            point.median_ms, point.n = summary.median_ms, summary.n
            point.ci_ms = None if summary.ci_low_ms is None else (summary.ci_low_ms, summary.ci_high_ms)
        if run.source == "measured" and (lost := summary.n - len(times) - attempt.retried) > 0:
            point.warnings.append(f"{lost} of the {summary.n} steps could not be read")
    _judge(point, attempt, run, expected)
    if point.median_ms and (total := done.total_tflop if done else factor):
        point.tflops = total / point.median_ms * 1e3
        _plausible(
            point, run, factor / total if factor else summary and summary.tflops and summary.tflops / point.tflops
        )
    return point


def _agreeing(attempt: Attempt, total: float | None, warnings: list[str]) -> tuple[np.ndarray, float | None]:
    """The times whose logged rate agrees with them, and the TFLOP of a step those rates mean (None without rates).

    A digit lost in either, or a record of another length, shows as work that is not the other steps'. Where half
    the steps have a rate, one without has lost more than that.
    """
    times, rates = np.array(attempt.times), np.array(attempt.rates)
    rated = ~np.isnan(rates)
    if 2 * rated.sum() < len(times) or not len(times):
        return times, None

    def agree(value: float) -> np.ndarray:
        expected = value / times * 1e3
        return rated & (np.abs(rates - expected) <= np.maximum(RATE_TOLERANCE * expected, ROUNDING))

    usual = float(np.median((times * rates)[rated])) / 1e3
    if total is not None and agree(total).any():
        usual = total
    kept = times[agree(usual)]
    if bad := len(times) - len(kept):
        warnings.append(f"{bad} steps left out: their time and their rate disagree")
    return kept, usual


def _judge(point: Point, attempt: Attempt, run: records.Run, expected: int) -> None:
    """The outcome of a length that did not fail by its record: complete, cut short, or out of memory in a log."""
    of_log = attempt.run is None
    if attempt.outcome:
        point.outcome = "measured" if point.n >= stats.MIN_STEPS or run.source == "published" else "partial"
    elif of_log and attempt.seen >= expected and point.n >= stats.MIN_STEPS:
        if point.error:
            point.warnings.append(f"after its last step the log has: {point.error}")
    elif attempt.oom:
        point.outcome, point.failure_kind = "oom", "gpu_oom"
    elif not attempt.seen:
        point.outcome, point.error = "failed", point.error or "it began and no step was logged"
    else:
        point.outcome = "measured" if of_log and point.n >= stats.MIN_STEPS else "partial"
        end = f"of {expected} steps" if of_log else "steps and no summary"
        point.warnings.append(f"incomplete ({attempt.seen} {end})")


def _plausible(point: Point, run: records.Run, factor: float | None) -> None:
    """MFU; a point no GPU could reach, or no such GPU could be so slow at, is void and says which unit is wrong."""
    known = specification(run.gpu)
    peak = run.gpu.peak_tflops or (known and known.bf16)
    highest = peak or max(g.bf16 or 0 for g in gpus.load().values())
    wrong = None
    if run.gpu.device == "cuda" and point.tflops > highest:
        wrong = (
            f"{point.tflops:.4g} TFLOPS is over the peak of {highest:g}: exec_time_ms is not in ms, or of other work"
        )
    elif run.gpu.device == "cuda" and peak and point.tflops < LEAST_SHARE * peak:
        wrong = f"{point.tflops:.4g} TFLOPS is under 1 % of the peak of {peak:g}: exec_time_ms is not in ms"
    elif factor and not 1 / FOREIGN < factor < FOREIGN:
        wrong = f"the logged rate is {factor:.3g} times the recomputed one: these steps are not of this length"
    if wrong:
        point.outcome, point.failure_kind, point.error = "failed", "unit_error", f"unit error: {wrong}"
        point.times_ms, point.median_ms, point.ci_ms, point.n, point.tflops = (), None, None, 0, None
        return
    if factor and abs(factor - 1) > RATE_TOLERANCE:
        point.warnings.append(f"the logged rate is {factor:.3f} times the recomputed one: another FLOP convention?")
    point.mfu = point.tflops / peak if peak else None
