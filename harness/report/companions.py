"""Tables of what stands beside the sweeps: the GPUs' specifications and ceilings, and what the companions measured.

specifications(gpus.by_key("B200"), gpus.by_key("B300"))
decomposition(old_box, new_box, result)     # bench_decompose.py; liger too
attention(old_box, new_box, result)         # bench_flash_attn.py
"""

from __future__ import annotations

import re
import tomllib
from itertools import combinations

from harness import flops, gpus, records
from harness.gpus import Gpu
from harness.report import comparing
from harness.report.box import Box
from harness.report.table import Table, figure, headed, known, names, quotient, recipe_name, share

SPECIFICATIONS = {name: f"{name} dense, TFLOPS" for name in gpus.DTYPES} | {
    "memory_gb": "memory, GB",
    "bandwidth_tb_s": "memory bandwidth, TB/s",
    "nvlink_gb_s": "NVLink, GB/s",
    "power_w": "power, W",
}


def specifications(old: Gpu, new: Gpu) -> Table:
    """Published figures and their ratios."""
    rows = []
    for name, label in SPECIFICATIONS.items():
        values = [getattr(gpu, name) for gpu in (old, new)]
        cannot = [name.removesuffix("_gb_s") in gpu.unsupported for gpu in (old, new)]
        if any(values):
            cells = ["none" if no else f"{x:g}" if x else "-" for x, no in zip(values, cannot, strict=True)]
            rows.append([label, *cells, "only there" if cannot[0] else quotient(*values)])
    return Table(f"Specifications: {old.label} and {new.label}", ["per GPU", old.label, new.label, "ratio"], rows)


def ceilings(old: Gpu, new: Gpu, *boxes: Box) -> Table:
    """The best matmul anyone published, beside what bench_ceilings.py found on the boxes."""
    own = [{c.name: c.value for _, c in box.ceilings if c.what == "matmul" and c.value} for box in boxes]
    header = ["matmul, TFLOPS", old.label, "of its peak", new.label, "of its peak", "ratio"]
    if any(own):
        header += [f"{old.label}, this box", f"{new.label}, this box", "ratio"]
    rows, stacks = [], []
    for name in gpus.DTYPES:
        row, best, mine = [name], [], [found.get(name) for found in own]
        for gpu in (old, new):
            ceiling = gpu.ceilings.get(name)
            best.append(ceiling and ceiling.tflops)
            row += [f"{best[-1]:.1f}", f"{best[-1] / getattr(gpu, name):.1%}"] if ceiling else ["-", "-"]
            stacks += [f"{gpu.label} {name} {ceiling.torch}"] if ceiling else []
        if any(best + mine):
            row.append(quotient(*best))
            rows.append(row + [*map(figure, mine), quotient(*mine)] if any(own) else row)
    note = f"Published with different stacks, so not a matched comparison: torch of {', '.join(stacks)}."
    return Table("Matmul ceilings", header, rows, [note] if stacks else [])


def decomposition(old: Box, new: Box, result: dict) -> Table:
    """Buckets of a step; the total's rate is of all of its work."""
    rows, notes = [], {}
    for (run, a), (_, b) in comparing.matched(old, new):
        n, done, sides = a.seq_len, flops.step_work(run, a.seq_len), []
        for step, box in ((a, old), (b, new)):
            rate = done.total_tflop / step.step_ms * 1e3 if done else None
            peak = box.gpu and box.gpu.dense(run.dtype)
            mfu = rate / peak if rate and peak else None
            total = records.Bucket(name="total", ms=step.step_ms, tflops=rate, mfu=mfu)
            two = {f"of two: {x.name}" if step.full else x.name: x for x in step.two}
            sides.append({x.name: x for x in step.full} | two | {"total": total})
        recipe = recipe_name(run.recipe) if run.recipe else "-"
        for name in (name for name in sides[0] if name in sides[1]):
            pair = sides[0][name], sides[1][name]
            cells = [text for x in pair for text in (figure(x.ms), figure(x.tflops), share(x.mfu))]
            rows.append([str(n), recipe, name, *cells, quotient(pair[1].ms, pair[0].ms)])
        if done and all("attention" in side for side in sides):
            parts = " and ".join(share(side["attention"].ms / side["total"].ms) for side in sides)
            notes[f"Attention is {share(done.attention_share)} of the FLOPs at {n}, {parts} of the time."] = None
    header = ["seqlen", "recipe", "bucket", *headed(result, "ms", "TFLOPS", "MFU"), "ratio"]
    return Table("Where the time of a step goes", header, rows, list(notes))


def _published(old: Box, new: Box) -> dict:
    """What was published as a ratio of these two boxes only: OLD_NEW.toml beside their folders."""
    path = old.folder.parent / f"{old.folder.name}_{new.folder.name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def liger(old: Box, new: Box, result: dict) -> Table:
    """The same decomposed step without and with Liger."""
    rows, said = [], _published(old, new).get("liger", {})

    def with_it(recipe: records.Recipe, seq_len: int) -> str:
        switched = {"name": "", "use_liger": True, "liger_applied": True}
        return f"{recipe.model_copy(update=switched)!r} at {seq_len}"

    steps = [(run.recipe, a, b) for (run, a), (_, b) in comparing.matched(old, new) if run.recipe]
    switched_on = {with_it(recipe, a.seq_len): (a, b) for recipe, a, b in steps if recipe.liger_applied}
    for recipe, a, b in steps:
        n = a.seq_len
        if recipe.liger_applied:
            continue
        if with_liger := switched_on.get(with_it(recipe, n)):
            c, d = with_liger
            peaks, speed = (c.peak_mem_gib, d.peak_mem_gib), quotient(d.step_ms, c.step_ms)
            change = f"{c.step_ms / a.step_ms - 1:+.1%}, {d.step_ms / b.step_ms - 1:+.1%}"
        elif said.get("seq_len") == n:
            peaks, speed = (said["old_peak_gib"], said["new_peak_gib"]), f"{said['speedup']:.2f}"
            change = f"within {said['step_time_within']:.1%}"
        else:
            continue
        off = (a.peak_mem_gib, b.peak_mem_gib)
        rows.append([str(n), "off", *map(figure, off), "", quotient(b.step_ms, a.step_ms)])
        rows.append([str(n), "on", *map(figure, peaks), change, speed])
    header = ["seqlen", "Liger", *headed(result, "peak GiB"), "change of step time", "speedup"]
    return Table("Liger off and on", header, rows)


def fastest(box: Box) -> dict[tuple, records.AttentionTime]:
    """By length, mode and shape, the fastest attention kernel bench_flash_attn.py found on the box."""
    timed = sorted((t for _, t in box.attention if t.fwd_bwd_tflops), key=lambda t: t.fwd_bwd_tflops)
    return {(t.seqlen, t.mode, t.batch, t.heads, t.kv_heads, t.head_dim, t.dtype, t.causal): t for t in timed}


def attention(old: Box, new: Box, result: dict) -> Table:
    """The attention kernel alone: the fastest each box has."""
    best = [fastest(old), fastest(new)]
    if not any(best) and (said := _published(old, new).get("attention")):
        rows = [[n, f"{speed:.2f}"] for n, speed in said["speedup"].items()]
        return Table(f"Attention alone, forward + backward ({said['shape']})", ["seqlen", "ratio"], rows)
    rows = []
    for key in sorted({*best[0], *best[1]}):
        row, pair = [str(key[0]), key[1]], [side.get(key) for side in best]
        for t in pair:
            rates = (t.fwd_tflops, t.fwd_bwd_tflops, t.model_tflops) if t else (None, None, None)
            row += [t.backend if t else "not run", *map(figure, rates)]
        rows.append([*row, quotient(*(t.fwd_bwd_tflops for t in pair)) if all(pair) else ""])
    units = ("kernel", "forward TFLOPS", "forward + backward TFLOPS", "TFLOPS by the model's count")
    return Table("Attention alone", ["seqlen", "mode", *headed(result, *units), "ratio"], rows)


def stacks(old: Box, new: Box, result: dict) -> Table:
    """One GPU under several stacks: TFLOPS by torch and CUDA, at the length most of them have."""
    found, notes = [], []
    for box, name in zip((old, new), names(result).values(), strict=True):
        lengths: dict[int, dict[tuple[tuple, str], float]] = {}
        for sweep in box.sweeps:  # of two measurements of one stack the newer one stays
            torch, _, tag = (sweep.run.stack.torch or "").partition("+")
            tag = tag or "cu" + (sweep.run.stack.cuda or "?").replace(".", "")
            version = tuple(map(int, re.findall(r"\d+", torch)))  # 2.9 is before 2.10
            for n, p in sweep.points.items():
                if p.outcome == "measured" and p.tflops and sweep.run.recipe == box.sweeps[0].run.recipe:
                    lengths.setdefault(n, {})[version, tag] = p.tflops
        n = min(lengths, key=lambda n: (-len(lengths[n]), n), default=None)
        if n and len(lengths[n]) > 1:
            found += [(name, str(n), tag, lengths[n]) for tag in sorted({tag for _, tag in lengths[n]})]
            notes.append(f"{name}: {_changes(lengths[n])}.")
    versions = sorted({version for *_, rates in found for version, _ in rates})
    rows = [[*row, tag, *(known(rates.get((x, tag)), "{:.1f}") for x in versions)] for *row, tag, rates in found]
    header = ["GPU", "seqlen", "CUDA", *(f"torch {_dotted(version)}" for version in versions)]
    return Table("One GPU, several stacks, TFLOPS", header, rows, notes)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _changes(rates: dict[tuple[tuple, str], float]) -> str:
    """What another torch or another CUDA alone changed, and all of it."""
    stacks, texts = sorted(rates), []
    for a, b in combinations(stacks, 2):
        if a[0] == b[0] or a[1] == b[1] or (a, b) == (stacks[0], stacks[-1]):
            before, after = (f"{_dotted(version)}/{tag}" for version, tag in (a, b))
            texts.append(f"{before} to {after} {rates[b] / rates[a] - 1:+.1%}")
    return ", ".join(texts)
