"""Which sweeps of two boxes may be set side by side, what speaks against it, and what must be said about it.

    pair = comparing.pair(old_box, new_box)    # the best comparable sweeps of the two
    pair.never, pair.differences               # both empty: the figures compare the boxes and nothing else
    pair.warnings                              # true comparisons with something to know

`never`: not the same kind of machine (a MIG slice, a CPU, a torch without CUDA), no flag overrides it. `differences`:
another stack, model, recipe, number of GPUs, FLOP convention, allocator or determinism setting, or a sick card: refused
unless the user insists. `warnings`: hosts, links, drivers, throttling, beta kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

from harness import flops, records
from harness.report import rates
from harness.report.box import Box, Sweep

LONG_SHARE, SHORT_SHARE = 2 / 3, 1 / 3  # of the model FLOPs; for an 8B model about 110k and 28k tokens
CAPPED = 0.95  # a power limit under this share of the card's rated power is a cap
HALF_BUSY = 0.5  # under this busy share of a profiled step, the host (or a compiler) sets the pace, not the GPU
# Config keys that say nothing about the work of a step.
_IDLE_CONFIG = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "max_position_embeddings"}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # new and old names of one
_DETERMINISTIC = "FLASH_ATTENTION_DETERMINISTIC"
LOG_FACTS = ("model", "number of GPUs", "global batch", "precision", "software")  # named when no side knows them
TRAINER = "this project's or the guide's"
_PRERELEASE = re.compile(r"\d\.?(a|b|rc|dev)\d*", re.IGNORECASE)


@dataclass
class Pair:
    old: Sweep
    new: Sweep
    never: list[str]
    differences: list[str]
    warnings: list[str]

    @property
    def common(self) -> list[int]:
        """Lengths measured on both boxes, with enough steps; a verdict uses these only."""
        return sorted({*lengths(self.old, "measured")} & {*lengths(self.new, "measured")}, key=lambda n: n or 0)

    @property
    def of_log(self) -> bool:
        return "log" in (self.old.run.source, self.new.run.source)

    @property
    def comparable(self) -> bool:
        return not self.never and not self.differences


def pair(old: Box, new: Box) -> Pair | None:
    """The best pair; null when a box has no sweep."""
    return next(iter(pairs(old, new)), None)


def pairs(old: Box, new: Box) -> list[Pair]:
    """Every pair of sweeps, best first: fewest differences, then bf16, then most common lengths, then the newest.

    The later ones matter where they are comparable too: another stack or recipe measured on both boxes.
    """
    found = []
    for a, b in product(reversed(joined(old)), reversed(joined(new))):
        never, differences, unknown = compare(a.run, b.run)
        if "log" in (a.run.source, b.run.source):
            differences += rates.differences(a, b)
            b = rates.aligned(a, b)
        found.append(Pair(a, b, never, differences + _sick(old, new), unknown))
        found[-1].warnings += _warnings(old, new, found[-1])

    def order(p: Pair) -> tuple:
        return bool(p.never), len(p.differences), not p.common, p.new.run.dtype != "bf16", -len(p.common)

    return sorted(found, key=order)


def formats(box: Box) -> list[Pair]:
    """(bf16, another format) of the box's sweeps that differ in the format alone: what it gives on the same box."""
    found = []
    for a, b in product(joined(box), repeat=2):
        never, differences, unknown = compare(a.run, b.run)
        alike = a.run.attention == b.run.attention and all(text.startswith("format: ") for text in differences)
        if a.run.dtype == "bf16" and b.run.dtype != "bf16" and not never and alike:
            found.append(Pair(a, b, [], differences, unknown))
    return [pair for pair in found if pair.common]


def joined(box: Box) -> list[Sweep]:
    """The box's sweeps, those of equal configuration as one: a length counts as last measured, else as last seen."""
    made: dict[str, Sweep] = {}
    for sweep in box.sweeps:
        key = configuration(sweep.run)
        if before := made.get(key):
            measured = lengths(before, "measured")
            later = {n: p for n, p in sweep.points.items() if p.outcome == "measured" or n not in measured}
            note = f"joined with {sweep.file.name}, of the same configuration: the last measured counts"
            sweep = replace(before, points=before.points | later, notes=[*before.notes, note, *sweep.notes])
        made[key] = sweep
    return list(made.values())


def configuration(run: records.Run) -> str:
    """Equal for two runs of which the later replaces the earlier."""
    return repr((sorted(_facts(run).items()), run.attention and run.attention.backend, run.gpu.name))


def matched(old: Box, new: Box) -> list[tuple[tuple[records.Run, records.Decomposition], ...]]:
    """((run, step) of OLD, (run, step) of NEW) of every length decomposed on both boxes in comparable runs."""
    every = product(old.decompositions, new.decompositions)
    return [(a, b) for a, b in every if a[1].seq_len == b[1].seq_len and not any(compare(a[0], b[0])[:2])]


def compare(old: records.Run, new: records.Run) -> tuple[list[str], list[str], list[str]]:
    """(never, differences, what one side did not record) of two runs, one text each, by key."""
    never, differences, unknown, one_sided = [], [], [], {}
    a, b = _facts(old), _facts(new)
    if of_log := "log" in (old.source, new.source):
        a, b = a | _job(old), b | _job(new)
    if "model" in a.keys() ^ b.keys():  # known by name alone on one side
        a, b = ({"model": run.model and run.model.name} | facts for run, facts in ((old, a), (new, b)))
    for key in a | b:
        x, y = a.get(key), b.get(key)
        if x == y:
            continue
        if key in ("device", "MIG slice") and not (key == "device" and None in (x, y)):
            never.append(f"{key}: {x or 'none'} and {y or 'none'}")
        elif x is not None and y is not None:
            differences.append(f"{key}: {x} and {y}")
        elif not key.startswith("config "):  # a shipped shape has only the keys that set the work
            one_sided.setdefault("OLD" if x is None else "NEW", []).append(key)
    for side, keys in one_sided.items():
        named = dict.fromkeys("recipe" if key.startswith("recipe ") else key for key in keys)
        for text in [", ".join(named)] if of_log else keys:
            unknown.append(f"{text} is not recorded on {side}, so it was not compared")
    a, b = ({"model": run.model and run.model.name} | facts for run, facts in ((old, a), (new, b)))
    if both := [key for key in LOG_FACTS if of_log and a.get(key) is None and b.get(key) is None]:
        unknown.append(f"unknown on both sides: {', '.join(both)}")
    for side, run in (("OLD", old), ("NEW", new)):
        if run.gpu.device == "cuda" and run.stack.cuda is None and run.stack.torch not in ("unknown", None):
            never.append(f"CUDA: {side} ran a torch without it ({run.stack.torch})")
        if run.attention and run.attention.mismatch:
            differences.append(f"attention on {side}: {run.attention.mismatch}")
        if run.mismatch:
            differences.append(f"ranks of {side}: {run.mismatch}")
    return never, differences, unknown


def lengths(sweep: Sweep, *outcomes: str) -> list[int]:
    return [n for n, p in sweep.points.items() if p.outcome in outcomes]


def regime(attention_share: float | None) -> str:
    """long, short (or packed: documents attend only within themselves), mixed, or unknown without FLOPs.

    By attention's share of the model FLOPs, because that is what moves a speedup.
    """
    if attention_share is None:
        return "unknown"
    return "long" if attention_share > LONG_SHARE else "short" if attention_share < SHORT_SHARE else "mixed"


def heavy(recipe: records.Recipe | None) -> bool:
    """A recipe made for long context: at short lengths its host optimizer and recompute are most of the step."""
    return bool(recipe and recipe.offload_optimizer and recipe.grad_checkpoint)


def _facts(run: records.Run) -> dict:
    """What must be equal, by the name a person knows it by; null is unknown (for a MIG slice: none)."""
    facts = {"device": run.gpu.device, "MIG slice": run.gpu.name if run.gpu.mig else None}
    stack = run.stack.model_dump(exclude={"attention_package"})
    stack = {name: None if version == "unknown" else version for name, version in stack.items()}
    stack["torch"] = stack["torch"] and stack["torch"].split("+")[0]
    stack["python"] = stack["python"] and ".".join(stack["python"].split(".")[:2])  # a patch level is no other one
    facts |= stack | {"number of GPUs": run.world_size, "FLOP convention": run.flop_convention}
    if run.model:
        facts |= {"layers": run.model.num_layers, "weights": run.model.weights}
        facts |= {f"config {k}": v for k, v in run.model.config.items() if k[:1] != "_" and k not in _IDLE_CONFIG}
        if not run.model.config:
            facts["model"] = run.model.name
    if run.recipe:
        facts |= {f"recipe {k}": v for k, v in run.recipe.model_dump(exclude={"name", "doc_len", "dtype"}).items()}
        facts["format"] = _format(run)
        facts["documents"] = run.recipe.doc_len or "one per sequence"
    if run.job:
        facts |= _job(run)
    if _recorded(run):
        facts["allocator setting"] = next((run.environment[k] for k in _ALLOCATOR if k in run.environment), "default")
        facts[_DETERMINISTIC] = run.environment.get(_DETERMINISTIC, "0")
    return facts


def _format(run: records.Run) -> str:
    """What the step multiplies in, and by which package: another version rounds otherwise."""
    if not run.format:
        return run.dtype
    return f"{run.dtype}{', emulated' if run.format.emulated else ''} ({run.format.recipe})"


def _job(run: records.Run) -> dict:
    """What other trainers' logs may say too, by one name for all sources."""
    if run.job:
        said = run.job.model_dump(exclude={"tokens_per_step"})  # rounded: rates.differences has it
        return {key.replace("_", " "): value for key, value in said.items()}
    if run.recipe:
        r = run.recipe
        batch = r.batch_size * r.grad_accum * run.world_size / r.sp_size
        return {"trainer": TRAINER, "precision": run.dtype, "global batch": round(batch)}
    return {}


def log_facts(sweep: Sweep) -> dict:
    """What a sweep is taken for; null is what nobody said."""
    run = sweep.run
    facts = {"gpu": run.gpu.name, "gpus": run.world_size, "seq_len": next(iter(sweep.points), None)}
    return facts | {"model": run.model and run.model.name} | (run.job.model_dump() if run.job else {})


def _recorded(run: records.Run) -> bool:
    """Whether an empty environment means that nothing was set; logs of other scripts do not say."""
    return bool(run.settings or run.environment)


def _sick(old: Box, new: Box) -> list[str]:
    """A card far under its kind says nothing about its kind."""
    return [
        f"unhealthy card on {side}: {c.name} reaches {c.value:.0f} {c.unit}" + (f" ({c.reason})" if c.reason else "")
        for side, box in (("OLD", old), ("NEW", new))
        for _, c in box.ceilings
        if c.unhealthy and c.value is not None
    ]


def _warnings(old: Box, new: Box, pair: Pair) -> list[str]:
    """What to know about a pair that may be compared."""
    a, b = pair.old.run, pair.new.run
    found = [f"OLD: {text}" for text in _one_sided(old, pair.old)]
    found += [f"NEW: {text}" for text in _one_sided(new, pair.new)]
    if a.recipe and a.recipe.offload_optimizer:
        found.append("the optimizer runs on the host (offload): the step compares the hosts too, most at short lengths")
    short = [n for n in pair.common if (done := flops.step_work(a, n)) and regime(done.attention_share) == "short"]
    if heavy(a.recipe) and short:
        found.append(f"a long-context recipe at short lengths ({_listed(short)}) is overhead, not representative")
    beside = [(f"host {k}", v, getattr(b.host, k)) for k, v in a.host.model_dump(exclude={"nodes"}).items()]
    beside += [("driver", a.gpu.driver, b.gpu.driver), ("links", "+".join(a.gpu.links), "+".join(b.gpu.links))]
    if _facts(a)["python"] == _facts(b)["python"]:
        beside.append(("python patch level", a.stack.python, b.stack.python))
    if _recorded(a) and _recorded(b):
        names = sorted({*a.environment, *b.environment} - {*_ALLOCATOR, _DETERMINISTIC})
        beside += [(k, a.environment.get(k, "unset"), b.environment.get(k, "unset")) for k in names]
    if pair.of_log and (text := rates.rests_on(pair.old, pair.new)):
        found.append(text)
    found += [f"{name} differs: {x} and {y}" for name, x, y in beside if x and y and x != y]
    if pair.old.file == pair.new.file:
        found.append("OLD and NEW are the same file")
    return found


def _one_sided(box: Box, sweep: Sweep) -> list[str]:
    run, points = sweep.run, sweep.points
    found = list(sweep.notes)
    if run.gpu.device == "cpu":
        found.append("these figures describe a CPU and no GPU")
    if run.source == "published":
        found.append("published figures, without single steps: no intervals")
    if run.stack.attention_package and _PRERELEASE.search(run.stack.attention_package.split()[-1]):
        found.append(f"the attention kernel is a pre-release ({run.stack.attention_package})")
    if run.model and run.model.weights == "random":
        found.append("random weights: the values that flow differ from a trained model's, and values change speed")
    rated, limit = box.gpu.power_w if box.gpu else None, run.gpu.power_limit_w
    if rated and limit and limit < CAPPED * rated:
        found.append(f"power limit {limit:.0f} W of the card's {rated:.0f} W")
    for text, shown in (
        ("throttled", lambda p: p.throttled),
        ("not steady", lambda p: p.steady is False),
        ("a step over twice the median", lambda p: p.times_ms and max(p.times_ms) > 2 * p.median_ms),
        ("fewer than three steady steps", lambda p: p.outcome == "partial"),
    ):
        if at := [n for n, p in points.items() if shown(p)]:
            found.append(f"{text} at {_listed(at)}")
    found += [f"{n}: {text}" for n, p in points.items() for text in p.warnings]
    idle = [d for _, d in box.decompositions if d.busy_share is not None and d.busy_share < HALF_BUSY]
    return found + [f"GPU busy {d.busy_share:.0%} of a step at {d.seq_len}: host-bound, or compiling" for d in idle]


def _listed(values: list[int]) -> str:
    return ", ".join(str(n or "an unknown length") for n in sorted(values, key=lambda n: n or 0))
