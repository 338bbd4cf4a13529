"""harness.stats against SciPy's trimmed Welch test and against simulated sweeps whose true ratio is known."""

import numpy as np
import pytest
from scipy import stats as reference

from harness.stats import MEDIAN_FACTOR, Ratio, median_interval, ratio_interval, steps_needed
from tests.bench_intervals import TRUE_RATIO, stopped, times

OLD = [2990.0, 2995.5, 3002.0, 2988.0, 3001.0, 2999.0, 2993.0, 3900.0, 2997.0, 2994.0]
NEW = [1500.0, 1503.0, 1498.0, 1502.0, 1510.0, 1497.5, 1501.0]


def test_the_ratio_is_of_the_medians_and_its_interval_is_yuens():
    found = ratio_interval(OLD, NEW)
    assert found.value == np.median(OLD) / np.median(NEW)
    test = reference.ttest_ind(np.log(OLD), np.log(NEW), equal_var=False, trim=0.2)
    difference = reference.trim_mean(np.log(OLD), 0.2) - reference.trim_mean(np.log(NEW), 0.2)
    half = MEDIAN_FACTOR * reference.t.ppf(0.975, test.df) * abs(difference / test.statistic)
    assert [found.low, found.high] == pytest.approx([found.value * np.exp(-half), found.value * np.exp(half)], rel=1e-9)
    assert found.significant is True


def test_one_median():
    median, low, high = median_interval(OLD)
    assert median == 2996.25 and low < median < high
    assert high - low < 20  # the one slow step does not widen it
    logs = np.sort(np.log(NEW))  # seven: one pulled in at either end, five kept
    winsorised = np.clip(logs, logs[1], logs[-2])
    half = MEDIAN_FACTOR * reference.t.ppf(0.975, 4) * np.sqrt(6 * winsorised.var(ddof=1) / (5 * 4))
    assert median_interval(NEW) == pytest.approx((1501.0, 1501.0 * np.exp(-half), 1501.0 * np.exp(half)), rel=1e-9)


def test_few_steps_have_no_interval():
    assert median_interval([5.0, 7.0]) == (6.0, None, None)
    found = ratio_interval(OLD, [5.0, 7.0])
    assert (found.value, found.low, found.high, found.significant) == (2996.25 / 6, None, None, None)
    assert None not in median_interval([5.0, 7.0, 6.0])


@pytest.mark.parametrize("bad", [[], [1.0, 0.0, 2.0], [1.0, -1.0], [1.0, float("nan"), 2.0], [float("inf")] * 3])
def test_impossible_times(bad):
    with pytest.raises(ValueError, match="finite and positive"):
        median_interval(bad)


def test_equal_steps_and_the_way_back():
    same = ratio_interval([2.0] * 5, [2.0] * 5)
    assert (same.value, same.low, same.high, same.significant) == (1.0, 1.0, 1.0, False)
    there, back = ratio_interval(OLD, NEW), ratio_interval(NEW, OLD)
    assert [back.value, back.low, back.high] == pytest.approx([1 / there.value, 1 / there.high, 1 / there.low])


def test_how_a_ratio_reads():
    assert str(Ratio(1.837)) == "1.84"
    assert str(Ratio(1.837, 1.82, 1.859)) == "1.84 [1.82, 1.86]"
    assert str(Ratio(1.003, 0.99, 1.02)) == "~ [0.99, 1.02]"


@pytest.mark.parametrize("slow", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("noise", [(0.003, 0.003), (0.03, 0.03), (0.003, 0.03)])
def test_the_interval_covers(noise, slow):
    """93 to 97 %, and three standard errors of a thousand simulated sweeps."""
    rng = np.random.default_rng(20)
    hits = 0
    for _ in range(1000):
        old = times(rng, 1700, noise[0], 10, slow[0], "normal")
        new = times(rng, 1700 / TRUE_RATIO, noise[1], 10, slow[1], "normal")
        found = ratio_interval(old, new)
        hits += found.low <= TRUE_RATIO <= found.high
    assert 0.93 - 0.02 <= hits / 1000 <= 0.97 + 0.02


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("noise", [(0.005, 0.005), (0.01, 0.01), (0.02, 0.005)])
def test_the_interval_covers_where_precision_stopped_early(noise, slow):
    """Looking after each step instead, and stopping at the first interval under 1 %, covers 87 to 89 %."""
    rng = np.random.default_rng(22)
    hits = taken = 0
    for _ in range(1000):
        old = stopped(times(rng, 20_000, noise[0], 10, slow, "normal"))
        new = stopped(times(rng, 20_000 / TRUE_RATIO, noise[1], 10, slow, "normal"))
        found = ratio_interval(old, new)
        hits, taken = hits + (found.low <= TRUE_RATIO <= found.high), taken + len(old) + len(new)
    assert 0.93 - 0.02 <= hits / 1000 <= 0.98 + 0.015
    assert taken < 2000 * 9  # it does stop early


def test_steps_needed_by_hand():
    """Five steps of 1 % deviation: t(0.975, 4) = 2.776, so (2.776 * 1.08 * 0.01 / 0.01)^2 = 8.99."""
    pilot = np.exp(0.01 * np.array([-1, -1, 0, 1, 1]))
    assert np.log(pilot).std(ddof=1) == pytest.approx(0.01)
    times = [9.0, *pilot, 1.5, 0.5]  # the slow first step and what comes after the sixth change nothing
    assert [steps_needed(times, p) for p in (0.01, 0.02, 0.1)] == [9, 6, 6]
    assert [steps_needed(times[:n], 0.01) for n in range(1, 9)] == [6] * 5 + [9] * 3
    assert steps_needed([2.0] * 6, 0.01) == 6


def test_boxes_that_do_not_differ_are_rarely_told_apart():
    rng = np.random.default_rng(21)
    told = sum(
        ratio_interval(*(times(rng, 500, 0.01, 10, False, "normal") for _ in range(2))).significant for _ in range(1000)
    )
    assert told < 80
