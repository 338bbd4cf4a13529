"""What to expect of a GPU nobody measured here: the ratio of dense peaks, times what published pairs reached of it.

    known = Calibration(library.pairs())
    known.expect(old_gpu, new_gpu, ("bf16", "fp8"), "dense")            # middle, 80 % range, from which class
    known.expect(old_gpu, new_gpu, ("fp8", "fp8"), "experts", model="Qwen3_30B_a3B")    # narrowed if it was measured

A class is two precisions, two GPUs and a kind of work. With fewer than LEAST pairs, or with one model alone, it widens:
to any work, the generations of the GPUs, the precisions, every pair. Its middle is of its models, one vote each, drawn
to the wider class's as if that were one model more. The range is as wide as this very rule was off on four in five of
the published pairs when their model was kept from it (for a model it knows: their release and the later ones). Nothing
else moves it. One published pair alone has its step taken apart, so nothing can show that a decomposition helps;
picture() is that pair. Nor does the length: the speedup falls with it in one source and grows with it in another.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import NamedTuple

from harness import flops
from harness.gpus import DTYPES, Gpu
from harness.report import comparing, fits, library
from harness.report.box import Box, NothingUsable, Sweep
from harness.report.library import Pair, peak, place

LEAST = 5  # pairs of a class; twice as many errors to tell a range from
CHANGES = ("in one precision", "to fewer bits", "to more bits")
NOMINAL = 0.8  # the share of pairs a range should hold
# Dense peaks of the step's format, memory bandwidths, NVLink rates. The rest stays: copies (no host link is known),
# idle, fixed time.
FOLLOWS = dict.fromkeys(("attention", "matmul", "dense", "everything else"), "compute")
FOLLOWS |= {"other_compute": "bandwidth", "optimizer": "bandwidth", "exposed_communication": "link"}


class Kind(NamedTuple):
    """A class of pairs; null is any. Generations are the major numbers of compute capability, "-" without one."""

    change: str | None = None  # of precision: one of CHANGES
    precisions: tuple[str, str] | None = None
    generations: tuple | None = None
    gpus: tuple[str, str] | None = None  # labels
    work: str | None = None

    def __str__(self) -> str:
        between = " to ".join(self.gpus or ()) or (
            self.generations and "capability {}.x to {}.x".format(*self.generations)
        )
        parts = (between, self.precisions and " to ".join(self.precisions), self.work)
        return ", ".join(part for part in parts if part) or f"every published pair {self.change or ''}".strip()

    def widths(self) -> list[Kind]:
        """This class of two GPUs and every wider one, the widest first."""
        return [Kind(*self[:n]) for n in range(6)]


def _narrowest(old: Gpu, new: Gpu, precisions: tuple[str, str], work: str) -> Kind:
    a, b = map(DTYPES.index, precisions)
    change, generations = CHANGES[(b > a) - (b < a)], tuple((g.capability or "-")[0] for g in (old, new))
    return Kind(change, precisions, generations, (old.label, new.label), work)


@dataclass(frozen=True)
class Case:
    """A published pair as what it teaches: the logarithm of its speedup over the ratio of the peaks."""

    kinds: list[Kind]  # the widest first
    model: str
    release: tuple[int, ...]
    reached: float

    @classmethod
    def of(cls, pair: Pair) -> Case:
        old, new, release = pair.old, pair.new, pair.old.release or ""
        version = tuple(map(int, release.split("."))) if re.fullmatch(r"\d+(\.\d+)*", release) else ()
        kind = _narrowest(old.gpu, new.gpu, pair.precisions, pair.work)
        return cls(
            kind.widths(), old.model.lower(), version, math.log(pair.speedup / peaks(old.gpu, new.gpu, pair.precisions))
        )


class Calibration:
    """What published pairs reached of the ratio of peaks, by class. Pairs of unknown peaks teach nothing."""

    def __init__(self, pairs: list[Pair]):
        kept = [p for p in pairs if forward(p.old.gpu, p.new.gpu, p.precisions)]
        self.cases = [Case.of(p) for p in kept if all(peak(r.gpu, r.precision) for r in (p.old, p.new))]
        self.sizes = Counter(kind for case in self.cases for kind in case.kinds)
        self.models = Counter(kind for kind, _ in {(kind, case.model) for case in self.cases for kind in case.kinds})
        self._same: dict[tuple[Kind, str], list[Case]] = defaultdict(list)
        for case in self.cases:
            self._same[case.kinds[-1], case.model].append(case)
        self._votes: dict[tuple[Kind, Kind | None], dict[str, float]] = {}
        # By how a middle was found ("model", or the number of classes from the widest on) and by class.
        self.errors: dict[tuple[int | str, Kind], list[tuple[Case, float]]] = defaultdict(list)
        for case in self.cases:
            for how, error in self._tried(case):
                for kind in case.kinds:
                    self.errors[how, kind].append((case, error))

    def _tried(self, case: Case) -> Iterator[tuple[int | str, float]]:
        """How far the middle is off on a pair that was not shown: of its model, earlier releases; of its class, all
        other models, and nothing that is in a finer class with it."""
        if before := [c for c in self._same[case.kinds[-1], case.model] if c.release < case.release]:
            yield "model", _newest(before) - case.reached
        for depth in range(1, self._depth(case.kinds) + 1):
            middle = self._middle(case.kinds[:depth], case.model, [*case.kinds, None][depth])
            if middle is not None:
                yield depth, middle - case.reached

    def _depth(self, widths: list[Kind]) -> int:
        """How many of the classes, from the widest on, have pairs enough."""
        enough = (i for i, k in enumerate(widths, 1) if self.sizes[k] >= LEAST and self.models[k] > 1)
        return max(enough, default=1)

    def _middle(self, widths: list[Kind], model: str = "", outside: Kind | None = None) -> float | None:
        """The middle of the last of these classes, of all models but one and of no pair of the class `outside`."""
        middle = None
        for kind in widths:
            if votes := [vote for name, vote in self._by_model(kind, outside).items() if name != model]:
                middle = fmean(votes if middle is None else [*votes, middle])
        return middle

    def _by_model(self, kind: Kind, outside: Kind | None) -> dict[str, float]:
        """What each model reached in a class: the median over pairs of GPUs, of the newest release."""
        if (kind, outside) not in self._votes:
            found = defaultdict(list)
            for (_, model), cases in self._same.items():
                if kind in cases[0].kinds and outside not in cases[0].kinds:
                    found[model].append(_newest(cases))
            self._votes[kind, outside] = {model: median(values) for model, values in found.items()}
        return self._votes[kind, outside]

    def expect(
        self, old: Gpu, new: Gpu, precisions: tuple[str, str], work: str | None, model: str | None = None
    ) -> dict:
        """The speedup to expect: middle, low and high, of which class, and why of no finer one.

        Raises NothingUsable when a peak is not known, or too little was published.
        """
        ratio, swap = peaks(old, new, precisions), not forward(old, new, precisions)
        kind = _narrowest(*((new, old, precisions[::-1]) if swap else (old, new, precisions)), work)
        widths, strange = kind.widths(), self._strangers(old, new)
        depth = min(self._depth(widths), 2 if strange else len(widths))
        reach = self.reach(1 if strange else depth, widths[: 1 if strange else depth])
        found = {"old_precision": precisions[0], "new_precision": precisions[1], "work": work, "peaks": ratio}
        middle, half, pairs = self._middle(widths[:depth]), reach, self.sizes[widths[depth - 1]]
        basis, why = str(widths[depth - 1]), self._few(widths[depth:])
        if same := self._same.get((kind, (model or "").lower())):
            middle, half, pairs = _newest(same), self.reach("model", widths) or half, len(same)
            basis, why = f"{model} itself, {kind}", ""
        if middle is None or half is None:
            raise NothingUsable(
                f"results/published has {self.sizes[widths[1]]} pairs {kind.change}: too few to project with"
            )
        low, mid, high = (ratio * math.exp(-x if swap else x) for x in (middle - half, middle, middle + half))
        found |= {"middle": mid, "low": min(low, high), "high": max(low, high), "pairs": pairs, "basis": basis}
        return found | {"widened": strange or why or None}

    def has(self, precisions: tuple[str, str], target: Gpu) -> bool:
        """Whether enough pairs go from one of these precisions to the other, and the target has a peak in it."""
        if not peak(target, precisions[1]):
            return False
        return sum(n for kind, n in self.sizes.items() if kind.precisions == precisions and kind.work) >= LEAST

    def _few(self, finer: list[Kind]) -> str:
        if not finer:
            return ""
        pairs, models = self.sizes[finer[-1]], self.models[finer[-1]]
        return f"{pairs} pairs of {models} models are of {finer[-1]}" if pairs else f"no pair is of {finer[-1]}"

    def _strangers(self, *both: Gpu) -> str:
        known = {label for case in self.cases for label in case.kinds[-1].gpus}
        return "; ".join(f"no published pair has a {gpu.label}" for gpu in both if gpu.label not in known)

    def reach(self, how: int | str, widths: list[Kind], without: str | None = None) -> float | None:
        """The error (of a logarithm) that NOMINAL of the published pairs keep under: of the finest of the classes with
        errors enough. `without` leaves a model out."""
        alike: list[float] = []
        for kind in reversed(widths):
            alike = sorted(abs(e) for c, e in self.errors[how, kind] if c.model != without)
            if len(alike) >= 2 * LEAST:
                break
        return alike[min(len(alike), math.ceil(NOMINAL * (len(alike) + 1))) - 1] if alike else None

    @functools.cached_property
    def record(self) -> dict[str, dict]:
        """How often it was right on pairs that were kept from it: of a model in a later release, of another model."""
        found: dict[str, list] = {"a later release": [], "another model": []}
        for how, kind in [*self.errors]:
            if kind == Kind():
                for case, error in self.errors[how, kind]:
                    if how in ("model", depth := self._depth(case.kinds)):
                        widths = case.kinds if how == "model" else case.kinds[:depth]
                        name = "a later release" if how == "model" else "another model"
                        found[name].append((error, self.reach(how, widths, case.model)))
        return {name: score(rows) for name, rows in found.items() if rows}


@functools.cache
def published() -> Calibration:
    """Of every pair in results/published; made once, for a page asks at every price."""
    return Calibration(library.pairs())


def score(rows: list[tuple[float, float]]) -> dict:
    """Of (error of a logarithm, reach): pairs, the share inside, the range's high over low, errors of the middle."""
    off = [abs(math.exp(error) - 1) for error, _ in rows]
    found = {"pairs": len(rows), "inside": fmean(abs(error) <= reach + 1e-9 for error, reach in rows)}
    found["width"] = math.exp(2 * median(reach for _, reach in rows))
    tail = quantiles(off, n=10, method="inclusive")[-1] if len(off) > 1 else off[0]
    return found | {"error": median(off), "error_90": tail}


def _newest(cases: list[Case]) -> float:
    """What the newest release reached."""
    newest = max(case.release for case in cases)
    return median(case.reached for case in cases if case.release == newest)


def forward(old: Gpu, new: Gpu, precisions: tuple[str, str]) -> bool:
    """Whether a pair is the way round it is kept: to the newer or faster GPU, or to fewer bits on one."""
    sides = [(place(gpu), DTYPES.index(p)) for gpu, p in zip((old, new), precisions, strict=True)]
    return sides[0] < sides[1]


def peaks(old: Gpu, new: Gpu, precisions: tuple[str, str]) -> float:
    """The ratio of dense peaks at each side's own precision. Raises NothingUsable when one is not known."""
    found = [peak(gpu, precision) for gpu, precision in zip((old, new), precisions, strict=True)]
    for gpu, precision, tflops in zip((old, new), precisions, found, strict=True):
        if not tflops:
            raise NothingUsable(f"the dense {precision} peak of {gpu.label} is not known: nothing to project with")
    return found[1] / found[0]


def spec_ratios(old: Gpu | None, new: Gpu, step: str = "bf16") -> dict[str, float | None]:
    """New over old: compute (dense, of the step's format), bandwidth, link (NVLink); null where one is not known."""
    names = {"bandwidth": "bandwidth_tb_s", "link": "nvlink_gb_s"}
    figures = {"compute": (old and old.dense(step), new.dense(step))}
    figures |= {k: (getattr(old, name, None), getattr(new, name)) for k, name in names.items()}
    return {k: b / a if a and b else None for k, (a, b) in figures.items()}


def picture(box: Box, sweep: Sweep | None, target: Gpu, pair: tuple[Box, Box]) -> dict | None:
    """The box's lengths on the target as one decomposed pair would have it: every part of a step at the ratio of the
    specifications that it follows, compute at ratio**k with the k = log(measured) / log(peaks) of attention and of
    everything else in that pair. One pair, no range. Null where it has no such step, or no length or ratio is known."""
    ratios, (a, b) = spec_ratios(box.gpu, target, sweep.run.dtype if sweep else "bf16"), pair
    compute, decomposed = spec_ratios(a.gpu, b.gpu)["compute"] if b.gpu else None, comparing.matched(a, b)
    if not (decomposed and compute and compute != 1 and ratios["compute"] and ratios["bandwidth"]):
        return None
    before, after = ({x.name: x.ms for x in step.two} for _, step in decomposed[0])
    k = {name: math.log(before[name] / after[name]) / math.log(compute) for name in before}
    steps = []
    for n in comparing.lengths(sweep, "measured") if sweep else ():
        if parts := _split(box, sweep, n):
            new_ms = 0.0
            for name, ms in parts[0].items():
                follows = FOLLOWS.get(name)
                ratio = (ratios[follows] if follows else None) or 1.0
                new_ms += ms / (ratio ** k.get(name, k["everything else"]) if follows == "compute" else ratio)
            old_ms = sweep.points[n].median_ms
            steps.append({"seq_len": n, "old_ms": old_ms, "speedup": old_ms / new_ms, "basis": parts[1]})
    return {"pair": f"{a.name} to {b.name} at {decomposed[0][0][1].seq_len}", "steps": steps} if steps else None


def _split(box: Box, sweep: Sweep, seq_len: int) -> tuple[dict[str, float], str] | None:
    """The step's ms by part, by the best source there is, and which one it is; null without any."""
    done, fit = flops.step_work(sweep.run, seq_len), fits.step_time(sweep)
    same = [d for r, d in box.decompositions if r.recipe == sweep.run.recipe and d.seq_len == seq_len and d.full]
    if same:
        parts, basis = {x.name: x.ms for x in same[0].full}, "its decomposition"
    elif not done:
        return None
    elif fit:
        parts, basis = fit.parts_ms(done), "a fit: fixed, dense, attention"
    else:
        parts = {"attention": done.attention_tflop, "dense": done.dense_tflop}
        basis = "FLOP shares, nothing fixed"
    scale = sweep.points[seq_len].median_ms / sum(parts.values())
    return {name: value * scale for name, value in parts.items()}, basis
