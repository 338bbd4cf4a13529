"""Every table of the report: in Markdown for the README, the same ones on should_upgrade.py's page.

    view = tables.view(read_box("results/a"), read_box("results/b"), decision.Options(price_ratio=2))
    print(tables.make(view)["speedup"].markdown())

A cell is a figure, a word for why there is none (OOM, failed, not run, partial), or "-" for what is not known. Rates
are per GPU; ratios are new over old, with their 95 % interval where both boxes have steps, `~` where it spans 1.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from itertools import combinations

from harness import flops, gpus, records
from harness.gpus import Gpu
from harness.report import comparing, decision
from harness.report.box import Box
from harness.report.verdict import about, between, ratio

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


def of_columns(title: str, columns: dict[str, list[str]], optional: dict[str, list[str]]) -> Table:
    """A table by its columns; an optional one is left out when all of it is unknown."""
    columns = columns | {name: cells for name, cells in optional.items() if set(cells) != {"-"}}
    return Table(title, list(columns), [list(row) for row in zip(*columns.values(), strict=True)])


@dataclass
class View:
    """Two boxes, the pair of their sweeps (None: there is none to compare) and the decision about them."""

    old: Box
    new: Box
    pair: comparing.Pair | None
    result: dict


def view(old: Box, new: Box, options: decision.Options) -> View:
    return View(old, new, comparing.pair(old, new), decision.decide(old, new, options))


def make(v: View) -> dict[str, Table]:
    """Every table there is data for, by name, in the order of the report."""
    found: dict[str, Table] = {}
    if v.old.gpu and v.new.gpu:
        found["specifications"] = specifications(v.old.gpu, v.new.gpu)
        found["ceilings"] = ceilings(v.old.gpu, v.new.gpu, v.old, v.new)
    if v.pair:
        found["environment"] = environment(v)
    if "speed" in v.result:
        rated = any(p[side]["tflops"] for p in v.result["speed"]["points"] for side in ("old", "new"))
        units = ("TFLOPS", "MFU") if rated else (timed(v.result),)
        found |= {"speedup": speedup(v.result, *units), "memory": memory(v)}
        found |= {"capacity": capacity(v.result), "price": price(v.result)}
        if v.pair.new.run.gpu.device == "cpu":
            found["speedup"].notes.append("These figures describe a CPU and no GPU.")
    found |= {"decomposition": decomposition(v), "liger": liger(v), "attention": attention(v), "stacks": stacks(v)}
    if compared := v.result.get("published"):
        found |= {"published": published_lines(compared)} | published_pairs(compared, *names(v.result).values())
    return {name: table for name, table in found.items() if table.rows}


def names(result: dict) -> dict[str, str]:
    """What the two boxes go by, by their side."""
    old, new = result["question"]["old"], result["question"]["new"]
    return {"old": old, "new": new} if old != new else {"old": f"{old} (OLD)", "new": f"{new} (NEW)"}


def headed(result: dict, *units: str) -> list[str]:
    return [f"{name} {unit}" for name in names(result).values() for unit in units]


def known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def length(seq_len: int | None) -> str:
    return "unknown" if seq_len is None else str(seq_len)


def figure(value: float | None) -> str:
    """Three digits, all of them from 100 on: 7.42, 14.3, 141, 1453."""
    return known(value, "{:.3g}" if value is None or abs(value) < 100 else "{:.0f}")


def share(value: float | None) -> str:
    return known(value, "{:.0%}")


def quotient(old: float | None, new: float | None) -> str:
    return f"{new / old:.2f}" if old and new else "-"


def recipe_name(recipe: records.Recipe) -> str:
    """long-context, or for a custom one what it has: ZeRO-2 + Liger; and the format when it is not bf16."""
    if recipe.dtype != "bfloat16":
        return f"{recipe_name(recipe.model_copy(update={'dtype': 'bfloat16'}))} in {recipe.dtype}"
    if recipe.name != "custom":
        return recipe.name
    parts = {"checkpointing": recipe.grad_checkpoint, "CPU AdamW": recipe.offload_optimizer, "Liger": recipe.use_liger}
    parts |= {"compile": recipe.compile, f"documents of {recipe.doc_len}": recipe.doc_len}
    return " + ".join([f"ZeRO-{recipe.zero_stage}", *(name for name, on in parts.items() if on)])


def setup_name(setup: dict) -> str:
    """The recipe in a part of the decision."""
    return recipe_name(records.Recipe(**setup["recipe"])) if setup["recipe"] else "unknown recipe"


def _cell(point: dict, text: str) -> str:
    """The text, or the word for why there is no figure."""
    return f"partial (n={point['n']})" if point["outcome"] == "partial" else WORDS.get(point["outcome"], text)


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


def environment(v: View) -> Table:
    """What ran on both boxes."""

    def facts(run: records.Run) -> dict:
        stack, attention, model = run.stack, run.attention, run.model
        versions = (stack.python, stack.transformers, stack.liger_kernel)
        return {
            "GPU": (f"{run.gpu.count}x " if run.gpu.count else "") + (run.gpu.name or ""),
            "attention": attention and ", ".join(filter(None, (attention.backend, stack.attention_package))),
            "torch / CUDA": stack.torch and f"{stack.torch} / {stack.cuda or '-'}",
            "deepspeed": stack.deepspeed,
            "python / transformers / liger": any(versions) and " / ".join(version or "-" for version in versions),
            "model": model and model.name + (f", {model.weights} weights" if model.weights else ""),
            "recipe": run.recipe and recipe_name(run.recipe),
            "driver": run.gpu.driver,
            "links": ", ".join(run.gpu.links),
            "host": run.host.cpu,
            "job": run.job and ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in run.job.model_dump().items() if v),
            "source": run.source,
        }

    old, new = facts(v.pair.old.run), facts(v.pair.new.run)
    rows = [[name, old[name] or "-", new[name] or "-"] for name in old if old[name] or new[name]]
    return Table("Environment", ["", *names(v.result).values()], rows)


def speedup(result: dict, *units: str) -> Table:
    """By length: of each box the units wanted of ms, TFLOPS and MFU; how many times faster; where that lands between
    the ratios of the specifications; and the steps it was made of."""
    points, compared = result["speed"]["points"], result["comparable"]
    columns = {"seqlen": [length(p["seq_len"]) for p in points]}
    columns["attention share of FLOPs"] = [share(p["attention_share"]) for p in points]
    texts = {
        "ms": lambda p: known(p["median_ms"], "{:,.0f}" if (p["median_ms"] or 0) >= 100 else "{:.3g}"),
        "tokens/s": lambda p: known(p["tokens_per_s_per_gpu"], "{:,.0f}"),
        "samples/s, all GPUs": lambda p: figure(p["median_ms"] and 1e3 / p["median_ms"]),
        "tokens/s, all GPUs": lambda p: known(p["median_ms"] and 1e3 / p["median_ms"], "{:,.0f}"),
        "TFLOPS": lambda p: figure(p["tflops"]),
        "MFU": lambda p: share(p["mfu"]),
    }
    for side, name in names(result).items():
        for unit in units:
            columns[f"{name} {unit}"] = [_cell(p[side], texts[unit](p[side])) for p in points]
    columns["speedup"] = [str(ratio(p["speedup"])) if p["speedup"] else "" for p in points]
    optional = {"bandwidth to compute": [_position(p["position"]) for p in points]}
    optional["steps"] = [_steps(p["old"], p["new"]) for p in points]
    recipe, ranks = compared["recipe"] and setup_name(compared), compared["gpus"] and f"{compared['gpus']} ranks"
    what = ", ".join(filter(None, (compared["model"], recipe, ranks))) or "of an unknown model"
    table = of_columns(f"Speedup by sequence length ({what})", columns, optional)
    if "bandwidth to compute" in table.header:
        table.notes.append(
            "bandwidth to compute: from the ratio of the memory bandwidths (0%) to that of the peaks (100%)."
        )
    if compared["differences"]:
        table.notes.append(f"**Not comparable**: {'; '.join(compared['differences'])}.")
    return table


def timed(result: dict) -> str:
    """What a box's speed is told in: ms of a step, or what else the logs have."""
    rows = [p[side] for p in result["speed"]["points"] for side in ("old", "new") if p[side]["median_ms"]]
    units = {"step": "ms", "sample": "samples/s, all GPUs", "token": "tokens/s, all GPUs"}
    kinds = {units.get(row["per"], "tokens/s") for row in rows}
    return kinds.pop() if len(kinds) == 1 else "tokens/s" if kinds else "ms"


def _steps(old: dict, new: dict) -> str:
    """How many times each figure is of; a log's may be means over several steps, or an average."""
    if not (old["n"] or new["n"] or "average" in (old["kind"], new["kind"])):
        return "-"
    words = {"step": "{}", "mean": "{} means", "average": "average"}
    return ", ".join(words[side["kind"]].format(side["n"] or 0) for side in (old, new))


def _position(at: float | None) -> str:
    return "-" if at is None else "under" if at < 0 else "over" if at > 1 else f"{at:.0%}"


def memory(v: View) -> Table:
    """Peak memory by length."""
    rows = []
    for p in v.result["speed"]["points"]:
        row = [length(p["seq_len"])]
        for side, sweep in (("old", v.pair.old), ("new", v.pair.new)):
            point = sweep.points.get(p["seq_len"])
            row.append(_cell(p[side], known(point and point.peak_mem_gib, "{:.1f}")))
        rows += [row] if {*row[1:]} != {"-"} else []
    return Table("Peak memory, reserved, worst rank", ["seqlen", *headed(v.result, "peak GiB")], rows)


def capacity(result: dict) -> Table:
    """The fitted line of memory, and the lengths each box holds."""
    sides = [result["memory"]["old"], result["memory"]["new"]]
    fits, part = [side["fit"] for side in sides], f"{result['memory']['usable_share']:.0%}"
    columns = {
        "memory, GiB": [figure(side["capacity_gib"]) + " (GB as sold)" * side["as_sold"] for side in sides],
        "longest that ran": [known(side["largest_measured"], "{}") for side in sides],
        "out of memory at": [", ".join(map(str, side["out_of_memory"])) or "-" for side in sides],
        "a kernel fails at": [", ".join(map(str, side["kernel_limit"])) or "-" for side in sides],
        "peak GiB, fitted": [f and f"{f['floor_gib']:.1f} + {f['gib_per_token']:.5f} per token" or "-" for f in fits],
        "largest error of the fit, GiB": [f"{f['worst_error_gib']:.1f}" if f else "-" for f in fits],
        f"longest by the fit, {part} of the memory": [about(side["largest_usable"]) for side in sides],
        "longest by the fit, all of it": [about(side["largest_all"]) for side in sides],
    }
    rows = [[name, *cells] for name, cells in columns.items() if set(cells) != {"-"}]
    notes = [f"{part} is what the published H200 could use of its 141 GB. A length by the fit was not measured."]
    if any(side["as_sold"] for side in sides):
        notes.append("Of a GB sold, devices report 0.93 (B300) to 1.01 GiB.")
    return Table("What each box holds", ["", *names(result).values()], rows, notes)


def price(result: dict) -> Table:
    """Cost and hours by common length; a speedup is the price ratio up to which the new box pays."""
    money = result["money"]
    ratio_given, points = money["price_ratio"], money["points"]
    columns = {"seqlen": [length(p["seq_len"]) for p in points]}
    columns["break-even price ratio"] = [str(ratio(p["break_even"])) for p in points]
    optional = {"per token": [p["outcome"] or "-" for p in points]}
    optional["change"] = [known(p["cost_change"], "{:+.0%}") for p in points]
    units = {"per_mtoken": ("cost", "{:.3f}"), "hours": ("hours", "{:,.1f}"), "joules_per_token": ("J/token", "{:.3g}")}
    for key, (unit, form) in units.items():
        for side, name in names(result).items():
            optional[f"{name} {unit}"] = [known(p[f"{side}_{key}"], form) for p in points]
    table = of_columns(f"Price at a ratio of {ratio_given:.2f}" if ratio_given else "Price", columns, optional)
    on = f"{money['tokens']:.3g} tokens on {money['gpus'] or 'an unknown number of'} GPUs"
    table.notes.append(
        f"Cost: {money['unit']} per million tokens. Hours: {on}. Within 2 %, or inside the interval, is break-even."
    )
    return table


def decomposition(v: View) -> Table:
    """Buckets of a step; the total's rate is of all of its work."""
    rows, notes = [], {}
    for (run, a), (_, b) in comparing.matched(v.old, v.new):
        n, done, sides = a.seq_len, flops.step_work(run, a.seq_len), []
        for step, box in ((a, v.old), (b, v.new)):
            rate = done.total_tflop / step.step_ms * 1e3 if done else None
            peak = box.gpu and box.gpu.dense(run.dtype)
            mfu = rate / peak if rate and peak else None
            total = records.Bucket(name="total", ms=step.step_ms, tflops=rate, mfu=mfu)
            two = {f"of two: {x.name}" if step.full else x.name: x for x in step.two}
            sides.append({x.name: x for x in step.full} | two | {"total": total})
        recipe = recipe_name(run.recipe) if run.recipe else "-"
        for name in (name for name in sides[0] if name in sides[1]):
            old, new = sides[0][name], sides[1][name]
            cells = [text for x in (old, new) for text in (figure(x.ms), figure(x.tflops), share(x.mfu))]
            rows.append([str(n), recipe, name, *cells, quotient(new.ms, old.ms)])
        if done and all("attention" in side for side in sides):
            parts = " and ".join(share(side["attention"].ms / side["total"].ms) for side in sides)
            notes[f"Attention is {share(done.attention_share)} of the FLOPs at {n}, {parts} of the time."] = None
    header = ["seqlen", "recipe", "bucket", *headed(v.result, "ms", "TFLOPS", "MFU"), "ratio"]
    return Table("Where the time of a step goes", header, rows, list(notes))


def _published(v: View) -> dict:
    """What was published as a ratio of these two boxes only: OLD_NEW.toml beside their folders."""
    path = v.old.folder.parent / f"{v.old.folder.name}_{v.new.folder.name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def liger(v: View) -> Table:
    """The same decomposed step without and with Liger."""
    rows, said = [], _published(v).get("liger", {})
    switched = {"use_liger": True, "liger_applied": True}

    def row(word: str, change: str, old: records.Decomposition, new: records.Decomposition) -> list[str]:
        peaks = figure(old.peak_mem_gib), figure(new.peak_mem_gib)
        return [str(old.seq_len), word, *peaks, change, quotient(new.step_ms, old.step_ms)]

    steps = [
        (run.recipe.model_copy(update={"name": ""}), a, b)
        for (run, a), (_, b) in comparing.matched(v.old, v.new)
        if run.recipe
    ]
    for recipe, a, b in (step for step in steps if not step[0].liger_applied):
        with_liger = []
        for other, c, d in steps:
            if other == recipe.model_copy(update=switched) and c.seq_len == a.seq_len:
                change = f"{c.step_ms / a.step_ms - 1:+.1%}, {d.step_ms / b.step_ms - 1:+.1%}"
                with_liger = row("on", change, c, d)
        if not with_liger and said.get("seq_len") == a.seq_len:
            peaks, change = map(figure, (said["old_peak_gib"], said["new_peak_gib"])), said["step_time_within"]
            with_liger = [str(a.seq_len), "on", *peaks, f"within {change:.1%}", f"{said['speedup']:.2f}"]
        rows += [row("off", "", a, b), with_liger] if with_liger else []
    header = ["seqlen", "Liger", *headed(v.result, "peak GiB"), "change of step time", "speedup"]
    return Table("Liger off and on", header, rows)


def fastest(box: Box) -> dict[tuple, records.AttentionTime]:
    """By length, mode and shape, the fastest attention kernel bench_flash_attn.py found on the box."""
    timed = sorted((t for _, t in box.attention if t.fwd_bwd_tflops), key=lambda t: t.fwd_bwd_tflops)
    return {(t.seqlen, t.mode, t.batch, t.heads, t.kv_heads, t.head_dim, t.dtype, t.causal): t for t in timed}


def attention(v: View) -> Table:
    """The attention kernel alone: the fastest each box has."""
    best = [fastest(v.old), fastest(v.new)]
    if not any(best) and (said := _published(v).get("attention")):
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
    return Table("Attention alone", ["seqlen", "mode", *headed(v.result, *units), "ratio"], rows)


def stacks(v: View) -> Table:
    """One GPU under several stacks: TFLOPS by torch and CUDA, at the length most of them have."""
    found, notes = [], []
    for box, name in zip((v.old, v.new), names(v.result).values(), strict=True):
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


def published_lines(p: dict) -> Table:
    """A row a kind of work and pair of precisions: what published pairs say."""
    lines, price_ratio = p["lines"], p["price_ratio"]
    columns = {"work": [line["work"] for line in lines]}
    columns["precision"] = [f"{line['old_precision']} -> {line['new_precision']}" for line in lines]
    columns |= {"pairs": [str(line["pairs"]) for line in lines], "models": [str(len(line["models"])) for line in lines]}
    columns["speedup, median"] = [f"{line['median']:.2f}" for line in lines]
    columns["range"] = [between(line["low"], line["high"], "{:.2f}") for line in lines]
    columns["break-even price ratio"] = [f"{line['break_even']:.2f}" for line in lines]
    told = [", ".join(f"{kind} {n}" for kind, n in sorted(line["outcomes"].items())) or "-" for line in lines]
    return of_columns("What others measured on both", columns, {f"at {price_ratio:.2f}" if price_ratio else "": told})


def published_pairs(p: dict, old: str, new: str) -> dict[str, Table]:
    """By file, a row a pair: the lines of both figures, and what is not equal."""
    header = ["model", "seqlen", "precision", "release", old, new, "speedup", "lines", "differs, old/new"]
    found: dict[str, Table] = {}
    for pair in p["pairs"]:
        a, b = pair["old"], pair["new"]
        (file, _, line), (other, _, its) = (side["where"].rpartition(":") for side in (a, b))
        said = a["said"] if a["said"] == b["said"] else f"{a['said']} -> {b['said']}"
        rates = (f"{side['tokens_per_s_per_gpu']:,.0f}" for side in (a, b))
        row = [pair["model"], str(pair["seq_len"]), said, pair["release"] or "-", *rates, f"{pair['speedup']:.2f}"]
        row += [f"{line}, {its}", ", ".join(pair["differs"]) or "-"]
        files = file if file == other else f"{file} and {other}"
        found.setdefault(files, Table(f"Tokens/s per GPU by results/published/{files}", header, [])).rows.append(row)
    return found


def expected(p: dict) -> Table:
    """A row a precision: the middle and the range of a projection, and the class of pairs it is of."""
    rows = [
        [f"{line['work'] or 'unknown'}, {line['old_precision']} -> {line['new_precision']}", f"{line['peaks']:.2f}",
         f"{line['middle']:.2f}", between(line["low"], line["high"], "{:.2f}"), str(line["pairs"]), line["basis"]]
        for line in p["lines"]
    ]  # fmt: skip
    header = [
        "work, precision",
        "ratio of peaks",
        "speedup",
        f"{p['nominal']:.0%} range",
        "pairs",
        "by what was reached of",
    ]
    return Table("Projection", header, rows)


def coverage(found: dict[tuple[str, str], int]) -> Table:
    """Which GPUs published pairs cover."""
    rows = [[*(gpus.load()[key].label for key in pair), str(count)] for pair, count in found.items()]
    return Table("Published pairs", ["old", "new", "pairs"], rows)
