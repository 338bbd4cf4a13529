"""How many times faster: ratios of times of the same work, or of tokens per second and GPU.

    rates.speedup(pair, 8192)              # stats.Ratio; raises Missing when a log leaves out what that takes
    rates.tokens_per_s(run, point)         # per GPU; None: not known

A point's time is of a step, or, where a log does not say what a step is, of a sample or of a token. Two times of the
same thing have a ratio although neither log says how large it is; otherwise both have to be known in tokens of one GPU.
"""

from __future__ import annotations

from dataclasses import replace

from harness import flops, records, stats
from harness.report.box import Missing, Point, Sweep

ROUNDING = 1e-3  # tokens a step are from dividing printed rates
NAMES = {"seq_len": "the sequence length", "global_batch": "the batch", "gpus": "the number of GPUs"}
_NEEDED = {  # what it takes to know the tokens of one GPU in a time of it
    "step": ("seq_len", "global_batch", "gpus"),
    "sample": ("seq_len", "gpus"),
    "token": ("gpus",),
    "token of a GPU": (),
}


def step_tokens(run: records.Run, seq_len: int | None) -> float | None:
    """Tokens of all GPUs a step; None: the log does not say."""
    if run.job:
        job = run.job
        return job.tokens_per_step or (job.global_batch and seq_len and job.global_batch * seq_len)
    return flops.step_tokens(run, seq_len) * run.world_size


def gpu_tokens(run: records.Run, point: Point) -> float | None:
    """Tokens of one GPU in what the point's time is of."""
    gpus, n = run.world_size, point.seq_len
    per = {"step": lambda: flops.step_tokens(run, n), "sample": lambda: n and gpus and n / gpus}
    per |= {"token": lambda: gpus and 1 / gpus, "token of a GPU": lambda: 1.0}
    return per[point.per]()


def tokens_per_s(run: records.Run, point: Point) -> float | None:
    """Per GPU; None: not measured, or not known."""
    tokens = gpu_tokens(run, point)
    return tokens / point.median_ms * 1e3 if tokens and point.median_ms else None


def known(sweep: Sweep, point: Point) -> dict[str, object]:
    """The facts of NAMES for a point of a sweep; null: no log says."""
    job = sweep.run.job
    batch = "a recipe with one" if job is None else job.global_batch
    if not batch and job.tokens_per_step:
        batch = f"{job.tokens_per_step} tokens a step"
    return {"seq_len": point.seq_len, "global_batch": batch, "gpus": sweep.run.world_size}


def measured(sweep: Sweep) -> dict[int | None, Point]:
    """The points with a time, by length."""
    return {n: p for n, p in sweep.points.items() if p.median_ms}


def differences(a: Sweep, b: Sweep) -> list[str]:
    """Where steps of two boxes, one of them a log, are of other work: the length, the tokens a step."""
    old, new = measured(a), measured(b)
    if old and new and not old.keys() & new.keys() and None not in old.keys() | new.keys():
        return [f"length: {', '.join(map(str, old))} and {', '.join(map(str, new))}"]
    batches = [s.run.job and s.run.job.global_batch for s in (a, b)]
    for n in old.keys() & new.keys() if None in batches else ():  # else the batches say it
        x, y = step_tokens(a.run, n), step_tokens(b.run, n)
        if x and y and abs(x / y - 1) > ROUNDING:
            return [f"tokens a step at {n or 'the unknown length'}: {x:.0f} and {y:.0f}"]
    return []


def aligned(old: Sweep, new: Sweep) -> Sweep:
    """NEW with its only length put beside OLD's only one, where they differ and that is allowed."""
    a, b = list(measured(old)), list(measured(new))
    if len(a) == len(b) == 1 and a != b and None not in a + b:
        return replace(new, points={a[0]: new.points[b[0]]})
    return new


def speedup(old: Sweep, new: Sweep, seq_len: int | None) -> stats.Ratio:
    """New over old at a common length, with an interval where both boxes have steps. Raises Missing.

    Where the work differs (and that was allowed), it is of tokens per second and GPU or of nothing.
    """
    a, b = old.points[seq_len], new.points[seq_len]
    ratio = stats.Ratio(a.median_ms / b.median_ms)
    if a.times_ms and b.times_ms:
        ratio = stats.ratio_interval(a.times_ms, b.times_ms, a.weights, b.weights)
    tokens = gpu_tokens(old.run, a), gpu_tokens(new.run, b)
    if all(tokens):
        scale = tokens[1] / tokens[0]  # 1 in like recipes
        return stats.Ratio(*(x and x * scale for x in (ratio.value, ratio.low, ratio.high)))
    x, y = known(old, a), known(new, b)
    why = [f"{NAMES[key]} differs: {x[key]} and {y[key]}" for key in NAMES if x[key] and y[key] and x[key] != y[key]]
    if a.per != b.per:
        why = [f"one has the time of a {a.per}, the other of a {b.per}"]
    for side, sweep, point, facts in (("OLD", old, a, x), ("NEW", new, b, y)) if why else ():
        if lacks := [key for key in _NEEDED[point.per] if not facts[key]]:
            _ask(side, sweep, lacks, f"{why[0]}, so only tokens per second and GPU compare")
    return ratio


def rests_on(old: Sweep, new: Sweep) -> str | None:
    """What two times of the same thing have to be equal in, where no log says it; None: all of it is known."""
    for n, a in measured(old).items():
        b = measured(new).get(n)
        if not b or a.per != b.per or (gpu_tokens(old.run, a) and gpu_tokens(new.run, b)):
            continue
        facts = known(old, a), known(new, b)
        if lacks := [NAMES[key] for key in _NEEDED[a.per] if not all(side[key] for side in facts)]:
            return (
                f"the ratio is of times of a {a.per}: it rests on {' and '.join(lacks)} being equal, which no log says"
            )
    return None


def check(old: Sweep, new: Sweep) -> None:
    """Raises Missing when one log says a length or a batch and the other does not: equal must not be assumed."""
    steps = all(p.per == "step" for sweep in (old, new) for p in measured(sweep).values())
    for side, sweep, other, source in (("OLD", old, "NEW", new), ("NEW", new, "OLD", old)):
        for key in ("seq_len", "global_batch") if steps else ("seq_len",):
            mine, said = ([known(s, p)[key] for p in measured(s).values()] for s in (sweep, source))
            if None in mine and (told := [str(x) for x in said if x]):
                _ask(side, sweep, [key], f"{other} has {', '.join(told)}")


def _ask(side: str, sweep: Sweep, keys: list[str], why: str) -> None:
    """Raises Missing: one line with what is missing, why it is needed, and what to write where."""
    lines, options = "; ".join(f"{key} = N" for key in keys), " ".join(f"--{side.lower()} {key}=N" for key in keys)
    where = f"write {lines} into box.toml beside it, or give {options}"
    raise Missing(f"{side} ({sweep.file.name}) does not say {', '.join(keys)}, and {why}: {where}")
