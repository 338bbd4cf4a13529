"""The decision about two boxes as one dict, in the order a person decides; the page is printed from it.

    result = decide(read_box(old), read_box(new), Options(price_ratio=2.0))
    result["gate"], ["comparable"], ["speed"], ["memory"], ["money"], ["verdict"]

Every number is finite, null is unknown. A result without "speed" was refused: the boxes are not comparable.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product

from harness import flops, records
from harness.gpus import DTYPES, Gpu
from harness.report import comparing, cost, fits, gate, library, projection, rates, verdict
from harness.report.box import Box, Missing, NothingUsable, Point, Sweep, named
from harness.report.comparing import Pair
from harness.report.published import Narrow, compare

POINT_KEYS = ("outcome", "median_ms", "ci_ms", "n", "tflops", "mfu", "joules_per_token", "error", "kind", "per")


@dataclass(frozen=True)
class Options:
    """price_*: per GPU and hour, or only their ratio. tokens: of the job that is timed. gpus: null = as measured."""

    price_old: float | None = None
    price_new: float | None = None
    price_ratio: float | None = None
    needs: tuple[str, ...] = ()
    doc_len: int | None = None
    tokens: float = 1e9
    gpus: int | None = None
    allow_mismatch: bool = False
    fleet: tuple[cost.Crew, cost.Crew] | None = None  # old, new
    fleet_base: tuple[cost.Crew, float] | None = None  # old GPUs, and the days they take
    scaling: float = 1.0
    narrow: Narrow = Narrow()  # what published figures must be of

    @property
    def ratio(self) -> float | None:
        return self.price_new / self.price_old if self.price_old and self.price_new else self.price_ratio


def decide(old: Box, new: Box, options: Options) -> dict:
    """Everything that can be said about two boxes; of GPUs known by name only, the gate and the fleet.

    Raises ValueError for a need that is none and for a fleet whose job nothing says the length of; Missing (one too)
    where a log leaves out what the answer takes.
    """
    result, pairs = _opening(old, new, options), comparing.pairs(old, new)
    if found := [*_formats("old", old), *_formats("new", new)]:
        result["formats"] = found
    pair = pairs[0] if pairs else None
    if options.fleet and not old.sweeps and not new.sweeps:
        return result | {"fleet": _fleet(old, new, None, options)}
    result["comparable"] = _comparable(old, new, pair, options.allow_mismatch)
    if not (result["comparable"]["ok"] or result["comparable"]["allowed"]):
        return result
    if pair.of_log:
        rates.check(pair.old, pair.new)
    result["speed"] = _speed(old, new, pairs)
    if options.doc_len:
        result["documents"] = _documents(pair, result["speed"]["buckets"], options.doc_len)
    result["memory"] = _memory(old, new, pair.old, pair.new)
    result["money"] = _money(pair, result["speed"]["points"], options)
    if options.fleet:
        result["fleet"] = _fleet(old, new, pair, options)
    result["verdict"] = verdict.verdicts(result)
    return result


def published(old: Gpu, new: Gpu, options: Options) -> dict:
    """What others measured on two GPUs. Raises NothingUsable when there is no pair of what options.narrow asks for."""
    found = compare(old, new, options.narrow, options.ratio)
    return _opening(named(old), named(new), options, library.load().problems) | {
        "published": found,
        "verdict": [verdict.class_of_pairs(line, options.ratio) for line in found["lines"]],
    }


def project(old: Box, target: Gpu, options: Options, pair: tuple[Box, Box] | None) -> dict:
    """The same question about a GPU that nobody measured here: by what published pairs reached, a line for every
    precision it could be trained in. Raises NothingUsable.

    pair: two measured boxes with a step taken apart, for the picture by length; old may be a GPU known by name only.
    """
    new, sweeps, narrow = Box(old.folder, target.label, target), comparing.joined(old), options.narrow
    sweep = max(sweeps, key=lambda s: (s.run.dtype == "bf16", len(comparing.lengths(s, "measured"))), default=None)
    run = sweep.run if sweep else next((run for run, _ in old.decompositions), None)
    first = narrow.precision or (library.precision_of(run.dtype) if run else "bf16")
    said = {"gpu": run.gpu.name if run else old.name, "precision": first}
    if lacks := [key for key, value in said.items() if not value]:
        how = " ".join({"gpu": "--old gpu=H200", "precision": "--old precision=bf16"}[key] for key in lacks)
        raise Missing(f"{old.folder} does not say its {' and '.join(lacks)}: write it into box.toml, or {how}")
    if old.gpu is None:
        raise NothingUsable(f"{old.name} is not in harness/gpus.toml: nothing to project with")
    model = narrow.model or (run.model.name if run and run.model else None)
    works = [library.kind_of_work(model) or "unknown"] if model else ["dense", "experts"]
    fewer = [p for p in ("fp8", "nvfp4") if DTYPES.index(p) > DTYPES.index(first)]
    known, lines = projection.published(), []
    for work, precision in product(works, [narrow.new_precision] if narrow.new_precision else [first, *fewer]):
        if precision not in fewer or narrow.new_precision or known.has((first, precision), target):
            lines.append(known.expect(old.gpu, target, (first, precision), work, model))
    found = {"ratios": projection.spec_ratios(old.gpu, target), "matmul_ceilings": gate.ceilings(old, new)}
    found |= {"nominal": projection.NOMINAL, "lines": lines, "record": known.record}
    found["picture"] = projection.picture(old, sweep, target, pair) if pair else None
    result = _opening(old, new, options, library.load().problems) | {"projection": found}
    if sweep:
        result["memory"] = _memory(old, new, sweep, None)
    return result | {"verdict": [verdict.renting(line, options.ratio, target.label) for line in lines]}


def _opening(old: Box, new: Box, options: Options, more: list[str] = ()) -> dict:
    problems = [f"published: {text}" for text in more]
    problems += [f"{side}: {text}" for side, box in (("OLD", old), ("NEW", new)) for text in box.problems]
    question = {"old": old.name, "new": new.name, "price_ratio": options.ratio, "price_old": options.price_old}
    question |= {"price_new": options.price_new, "problems": problems}
    return {"question": question, "gate": gate.answer(old, new, options.needs)}


def _comparable(old: Box, new: Box, pair: Pair | None, allowed: bool) -> dict:
    """ok, or allowed all the same, and everything that speaks against it."""
    if pair is None:
        never = [f"no sweep in {side}" for side, box in (("OLD", old), ("NEW", new)) if not box.sweeps]
        return {"ok": False, "allowed": False, "never": never, "differences": [], "warnings": [], "common": []}
    run = pair.new.run
    found = {"ok": pair.comparable, "allowed": allowed and not pair.never, "never": pair.never}
    found |= {"differences": pair.differences, "warnings": pair.warnings, "common": pair.common}
    found |= {"files": {"old": pair.old.file.name, "new": pair.new.file.name}, "gpus": run.world_size}
    if pair.of_log:
        found["facts"] = {"old": comparing.log_facts(pair.old), "new": comparing.log_facts(pair.new)}
    return found | {"model": run.model.name if run.model else None} | _setup(pair.old.run, run)


def _setup(old: records.Run, new: records.Run) -> dict:
    """What was run; stack and recipe are NEW's (equal on both, unless a mismatch is allowed)."""
    attention = {side: run.attention.backend if run.attention else None for side, run in (("old", old), ("new", new))}
    recipe = new.recipe.model_dump() if new.recipe else None
    heavy = comparing.heavy(new.recipe)
    return {"attention": attention, "stack": new.stack.model_dump(), "recipe": recipe, "heavy_recipe": heavy}


def _speed(old: Box, new: Box, pairs: list[Pair]) -> dict:
    """Rates and speedups per length, the buckets of decomposed steps, and other stacks or recipes both boxes have."""
    pair = pairs[0]
    specs = projection.spec_ratios(old.gpu, new.gpu, pair.new.run.dtype) if new.gpu else {}
    found = {"ratios": specs, "points": _points(pair, specs), "buckets": _buckets(old, new, specs.get("compute"))}
    a, b = fits.step_time(pair.old), fits.step_time(pair.new)
    found["fit"] = {"old": a and asdict(a), "new": b and asdict(b)}
    found["others"], seen = [], [_setup(pair.old.run, pair.new.run)]
    for other in pairs:  # a line of its own for each, never mixed with the main one
        setup = _setup(other.old.run, other.new.run)
        if other.comparable and other.common and setup not in seen:
            seen.append(setup)
            found["others"].append(setup | {"points": _points(other, specs)})
    return found


def _formats(side: str, box: Box) -> list[dict]:
    """What another format gives on a box that was measured in both, without buying anything: over bf16, per length.

    The losses are those after the most optimizer steps both did; null where a side recorded none.
    """
    rows = []
    for pair in comparing.formats(box):
        fmt, points = pair.new.run.format, []
        for n in pair.common:
            ratio, losses = rates.speedup(pair.old, pair.new, n), [s.points[n].losses for s in (pair.old, pair.new)]
            steps = max({*losses[0]} & {*losses[1]}, default=None)
            row = {"seq_len": n, "speedup": asdict(ratio) | {"significant": ratio.significant}, "steps": steps}
            points.append(row | {k: at.get(steps) for k, at in zip(("bf16_loss", "loss"), losses, strict=True)})
        row = {"side": side, "dtype": pair.new.run.dtype, "format": fmt and fmt.model_dump(), "points": points}
        rows.append(row | _setup(pair.old.run, pair.new.run))
    return rows


def _points(pair: Pair, specs: dict) -> list[dict]:
    """One row a length that either box has; position: 0 at the bandwidth ratio, 1 at the compute ratio."""
    low, high = sorted((specs.get("bandwidth") or 0, specs.get("compute") or 0))
    rows = []
    for n in sorted({*pair.old.points, *pair.new.points}, key=lambda n: n or 0):
        done = flops.step_work(pair.new.run, n) or flops.step_work(pair.old.run, n)
        row = {"seq_len": n, "attention_share": done.attention_share if done else None}
        for side, sweep in (("old", pair.old), ("new", pair.new)):
            p = sweep.points.get(n, Point(n, "not_run"))
            rate = rates.tokens_per_s(sweep.run, p)
            row[side] = {k: getattr(p, k) for k in POINT_KEYS} | {"tokens_per_s_per_gpu": rate}
        row |= {"speedup": None, "position": None}
        if n in pair.common:
            ratio = rates.speedup(pair.old, pair.new, n)
            row["speedup"] = asdict(ratio) | {"significant": ratio.significant}
            row["position"] = (ratio.value - low) / (high - low) if low and high > low else None
        rows.append(row)
    return rows


def _buckets(old: Box, new: Box, compute: float | None) -> list[dict]:
    """Decomposed steps that both boxes have in comparable runs, the fastest per token first: ratio of every bucket.

    holds_back: the bucket that costs the most time over what it would take at the compute ratio.
    """
    rows = []
    for (run, a), (other, b) in comparing.matched(old, new):
        split = "full" if a.full and b.full else "two"
        before, after = ({x.name: x.ms for x in getattr(d, split)} for d in (a, b))
        lost = {k: after.get(k, 0) - ms / compute for k, ms in before.items()} if compute else {}
        done = flops.step_work(run, a.seq_len)
        row = {"seq_len": a.seq_len, "old_ms": a.step_ms, "new_ms": b.step_ms, "speedup": a.step_ms / b.step_ms}
        row |= {"work": asdict(done) if done else None, "attention_share": done.attention_share if done else None}
        row["ratios"] = {k: ms / after[k] if after.get(k) else None for k, ms in before.items()}
        row["share_of_new_step"] = {k: ms / b.step_ms for k, ms in after.items()}
        row["holds_back"] = max(lost, key=lost.get) if lost and max(lost.values()) > 0 else None
        rows.append(row | _setup(run, other))
    return sorted(rows, key=lambda row: row["new_ms"] / row["seq_len"])


def _documents(pair: Pair, steps: list[dict], doc_len: int) -> dict:
    """The speedup of documents of doc_len tokens packed into the longest common length, by two independent ways.

    decomposed: each box's attention and remaining rates at a decomposed step, weighed by the packed FLOPs (small
    matmuls, no host part). fitted: the sweep's fixed, dense and attention parts (large matmuls). Both extrapolate.
    """
    seq_len = max([doc_len, *pair.common])
    packed = flops.step_work(pair.old.run, seq_len, doc_len)
    share = packed.attention_share if packed else None
    found = {"doc_len": doc_len, "seq_len": seq_len, "attention_share": share, "regime": comparing.regime(share)}
    found |= {"decomposed": None, "fitted": None}
    step = next((s for s in steps if s["work"] and not s["heavy_recipe"] and "attention" in s["ratios"]), None)
    if packed and step:
        new_attention = step["new_ms"] * step["share_of_new_step"]["attention"]
        old_attention = new_attention * step["ratios"]["attention"]
        more_attention = packed.attention_tflop / step["work"]["attention_tflop"]
        more_dense = packed.dense_tflop / step["work"]["dense_tflop"]
        old_ms = old_attention * more_attention + (step["old_ms"] - old_attention) * more_dense
        found["decomposed"] = old_ms / (new_attention * more_attention + (step["new_ms"] - new_attention) * more_dense)
    a, b = fits.step_time(pair.old), fits.step_time(pair.new)
    if packed and a and b:
        found["fitted"] = sum(a.parts_ms(packed).values()) / sum(b.parts_ms(packed).values())
    return found


def _memory(old: Box, new: Box, old_sweep: Sweep | None, new_sweep: Sweep | None) -> dict:
    """What fits only on NEW, measured; and the largest lengths by the fit, for the usable and for all of the memory.

    A box without a sweep (a projection) is given the other's line: peaks hardly depend on the GPU.
    """
    found, ran = {"usable_share": fits.USABLE_SHARE}, []
    for side, box, sweep in (("old", old, old_sweep), ("new", new, new_sweep)):
        source, (capacity, as_sold) = sweep or old_sweep, gate.capacity_gib(box, sweep)
        line = fits.memory_line(source) if source else None
        ran = comparing.lengths(sweep, "measured", "partial") if sweep else []
        row = {"capacity_gib": capacity, "as_sold": as_sold, "fit": line and asdict(line)}
        row |= {
            "largest_measured": max(ran, default=None),
            "out_of_memory": comparing.lengths(sweep, "oom") if sweep else [],
            "kernel_limit": [n for n, p in sweep.points.items() if p.failure_kind == "kernel_limit"] if sweep else [],
        }
        for name, share in (("largest_usable", fits.USABLE_SHARE), ("largest_all", 1)):
            row[name] = line.largest(capacity * share) if line and capacity else None
        found[side] = row
    return found | {"only_new": [n for n in found["old"]["out_of_memory"] if n in ran]}


def _money(pair: Pair, points: list[dict], options: Options) -> dict:
    """Cost per million tokens, break-even price ratio and hours of the job, per common length."""
    ratio, gpu_count = options.ratio, options.gpus or pair.new.run.world_size
    rows = []
    for point in points:
        if not (gain := point["speedup"]):
            continue
        row = {"seq_len": point["seq_len"], "break_even": gain}
        for side, price in (("old", options.price_old or 1.0), ("new", options.price_new or ratio)):
            rate = point[side]["tokens_per_s_per_gpu"]
            row[f"{side}_per_mtoken"] = cost.per_mtoken(price, rate) if price and rate else None
            row[f"{side}_hours"] = cost.hours(options.tokens, rate, gpu_count) if rate and gpu_count else None
            row[f"{side}_joules_per_token"] = point[side]["joules_per_token"]
        row["outcome"] = cost.outcome(verdict.ratio(gain), ratio) if ratio else None
        rows.append(row | {"cost_change": ratio / gain["value"] - 1 if ratio else None})
    unit = "price units" if options.price_old else "old GPU-hours"
    return {"price_ratio": ratio, "unit": unit, "tokens": options.tokens, "gpus": gpu_count, "points": rows}


def _fleet(old: Box, new: Box, pair: Pair | None, options: Options) -> dict:
    """Two fleets and one job; options.fleet and a price are needed. Measured boxes give the speedup at their longest
    common length, and the job's days when options.fleet_base does not; without them the ratios of the specifications
    are bounds, not expectations."""
    gain, base = None, options.fleet_base
    if pair and pair.common:
        longest, run = pair.common[-1], pair.old.run
        gain, rate = rates.speedup(pair.old, pair.new, longest), rates.tokens_per_s(run, pair.old.points[longest])
        if rate and run.world_size:
            base = base or (cost.Crew(run.world_size), cost.hours(options.tokens, rate, run.world_size) / 24)
    if base is None:
        raise ValueError("how long does the job take now? Give --fleet-base, such as 3+1=8.8")
    specs = projection.spec_ratios(old.gpu, new.gpu) if new.gpu else {}
    peaks = {name: specs[name] for name in ("compute", "bandwidth") if specs.get(name)}
    return cost.fleet(*base, *options.fleet, options.ratio, peaks, options.scaling, gain)
