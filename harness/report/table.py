"""A table of the report, and how its cells say a figure.

    Table.of("Peak memory", points, {"seqlen": lambda p: length(p["seq_len"]), "GiB": lambda p: figure(p["gib"])})

A cell is a figure, a word for why there is none (OOM, failed, not run, partial), or "-" for what is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from harness import records

WORDS = {"oom": "OOM", "failed": "failed", "not_run": "not run"}


@dataclass
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, title: str, things: Iterable, columns: dict[str, Callable], optional: Iterable[str] = ()) -> Table:
        """A row a thing; a column makes its cell of the thing. An optional one goes where all of it is unknown."""
        things = list(things)
        cells = {name: [cell(thing) for thing in things] for name, cell in columns.items()}
        kept = {name: made for name, made in cells.items() if name not in optional or {*made} - {"-"}}
        return cls(title, list(kept), [list(row) for row in zip(*kept.values(), strict=True)])

    def markdown(self) -> str:
        """Title, pipe table, notes; ends with a newline."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join([f"**{self.title}**", body, *self.notes]) + "\n"


def names(result: dict) -> dict[str, str]:
    """What the two boxes go by, by their side."""
    old, new = result["question"]["old"], result["question"]["new"]
    return {"old": old, "new": new} if old != new else {"old": f"{old} (OLD)", "new": f"{new} (NEW)"}


def headed(result: dict, *units: str) -> list[str]:
    return [f"{name} {unit}" for name in names(result).values() for unit in units]


def beside(result: dict, unit: str, cell: Callable) -> dict[str, Callable]:
    """A column a box, named for it and the unit, of cell(side, thing)."""
    return {f"{name} {unit}": partial(cell, side) for side, name in names(result).items()}


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


def outcome(point: dict, text: str) -> str:
    """The text, or the word for why there is no figure."""
    return f"partial (n={point['n']})" if point["outcome"] == "partial" else WORDS.get(point["outcome"], text)


def work_name(line: dict) -> str:
    """The class of a published or projected line: dense, fp8 -> fp8."""
    return f"{line['work'] or 'unknown work'}, {line['old_precision']} -> {line['new_precision']}"
