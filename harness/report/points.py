"""Launches as they were read -> the points of a sweep: which repeat counts, which steps are steady, what is sound."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness import flops, gpus, records, stats
from harness.report import comparing
from harness.report.box import Point, Sweep, specification

RATE_TOLERANCE = 0.01  # a logged rate further than this from work / time is said ...
FOREIGN = 2.0  # ... and further than this factor it is no other convention but another length, or damage
LEAST_SHARE = 0.01  # of the peak; less is a wrong unit
ROUNDING = 0.006  # of a rate written with two decimals
PEAKS = ("peak_mem_gib", "peak_allocated_gib")


@dataclass(eq=False)
class Attempt:
    """One length of one launch while it is read."""

    seq_len: int | None
    run: records.Run | None = None
    of_log: bool = False  # the guide's, and `run` from its headers
    env: dict[str, str] = field(default_factory=dict)  # first header of a log
    said: dict[str, str] = field(default_factory=dict)  # second header
    before: Attempt | None = None  # the one this may be a part of: only its headers are others
    times: array = field(default_factory=lambda: array("d"))  # ms; neither warm-up nor retried
    rates: array = field(default_factory=lambda: array("d"))  # as logged; nan where there is none
    seen: int = 0  # steps, with warm-up
    last: tuple[int, bool] = (-1, False)  # number, and whether its time is in `times`
    retried: int = 0
    peaks: dict[str, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    outcome: records.Summary | records.Failure | records.NotRun | None = None
    error: str | None = None
    oom: bool = False

    def retry_last(self) -> None:
        if self.last[1]:
            self.times.pop(), self.rates.pop()
            self.last = self.last[0], False
            self.retried += 1


def sweeps(
    path: Path, attempts: list[Attempt], last_run: records.Run | None, planned: list[int], skipped: Counter[str]
) -> list[Sweep]:
    """The attempts of one file, grouped by configuration; of several at one length the last complete one counts."""
    groups: dict[str, tuple[records.Run, dict[int, list[Attempt]]]] = {}
    for attempt in attempts:
        run = attempt.run or (None if attempt.of_log else last_run)
        if run is None or attempt.seq_len is None:
            what = getattr(attempt.outcome, "kind", None) or attempt.error
            skipped["launches that never said on what GPU, or of what length" + (f" ({what})" if what else "")] += 1
            continue
        groups.setdefault(comparing.configuration(run), (run, {}))[1].setdefault(attempt.seq_len, []).append(attempt)

    made = []
    for run, lengths in groups.values():
        expected = max(a.seen for found in lengths.values() for a in found)
        sweep = Sweep(path, run, {})
        for seq_len, found in sorted(lengths.items()):
            chosen = _choose(found, expected)
            sweep.points[seq_len] = _point(chosen, run, expected)
            if len(found) > 1:
                number = found.index(chosen) + 1
                sweep.notes.append(f"{seq_len}: {len(found)} runs in {path.name}, number {number} is used")
        made.append(sweep)
    if made:
        missing = {n: Point(n, "not_run", error="planned, never reached") for n in planned}
        made[-1].points = dict(sorted((missing | made[-1].points).items()))
    return made


def _choose(found: list[Attempt], expected: int) -> Attempt:
    """The last complete one: with an outcome record, or in a log with all steps; else the last that has enough."""

    def worth(a: Attempt) -> tuple[bool, bool]:
        complete = bool(a.outcome) or (a.of_log and a.seen >= expected)
        return complete, complete or len(a.times) >= stats.MIN_STEPS

    return max(reversed(found), key=worth)


def _point(attempt: Attempt, run: records.Run, expected: int) -> Point:
    seq_len, outcome = attempt.seq_len, attempt.outcome
    if isinstance(outcome, records.Failure):
        word = "oom" if outcome.kind == "gpu_oom" else "failed"
        return Point(seq_len, word, failure_kind=outcome.kind, error=outcome.error)
    if isinstance(outcome, records.NotRun):
        return Point(seq_len, "not_run", error=outcome.reason)
    point = Point(seq_len, "measured", error=attempt.error, losses=attempt.losses)
    done = flops.step_work(run, seq_len)
    total = done.total_tflop if done else None
    if total is None and run.model:
        why = f"the work of a step is not known ({run.model.uncounted}): the rate is as logged, unchecked"
        point.warnings.append(why)
    times, logged = _agreeing(attempt, total, point.warnings)
    if attempt.retried:
        point.warnings.append(f"{attempt.retried} steps left out: the allocator had to free and retry")
    said = attempt.peaks
    if outcome:
        said = {name: getattr(outcome, name) for name in (*PEAKS, "joules_per_token", "steady", "throttled")}
    for name, value in said.items():
        setattr(point, name, value)
    if len(times):
        set_times(point, times.tolist())
    elif outcome and not attempt.seen:
        point.median_ms, point.n = outcome.median_ms, outcome.n
        point.ci_ms = None if outcome.ci_low_ms is None else (outcome.ci_low_ms, outcome.ci_high_ms)
    if outcome and run.source == "measured" and (lost := outcome.n - len(times) - attempt.retried) > 0:
        point.warnings.append(f"{lost} of the {outcome.n} steps could not be read")
    _judge(point, attempt, run, expected)
    if point.median_ms and (total or logged):
        point.tflops = (total or logged) / point.median_ms * 1e3
        if logged is None and outcome and outcome.tflops:
            logged = outcome.tflops * point.median_ms / 1e3
        _plausible(point, run, logged / total if logged and total else None)
    return point


def set_times(point: Point, times: Sequence[float], weights: Sequence[float] = ()) -> None:
    """The steady steps of a point, with what follows from them."""
    point.times_ms, point.weights, point.n = tuple(times), tuple(weights), len(times)
    point.median_ms, *interval = stats.median_interval(times, weights)
    point.ci_ms = None if None in interval else tuple(interval)


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
    enough = point.n >= stats.MIN_STEPS
    if attempt.outcome:
        point.outcome = "measured" if enough or run.source == "published" else "partial"
    elif attempt.of_log and attempt.seen >= expected and enough:
        if point.error:
            point.warnings.append(f"after its last step the log has: {point.error}")
    elif attempt.oom:
        point.outcome, point.failure_kind = "oom", "gpu_oom"
    elif not attempt.seen:
        point.outcome, point.error = "failed", point.error or "it began and no step was logged"
    else:
        point.outcome = "measured" if attempt.of_log and enough else "partial"
        end = f"of {expected} steps" if attempt.of_log else "steps and no summary"
        point.warnings.append(f"incomplete ({attempt.seen} {end})")


def _plausible(point: Point, run: records.Run, factor: float | None) -> None:
    """MFU; a point no GPU could reach, or no such GPU could be so slow at, is void and says which unit is wrong."""
    known, rate, wrong = specification(run.gpu), point.tflops, None
    peak = run.gpu.peak_tflops or (known and known.dense(run.dtype))
    highest = peak or max(g.dense(run.dtype) or g.bf16 or 0 for g in gpus.load().values())
    if run.gpu.device == "cuda" and rate > highest:
        wrong = f"{rate:.4g} TFLOPS is over the peak of {highest:g}: exec_time_ms is not in ms, or of other work"
    elif run.gpu.device == "cuda" and peak and rate < LEAST_SHARE * peak:
        wrong = f"{rate:.4g} TFLOPS is under 1 % of the peak of {peak:g}: exec_time_ms is not in ms"
    elif factor and not 1 / FOREIGN < factor < FOREIGN:
        wrong = f"the logged rate is {factor:.3g} times the recomputed one: these steps are not of this length"
    if wrong:
        point.outcome, point.failure_kind, point.error = "failed", "unit_error", f"unit error: {wrong}"
        point.times_ms, point.median_ms, point.ci_ms, point.n, point.tflops = (), None, None, 0, None
        return
    if factor and abs(factor - 1) > RATE_TOLERANCE:
        point.warnings.append(f"the logged rate is {factor:.3f} times the recomputed one: another FLOP convention?")
    point.mfu = rate / peak if peak else None
