"""How often the projection was right on published pairs that were kept from it, beside two rules anyone would try.

python -m tests.bench_projection [--folder results/published]

earlier -> later: every release by those before it. One release, one model, one source out: by all that is left.
"known": pairs whose model, GPUs and precisions were in what it was shown; "new": the others. inside: of its 80 %
ranges. width: high over low, the median one. error: of the middle. The rules have no range.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from harness.report import library
from harness.report.library import Pair
from harness.report.projection import Calibration, Case, forward, peaks, score

RULES = {
    "ratio of peaks": lambda p: peaks(p.old.gpu, p.new.gpu, p.precisions),
    "ratio of bandwidths": lambda p: p.new.gpu.bandwidth_tb_s / p.old.gpu.bandwidth_tb_s,
}


def upgrades(folder: Path = library.FOLDER) -> list[Pair]:
    """Every pair of two GPUs once, the way it is kept, in as many bits or fewer."""
    pairs = library.matched(library.load(folder).rows)
    two = (p for p in pairs if p.old.gpu.key != p.new.gpu.key and forward(p.old.gpu, p.new.gpu, p.precisions))
    return [p for p in two if Case.of(p).kinds[1].change != "to more bits"]


def splits(pairs: list[Pair]) -> Iterator[tuple[str, list[Pair], list[Pair]]]:
    """(name, what is shown, what is kept): of every release, model and source once."""
    versions = sorted({Case.of(p).release for p in pairs} - {()})
    for version in versions[1:]:
        before = [p for p in pairs if Case.of(p).release < version]
        yield "earlier -> later", before, [p for p in pairs if Case.of(p).release == version]
    for version in versions:
        out = [p for p in pairs if Case.of(p).release == version]
        yield "one release out", [p for p in pairs if p not in out], out
    for name, key in (("one model out", "model"), ("source out: ", "source")):
        for value in sorted({getattr(p.old, key) for p in pairs}):
            kept = [p for p in pairs if getattr(p.old, key) == value]
            yield name + value * (key == "source"), [p for p in pairs if getattr(p.old, key) != value], kept


def tried(pairs: list[Pair]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By split and by rule, (error of the middle, half of the range) of every pair, both of the logarithm."""
    found: dict = defaultdict(lambda: defaultdict(list))
    for name, shown, kept in splits(pairs):
        known = Calibration(shown)
        seen = {(case.kinds[-1], case.model) for case in known.cases}
        for pair in kept:
            case = Case.of(pair)
            e = known.expect(pair.old.gpu, pair.new.gpu, pair.precisions, pair.work, pair.old.model)
            row = math.log(e["middle"] / pair.speedup), math.log(e["high"] / e["middle"])
            names = [name]
            if name in ("earlier -> later", "one release out"):
                names.append(f"{name}, {'known' if (case.kinds[-1], case.model) in seen else 'new'}")
            for each in names:
                found[each]["projection"].append(row)
                for rule, ratio in RULES.items():
                    found[each][rule].append((math.log(ratio(pair) / pair.speedup), 0.0))
    return found


def slopes(pairs: list[Pair]) -> dict[str, list[float]]:
    """By source, the change of the speedup per doubling of the length, of every model measured at several lengths."""
    found = defaultdict(list)
    groups: dict[tuple, dict[int, float]] = defaultdict(dict)
    for p in pairs:
        groups[p.old.source, p.old.gpu.label, p.new.gpu.label, p.precisions, p.old.model, p.old.release][
            p.old.seq_len
        ] = p.speedup
    for (source, old, new, *_), by_length in groups.items():
        if len(by_length) > 2:
            x, y = [math.log2(n) for n in by_length], [math.log(gain) for gain in by_length.values()]
            mx, my = sum(x) / len(x), sum(y) / len(y)
            slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
            found[f"{source}, {old} to {new}"].append(math.expm1(slope))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=library.FOLDER)
    folder = parser.parse_args().folder
    pairs = upgrades(folder)
    for problem in library.load(folder).problems:
        print(f"! {problem}")
    print(f"{len(pairs)} pairs\n{'':28}{'rule':22}{'pairs':>6}{'inside':>8}{'width':>7}{'error':>8}{'9 in 10':>9}")
    for name, rules in tried(pairs).items():
        for rule, rows in rules.items():
            s = score(rows)
            inside = f"{s['inside']:8.0%}{s['width']:6.2f}x" if rule == "projection" else f"{'-':>8}{'-':>7}"
            print(f"{name:28}{rule:22}{s['pairs']:6}{inside}{s['error']:8.1%}{s['error_90']:9.1%}")
    print("\nThe speedup per doubling of the length, models with three lengths or more:")
    for name, found in slopes(pairs).items():
        print(f"{name:44}{median(found):+7.1%} (median of {len(found)}; {min(found):+.1%} to {max(found):+.1%})")


if __name__ == "__main__":
    main()
