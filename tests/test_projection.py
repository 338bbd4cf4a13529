"""Projection to a GPU nobody measured: hand computations, the published back-test, both renting answers."""

import math
from pathlib import Path

import pytest

from harness import gpus
from harness.report import decision, projection
from harness.report.box import NothingUsable
from harness.report.reading import read_box
from tests.handmade import box, decomposition, light, point, run, upgrade

ROOT = Path(__file__).resolve().parent.parent
H200, B200, B300, A100 = (gpus.by_key(k) for k in ("H200", "B200", "B300", "A100"))
SEEN = {"attention": 0.76, "everything_else": 0.62, "source": "a pair"}
SHAPE = {"attention": 100.0, "matmul": 500.0, "other_compute": 100.0, "optimizer": 50.0, "copies": 40.0,
         "exposed_communication": 60.0, "idle": 150.0}  # fmt: skip
COMPUTE, BANDWIDTH, LINK = 2250 / 989, 8.0 / 4.8, 1800 / 900


def whole(*points, **ms):
    """An H200 with one sweep and a full decomposition at 8192 in the same recipe."""
    return box(run(), *points, decompositions=[(run(kind="decompose"), decomposition(8192, **(ms or SHAPE)))])


def test_every_bucket_follows_its_own_ratio():
    old = whole(point(8192, 1000.0))
    sweep, step = projection.project(old, old.sweeps[0], B200, SEEN)
    assert sweep["basis"] == "its decomposition" and step["what"] == "decomposed step"
    high = 100 / COMPUTE + 500 / COMPUTE + 150 / BANDWIDTH + 60 / LINK + 40 + 150
    low = 100 / COMPUTE**0.76 + 500 / COMPUTE**0.62 + 150 / BANDWIDTH + 60 / LINK + 40 + 150
    assert sweep["high"] == pytest.approx(1000 / high, rel=1e-3) and sweep["low"] == pytest.approx(1000 / low, rel=1e-3)
    assert step["high"] == pytest.approx(1000 / high) and step["low"] == pytest.approx(1000 / low)


def test_a_sweep_point_slower_than_its_decomposition_is_scaled():
    old = whole(point(8192, 2000.0))
    (sweep, step) = projection.project(old, old.sweeps[0], B200, SEEN)
    assert sweep["old_ms"] == pytest.approx(2000, rel=1e-3) and sweep["high"] == pytest.approx(step["high"], rel=1e-3)


@pytest.mark.parametrize(("bucket", "speed"), [("idle", 1), ("copies", 1), ("exposed_communication", LINK),
    ("optimizer", BANDWIDTH), ("other_compute", BANDWIDTH)])  # fmt: skip
def test_a_step_of_one_bucket(bucket, speed):
    old = whole(attention=0.0, **{bucket: 1000.0})
    (step,) = projection.project(old, None, B200, SEEN)
    assert step["low"] == pytest.approx(speed) and step["high"] == pytest.approx(speed)


def test_without_a_decomposition_flop_shares_and_it_is_said():
    old = box(run(), point(131072, 46000.0))
    (step,) = projection.project(old, old.sweeps[0], B200, SEEN)
    share = 0.696  # published attention share at 128k
    assert step["basis"] == "FLOP shares, nothing fixed"
    assert step["high"] == pytest.approx(COMPUTE, rel=1e-6)
    assert step["low"] == pytest.approx(1 / (share / COMPUTE**0.76 + (1 - share) / COMPUTE**0.62), rel=1e-3)


def test_a_fixed_part_stays_fixed():
    # made of 2000 ms fixed, dense work at 500 TFLOPS and attention at 400: the fit must find all three
    dense, attention = 368.868971 / 8192, 52.776558 / 8192**2
    times = {n: 2000 + 1e3 * (dense * n / 500 + attention * n * n / 400) for n in (8192, 32768, 65536, 131072, 262144)}
    old = box(run(), *(point(n, ms) for n, ms in times.items()))
    steps = projection.project(old, old.sweeps[0], B200, None)
    assert steps[0]["basis"].startswith("a fit")
    assert {p["name"]: round(p["old_ms"]) for p in steps[0]["parts"]} == {"fixed": 2000, "dense": 738, "attention": 132}
    assert steps[0]["high"] == pytest.approx(times[8192] / (2000 + (times[8192] - 2000) / COMPUTE), rel=1e-3)


def test_a_decomposition_in_another_recipe_is_not_the_sweep_s():
    other = box(run(), point(8192, 1000.0), decompositions=[(light(run()), decomposition(8192, **SHAPE))])
    sweep, step = projection.project(other, other.sweeps[0], B200, SEEN)
    assert sweep["basis"] == "FLOP shares, nothing fixed" and step["basis"] == "its buckets"
    longer = box(run(), point(16384, 1000.0), decompositions=[(run(), decomposition(8192, **SHAPE))])
    assert projection.project(longer, longer.sweeps[0], B200, SEEN)[0]["basis"] == "FLOP shares, nothing fixed"


def test_only_the_same_step_in_the_same_recipe_back_tests():
    old = box(run(), decompositions=[(run(), decomposition(8192, **SHAPE))])
    new = box(run("NVIDIA B200"), decompositions=[(light(run("NVIDIA B200")), decomposition(8192, **SHAPE))])
    assert projection.back_test(old, new, SEEN) == [] and projection.seen_ratios(old, new) is None


def test_equal_peaks_stay_equal_and_older_gpus_are_slower():
    old = whole(point(8192, 1000.0))
    to_same = projection.project(old, old.sweeps[0], H200, SEEN)
    assert all(s["low"] == pytest.approx(1) and s["high"] == pytest.approx(1) for s in to_same)
    assert all(s["low"] <= s["high"] < 1 for s in projection.project(old, old.sweeps[0], A100, SEEN))


def test_nothing_to_project_with():
    unknown = box(run(**{"gpu.name": "NVIDIA X1"}), point(8192, 1000.0))
    with pytest.raises(ValueError, match="nothing to project with"):
        projection.project(unknown, unknown.sweeps[0], B200, SEEN)


def test_a_length_whose_work_is_not_known_needs_its_decomposition():
    unknown = box(run(**{"model.uncounted": "mamba"}), point(8192, 1000.0))
    assert projection.project(unknown, unknown.sweeps[0], B200, SEEN) == []
    with pytest.raises(NothingUsable, match="neither a measured length nor a decomposed step"):
        decision.project(unknown, B200, decision.Options(), None)


def test_without_a_price_renting_depends_on_it():
    result = decision.project(whole(point(8192, 1000.0)), B200, decision.Options(), None)
    (verdict,) = result["verdict"]
    assert verdict["outcome"] is None and verdict["change"] == "--price-ratio"
    assert verdict["sentence"].endswith("the speed; whether renting one pays depends on its price.")


def test_a_missing_link_rate_leaves_communication_as_it_is():
    rtx = gpus.by_key("RTX PRO 6000")
    old = whole(attention=0.0, exposed_communication=1000.0)
    (step,) = projection.project(old, None, rtx, None)
    assert projection.spec_ratios(old.gpu, rtx)["link"] is None and step["high"] == pytest.approx(1)


def test_ratios_seen_in_a_published_pair():
    old = box(run(), decompositions=[(light(run()), decomposition(8192, attention=118.07, everything_else=796.69))])
    after = decomposition(8192, attention=63.28, everything_else=478.43)
    new = box(run("NVIDIA B200"), decompositions=[(light(run("NVIDIA B200")), after)])
    seen = projection.seen_ratios(old, new)
    assert COMPUTE ** seen["attention"] == pytest.approx(118.07 / 63.28)
    assert COMPUTE ** seen["everything_else"] == pytest.approx(796.69 / 478.43)
    assert projection.seen_ratios(old, old) is None  # equal peaks teach nothing
    assert projection.seen_ratios(box(run()), new) is None


@pytest.fixture(scope="module")
def published():
    return [read_box(ROOT / "results" / "published" / name) for name in ("h200", "b200")]


def test_the_published_back_test(published):
    seen = projection.seen_ratios(*published)
    rows = {r["label"]: r for r in projection.back_test(*published, seen)}
    measured = {"8192": 167 / 141, "32768": 524 / 324, "65536": 719 / 391, "131072": 836 / 420, "196608": 852 / 422,
                "262144": 852 / 419, "8192 (decomposed)": 778.4 / 461}  # fmt: skip
    assert {k: r["measured"] for k, r in rows.items()} == pytest.approx(measured, rel=2e-3)
    assert all(r["inside"] for r in rows.values())
    errors = {k: math.sqrt(r["low"] * r["high"]) / r["measured"] - 1 for k, r in rows.items()}
    assert {k: r["error"] for k, r in rows.items()} == pytest.approx(errors)
    assert max(abs(r["error"]) for k, r in rows.items() if "decomposed" not in k) < 0.06
    assert rows["8192 (decomposed)"]["low"] == pytest.approx(rows["8192 (decomposed)"]["measured"], rel=1e-3)


def test_a_back_test_can_fail(published):
    too_proud = SEEN | {"attention": 1.0, "everything_else": 1.0}
    rows = projection.back_test(*published, too_proud)
    assert not all(r["inside"] for r in rows)


@pytest.mark.parametrize(
    ("price", "word", "sides"),
    [
        (3.0, "not worth renting", {"under": ["8192", "131072"], "around": [], "over": []}),
        (2.0, "rent", {"under": ["8192"], "around": ["131072"], "over": []}),
        (1.05, "likely buy", {"under": [], "around": [], "over": ["8192", "131072"]}),
        (1.5, "likely buy", {"under": ["8192"], "around": [], "over": ["131072"]}),
    ],
)
def test_advice(price, word, sides):
    def step(seq_len, low, high):
        return {"label": str(seq_len), "low": low, "high": high}

    assert projection.advice([step(8192, 1.1, 1.2), step(131072, 1.7, 2.2)], price) == (word, sides)


def test_the_page_for_a_box_worth_renting_and_one_that_is_not():
    code, page, _ = upgrade("--project-to", "B200", "--price-ratio", "2")
    assert code == 0 and "a projection, this B200 SXM was not measured" in page and "Back-test" in page
    assert "Rent one and measure: B200 SXM is projected at 1.13-2.28x the speed for 2.00x the price; break-even" in page
    assert "it loses even at the high end at 8192, 32768, 65536." in page
    code, page, _ = upgrade("--project-to", "B300", "--price-ratio", "3.5")
    assert code == 0 and "Not worth renting: B300 SXM is projected at 1.13-2.28x the speed" in page
    code, page, _ = upgrade("results/published/h200", "--project-to", "B200", "--price-ratio", "1.1")
    assert code == 0 and "Likely a buy, rent one to confirm" in page
    code, page, _ = upgrade("--project-to", "B200")
    assert code == 0 and "Rent one and measure" in page  # the published price ratio goes with the published boxes


def test_projection_used_wrongly():
    code, _, error = upgrade("--project-to", "B999")
    assert code == 2 and "B200" in error  # names the known ones
    code, _, error = upgrade("no-such-folder", "--project-to", "B200")
    assert code == 4 and "no-such-folder" in error and error.count("\n") == 1
    code, _, error = upgrade("a", "b", "--project-to", "B200")
    assert code == 2
