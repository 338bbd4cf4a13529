"""Every table of the report: in Markdown for the README, the same ones on should_upgrade.py's page.

    view = tables.view(read_box("results/a"), read_box("results/b"), decision.Options(price_ratio=2))
    print(tables.make(view)["speedup"].markdown())

Rates are per GPU; ratios are new over old, with their 95 % interval where both boxes have steps, `~` where it spans 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from harness import gpus, records
from harness.report import companions, comparing, decision
from harness.report.box import Box, named
from harness.report.table import (
    Table,
    beside,
    figure,
    known,
    length,
    names,
    outcome,
    recipe_name,
    setup_name,
    share,
    work_name,
)
from harness.report.verdict import about, between, ratio


@dataclass
class View:
    """Two boxes, the pair of their sweeps (None: there is none to compare) and the decision about them."""

    old: Box
    new: Box
    pair: comparing.Pair | None
    result: dict


def view(old: Box, new: Box, options: decision.Options) -> View:
    return View(old, new, comparing.pair(old, new), decision.decide(old, new, options))


def view_by_name(old: gpus.Gpu, new: gpus.Gpu, options: decision.Options) -> View:
    """What others measured on two GPUs. Raises NothingUsable."""
    return View(named(old), named(new), None, decision.published(old, new, options))


def make(v: View) -> dict[str, Table]:
    """Every table there is data for, by name, in the order of the report."""
    found: dict[str, Table] = {}
    if v.old.gpu and v.new.gpu:
        found["specifications"] = companions.specifications(v.old.gpu, v.new.gpu)
        found["ceilings"] = companions.ceilings(v.old.gpu, v.new.gpu, v.old, v.new)
    if v.pair:
        found["environment"] = environment(v)
    if "speed" in v.result:
        rated = any(p[side]["tflops"] for p in v.result["speed"]["points"] for side in ("old", "new"))
        units = ("TFLOPS", "MFU") if rated else (timed(v.result),)
        found |= {"speedup": speedup(v.result, *units), "memory": memory(v)}
        found |= {"capacity": capacity(v.result), "price": price(v.result)}
        if v.pair.new.run.gpu.device == "cpu":
            found["speedup"].notes.append("These figures describe a CPU and no GPU.")
    for name in ("decomposition", "liger", "attention", "stacks"):
        found[name] = getattr(companions, name)(v.old, v.new, v.result)
    if compared := v.result.get("published"):
        found |= {"published": published_lines(compared)} | published_pairs(compared, *names(v.result).values())
    return {name: table for name, table in found.items() if table.rows}


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


RATES = {
    "ms": lambda p: known(p["median_ms"], "{:,.0f}" if (p["median_ms"] or 0) >= 100 else "{:.3g}"),
    "tokens/s": lambda p: known(p["tokens_per_s_per_gpu"], "{:,.0f}"),
    "samples/s, all GPUs": lambda p: figure(p["median_ms"] and 1e3 / p["median_ms"]),
    "tokens/s, all GPUs": lambda p: known(p["median_ms"] and 1e3 / p["median_ms"], "{:,.0f}"),
    "TFLOPS": lambda p: figure(p["tflops"]),
    "MFU": lambda p: share(p["mfu"]),
}
BETWEEN = "bandwidth to compute"


def speedup(result: dict, *units: str) -> Table:
    """By length: the units of RATES of each box; how many times faster; where that lands between the ratios of the
    specifications; and the steps it was made of."""
    compared, columns = result["comparable"], {"seqlen": lambda p: length(p["seq_len"])}
    columns["attention share of FLOPs"] = lambda p: share(p["attention_share"])
    for side, name in names(result).items():
        columns |= {f"{name} {unit}": partial(_rate, side, RATES[unit]) for unit in units}
    columns["speedup"] = lambda p: str(ratio(p["speedup"])) if p["speedup"] else ""
    columns |= {BETWEEN: _position, "steps": _steps}
    recipe, ranks = compared["recipe"] and setup_name(compared), compared["gpus"] and f"{compared['gpus']} ranks"
    what = ", ".join(filter(None, (compared["model"], recipe, ranks))) or "of an unknown model"
    points = result["speed"]["points"]
    table = Table.of(f"Speedup by sequence length ({what})", points, columns, optional=(BETWEEN, "steps"))
    if BETWEEN in table.header:
        table.notes.append(f"{BETWEEN}: from the ratio of the memory bandwidths (0%) to the ratio of the peaks (100%).")
    if compared["differences"]:
        table.notes.append(f"**Not comparable**: {'; '.join(compared['differences'])}.")
    return table


def _rate(side: str, rate: Callable[[dict], str], point: dict) -> str:
    return outcome(point[side], rate(point[side]))


def timed(result: dict) -> str:
    """What a box's speed is told in: ms of a step, or what else the logs have."""
    rows = [p[side] for p in result["speed"]["points"] for side in ("old", "new") if p[side]["median_ms"]]
    units = {"step": "ms", "sample": "samples/s, all GPUs", "token": "tokens/s, all GPUs"}
    kinds = {units.get(row["per"], "tokens/s") for row in rows}
    return kinds.pop() if len(kinds) == 1 else "tokens/s" if kinds else "ms"


def _steps(point: dict) -> str:
    """How many times each figure is of; a log's may be means over several steps, or an average."""
    sides = point["old"], point["new"]
    if not any(side["n"] or side["kind"] == "average" for side in sides):
        return "-"
    words = {"step": "{}", "mean": "{} means", "average": "average"}
    return ", ".join(words[side["kind"]].format(side["n"] or 0) for side in sides)


def _position(point: dict) -> str:
    at = point["position"]
    return "-" if at is None else "below both" if at < 0 else "above both" if at > 1 else f"{at:.0%}"


def memory(v: View) -> Table:
    """Peak memory by length."""
    sweeps = {"old": v.pair.old, "new": v.pair.new}

    def peak(side: str, p: dict) -> str:
        point = sweeps[side].points.get(p["seq_len"])
        return outcome(p[side], known(point and point.peak_mem_gib, "{:.1f}"))

    columns = {"seqlen": lambda p: length(p["seq_len"])} | beside(v.result, "peak GiB", peak)
    table = Table.of("Peak memory, reserved, worst rank", v.result["speed"]["points"], columns)
    table.rows = [row for row in table.rows if {*row[1:]} != {"-"}]
    return table


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
    given = money["price_ratio"]
    columns = {"seqlen": lambda p: length(p["seq_len"])}
    columns["break-even price ratio"] = lambda p: str(ratio(p["break_even"]))
    optional = {"per token": lambda p: p["outcome"] or "-", "change": lambda p: known(p["cost_change"], "{:+.0%}")}
    optional |= beside(result, "cost", lambda side, p: known(p[f"{side}_per_mtoken"], "{:#.3g}"))
    optional |= beside(result, "hours", lambda side, p: known(p[f"{side}_hours"], "{:,.1f}"))
    optional |= beside(result, "J/token", lambda side, p: figure(p[f"{side}_joules_per_token"]))
    title = f"Price at a ratio of {given:.2f}" if given else "Price"
    table = Table.of(title, money["points"], columns | optional, optional)
    on = f"{money['tokens']:.3g} tokens on {money['gpus'] or 'an unknown number of'} GPUs"
    table.notes.append(
        f"Cost: {money['unit']} per million tokens. Hours: {on}. Within 2 %, or inside the interval, is break-even."
    )
    return table


def published_lines(p: dict) -> Table:
    """A row a kind of work and pair of precisions: what published pairs say."""
    columns = {
        "work": lambda line: line["work"],
        "precision": lambda line: f"{line['old_precision']} -> {line['new_precision']}",
        "pairs": lambda line: str(line["pairs"]),
        "models": lambda line: str(len(line["models"])),
        "speedup, median": lambda line: f"{line['median']:.2f}",
        "range": lambda line: between(line["low"], line["high"], "{:.2f}"),
        "break-even price ratio": lambda line: f"{line['break_even']:.2f}",
    }
    told = f"at {p['price_ratio']:.2f}" if p["price_ratio"] else ""
    columns[told] = lambda line: ", ".join(f"{kind} {n}" for kind, n in sorted(line["outcomes"].items())) or "-"
    return Table.of("What others measured on both", p["lines"], columns, optional=[told])


def published_pairs(p: dict, old: str, new: str) -> dict[str, Table]:
    """By file, a row a pair: the lines of both figures, and what is not equal."""
    header = ["model", "seqlen", "precision", "release", old, new, "speedup", "lines", "differs, old/new"]
    found: dict[str, Table] = {}
    for pair in p["pairs"]:
        sides = pair["old"], pair["new"]
        (file, _, line), (other, _, its) = (side["where"].rpartition(":") for side in sides)
        said = " -> ".join(dict.fromkeys(side["said"] for side in sides))
        rates = (f"{side['tokens_per_s_per_gpu']:,.0f}" for side in sides)
        row = [pair["model"], str(pair["seq_len"]), said, pair["release"] or "-", *rates, f"{pair['speedup']:.2f}"]
        row += [f"{line}, {its}", ", ".join(pair["differs"]) or "-"]
        files = " and ".join(dict.fromkeys([file, other]))
        found.setdefault(files, Table(f"Tokens/s per GPU by results/published/{files}", header, [])).rows.append(row)
    return found


def expected(p: dict) -> Table:
    """A row a precision: the middle and the range of a projection, and the class of pairs it is of."""
    columns = {
        "work, precision": work_name,
        "ratio of peaks": lambda line: f"{line['peaks']:.2f}",
        "speedup": lambda line: f"{line['middle']:.2f}",
        f"{p['nominal']:.0%} range": lambda line: between(line["low"], line["high"], "{:.2f}"),
        "pairs": lambda line: str(line["pairs"]),
        "published pairs it rests on": lambda line: line["basis"],
    }
    return Table.of("Projection", p["lines"], columns)


def by_length(one: dict, name: str) -> Table:
    """A projection by length, from one pair's decomposed step."""
    columns = {"seqlen": lambda s: str(s["seq_len"]), f"{name} ms": lambda s: f"{s['old_ms']:,.0f}"}
    columns |= {"speedup": lambda s: f"{s['speedup']:.2f}x", "parts of the step from": lambda s: s["basis"]}
    return Table.of("By length", one["steps"], columns)


def coverage(found: dict[tuple[str, str], int]) -> Table:
    """Which GPUs published pairs cover."""
    rows = [[*(gpus.load()[key].label for key in pair), str(count)] for pair, count in found.items()]
    return Table("Published pairs", ["old", "new", "pairs"], rows)
