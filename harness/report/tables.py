"""Every table of the report, in Markdown, from two boxes. No plotting library is needed.

    view = tables.view(read_box("results/a"), read_box("results/b"), decision.Options(price_ratio=2))
    print(tables.make(view)["speedup"].markdown())

A cell is a figure, a word for why there is none (OOM, failed, not run, partial), or "-" for what is not known. Rates
are per GPU; ratios are new over old, with their 95 % interval where both boxes have steps, `~` where it spans 1.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness import flops, gpus, records
from harness.gpus import Gpu
from harness.report import comparing, decision
from harness.report.box import Box, Point
from harness.stats import Ratio

WORDS = {"oom": "OOM", "failed": "failed", "not_run": "not run"}
SPECIFICATIONS = {name: f"{name} dense, TFLOPS" for name in gpus.DTYPES} | {
    "memory_gb": "memory, GB",
    "bandwidth_tb_s": "memory bandwidth, TB/s",
    "nvlink_gb_s": "NVLink, GB/s",
    "power_w": "power, W",
}


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Title, pipe table, notes; ends with a newline."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join([f"**{self.title}**", body, *self.notes]) + "\n"


@dataclass
class View:
    """Two boxes, the pair of their sweeps (None: there is none to compare) and the decision about them."""

    old: Box
    new: Box
    pair: comparing.Pair | None
    result: dict

    def header(self, *units: str) -> list[str]:
        return [f"{box.name} {unit}".strip() for box in (self.old, self.new) for unit in units]

    def points(self, seq_len: int) -> tuple[Point | None, Point | None]:
        return self.pair.old.points.get(seq_len), self.pair.new.points.get(seq_len)


def view(old: Box, new: Box, options: decision.Options) -> View:
    return View(old, new, comparing.pair(old, new), decision.decide(old, new, options))


def make(v: View) -> dict[str, Table]:
    """Every table there is data for, by name, in the order of the report."""
    found: dict[str, Table | None] = {}
    if v.old.gpu and v.new.gpu:
        found["specifications"] = specifications(v.old.gpu, v.new.gpu)
        found["ceilings"] = ceilings(v.old.gpu, v.new.gpu, v.old, v.new)
    if v.pair:
        found["environment"] = environment(v)
    if "speed" in v.result:
        found |= {"speedup": speedup(v), "memory": memory(v), "capacity": capacity(v), "price": price(v)}
    found |= {"decomposition": decomposition(v), "liger": liger(v), "attention": attention(v), "stacks": stacks(v)}
    return {name: table for name, table in found.items() if table and table.rows}


def figure(value: float | None) -> str:
    """Three digits, all of them from 100 on: 7.42, 14.3, 141, 1453."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def quotient(old: float | None, new: float | None) -> str:
    return f"{new / old:.2f}" if old and new else "-"


def ratio_of(found: dict) -> Ratio:
    """The decision's ratio as one that prints itself."""
    return Ratio(found["value"], found["low"], found["high"])


def recipe_name(recipe: records.Recipe) -> str:
    """long-context, or for a custom one what it has: ZeRO-2 + Liger."""
    if recipe.name != "custom":
        return recipe.name
    parts = {"checkpointing": recipe.grad_checkpoint, "CPU AdamW": recipe.offload_optimizer, "Liger": recipe.use_liger}
    parts |= {"compile": recipe.compile, f"documents of {recipe.doc_len}": recipe.doc_len}
    return " + ".join([f"ZeRO-{recipe.zero_stage}", *(name for name, on in parts.items() if on)])


def _cell(point: Point | None, text: str) -> str:
    """The text, or the word for why there is no figure."""
    if point is None:
        return WORDS["not_run"]
    return f"partial (n={point.n})" if point.outcome == "partial" else WORDS.get(point.outcome, text)


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
        best = [gpu.ceilings[name].tflops if name in gpu.ceilings else None for gpu in (old, new)]
        mine = [side.get(name) for side in own]
        if not any(best + mine):
            continue
        row = [name]
        for gpu, value in zip((old, new), best, strict=True):
            row += [f"{value:.1f}", f"{value / getattr(gpu, name):.1%}"] if value else ["-", "-"]
            stacks += [f"{gpu.label} {name} {gpu.ceilings[name].torch}"] if value else []
        row.append(quotient(*best))
        rows.append(row + [*map(figure, mine), quotient(*mine)] if any(own) else row)
    note = f"Published with different stacks, so not a matched comparison: torch of {', '.join(stacks)}."
    return Table("Matmul ceilings", header, rows, [note] if stacks else [])


def environment(v: View) -> Table:
    """What ran on both boxes."""

    def facts(r: records.Run) -> dict:
        attention, stack = r.attention, r.stack
        return {
            "GPU": f"{r.gpu.count}x {r.gpu.name}",
            "attention": attention and ", ".join(filter(None, (attention.backend, stack.attention_package))),
            "torch / CUDA": f"{stack.torch} / {stack.cuda or '-'}",
            "deepspeed": stack.deepspeed,
            "python / transformers / liger": " / ".join(
                x or "-" for x in (stack.python, stack.transformers, stack.liger_kernel)
            ),
            "model": r.model and f"{r.model.name}, {r.model.weights} weights",
            "recipe": r.recipe and recipe_name(r.recipe),
            "driver": r.gpu.driver,
            "links": ", ".join(r.gpu.links),
            "host": r.host.cpu,
            "source": r.source,
        }

    old, new = facts(v.pair.old.run), facts(v.pair.new.run)
    rows = [[name, str(old[name] or "-"), str(new[name] or "-")] for name in old if old[name] or new[name]]
    return Table("Environment", ["", *v.header("")], rows)


def speedup(v: View) -> Table:
    """Rates by length and how many times faster."""
    points = v.result["speed"]["points"]
    stepped = any(p[side]["n"] for p in points for side in ("old", "new"))
    rows = []
    for p in points:
        row = [str(p["seq_len"]), share(p["attention_share"])]
        for side, point in zip((p["old"], p["new"]), v.points(p["seq_len"]), strict=True):
            row += [_cell(point, figure(side["tflops"])), _cell(point, share(side["mfu"]))]
        row.append(str(ratio_of(p["speedup"])) if p["speedup"] else "")
        rows.append(row + [f"{p['old']['n']}, {p['new']['n']}"] if stepped else row)
    header = ["seqlen", "attention share of FLOPs", *v.header("TFLOPS", "MFU"), "speedup", *["steps"] * stepped]
    run, notes = v.pair.new.run, []
    what = [run.model and run.model.name, run.recipe and recipe_name(run.recipe), f"{run.world_size} ranks"]
    if different := v.result["comparable"]["differences"]:
        notes.append(f"**Not comparable**: {'; '.join(different)}.")
    if run.gpu.device == "cpu":
        notes.append("These figures describe a CPU and no GPU.")
    return Table(f"Speedup by sequence length ({', '.join(filter(None, what))})", header, rows, notes)


def memory(v: View) -> Table:
    """Peak memory by length."""
    rows = []
    for p in v.result["speed"]["points"]:
        cells = [_cell(x, f"{x.peak_mem_gib:.1f}" if x and x.peak_mem_gib else "-") for x in v.points(p["seq_len"])]
        rows.append([str(p["seq_len"]), *cells])
    return Table("Peak memory, reserved, worst rank", ["seqlen", *v.header("peak GiB")], rows)


def capacity(v: View) -> Table:
    """The fitted line of memory, and the lengths each box holds."""
    part, columns = f"{v.result['memory']['usable_share']:.0%}", []
    for m in (v.result["memory"]["old"], v.result["memory"]["new"]):
        fit, lengths = m["fit"], [m["largest_usable"], m["largest_all"]]
        columns.append({
            "memory, GiB": figure(m["capacity_gib"]),
            "longest that ran": str(m["largest_measured"] or "-"),
            "out of memory at": ", ".join(map(str, m["out_of_memory"])) or "-",
            "peak GiB, fitted": f"{fit['floor_gib']:.1f} + {fit['gib_per_token']:.5f} per token" if fit else "-",
            "largest error of the fit, GiB": f"{fit['worst_error_gib']:.1f}" if fit else "-",
            f"longest by the fit, {part} of the memory": f"{lengths[0] / 1000:.0f}k" if lengths[0] else "-",
            "longest by the fit, all of it": f"{lengths[1] / 1000:.0f}k" if lengths[1] else "-",
        })  # fmt: skip
    rows = [[name, *(c[name] for c in columns)] for name in columns[0] if {c[name] for c in columns} != {"-"}]
    note = f"{part} is what the published H200 could use of its 141 GB. A length by the fit was not measured."
    return Table("What each box holds", ["", *v.header("")], rows, [note])


def price(v: View) -> Table:
    """Cost of a token by length; a speedup is the price ratio up to which the new box pays."""
    money = v.result["money"]
    ratio, rows = money["price_ratio"], []
    for p in money["points"]:
        row = [str(p["seq_len"]), str(ratio_of(p["break_even"]))]
        if ratio:
            row += [
                f"{p['old_per_mtoken']:.3f}",
                f"{p['new_per_mtoken']:.3f}",
                f"{p['cost_change']:+.0%}",
                p["outcome"],
            ]
        rows.append(row)
    header = ["seqlen", "break-even price ratio"]
    header += [*v.header("cost of a million tokens"), "change", "per token"] if ratio else []
    return Table(f"Price at a ratio of {ratio:.2f}, in {money['unit']}" if ratio else "Price", header, rows)


def matched(v: View) -> Iterator[tuple[records.Run, records.Decomposition, records.Decomposition]]:
    """Decomposed steps both boxes have, alike."""
    for run, a in v.old.decompositions:
        for other, b in v.new.decompositions:
            if a.seq_len == b.seq_len and not any(comparing.compare(run, other)[:2]):
                yield run, a, b


def decomposition(v: View) -> Table:
    """Buckets of a step; the total's rate is of all of its work."""
    rows, notes = [], []
    for run, *steps in matched(v):
        done, sides = flops.step_work(run, steps[0].seq_len), []
        for d, box in zip(steps, (v.old, v.new), strict=True):
            rate = done.total_tflop / d.step_ms * 1e3 if done else None
            mfu = rate / box.gpu.bf16 if rate and box.gpu and box.gpu.bf16 else None
            total = records.Bucket(name="total", ms=d.step_ms, tflops=rate, mfu=mfu)
            two = {f"of two: {x.name}" if d.full else x.name: x for x in d.two}
            sides.append({x.name: x for x in d.full} | two | {"total": total})
        for name in (x for x in sides[0] if x in sides[1]):
            pair = [side[name] for side in sides]
            cells = [text for x in pair for text in (figure(x.ms), figure(x.tflops), share(x.mfu))]
            recipe = recipe_name(run.recipe) if run.recipe else "-"
            rows.append([str(steps[0].seq_len), recipe, name, *cells, quotient(pair[1].ms, pair[0].ms)])
        if done and all("attention" in side for side in sides):
            parts = " and ".join(share(side["attention"].ms / side["total"].ms) for side in sides)
            notes.append(
                f"Attention is {share(done.attention_share)} of the FLOPs at {d.seq_len}, {parts} of the time."
            )
    header = ["seqlen", "recipe", "bucket", *v.header("ms", "TFLOPS", "MFU"), "ratio"]
    return Table("Where the time of a step goes", header, rows, list(dict.fromkeys(notes)))


def _published(v: View) -> dict:
    """What was published as a ratio of these two boxes only: OLD_NEW.toml beside their folders."""
    path = v.old.folder.parent / f"{v.old.folder.name}_{v.new.folder.name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def liger(v: View) -> Table:
    """The same decomposed step without and with Liger."""
    steps, said, rows = [s for s in matched(v) if s[0].recipe], _published(v).get("liger", {}), []
    switched = {"use_liger": True, "liger_applied": True, "name": ""}
    for run, a, b in steps:
        if run.recipe.liger_applied:
            continue
        n, with_liger = str(a.seq_len), []
        for other, c, d in steps:
            alike = other.recipe.model_copy(update={"name": ""}) == run.recipe.model_copy(update=switched)
            if alike and c.seq_len == a.seq_len:
                change = f"{c.step_ms / a.step_ms - 1:+.1%}, {d.step_ms / b.step_ms - 1:+.1%}"
                peaks = [figure(c.peak_mem_gib), figure(d.peak_mem_gib)]
                with_liger = [n, "on", *peaks, change, quotient(d.step_ms, c.step_ms)]
        if not with_liger and said.get("seq_len") == a.seq_len:
            peaks, change = [figure(said["old_peak_gib"]), figure(said["new_peak_gib"])], said["step_time_within"]
            with_liger = [n, "on", *peaks, f"within {change:.1%}", f"{said['speedup']:.2f}"]
        if with_liger:
            peaks = [figure(a.peak_mem_gib), figure(b.peak_mem_gib)]
            rows += [[n, "off", *peaks, "", quotient(b.step_ms, a.step_ms)], with_liger]
    return Table("Liger off and on", ["seqlen", "Liger", *v.header("peak GiB"), "change of step time", "speedup"], rows)


def fastest(box: Box) -> dict[tuple, records.AttentionTime]:
    """By length, mode and shape, the fastest attention kernel bench_flash_attn.py found on the box."""
    timed = sorted((t for _, t in box.attention if t.fwd_bwd_tflops), key=lambda t: t.fwd_bwd_tflops)
    return {(t.seqlen, t.mode, t.batch, t.heads, t.kv_heads, t.head_dim, t.dtype, t.causal): t for t in timed}


def attention(v: View) -> Table:
    """The attention kernel alone: the fastest each box has."""
    best = [fastest(v.old), fastest(v.new)]
    if not any(best) and (said := _published(v).get("attention")):
        rows = [[n, f"{ratio:.2f}"] for n, ratio in said["speedup"].items()]
        return Table(f"Attention alone, forward + backward ({said['shape']})", ["seqlen", "ratio"], rows)
    rows = []
    for key in sorted({*best[0], *best[1]}):
        row, pair = [str(key[0]), key[1]], [side.get(key) for side in best]
        for t in pair:
            figures = map(figure, (t.fwd_tflops, t.fwd_bwd_tflops, t.model_tflops)) if t else ("-", "-", "-")
            row += [t.backend if t else "not run", *figures]
        rows.append([*row, quotient(*(t.fwd_bwd_tflops for t in pair)) if all(pair) else ""])
    columns = v.header("kernel", "forward TFLOPS", "forward + backward TFLOPS", "TFLOPS by the model's count")
    return Table("Attention alone", ["seqlen", "mode", *columns, "ratio"], rows)


def stacks(v: View) -> Table:
    """One GPU under several stacks: TFLOPS by torch and CUDA, at the length most of them have."""
    rows, notes = [], []
    for box in (v.old, v.new):
        cells: dict[int, dict[tuple[str, tuple], float]] = {}
        for sweep in box.sweeps:  # of two measurements of one stack the newer one stays
            torch, _, tag = sweep.run.stack.torch.partition("+")
            tag = tag or "cu" + (sweep.run.stack.cuda or "?").replace(".", "")
            for n, p in sweep.points.items():
                if p.outcome == "measured" and p.tflops and sweep.run.recipe == box.sweeps[0].run.recipe:
                    cells.setdefault(n, {})[tag, tuple(map(int, re.findall(r"\d+", torch)))] = p.tflops
        if cells and max(map(len, cells.values())) > 1:
            n = min(cells, key=lambda n: (-len(cells[n]), n))
            rows += [(box.name, str(n), tag, cells[n]) for tag in sorted({tag for tag, _ in cells[n]})]
            notes.append(f"{box.name}: {_changes(cells[n])}.")
    columns = sorted({torch for *_, found in rows for _, torch in found})
    body = [
        [*row, tag, *(f"{x:.1f}" if (x := found.get((tag, c))) else "-" for c in columns)] for *row, tag, found in rows
    ]
    header = ["GPU", "seqlen", "CUDA", *(f"torch {'.'.join(map(str, c))}" for c in columns)]
    return Table("One GPU, several stacks, TFLOPS", header, body, notes)


def _changes(found: dict[tuple[str, tuple], float]) -> str:
    """What each step of torch or CUDA alone changed, then all of it."""
    keys = sorted(found, key=lambda key: (key[1], key[0]))
    lanes = [[k for k in keys if k[i] == value] for i in (0, 1) for value in sorted({k[i] for k in keys})] + [keys]
    steps = [pair for lane in lanes[:-1] for pair in zip(lane, lane[1:], strict=False)]
    steps += [(lane[0], lane[-1]) for lane in lanes]
    name = {key: f"{'.'.join(map(str, key[1]))}/{key[0]}" for key in keys}
    return ", ".join(
        f"{name[a]} to {name[b]} {found[b] / found[a] - 1:+.1%}" for a, b in dict.fromkeys(steps) if a != b
    )
