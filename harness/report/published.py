"""Two GPUs by name -> what others measured on both: matched pairs of the library, by kind of work and precision.

found = compare(gpus.by_key("H100"), gpus.by_key("B200"), Narrow(), price_ratio=2.2)
found["lines"], found["pairs"]       # a line a class of pairs; every pair with the file and line of both its rows
coverage()                           # which GPUs are covered by how many pairs
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median

from harness import gpus
from harness.gpus import DTYPES, Gpu
from harness.report import cost, library
from harness.report.box import NothingUsable
from harness.report.library import Pair
from harness.stats import Ratio

ROW_KEYS = ("where", "origin", "count", "global_batch", "micro_batch", "parallel", "tokens_per_s_per_gpu", "tflops")


@dataclass(frozen=True)
class Narrow:
    """What the pairs must be of; null: any. A model by a part of its name."""

    model: str | None = None
    seq_len: int | None = None
    precision: str | None = None
    new_precision: str | None = None

    def keeps(self, pair: Pair) -> bool:
        """Whether a pair is of that. To more bits than before only where NEW's precision is asked for."""
        a, b = pair.old, pair.new
        asked = ((self.seq_len, a.seq_len), (self.precision, a.precision), (self.new_precision, b.precision))
        useful = self.new_precision or DTYPES.index(b.precision) >= DTYPES.index(a.precision)
        named = (self.model or "").lower() in a.model.lower()
        return bool(useful and named and all(want in (None, has) for want, has in asked))


def compare(old: Gpu, new: Gpu, narrow: Narrow, price_ratio: float | None) -> dict:
    """Raises NothingUsable, with the nearest there is, when nothing matches."""
    every = [p for p in library.pairs() if (p.old.gpu.key, p.new.gpu.key) == (old.key, new.key)]
    pairs = sorted(
        filter(narrow.keeps, every), key=lambda p: (_line(p), p.old.model, p.old.seq_len, p.old.release or "")
    )
    if not pairs:
        raise NothingUsable(_nothing(old, new, every))
    groups: dict[tuple, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[_line(pair)].append(pair)
    rows = [_pair(pair, price_ratio) for pair in pairs]
    return {"price_ratio": price_ratio, "lines": [_of(group, price_ratio) for group in groups.values()], "pairs": rows}


def _line(pair: Pair) -> tuple:
    return pair.work, *(DTYPES.index(p) for p in pair.precisions)


def _of(pairs: list[Pair], price_ratio: float | None) -> dict:
    """One class: how many pairs of how many models, the speedups, which is the price ratio up to which it pays."""
    gains = [pair.speedup for pair in pairs]
    outcomes = Counter(cost.outcome(Ratio(gain), price_ratio) for gain in gains) if price_ratio else {}
    found = {"work": pairs[0].work, "old_precision": pairs[0].old.precision, "new_precision": pairs[0].new.precision}
    found |= {"pairs": len(pairs), "models": sorted({p.old.model for p in pairs}), "median": median(gains)}
    found |= {"low": min(gains), "high": max(gains), "break_even": median(gains), "outcomes": dict(outcomes)}
    return found | {"outcome": None if not outcomes else next(iter(outcomes)) if len(outcomes) == 1 else "depends"}


def _pair(pair: Pair, price_ratio: float | None) -> dict:
    found = {"work": pair.work, "source": pair.old.source, "release": pair.old.release, "model": pair.old.model}
    found |= {"seq_len": pair.old.seq_len, "speedup": pair.speedup, "break_even": pair.speedup, "differs": pair.differs}
    for side, row in (("old", pair.old), ("new", pair.new)):
        found[side] = {k: getattr(row, k) for k in ROW_KEYS} | {"precision": row.precision, "said": row.precision_said}
    return found | {"outcome": cost.outcome(Ratio(pair.speedup), price_ratio) if price_ratio else None}


def _nothing(old: Gpu, new: Gpu, every: list[Pair]) -> str:
    if every:
        had = ", ".join(f"{value} ({n})" for value, n in Counter(map(_named, every)).items())
        return f"no published pair of {old.label} and {new.label} is of that; there are: {had}"
    wanted = old.key, new.key
    counts = {pair: n for pair, n in coverage().items() if pair[0] != pair[1] and {*pair} & {*wanted}}
    near = sorted(counts, key=lambda pair: (sum(map(_unlike, pair, wanted)), -counts[pair]))[:3]
    told = "; ".join(f"{' to '.join(gpus.load()[key].label for key in pair)} ({counts[pair]} pairs)" for pair in near)
    hint = f"Nearest: {told}" if near else "No pair has either of them"
    return f"no published pair of {old.label} and {new.label}. {hint}. --list names all, --project-to expects"


def _named(pair: Pair) -> str:
    return f"{pair.old.model} at {pair.old.seq_len}, {' to '.join(pair.precisions)}"


def _unlike(*keys: str) -> int:
    """0: the same GPU, 1: of one generation, 3: of two."""
    a, b = (gpus.load()[key] for key in keys)
    return 0 if a == b else 1 if a.capability and b.capability and a.capability[0] == b.capability[0] else 3


def coverage() -> dict[tuple[str, str], int]:
    """Pairs by the GPUs' keys, the older first; also of one GPU in two precisions."""
    kept = filter(Narrow().keeps, library.pairs())
    found = Counter(
        (p.old.gpu.key, p.new.gpu.key) for p in kept if library.place(p.old.gpu) <= library.place(p.new.gpu)
    )
    return dict(sorted(found.items(), key=lambda item: [library.place(gpus.load()[key]) for key in item[0]]))
