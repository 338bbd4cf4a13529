"""Medians and ratios of step times with their 95 % intervals.

The statistic is the median, because one slow step (a collector pause, a first compilation) must not move it. Its
interval is computed, not drawn: the logarithms of the times get a winsorised standard error and a t quantile (Yuen,
Biometrika 61, 1974: the fifth at either end is pulled in), Welch's degrees of freedom where two boxes meet, and one
constant for the median being a little noisier than Yuen's trimmed mean. With ten steps, 0.3 to 3 % normal noise,
equal or not on the two boxes, with or without a slow first step it covers the truth in 94 to 97 % of sweeps; noise
with a long tail makes it up to 98. A percentile bootstrap of the medians covers 93 to 98 there, least where the noise
differs, and knows nothing of three or four steps. `python tests/bench_intervals.py` prints all of this.

Steps are taken as independent; drift is for the caller to find. No torch here; the only cost is one scipy function.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_STEPS = 3  # fewer say nothing about their spread
PILOT = slice(1, 6)  # the five steps whose spread settles how many are enough; the first one may well be slow
DRIFT = 0.10  # a step that differs from its neighbour by more is start-up; by half of it within a run, it is not steady
MAX_STARTUP = 5  # steps; what has not settled then is noise
TRIM = 0.2  # the share pulled in at either end
MEDIAN_FACTOR = 1.08  # standard error of the median / of the 20 % trimmed mean, ten normal values: 0.373 / 0.345


@dataclass(frozen=True)
class Ratio:
    """How many times faster (old time / new time). low and high are null where there are no steps to tell from."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def significant(self) -> bool | None:
        """False: the interval spans 1, no difference is shown. Null: unknown."""
        if self.low is None or self.high is None:
            return None
        return not self.low <= 1 <= self.high

    def __str__(self) -> str:
        """`1.84`, `1.84 [1.82, 1.86]`, or `~ [0.99, 1.01]` for no difference."""
        if self.significant is None:
            return f"{self.value:.2f}"
        value = f"{self.value:.2f}" if self.significant else "~"
        return f"{value} [{self.low:.2f}, {self.high:.2f}]"


def drifts(step: float, other: float) -> bool:
    """Whether a step differs from its neighbour by more than DRIFT."""
    return abs(step - other) > DRIFT * other


def steady(times: Sequence[float]) -> bool:
    """Whether the medians of the first and the second half are within DRIFT / 2; fewer than four cannot show drift."""
    half = len(times) // 2
    if half < 2:
        return True
    first, second = np.median(times[:half]), np.median(times[-half:])
    return bool(abs(first - second) <= DRIFT / 2 * np.median(times))


def startup(times: Sequence[float]) -> int:
    """How many leading steps of somebody else's run are start-up: slower than the next one, and drifting."""
    for i in range(min(MAX_STARTUP, len(times) - 1)):
        if not (times[i] > times[i + 1] and drifts(times[i], times[i + 1])):
            return i
    return 0


def median_interval(times: Sequence[float], weights: Sequence[float] = ()) -> tuple[float, float | None, float | None]:
    """Median and 95 % interval of positive times, in their unit; the interval is null for fewer than three.

    weights: how many steps each time is the mean of; none: equally many. However large, a mean is one observation.
    Raises ValueError for no times, or one that is not finite and positive.
    """
    median, error, df = _median(times, weights)
    if error is None:
        return median, None, None
    factor = math.exp(_t975(df) * error)
    return median, median / factor, median * factor


def ratio_interval(
    old: Sequence[float], new: Sequence[float], old_weights: Sequence[float] = (), new_weights: Sequence[float] = ()
) -> Ratio:
    """median(old) / median(new) with its 95 % interval: the speedup when both are times of the same work.

    The interval is null when either box has fewer than three steps. Raises ValueError as median_interval does.
    """
    old_median, old_error, old_df = _median(old, old_weights)
    new_median, new_error, new_df = _median(new, new_weights)
    value = old_median / new_median
    if old_error is None or new_error is None:
        return Ratio(value)
    error = math.hypot(old_error, new_error)
    df = error**4 / (old_error**4 / old_df + new_error**4 / new_df) if error else 1.0
    factor = math.exp(_t975(df) * error)
    return Ratio(value, value / factor, value * factor)


def steps_needed(times: Sequence[float], precision: float) -> int:
    """Steps for a 95 % interval of about +- `precision` (0.01 is 1 %) around the median, by the PILOT among `times`.

    The answer is the same however many more there are (Stein, Annals of Mathematical Statistics 16, 1945). Looking
    after every step and stopping when the interval is narrow would stop at the lucky ones: such intervals cover the
    truth in 87 % where these cover it in 94 to 98.
    """
    pilot = np.log(times[PILOT])
    if len(pilot) < PILOT.stop - PILOT.start:
        return PILOT.stop
    half = _t975(len(pilot) - 1) * MEDIAN_FACTOR * float(pilot.std(ddof=1))  # of the interval, with one step
    return max(PILOT.stop, math.ceil((half / precision) ** 2))


def _median(times: Sequence[float], weights: Sequence[float] = ()) -> tuple[float, float | None, int]:
    """The median, the standard error of its logarithm (null under three times), degrees of freedom.

    Weighted as means over so many steps are: their variance falls with the weight, so it is estimated by weighted
    squares, over as many degrees of freedom as there are means.
    """
    values = np.asarray(times, dtype=float)
    n = len(values)
    if not n or not np.all(np.isfinite(values)) or values.min() <= 0:
        raise ValueError("times must be finite and positive, at least one")
    order = np.argsort(values, kind="stable")
    values = values[order]
    shares = np.asarray(weights, dtype=float)[order] if len(weights) else np.ones(n)
    shares *= n / shares.sum()
    passed = np.cumsum(shares)
    first, second = (np.searchsorted(passed, n / 2 * (1 + e)) for e in (-1e-9, 1e-9))
    median = float(values[first] + values[min(second, n - 1)]) / 2
    if n < MIN_STEPS:
        return median, None, 0
    cut = int(TRIM * n)
    kept = n - 2 * cut
    logs = np.clip(np.log(values), math.log(values[cut]), math.log(values[n - 1 - cut]))
    mean = np.average(logs, weights=shares)
    variance = float(shares @ (logs - mean) ** 2) / (kept * (kept - 1))
    return median, MEDIAN_FACTOR * math.sqrt(variance), kept - 1


def _t975(df: float) -> float:
    from scipy.special import stdtrit  # 0.2 s to import: not for a caller that has no steps

    return float(stdtrit(df, 0.975))
