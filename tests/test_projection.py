"""Projection to a GPU nobody measured here: hand computations, the back-test on what others published, the page."""

import json
import math
import re
from pathlib import Path

import pytest

from harness import gpus
from harness.report import decision, projection
from harness.report.box import NothingUsable
from harness.report.library import Pair, Row
from harness.report.projection import Calibration
from harness.report.reading import read_box
from tests import bench_projection
from tests.handmade import box, decomposition, light, point, run, upgrade

ROOT = Path(__file__).resolve().parent.parent
A100, H100, H200, B200, GB200, B300, GB300, MI355X, RTX = (
    gpus.by_key(k) for k in ("A100", "H100", "H200", "B200", "GB200", "B300", "GB300", "MI355X", "RTX PRO 6000")
)
COMPUTE, BANDWIDTH, LINK = 2250 / 989, 8.0 / 4.8, 1800 / 900
FP8 = ("fp8", "fp8")


def pair(model, speedup, old=H100, new=B200, precisions=FP8, work="dense", release="1.0", kind="pre-training"):
    def row(gpu, precision, rate):
        return Row(gpu, model, 4096, precision, precision, rate, "made", f"made:{model}", work=work, release=release,
                   kind=kind)  # fmt: skip

    return Pair(row(old, precisions[0], 1000.0), row(new, precisions[1], 1000.0 * speedup))


def made(*more) -> list[Pair]:
    """Three dense models, six pairs, H100 to B200 in fp8: 2.0, 2.2 and 2.4 in the newest release."""
    return [pair(name, gain, release=release) for name, gain, release in (
        ("a", 1.0, "1.0"), ("a", 2.0, "2.0"), ("b", 2.0, "1.0"), ("b", 2.2, "2.0"), ("c", 1.1, "1.9"),
        ("c", 2.4, "1.10"),
    )] + list(more)  # fmt: skip


def test_the_middle_by_hand():
    # votes of a class: one a model, of its newest release; every wider class is the same six pairs, so drawing to it
    # is ((sum + m) / 4) five times over, and the mean of equal things is the mean
    expected = math.exp(sum(map(math.log, (2.0, 2.2, 2.4))) / 3)
    found = Calibration(made()).expect(H100, B200, FP8, "dense")
    assert found["middle"] == pytest.approx(expected) and found["pairs"] == 6 and found["widened"] is None
    assert found["basis"] == "H100 SXM to B200 SXM, fp8 to fp8, dense"
    assert found["peaks"] == pytest.approx(4500 / 1979)


def test_a_class_is_drawn_to_the_wider_one_as_by_one_model_more():
    others = [pair(f"e{i}", 3.0, work="experts") for i in range(6)]
    dense = [pair("a", 2.0), pair("b", 2.0), *(pair("b", 2.0, release=f"0.{i}") for i in range(4))]
    every = (2 * math.log(2.0) + 6 * math.log(3.0)) / 8  # of every class down to the two GPUs
    wanted = math.exp((2 * math.log(2.0) + every) / 3)
    assert Calibration(dense + others).expect(H100, B200, FP8, "dense")["middle"] == pytest.approx(wanted)


def test_a_model_that_was_measured_narrows_it_to_its_newest_release():
    found = Calibration(made()).expect(H100, B200, FP8, "dense", "A")
    assert found["middle"] == pytest.approx(2.0) and found["pairs"] == 2 and found["basis"].startswith("A itself")
    assert Calibration(made()).expect(H100, B200, FP8, "dense", "c")["middle"] == pytest.approx(2.4)  # 1.10 is over 1.9


def test_few_pairs_or_one_model_widen_a_class_and_it_is_said():
    few = [pair(f"e{i}", 3.0, work="experts") for i in range(4)]
    found = Calibration(made(*few)).expect(H100, B200, FP8, "experts")
    assert found["basis"] == "H100 SXM to B200 SXM, fp8 to fp8"
    assert found["widened"] == "4 pairs of 4 models are of H100 SXM to B200 SXM, fp8 to fp8, experts"
    alone = [pair("e", 3.0, work="experts", release=f"{i}.0") for i in range(9)]
    found = Calibration(made(*alone)).expect(H100, B200, FP8, "experts")
    assert found["basis"] == "H100 SXM to B200 SXM, fp8 to fp8" and found["widened"].startswith("9 pairs of 1 models")


def test_the_range_is_how_far_it_was_off():
    # ten models at the ratio of peaks, one of them kept: off by what it is from the others
    gains = [1.9, 1.95, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.05, 2.4]
    pairs = [pair(f"m{i}", gain) for i, gain in enumerate(gains)]
    logs = [math.log(g) for g in gains]
    errors = sorted(abs((sum(logs) - x) / 9 - x) for x in logs)  # of ten, the ninth keeps 80 %: ceil(0.8 * 11)
    found = Calibration(pairs).expect(H100, B200, FP8, "dense")
    assert math.log(found["high"] / found["middle"]) == pytest.approx(errors[8], rel=1e-6)
    assert found["low"] * found["high"] == pytest.approx(found["middle"] ** 2)


def test_the_way_back_is_the_inverse():
    known = projection.published()
    there, back = known.expect(H100, B200, FP8, "experts"), known.expect(B200, H100, FP8, "experts")
    assert [back[k] for k in ("low", "middle", "high")] == pytest.approx(
        [1 / there[k] for k in ("high", "middle", "low")]
    )


@pytest.mark.parametrize("pair_of", [(RTX, B200), (H100, MI355X), (H100, RTX)])
def test_a_gpu_no_pair_has_gets_the_widest_class_and_is_told(pair_of):
    known = projection.published()
    found, usual = (
        known.expect(*pair_of, ("bf16", "bf16"), "dense"),
        known.expect(A100, H100, ("bf16", "bf16"), "dense"),
    )
    strange = next(g for g in pair_of if g in (RTX, MI355X))
    assert found["basis"] == "every published pair in one precision"
    assert f"no published pair has a {strange.label}" in found["widened"]
    assert found["high"] / found["low"] > 2 * usual["high"] / usual["low"]


@pytest.mark.parametrize(("old", "new", "precisions", "what"), [
    (A100, H100, FP8, "fp8 peak of A100 SXM 80GB"), (H100, MI355X, ("bf16", "nvfp4"), None),
    (H100, gpus.by_key("MI300X"), ("bf16", "nvfp4"), "nvfp4 peak of MI300X")])  # fmt: skip
def test_a_gpu_without_a_known_peak_is_refused(old, new, precisions, what):
    known = projection.published()
    if what is None:  # its sheet has one figure for 4 bits
        assert known.expect(old, new, precisions, "dense")["peaks"] == pytest.approx(10100 / 989)
        return
    with pytest.raises(NothingUsable, match=f"the dense {what} is not known: nothing to project with"):
        known.expect(old, new, precisions, "dense")


def test_nothing_published_is_nothing_to_project_with():
    with pytest.raises(NothingUsable, match="0 pairs in one precision: too few to project with"):
        Calibration([]).expect(H100, B200, FP8, "dense")


@pytest.fixture(scope="module")
def tried():
    return {name: {rule: projection.score(rows) for rule, rows in rules.items()}
            for name, rules in bench_projection.tried(bench_projection.upgrades()).items()}  # fmt: skip


@pytest.mark.parametrize(
    ("split", "error"),
    [("earlier -> later", 0.10), ("earlier -> later, known", 0.05), ("one release out", 0.10),
     ("one release out, known", 0.05), ("one model out", 0.125)],
)  # fmt: skip
def test_the_back_test_keeps_its_promise(tried, split, error):
    ours = tried[split]["projection"]
    assert 0.70 <= ours["inside"] <= 0.90 and ours["error"] <= error
    assert ours["error"] < tried[split]["ratio of peaks"]["error"]
    assert ours["error"] < tried[split]["ratio of bandwidths"]["error"]


def test_a_generation_in_no_other_source_is_given_a_wide_range(tried):
    out = tried["source out: llm_foundry"]["projection"]
    assert out["inside"] > 0.8 and out["width"] > 3
    assert out["error"] > 0.2  # the honest part: its middle is no better than the ratio of peaks


def test_a_back_test_can_fail():
    """Kept pairs twice as fast as what was shown says."""
    pairs = bench_projection.upgrades()
    shown = [p for p in pairs if p.old.release != "26.04.01"]
    known, rows = Calibration(shown), []
    for p in pairs:
        if p.old.release == "26.04.01":
            e = known.expect(p.old.gpu, p.new.gpu, p.precisions, p.work, p.old.model)
            rows.append((math.log(e["middle"] / (2 * p.speedup)), math.log(e["high"] / e["middle"])))
    assert projection.score(rows)["inside"] < 0.5


def test_the_record_on_the_page_is_the_back_test():
    record = projection.published().record
    for found in record.values():
        assert 0.70 <= found["inside"] <= 0.90
    assert record["a later release"]["error"] < 0.05 and record["another model"]["error"] < 0.15


def test_scores_by_hand():
    found = projection.score([(math.log(1.1), 0.2), (math.log(0.5), 0.2), (0.0, 0.4)])
    assert found["inside"] == pytest.approx(2 / 3) and found["error"] == pytest.approx(0.1)
    assert found["width"] == pytest.approx(math.exp(0.4)) and found["error_90"] == pytest.approx(0.42)


# --- one pair's picture by length

SHAPE = {"attention": 100.0, "matmul": 500.0, "other_compute": 100.0, "optimizer": 50.0, "copies": 40.0,
         "exposed_communication": 60.0, "idle": 150.0}  # fmt: skip


def seen():
    """H200 and B200, one step apart: attention 1.9x, everything else 1.7x."""
    old = box(run(), decompositions=[(light(run()), decomposition(8192, attention=190.0, everything_else=850.0))])
    new = box(run("NVIDIA B200"))
    step = decomposition(8192, attention=100.0, everything_else=500.0)
    new.decompositions = [(light(run("NVIDIA B200")), step)]
    return old, new


def test_a_picture_has_every_bucket_follow_its_own_ratio():
    old = box(run(), point(8192, 2000.0), decompositions=[(run(kind="decompose"), decomposition(8192, **SHAPE))])
    (step,) = projection.picture(old, old.sweeps[0], B200, seen())["steps"]
    new = 100 / 1.9 + 500 / 1.7 + 150 / BANDWIDTH + 60 / LINK + 40 + 150
    assert step["basis"] == "its decomposition" and step["speedup"] == pytest.approx(1000 / new)
    assert step["old_ms"] == pytest.approx(2000, rel=1e-3)  # a sweep slower than its decomposition is scaled


def test_a_picture_without_a_decomposition_is_of_flop_shares():
    old = box(run(), point(131072, 46000.0))
    (step,) = projection.picture(old, old.sweeps[0], B200, seen())["steps"]
    share = 0.696  # published attention share at 128k
    assert step["basis"] == "FLOP shares, nothing fixed"
    assert step["speedup"] == pytest.approx(1 / (share / 1.9 + (1 - share) / 1.7), rel=1e-3)


def test_a_fixed_part_stays_fixed():
    # made of 2000 ms fixed, dense work at 500 TFLOPS and attention at 400: the fit must find all three
    dense, attention = 368.868971 / 8192, 52.776558 / 8192**2
    parts = {n: (1e3 * dense * n / 500, 1e3 * attention * n * n / 400) for n in (8192, 32768, 65536, 131072)}
    old = box(run(), *(point(n, 2000 + sum(ms)) for n, ms in parts.items()))
    step = projection.picture(old, old.sweeps[0], B200, seen())["steps"][0]
    new = 2000 + parts[8192][0] / 1.7 + parts[8192][1] / 1.9
    assert step["basis"].startswith("a fit") and step["speedup"] == pytest.approx(
        (2000 + sum(parts[8192])) / new, rel=1e-3
    )


def test_no_picture_where_nothing_can_be_drawn():
    old = box(run(), point(8192, 1000.0))
    assert projection.picture(old, old.sweeps[0], B200, (old, old)) is None  # no decomposed step
    pair_of = seen()
    assert projection.picture(old, old.sweeps[0], B200, (pair_of[0], pair_of[0])) is None  # equal peaks teach nothing
    unknown = box(run(**{"model.uncounted": "mamba"}), point(8192, 1000.0))
    assert projection.picture(unknown, unknown.sweeps[0], B200, pair_of) is None
    other = box(run(), decompositions=[(run(), decomposition(8192, **SHAPE))])
    assert projection.picture(other, None, B200, pair_of) is None


def test_the_guide_s_pair_is_the_worked_example():
    guide = [read_box(ROOT / "results" / "published" / name) for name in ("h200", "b200")]
    sweep = max(guide[0].sweeps, key=lambda s: len(s.points))
    found = projection.picture(guide[0], sweep, B200, guide)
    assert found["pair"] == "H200 SXM to B200 SXM at 8192"
    measured = {
        8192: 167 / 141,
        32768: 524 / 324,
        65536: 719 / 391,
        131072: 836 / 420,
        196608: 852 / 422,
        262144: 852 / 419,
    }
    for step in found["steps"]:
        assert step["speedup"] == pytest.approx(measured[step["seq_len"]], rel=0.15)


# --- the page


@pytest.mark.parametrize(("price", "word"), [("6.5", "not worth renting"), ("2.0", "rent"), ("0.5", "likely buy")])
def test_advice(price, word):
    code, text, _ = upgrade("H100", "--project-to", "B200", "--model", "llama", "--price-ratio", price, "--json")
    (first, *_) = json.loads(text)["verdict"]
    assert code == 0 and first["outcome"] == word


def test_the_page():
    code, page, _ = upgrade("--project-to", "B300", "--price-ratio", "1.4")
    assert code == 0 and "a projection, this B300 SXM was not measured" in page
    assert "dense, bf16 -> bf16" in page and "dense, bf16 -> fp8" in page and "Tried on" in page
    assert "By length, as one pair would have it (H200 SXM to B200 SXM at 8192)" in page
    code, page, _ = upgrade("H100", "--project-to", "GB300", "--precision", "fp8", "--model", "LLAMA3_70B")
    assert code == 0 and "LLAMA3_70B itself" in page and "By length" not in page
    assert "the speed (dense, fp8 -> fp8); whether renting one pays depends on its price." in page
    code, page, _ = upgrade("H100", "--project-to", "B200")
    assert code == 0 and "experts, bf16 -> bf16" in page  # nothing says what you train
    code, text, _ = upgrade("results/published/h200", "--project-to", "B200", "--json")
    lines = json.loads(text)["projection"]["lines"]
    assert lines[0]["basis"].startswith("meta-llama/Llama-3.1-8B itself")


def test_an_unknown_gpu_has_nothing_to_project_with():
    unknown = box(run(**{"gpu.name": "NVIDIA X1"}), point(8192, 1000.0))
    with pytest.raises(NothingUsable, match="nothing to project with"):
        decision.project(unknown, B200, decision.Options(), None)


def test_projection_used_wrongly():
    code, _, error = upgrade("--project-to", "B999")
    assert code == 2 and "B200" in error  # names the known ones
    code, _, error = upgrade("no-such-folder", "--project-to", "B200")
    assert code == 4 and "no-such-folder" in error and error.count("\n") == 1
    code, _, error = upgrade("a", "b", "--project-to", "B200")
    assert code == 2
    code, _, error = upgrade("A100", "--project-to", "B200", "--precision", "fp8")
    assert code == 4 and "the dense fp8 peak of A100 SXM 80GB is not known" in error


@pytest.mark.parametrize(
    ("log", "given", "lacks"),
    [
        ("nanogpt_a100.log", [], "does not say its gpu and precision: .* --old gpu=H200 --old precision=bf16"),
        ("mlperf_8x_gb200_llama31_8b.log", [], "does not say its precision: .* --old precision=bf16"),
        ("mlperf_8x_gb200_llama31_8b.log", ["--old", "precision=BF16"], None),
        ("mlperf_8x_gb200_llama31_8b.log", ["--precision", "fp8"], None),
    ],
)
def test_a_log_that_does_not_say_enough_to_project_from(log, given, lacks):
    code, page, error = upgrade(f"tests/data/logs/{log}", "--project-to", "B300", "--price-ratio", "1.2", *given)
    assert code == (2 if lacks else 0) and (re.search(lacks, error) if lacks else "80% range" in page)
