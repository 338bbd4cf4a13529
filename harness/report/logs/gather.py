"""A file of another trainer -> its launches -> sweeps of one point each. The one place that makes points of logs.

A launch ends where the step goes back (a restart) or the batch changes. Several ranks' lines of one step are one
step, as long as its slowest. Times become those of a step where batch, length and GPUs are known, and stay times of a
sample or a token where not.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

from harness import flops, records, stats
from harness.report.box import Point, Sweep, specification
from harness.report.logs import facts as box_facts
from harness.report.logs.reader import FACTS, SPEEDS, Reader, whole

LATE = 2  # printed steps by which a rank may lag; further back it is a restart
SPLITS = ("global_batch", "seq_len", "gpus")  # another value of these is another launch
# speed -> (ms of what, by its value). Of the whole box, but for the last one.
_TIMES = {
    "ms": ("step", lambda x: x),
    "s": ("step", lambda x: 1e3 * x),
    "steps_per_s": ("step", lambda x: 1e3 / x),
    "samples_per_s": ("sample", lambda x: 1e3 / x),
    "tokens_per_s": ("token", lambda x: 1e3 / x),
    "tokens_per_s_per_gpu": ("token of a GPU", lambda x: 1e3 / x),
}
PEAKS = ("peak_mem_gib", "peak_allocated_gib")


@dataclass
class Launch:
    """Observations of one launch while the file is read; times are ms of what `speed` is of."""

    facts: dict
    speed: str | None = None
    times: array = field(default_factory=lambda: array("d"))
    steps: array = field(default_factory=lambda: array("d"))  # -1 where the line has none
    peaks: dict[str, float] = field(default_factory=dict)
    tflops: array = field(default_factory=lambda: array("d"))  # as printed, by the trainer's own count
    last: dict = field(default_factory=dict)


class Gathering:
    """The launches of one format in one file."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.launches: list[Launch] = []
        self.facts: dict = {}
        self.told: dict[str, int] = {}  # fact -> launches there were when it was said
        self.torn: set[str] = set()
        self.changed = False  # a fact, since the last observation
        self.lost = 0  # lines of this format that could not be read

    def line(self, text: str) -> None:
        self.take(self.reader.read(text))

    def tell(self, text: str) -> None:
        self._learn(self.reader.tell(text))

    def _learn(self, said: dict) -> None:
        """Facts for the lines that come; one said twice, with no line between, is of two runs at once and no fact."""
        for key in said.keys() & FACTS:
            value = said[key]
            if self.facts.get(key) != value and key not in self.torn:
                if key in self.facts and self.told.get(key) == len(self.launches):
                    self.torn.add(key)
                    del self.facts[key]
                    continue
                self.facts[key], self.told[key] = value, len(self.launches)
                self.changed = True

    def take(self, seen: dict | None) -> None:
        """An observation or facts; None is a line that could not be read."""
        speeds = [key for key in SPEEDS if key in seen] if seen is not None else []
        if seen is None or not all(seen[key] for key in speeds):
            self.lost += 1
            return
        self._learn(seen)
        if not speeds:
            return
        speed = speeds[0]
        launch, time, step = (
            self.launches[-1] if self.launches else None,
            _TIMES[speed][1](seen[speed]),
            seen.get("step", -1),
        )
        alone = launch and len(launch.times) == 1 and self.reader.kind != "average"
        if alone and speed != launch.speed and launch.speed in speeds:
            self.launches.pop()  # of a line without its best figure, cut off
            self.lost, launch = self.lost + 1, None
        elif launch and launch.speed in seen:
            speed = launch.speed
        time = _TIMES[speed][1](seen[speed])
        if launch is None or self._another(launch, speed, step):
            launch = Launch(dict(self.facts), speed)
            self.launches.append(launch)
        if self.changed:
            launch.facts |= self.facts
            self.changed = False
        if step >= 0 and launch.steps and step <= launch.steps[-1]:
            at = next((i for i in range(1, min(LATE, len(launch.steps)) + 1) if launch.steps[-i] == step), None)
            if at:
                launch.times[-at] = max(time, launch.times[-at])
            else:
                self.lost += 1
            return
        launch.times.append(time)
        launch.steps.append(step)
        launch.last = seen
        for key in PEAKS:
            if key in seen:
                launch.peaks[key] = max(seen[key], launch.peaks.get(key, 0))
        if seen.get("tflops"):
            launch.tflops.append(seen["tflops"])

    def _another(self, launch: Launch, speed: str, step: float) -> bool:
        if speed != launch.speed or self.reader.kind == "average":
            return True
        if self.changed and any(self.facts.get(key) != launch.facts[key] for key in SPLITS if key in launch.facts):
            return True
        return bool(launch.steps) and 0 <= step < launch.steps[-min(LATE, len(launch.steps))]

    def worth(self) -> tuple:
        """Which format of a file is read: steps and means before averages, then the most of them."""
        counts = [len(x.times) for x in self.launches]
        several = max(counts, default=0) > 1
        return bool(counts), several or self.reader.kind == "average", self.reader.kind != "average", sum(counts)


def sweeps(path: Path, found: Gathering, given: dict, problems: list[str]) -> list[Sweep]:
    """Of the chosen format; `problems` are the box's and name what the log and box.toml disagree on, once."""
    made, said = [], []
    for i, launch in enumerate(found.launches):
        facts = box_facts.merged(launch.facts | _divided(launch), given, said)
        run = box_facts.run_of(facts, found.reader.name, f"{path.stem}-{i + 1}", said)
        point, notes = _point(launch, run, facts.get("seq_len"), found.reader)
        made.append(Sweep(path, run, {point.seq_len: point}, notes))
    problems += [f"{path.name}: {text}" for text in dict.fromkeys(said)]
    if len(made) > 1:
        for i, sweep in enumerate(made, 1):
            sweep.notes.insert(0, f"run {i} of {len(made)} in {path.name}")
    return made


def _divided(launch: Launch) -> dict:
    """What the speeds of one line say of the job by dividing, where the log does not say it itself."""
    seen, facts = launch.last, {}
    step = next((1 / _TIMES[k][1](seen[k]) for k in ("ms", "s", "steps_per_s") if k in seen), None)  # steps per ms
    samples, tokens, own = (seen.get(k) for k in ("samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu"))
    if samples and step:
        facts["global_batch"] = whole(samples / step / 1e3)
    if tokens and samples:
        facts["seq_len"] = whole(tokens / samples)
    if tokens and own:
        facts["gpus"] = whole(tokens / own)
    if tokens and step:
        near = round(tokens / step / 1e3 / 1024) * 1024  # token counts are: rates are rounded
        facts["tokens_per_step"] = near if near and abs(tokens / step / 1e3 / near - 1) < 5e-4 else None
    return {key: value for key, value in facts.items() if value and key not in launch.facts}


def _weights(launch: Launch, kind: str) -> tuple[float, ...]:
    """Steps each mean is over, by the step numbers; none where they are not known or all alike."""
    steps = launch.steps
    if kind != "mean" or len(steps) < 2 or min(steps) < 0:
        return ()
    between = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    first = between[0] if steps[0] >= between[0] - 1 else max(steps[0], 1)  # counted from 0 or from 1
    weights = (first, *between)
    return () if min(weights) == max(weights) else weights


def _point(launch: Launch, run: records.Run, seq_len: int | None, reader: Reader) -> tuple[Point, list[str]]:
    point, notes = Point(seq_len and int(seq_len), "measured", kind=reader.kind), [reader.note] if reader.note else []
    times, weights = list(launch.times), _weights(launch, reader.kind)
    point.per, factor = _per_step(_TIMES[launch.speed][0], run, point.seq_len)
    if len(times) == 1 and reader.kind != "average":
        point.outcome, point.error = "partial", "one observation alone, which may be start-up: no step to compare"
        notes.append(point.error)
    elif reader.kind != "average" and (left := stats.startup(times)):
        notes.append(f"start-up left out: {left} of {len(times)} {_named(reader.kind, len(times))}")
        times, weights = times[left:], weights[left:]
    for name, value in launch.peaks.items():
        setattr(point, name, value)
    times = [factor * x for x in times]
    point.n = len(times)
    point.median_ms, *interval = stats.median_interval(times, weights)
    point.ci_ms = None if None in interval else tuple(interval)
    if reader.kind == "average":
        notes.append("an average over the whole run, start-up and evaluation in it: no interval")
        point.n = 0
    else:
        point.times_ms, point.weights = tuple(times), weights
        point.steady = stats.steady(times)
        if point.n > 1 and point.ci_ms is None:
            notes.append(f"{point.n} {_named(reader.kind, point.n)}: too few for an interval")
    if done := flops.step_work(run, point.seq_len) if point.per == "step" else None:
        point.tflops = done.total_tflop / point.median_ms * 1e3
        known = specification(run.gpu)
        if known and (peak := known.dense(run.dtype)):
            point.mfu = point.tflops / peak
        if launch.tflops:
            printed = stats.median_interval(launch.tflops)[0]
            share = printed / point.tflops
            notes.append(f"the log prints {printed:.4g} TFLOPS by its own count, {share:.2f} of what is recomputed")
    return point, notes


def _named(kind: str, n: int) -> str:
    return {"step": "steps", "mean": "means", "average": "averages"}[kind] if n != 1 else kind


def _per_step(per: str, run: records.Run, seq_len: int | None) -> tuple[str, float]:
    """("step", what makes the time one of a step), or what it is of and 1."""
    job, own = run.job, flops.step_tokens(run, seq_len)
    tokens = job.tokens_per_step or (job.global_batch and seq_len and job.global_batch * seq_len)
    factor = {"step": 1, "sample": job.global_batch, "token": tokens, "token of a GPU": own}[per]
    return ("step", factor) if factor else (per, 1)
