"""Money, time and fleets against hand computations and the published figures."""

import math

import pytest

from harness.report import cost
from harness.report.cost import Crew, fleet
from harness.stats import Ratio


def test_cost_of_a_million_tokens():
    # 1000 tokens/s are 3.6e6 an hour: 1e6 tokens take 1/3.6 of an hour, at 3.6 an hour they cost 1
    assert cost.per_mtoken(3.6, 1000) == pytest.approx(1.0)
    assert cost.per_mtoken(7.2, 2000) == pytest.approx(1.0)  # twice the price at twice the rate: break-even


def test_hours_of_a_job():
    assert cost.hours(8 * 3600 * 500, 500, 8) == pytest.approx(1.0)
    assert cost.hours(1e9, 1668, 8) == pytest.approx(20.8, rel=1e-3)  # 262144 tokens in 157.15 s are 1668 tokens/s


@pytest.mark.parametrize(
    ("speedup", "price", "word"),
    [
        (Ratio(1.99), 2.0, "break-even"),  # published: 1.99 to 2.03 at twice the price
        (Ratio(2.03), 2.0, "break-even"),
        (Ratio(2.05), 2.0, "wins"),
        (Ratio(1.95), 2.0, "loses"),
        (Ratio(1.69), 2.0, "loses"),
        (Ratio(1.90, 1.75, 2.05), 2.0, "break-even"),  # the interval spans the price
        (Ratio(1.90, 1.88, 1.92), 2.0, "loses"),
        (Ratio(2.50, 2.45, 2.55), 2.0, "wins"),
        (Ratio(2.00, 1.999, 2.001), 2.01, "break-even"),  # told apart, but by less than decides anything
        (Ratio(1.0), 1.0, "break-even"),
    ],
)
def test_outcome(speedup, price, word):
    assert cost.outcome(speedup, price) == word


@pytest.mark.parametrize("text", ["0", "-2", "nan", "inf", "-inf", "two", ""])
def test_prices_that_are_none(text):
    with pytest.raises(ValueError, match="not a number above zero"):
        cost.positive(text)


def test_crews():
    assert cost.parse_crew("7+1") == Crew(7, 1) and cost.parse_crew("7+1").gpus == 8
    assert cost.parse_crew("8") == Crew(8, 0) and str(Crew(8)) == "8" and str(Crew(7, 1)) == "7+1"
    for text in ("0+1", "", "+1", "7-1", "7+", "x"):
        with pytest.raises(ValueError, match="not a fleet"):
            cost.parse_crew(text)


PUBLISHED = (Crew(3, 1), 8.8, Crew(7, 1), Crew(3, 1), 3.4, {"compute": 2250 / 503.8, "bandwidth": 8.0 / 1.79})


def test_the_published_fleet_case():
    """4 GPUs (3 workers + 1 feeder) need 8.8 days; 8 of them, or 4 of 3.4 times the price?"""
    answer = fleet(*PUBLISHED)
    rows = {r["fleet"]: r for r in answer["rows"]}
    assert rows["old, as now"]["days"] == 8.8
    assert rows["old"]["days"] == pytest.approx(3.77, abs=0.005)  # 8.8 * 3 / 7
    assert rows["old"]["cost"] == pytest.approx(8 * 8.8 * 3 / 7)
    assert answer["old_gpus_for_the_price"] == pytest.approx(13.6)  # 4 * 3.4
    assert rows["old, for the price of the new"]["days"] == pytest.approx(8.8 * 3 / 12.6)
    assert {round(r, 2) for r in answer["peak_ratios"].values()} == {4.47}
    need = answer["needed"]
    assert need["equal_time"] == pytest.approx(7 / 3)  # per worker, 3 new ones against 7 old
    assert need["equal_spend"] == pytest.approx(7 / 3 * 13.6 / 8)
    assert need["equal_purchase"] == pytest.approx(12.6 / 3)
    new = rows["new, at the compute ratio 4.47"]
    assert new["days"] == pytest.approx(8.8 / (2250 / 503.8)) and new["cost"] == pytest.approx(new["days"] * 4 * 3.4)
    assert answer["measured_speedup"] is None


def test_break_even_speedups_do_break_even():
    need = fleet(*PUBLISHED)["needed"]

    def new(speedup):
        return fleet(*PUBLISHED, speedup=Ratio(speedup))["rows"][-1]

    rows = {r["fleet"]: r for r in fleet(*PUBLISHED)["rows"]}
    assert new(need["equal_time"])["days"] == pytest.approx(rows["old"]["days"])
    assert new(need["equal_spend"])["cost"] == pytest.approx(rows["old"]["cost"])
    assert new(need["equal_purchase"])["days"] == pytest.approx(rows["old, for the price of the new"]["days"])


def test_scaling_costs_the_larger_crews_only():
    answer = fleet(*PUBLISHED, scaling=0.9, speedup=Ratio(3.0, 2.9, 3.1))
    rows = {r["fleet"]: r["days"] for r in answer["rows"]}
    assert rows["old, as now"] == 8.8
    assert rows["old"] == pytest.approx(8.8 * 3 / 7 / 0.9)
    assert rows["new, at the measured 3.00"] == pytest.approx(8.8 / 3)
    assert answer["needed"]["equal_time"] == pytest.approx(7 / 3 * 0.9)


def test_a_new_fleet_too_cheap_to_buy_a_worker():
    answer = fleet(Crew(3, 1), 8.8, Crew(3, 2), Crew(1, 0), 1.5, {})  # its price buys 1.5 old GPUs: no worker
    assert not any("for the price" in r["fleet"] for r in answer["rows"])
    assert all(math.isfinite(x) for x in answer["needed"].values())
