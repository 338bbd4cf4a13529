"""A file of another trainer -> its launches -> sweeps of one point each.

A launch ends where the step goes back (a restart) or the batch changes. Several ranks' lines of one step are one
step, as long as its slowest. Times become those of a step where batch, length and GPUs are known, and stay times of a
sample or a token where not.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

from harness import flops, records, stats
from harness.report import points, rates
from harness.report.box import Point, Sweep, specification
from harness.report.logs import facts as box_facts
from harness.report.logs.reader import FACTS, SPEEDS, Reader, whole

LATE = 2  # printed steps by which a rank may lag; further back it is a restart
SPLITS = {"global_batch", "seq_len", "gpus"}  # another value of these is another launch


@dataclass
class Launch:
    """Observations of one launch while the file is read; times are ms of what `per` names."""

    facts: dict
    per: str
    times: array = field(default_factory=lambda: array("d"))
    steps: array = field(default_factory=lambda: array("d"))  # -1 where the line has none
    peaks: dict[str, float] = field(default_factory=dict)
    last: dict = field(default_factory=dict)  # the last line, as read
    last_times: dict[str, float] = field(default_factory=dict)  # of each thing it has a speed of


class Gathering:
    """The launches of one format in one file."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.launches: list[Launch] = []
        self.said: dict = {}  # facts since the last observation; null: two runs at once, each says another
        self.lost = 0  # lines of this format that could not be read

    def take(self, seen: dict | None) -> None:
        """A line as the reader read it: an observation, facts, or null, which is counted."""
        if seen is None:
            self.lost += 1
            return
        times: dict[str, float] = {}
        for speed, (per, ms) in SPEEDS.items():
            if speed in seen:
                times.setdefault(per, ms(seen[speed]))
        facts = {key: seen[key] for key in seen.keys() & FACTS}
        if times:
            self._observe(seen, times, self.said | facts)
            self.said = {}
        for key in facts if not times else ():
            self.said[key] = facts[key] if self.said.get(key, facts[key]) == facts[key] else None

    def _observe(self, seen: dict, times: dict[str, float], said: dict) -> None:
        launch, step = self.launches[-1] if self.launches else None, seen.get("step", -1)
        per = launch.per if launch and launch.per in times else next(iter(times))
        recent = launch.steps[-LATE:] if launch else []
        if launch is None or self._another(launch, per, said) or (0 <= step < max(recent) and step not in recent):
            launch = Launch((launch.facts if launch else {}) | said, per)
            self.launches.append(launch)
        elif step >= 0 and step in recent:  # another rank's
            at = recent.index(step) - len(recent)
            launch.times[at] = max(times[per], launch.times[at])
            return
        launch.facts |= said
        launch.times.append(times[per])
        launch.steps.append(step)
        launch.last, launch.last_times = seen, times
        for key in points.PEAKS:
            if key in seen:
                launch.peaks[key] = max(seen[key], launch.peaks.get(key, 0))

    def _another(self, launch: Launch, per: str, said: dict) -> bool:
        changed = any(launch.facts.get(key, said[key]) != said[key] for key in said.keys() & SPLITS)
        return changed or per != launch.per or self.reader.kind == "average"

    def worth(self) -> tuple:
        """Which format of a file is read: steps and means before averages, then the most of them."""
        counts = [len(x.times) for x in self.launches]
        average = self.reader.kind == "average"
        return bool(counts), average or max(counts, default=0) > 1, not average, sum(counts)


def sweeps(path: Path, found: Gathering, given: dict, problems: list[str]) -> list[Sweep]:
    """Of the chosen format; `problems` are the box's and name what the log and box.toml disagree on, once."""
    made, said = [], []
    for i, launch in enumerate(found.launches, 1):
        facts = box_facts.merged(_divided(launch.last_times) | launch.facts, given, said)
        run = box_facts.run_of(facts, found.reader.name, f"{path.stem}-{i}", said)
        notes = [f"run {i} of {len(found.launches)} in {path.name}"] if len(found.launches) > 1 else []
        point = _point(launch, run, facts.get("seq_len"), found.reader, notes)
        made.append(Sweep(path, run, {point.seq_len: point}, notes))
    problems += [f"{path.name}: {text}" for text in dict.fromkeys(said)]
    return made


def _divided(times: dict[str, float]) -> dict:
    """What the speeds of one line say of the job by dividing, where they fit."""
    step, sample, token, own = map(times.get, ("step", "sample", "token", "token of a GPU"))
    facts = {
        "global_batch": step and sample and whole(step / sample),
        "seq_len": sample and token and whole(sample / token),
        "gpus": token and own and whole(own / token),
    }
    if step and token:
        near = round(step / token / 1024) * 1024  # token counts are: rates are rounded
        facts["tokens_per_step"] = near if near and abs(step / token / near - 1) < 5e-4 else None
    return {key: value for key, value in facts.items() if value}


def _weights(launch: Launch, kind: str) -> tuple[float, ...]:
    """Steps each mean is over, by the step numbers; none where they are not known or all alike."""
    steps = launch.steps
    if kind != "mean" or len(steps) < 2 or min(steps) < 0:
        return ()
    between = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    first = between[0] if steps[0] >= between[0] - 1 else max(steps[0], 1)  # counted from 0 or from 1
    weights = (first, *between)
    return () if min(weights) == max(weights) else weights


def _point(launch: Launch, run: records.Run, seq_len: int | None, reader: Reader, notes: list[str]) -> Point:
    """Of one launch; what is to be known of it goes to `notes`."""
    point = Point(seq_len and int(seq_len), "measured", kind=reader.kind, **launch.peaks)
    notes += [reader.note] if reader.note else []
    factor = _of_a_step(launch.per, run, point.seq_len)
    point.per = "step" if factor else launch.per
    times, weights = [(factor or 1) * x for x in launch.times], _weights(launch, reader.kind)
    if reader.kind == "average":
        notes.append("an average over the whole run, start-up and evaluation in it: no interval")
        point.median_ms = times[0]
    else:
        left = stats.startup(times)
        if len(times) == 1:
            point.outcome, point.error = "partial", "one observation alone, which may be start-up: no step to compare"
            notes.append(point.error)
        elif left:
            notes.append(f"start-up left out: {left} of {len(times)} {reader.kind}s")
        points.set_times(point, times[left:], weights[left:])
        point.steady = stats.steady(point.times_ms)
        if point.n > 1 and point.ci_ms is None:
            notes.append(f"{point.n} {reader.kind}s: too few for an interval")
    done = flops.step_work(run, point.seq_len) if point.per == "step" else None
    if done:
        point.tflops = done.total_tflop / point.median_ms * 1e3
        if printed := launch.last.get("tflops"):
            share = printed / done.total_tflop * times[-1] / 1e3
            notes.append(f"the log prints {printed:.4g} TFLOPS by its own count, {share:.2f} of what is recomputed")
        known = specification(run.gpu)
        if known and (peak := known.dense(run.dtype)):
            point.mfu = point.tflops / peak
    return point


def _of_a_step(per: str, run: records.Run, seq_len: int | None) -> float | None:
    """What makes a time of `per` one of a step; None: not known."""
    tokens, own = rates.step_tokens(run, seq_len), flops.step_tokens(run, seq_len)
    return {"step": 1, "sample": run.job.global_batch, "token": tokens, "token of a GPU": own}[per]
