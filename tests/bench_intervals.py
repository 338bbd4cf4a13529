"""How often the 95 % interval of a ratio covers the true one, over simulated sweeps. Nothing is asserted.

    python tests/bench_intervals.py [--sweeps 2000] [--steps 10] [--seed 0]

Ten steps a box; noise of 0.3 to 3 % of the step time, equal or not on the two boxes, normal or with a tail (gamma,
t with 3 degrees of freedom); without and with a slow first step (5 to 100 % longer) on both boxes or on one. Beside
it, the same with each box stopped before its last step by PRECISION=1 (and how many steps that takes), what a
percentile bootstrap of the medians covers, and the median width of two of the intervals.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.stats import median_interval, ratio_interval, steps_needed  # noqa: E402

TRUE_RATIO = 1.7
NOISES = [(0.003, 0.003), (0.01, 0.01), (0.03, 0.03), (0.003, 0.03)]
SLOW = {"none": (False, False), "both": (True, True), "new": (False, True)}
SHAPES = {
    "normal": lambda rng, n: rng.normal(0, 1, n),
    "gamma": lambda rng, n: (rng.gamma(2, 1, n) - 1.67835) / np.sqrt(2),  # its median taken off
    "t3": lambda rng, n: rng.standard_t(3, n) / np.sqrt(3),
}


def times(rng: np.random.Generator, typical_ms: float, noise: float, steps: int, slow: bool, shape: str) -> np.ndarray:
    """Step times whose true median is typical_ms."""
    values = typical_ms * np.maximum(1 + noise * SHAPES[shape](rng, steps), 0.1)
    if slow:
        values[0] *= 1 + rng.uniform(0.05, 1)
    return values


def stopped(times: np.ndarray, precision: float = 0.01) -> np.ndarray:
    """The steps that PRECISION leaves of them; steps are taken to be long enough for its 30 seconds."""
    return times[: steps_needed(times, precision)]


def bootstrap(rng: np.random.Generator, old: np.ndarray, new: np.ndarray, rounds: int = 500) -> tuple[float, float]:
    """The plain percentile interval, for comparison."""
    medians = [np.median(rng.choice(x, (rounds, len(x))), axis=1) for x in (old, new)]
    low, high = np.percentile(medians[0] / medians[1], [2.5, 97.5])
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    print(f"{args.sweeps} sweeps of {args.steps} steps a row, true ratio {TRUE_RATIO}; coverage and median width in %")
    print("noise old, new   slow first shape           ratio      stopped  one median     bootstrap")
    covered, total = 0, 0
    for shape in SHAPES:
        for noise in NOISES:
            for name, slow in SLOW.items():
                hits, widths, single, taken = np.zeros(3), [], 0, 0
                for _ in range(args.sweeps):
                    old = times(rng, 1700, noise[0], args.steps, slow[0], shape)
                    new = times(rng, 1700 / TRUE_RATIO, noise[1], args.steps, slow[1], shape)
                    cut = stopped(old), stopped(new)
                    ours, early, plain = ratio_interval(old, new), ratio_interval(*cut), bootstrap(rng, old, new)
                    ends = (ours.low, ours.high), (early.low, early.high), plain
                    hits += [low <= TRUE_RATIO <= high for low, high in ends]
                    taken += sum(map(len, cut)) / 2
                    widths.append([ours.high - ours.low, plain[1] - plain[0]])
                    _, low, high = median_interval(new)
                    single += low <= 1700 / TRUE_RATIO <= high
                width = np.median(widths, axis=0) / TRUE_RATIO * 100
                share = hits / args.sweeps * 100
                covered, total = covered + hits[0], total + args.sweeps
                print(
                    f"{noise[0]:6.1%}, {noise[1]:6.1%}   {name:10} {shape:7} {share[0]:5.1f} ({width[0]:5.2f})"
                    f" {share[1]:5.1f} ({taken / args.sweeps:4.1f})"
                    f" {single / args.sweeps * 100:11.1f} {share[2]:5.1f} ({width[1]:5.2f})",
                    flush=True,
                )
    print(f"all together {covered / total:.1%}")


if __name__ == "__main__":
    main()
