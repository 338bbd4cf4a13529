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


def differences(a: Sweep, b: Sweep) -> list[str]:
    """Where steps of two boxes, one of them a log, are of other work: the length, the tokens a step."""
    old, new = ({n for n, p in s.points.items() if p.median_ms} for s in (a, b))
    if old and new and not old & new and None not in old | new:
        return [f"length: {', '.join(map(str, sorted(old)))} and {', '.join(map(str, sorted(new)))}"]
    for n in old & new:
        x, y = step_tokens(a.run, n), step_tokens(b.run, n)
        batches = [s.run.job and s.run.job.global_batch for s in (a, b)]
        if x and y and abs(x / y - 1) > ROUNDING and None in batches:  # else the batches say it
            return [f"tokens a step at {n or 'the unknown length'}: {x:.0f} and {y:.0f}"]
    return []


def aligned(old: Sweep, new: Sweep) -> Sweep:
    """NEW with its only length put beside OLD's only one, where they differ and that is allowed."""
    a, b = ([n for n, p in s.points.items() if p.median_ms] for s in (old, new))
    if "log" in (old.run.source, new.run.source) and len(a) == len(b) == 1 and a != b and None not in a + b:
        return replace(new, points={a[0]: new.points[b[0]]})
    return new


def speedup(old: Sweep, new: Sweep, seq_len: int | None) -> stats.Ratio:
    """New over old at a common length, with an interval where both boxes have steps. Raises Missing.

    Where the work differs (and that was allowed), it is of tokens per second and GPU or of nothing.
    """
    a, b = old.points[seq_len], new.points[seq_len]
    stepped = a.times_ms and b.times_ms
    value = stats.Ratio(a.median_ms / b.median_ms)
    ratio = stats.ratio_interval(a.times_ms, b.times_ms, a.weights, b.weights) if stepped else value
    tokens = gpu_tokens(old.run, a), gpu_tokens(new.run, b)
    if all(tokens):
        scale = tokens[1] / tokens[0]  # 1 in like recipes
        return stats.Ratio(*(x if x is None else x * scale for x in (ratio.value, ratio.low, ratio.high)))
    if a.per != b.per:
        _ask(old, new, a, b, f"one has the time of a {a.per}, the other of a {b.per}")
    batches = [s.run.job and s.run.job.global_batch for s in (old, new)]
    sizes = {
        "lengths": (a.seq_len, b.seq_len),
        "batches": batches,
        "numbers of GPUs": (old.run.world_size, new.run.world_size),
    }
    for name, (x, y) in sizes.items():
        if x and y and x != y:
            _ask(old, new, a, b, f"the {name} differ ({x} and {y}), so only tokens per second and GPU compare")
    return ratio


def rests_on(old: Sweep, new: Sweep) -> str | None:
    """What two times of the same thing have to be equal in, where no log says it; None: all of it is known."""
    for n in old.points.keys() & new.points.keys():
        a, b = old.points[n], new.points[n]
        if not (a.median_ms and b.median_ms) or a.per != b.per or (gpu_tokens(old.run, a) and gpu_tokens(new.run, b)):
            continue
        lacking = {"the sequence length": n is None and a.per != "token of a GPU"}
        lacking["the batch"] = a.per == "step" and not all(_batch(s) for s in (old, new))
        lacking["the number of GPUs"] = not all(s.run.world_size for s in (old, new))
        if names := [name for name, lacks in lacking.items() if lacks]:
            listed = " and ".join(names)
            return f"the ratio is of times of a {a.per}: it rests on {listed} being equal, which no log says"
    return None


def _ask(old: Sweep, new: Sweep, a: Point, b: Point, why: str) -> None:
    """For what the first side that lacks something lacks."""
    for side, sweep, point in (("OLD", old, a), ("NEW", new, b)):
        if gpu_tokens(sweep.run, point):
            continue
        known = {"seq_len": point.seq_len, "gpus": sweep.run.world_size}
        known["global_batch"] = step_tokens(sweep.run, point.seq_len) or sweep.run.job.global_batch
        if known["global_batch"] and sweep.run.job.tokens_per_step:
            known["seq_len"] = True
        ask(side, sweep, [key for key in _NEEDED[point.per] if not known[key]], why)


def check(old: Sweep, new: Sweep) -> None:
    """Raises Missing when one log says a length or a batch and the other does not: equal must not be assumed."""
    sides = {"OLD": old, "NEW": new}
    lengths = {side: {n for n, p in s.points.items() if p.median_ms} for side, s in sides.items()}
    steps = all(p.per == "step" for s in sides.values() for p in s.points.values() if p.median_ms)
    for side, other in (("OLD", "NEW"), ("NEW", "OLD")):
        said = lengths[other] - {None}
        if None in lengths[side] and said:
            listed = ", ".join(map(str, sorted(said)))
            ask(side, sides[side], ["seq_len"], f"{other} has {listed}")
        elif steps and (x := _batch(sides[other])) and not _batch(sides[side]):
            ask(side, sides[side], ["global_batch"], f"{other} has {x}")


def _batch(sweep: Sweep) -> str | None:
    job = sweep.run.job
    if job is None or job.global_batch:
        return f"{job.global_batch} sequences a step" if job else "a recipe with one"
    return f"{job.tokens_per_step} tokens a step" if job.tokens_per_step else None


def ask(side: str, sweep: Sweep, keys: list[str], why: str) -> None:
    """Raises Missing: one line with what is missing, why it is needed, and what to write where."""
    lines, options = "; ".join(f"{key} = N" for key in keys), " ".join(f"--{side.lower()} {key}=N" for key in keys)
    where = f"write {lines} into box.toml beside it, or give {options}"
    raise Missing(f"{side} ({sweep.file.name}) does not say {', '.join(keys)}, and {why}: {where}")
