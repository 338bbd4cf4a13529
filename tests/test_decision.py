"""The decision: published figures agree with the guide, made-up boxes with hand computations, the command with both."""

import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from harness import gpus, records
from harness.report.box import Sweep
from harness.report.cost import Crew
from harness.report.decision import Options, decide, project
from harness.report.reading import read_box
from harness.report.verdict_text import Page
from tests.handmade import NOISE, box, ceiling, decomposition, light, point, run, upgrade

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "results" / "published"
B200 = "NVIDIA B200"
TWICE = Options(price_ratio=2.0)


def about(result, name):
    return next(v for v in result["verdict"] if v["about"] == name)


@pytest.fixture(scope="module")
def published():
    return decide(read_box(PUBLISHED / "h200"), read_box(PUBLISHED / "b200"), TWICE)


def test_published_speedups(published):
    speedups = {p["seq_len"]: p["speedup"]["value"] for p in published["speed"]["points"]}
    guide = {8192: 1.184, 32768: 1.62, 65536: 1.84, 131072: 1.99, 196608: 2.02, 262144: 2.03}
    assert speedups == pytest.approx(guide, abs=0.006)
    shares = [round(100 * p["attention_share"], 1) for p in published["speed"]["points"]]
    assert shares == [12.5, 36.4, 53.4, 69.6, 77.4, 82.1]
    ratios = published["speed"]["ratios"]
    assert (round(ratios["compute"], 2), round(ratios["bandwidth"], 2)) == (2.28, 1.67)


def test_published_break_even_at_long_context_and_loss_at_short(published):
    outcomes = {p["seq_len"]: p["outcome"] for p in published["money"]["points"]}
    assert [n for n, word in outcomes.items() if word == "break-even"] == [131072, 196608, 262144]
    assert all(outcomes[n] == "loses" for n in (8192, 32768, 65536))
    assert about(published, "long")["outcome"] == "break-even"
    assert "1.99-2.03x" in about(published, "long")["sentence"]
    short = about(published, "short")
    assert short["outcome"] == "loses"
    assert short["decided_by"]["low"] == pytest.approx(1.69, abs=0.005)  # the decomposed step, not the sweep's 1.18
    assert '"everything else"' in short["change"] and "1.69" in short["change"]


def test_published_8k_in_the_long_context_recipe_is_warned_about(published):
    assert any("short lengths (8192)" in w for w in published["comparable"]["warnings"])
    assert any("pre-release (flash-attn-4 4.0.0b22)" in w for w in published["comparable"]["warnings"])


def test_published_buckets(published):
    (step,) = [b for b in published["speed"]["buckets"] if not b["recipe"]["use_liger"]]
    assert {k: round(v, 2) for k, v in step["ratios"].items()} == {"attention": 1.87, "everything else": 1.67}
    assert step["holds_back"] == "everything else"
    assert step["share_of_new_step"]["attention"] == pytest.approx(0.12, abs=0.005)


def test_published_memory(published):
    new = published["memory"]["new"]
    assert round(new["largest_all"], -3) == 393_000  # 180 GiB by the fit
    assert new["fit"]["gib_per_token"] == pytest.approx(0.00043, abs=5e-6)
    assert 350_000 < new["largest_usable"] < 370_000  # 92 % of 180 GiB
    assert published["memory"]["old"]["largest_usable"] > 262_144  # 256k ran in the usable 130 GiB
    assert published["memory"]["old"]["as_sold"]
    assert published["memory"]["old"]["capacity_gib"] * published["memory"]["usable_share"] == pytest.approx(130)
    assert 0 < new["fit"]["rms_error_gib"] <= new["fit"]["worst_error_gib"] < 2


def test_published_fixed_time_is_the_same_on_both(published):
    fit = published["speed"]["fit"]
    assert fit["old"]["fixed_ms"] == pytest.approx(fit["new"]["fixed_ms"], rel=0.03)  # the host's optimizer
    assert max(fit["old"]["worst_error"], fit["new"]["worst_error"]) < 0.01


def test_published_hours_and_costs(published):
    last = published["money"]["points"][-1]
    rate = 262144 / (65847.0 / 419)  # tokens/s and GPU from the published TFLOP and TFLOPS
    assert last["old_hours"] == pytest.approx(1e9 / rate / 8 / 3600, rel=1e-3)
    assert last["old_per_mtoken"] == pytest.approx(1e6 / rate / 3600, rel=1e-3)
    assert last["new_per_mtoken"] / last["old_per_mtoken"] == pytest.approx(2 * 419 / 852, rel=1e-3)
    assert last["cost_change"] == pytest.approx(2 * 419 / 852 - 1, rel=1e-3)


def test_published_documents_of_8k():
    result = decide(read_box(PUBLISHED / "h200"), read_box(PUBLISHED / "b200"), Options(price_ratio=2.0, doc_len=8192))
    documents = result["documents"]
    assert documents["attention_share"] == pytest.approx(0.125, abs=0.001)  # that of a genuine 8k sequence
    assert documents["regime"] == "short" and documents["decomposed"] == pytest.approx(1.69, abs=0.005)
    assert documents["seq_len"] == 262144 and documents["fitted"] == pytest.approx(2.07, abs=0.01)
    assert about(result, "short")["yours"] and not about(result, "long")["yours"]
    _, page, _ = upgrade("--doc-len", "8192")
    assert "Attention is 12.5% of the FLOPs, whatever they are packed into." in page
    assert "1.69x by the decomposed step (small matmuls) or 2.07x by the sweep's fit, packed into 262144" in page
    assert "DOC_LEN=8192 measures it" in page
    whole = decide(
        read_box(PUBLISHED / "h200"), read_box(PUBLISHED / "b200"), Options(price_ratio=2.0, doc_len=262144)
    )["documents"]
    assert whole["regime"] == "long" and whole["fitted"] == pytest.approx(852 / 419, rel=0.01)


def test_the_gate():
    found = [ceiling("fp4", None, reason="an older torch"), ceiling("fp4", 5000.0), ceiling("bf16", 1700.0)]
    found.append(ceiling("nvfp4", None, reason="torch has no kernel"))
    new = box(run(B200), point(8192, 60), ceilings=[(run(B200), c) for c in found])
    needs = ("fp4", "nvfp4", "fp6", "bf16", "memory=170GiB", "memory=200GiB", "memory=100GB")
    result = decide(box(run(), point(8192, 100)), new, Options(needs=needs))
    assert result["gate"]["only_new"] == ["fp6", "fp4", "nvfp4"]
    assert [(a["need"], a["decides"]) for a in result["gate"]["needs"]] == [
        ("fp4", "upgrade"), ("nvfp4", "beware"), ("fp6", "beware"), ("bf16", "no"), ("memory 170 GiB", "upgrade"),
        ("memory 200 GiB", "neither"), ("memory 93 GiB", "no"),
    ]  # fmt: skip
    stacks = {a["need"]: a["new_stack"] for a in result["gate"]["needs"]}
    assert stacks["fp4"] == "runs, 5000 TFLOPS measured" and stacks["fp6"] == "not measured"
    assert stacks["nvfp4"] == "does not run: torch has no kernel"
    assert [v["outcome"] for v in result["verdict"] if v["about"] == "need"] == [
        "upgrade", "beware", "beware", "upgrade", "neither"]  # fmt: skip
    with pytest.raises(ValueError, match="is not a need"):
        decide(box(run(), point(8192, 100)), new, Options(needs=("int4",)))


def test_an_unknown_gpu_decides_nothing_by_itself():
    result = decide(box(run(**{"gpu.name": "NVIDIA X1"}), point(8192, 100)), box(run(B200), point(8192, 60)),
                    Options(price_ratio=2, needs=("fp4", "memory=170GiB")))  # fmt: skip
    assert all(a["old_can"] is None and a["decides"] == "no" for a in result["gate"]["needs"])
    assert result["speed"]["ratios"]["compute"] is None and result["speed"]["points"][0]["position"] is None
    assert result["memory"]["old"]["capacity_gib"] is None


def test_no_difference_is_said_with_its_interval():
    old, new = box(run(), point(8192, 100)), box(run(), point(8192, 100.05))
    speedup = decide(old, new, TWICE)["speed"]["points"][0]["speedup"]
    assert speedup["significant"] is False and speedup["low"] < 1 < speedup["high"]


def test_intervals_reach_the_money_and_decide():
    light_old, light_new = light(run()), light(run(B200))
    near = [100 / 1.96 * (1 + 20 * x) for x in NOISE]  # 1.96x in the median, of steps that spread by 20 %
    noisy = point(8192, 50)
    noisy.times_ms = tuple(near)
    result = decide(box(light_old, point(8192, 100)), box(light_new, noisy), TWICE)
    row = result["money"]["points"][0]
    assert row["break_even"]["low"] < 2 < row["break_even"]["high"] and row["outcome"] == "break-even"
    sharp = decide(box(light_old, point(8192, 100)), box(light_new, point(8192, 100 / 1.9)), TWICE)
    assert sharp["money"]["points"][0]["outcome"] == "loses"
    verdict = about(sharp, "short")
    assert verdict["outcome"] == "loses" and verdict["decided_by"]["low"] == pytest.approx(1.9)
    assert "(measured)" in verdict["sentence"]


def test_lengths_of_one_box_only():  # case 78
    old = box(run(), point(8192, 100), point(32768, 400), point(262144, outcome="oom"))
    new = box(run(B200), point(8192, 60), point(262144, 5000), point(393216, 9000))
    result = decide(old, new, TWICE)
    words = {p["seq_len"]: (p["old"]["outcome"], p["new"]["outcome"]) for p in result["speed"]["points"]}
    assert words == {8192: ("measured", "measured"), 32768: ("measured", "not_run"), 262144: ("oom", "measured"),
                     393216: ("not_run", "measured")}  # fmt: skip
    assert [p["speedup"] is not None for p in result["speed"]["points"]] == [True, False, False, False]
    assert result["memory"]["only_new"] == [262144]
    assert [p["seq_len"] for p in result["money"]["points"]] == [8192]
    assert about(result, "long")["outcome"] is None and "no common length" in about(result, "long")["sentence"]


def test_a_length_that_wins_beside_one_that_loses():
    old = box(light(run()), point(131072, 1000), point(262144, 4000))
    new = box(light(run(B200)), point(131072, 600), point(262144, 1600))
    verdict = about(decide(old, new, TWICE), "long")
    assert verdict["outcome"] == "depends" and "loses at 131072; wins at 262144" in verdict["sentence"]


def test_flipping_prices_flip():
    times = {131072: 1.9, 262144: 2.2}
    old = box(run(), *(point(n, 1000) for n in times))
    new = box(run(B200), *(point(n, 1000 / speedup) for n, speedup in times.items()))
    change = about(decide(old, new, Options(price_ratio=2.05)), "long")["change"]
    under, over = (float(word) for word in change.split() if word[0].isdigit())
    assert (under, over) == (pytest.approx(1.9 / 1.02, abs=0.01), pytest.approx(2.2 / 0.98, abs=0.01))
    for price, word in ((under - 0.01, "wins"), (over + 0.01, "loses")):
        assert about(decide(old, new, Options(price_ratio=price)), "long")["outcome"] == word


def test_the_tie_goes_to_the_memory_only_where_there_is_more():
    def page(old, new):
        peaks = {131072: 60.0, 196608: 90.0, 262144: 120.0}
        boxes = [
            box(b, *(point(n, n * 1e-3 * f, peak_mem_gib=p) for n, p in peaks.items())) for b, f in ((old, 2), (new, 1))
        ]
        return about(decide(*boxes, TWICE), "long")["sentence"]

    assert "and the memory" in page(run(), run(B200)) and "and the memory" not in page(run(), run())


def test_memory_of_a_length_that_ran_too_few_steps():
    old = box(run(), point(8192, 100), point(262144, outcome="oom"))
    new = box(run(B200), point(8192, 60), point(262144, 5000, outcome="partial", steps=2))
    assert decide(old, new, TWICE)["memory"]["only_new"] == [262144]  # it fits; how fast it is was not measured


def test_the_job_may_be_for_another_number_of_gpus():
    boxes = box(run(), point(8192, 100)), box(run(B200), point(8192, 60))
    hours = [decide(*boxes, Options(gpus=n))["money"]["points"][0]["old_hours"] for n in (None, 8, 16)]
    assert hours[0] == hours[1] == 2 * hours[2]


def test_the_fastest_light_decomposition_stands_for_documents_and_short_context():
    def steps(base, factor):
        slow = decomposition(8192, attention=200 * factor, everything_else=1800 * factor)
        fast = decomposition(8192, attention=100 * factor, everything_else=300 * factor**2)
        return [(light(run(base.gpu.name, **{"recipe.use_liger": on})), d) for on, d in ((False, slow), (True, fast))]

    heavy = decomposition(8192, attention=1.0, everything_else=2.0)
    old = box(run(), point(8192, 3000), decompositions=[(run(), heavy), *steps(run(), 1)])
    new = box(run(B200), point(8192, 2000), decompositions=[(run(B200), heavy), *steps(run(B200), 0.5)])
    result = decide(old, new, Options(price_ratio=2.0, doc_len=8192))
    assert len(result["speed"]["buckets"]) == 3
    assert about(result, "short")["decided_by"]["low"] == pytest.approx(400 / 125)
    assert result["documents"]["decomposed"] == pytest.approx(400 / 125)


def test_winning():
    old, new = box(run(), point(262144, 3000)), box(run(B200), point(262144, 1000))
    verdict = about(decide(old, new, TWICE), "long")
    assert verdict["outcome"] == "wins" and "33% less per token" in verdict["sentence"]


def test_without_a_price_the_answer_is_a_price_ratio():
    result = decide(box(run(), point(262144, 3000)), box(run(B200), point(262144, 1500)), Options())
    assert "pays up to that price ratio" in about(result, "long")["sentence"]
    row = result["money"]["points"][0]
    assert row["outcome"] is None and row["new_per_mtoken"] is None and row["old_hours"] == 2 * row["new_hours"]


def test_prices_rather_than_a_ratio():
    options = Options(price_old=2.5, price_new=4.0)
    result = decide(box(run(), point(262144, 3600.0)), box(run(B200), point(262144, 1800.0)), options)
    row = result["money"]["points"][0]
    assert result["money"]["price_ratio"] == 1.6
    assert row["old_per_mtoken"] == pytest.approx(2.5 / (262144 / 3.6 * 3600) * 1e6, rel=1e-3)
    assert row["cost_change"] == pytest.approx(1.6 / 2 - 1, rel=1e-6)


def test_models_that_cannot_be_counted_still_get_a_verdict():
    change = {"model.uncounted": "mamba"}
    result = decide(box(run(**change), point(8192, 100)), box(run(B200, **change), point(8192, 40)), TWICE)
    assert [v["about"] for v in result["verdict"]] == ["unknown"] and result["verdict"][0]["outcome"] == "wins"


def test_a_right_sized_recipe_measured_on_both_decides_short_context():
    old, new = (
        box(run(), point(8192, 2990), point(131072, 46000)),
        box(run(B200), point(8192, 2525), point(131072, 23000)),
    )
    old.sweeps.append(Sweep(Path("short.jsonl"), light(run()), {8192: point(8192, 900)}))
    new.sweeps.append(Sweep(Path("short.jsonl"), light(run(B200)), {8192: point(8192, 500)}))
    result = decide(old, new, TWICE)
    assert about(result, "short")["decided_by"]["low"] == pytest.approx(1.8)
    assert len(result["speed"]["others"]) == 1 and len(result["speed"]["points"]) == 2


def test_other_stacks_are_lines_of_their_own():  # case 75
    old, new = box(run(), point(8192, 100), point(32768, 300)), box(run(B200), point(8192, 60), point(32768, 160))
    stack = {"stack.torch": "2.10.0+cu129", "stack.cuda": "12.9"}
    old.sweeps.append(Sweep(Path("b"), run(**stack), {8192: point(8192, 130)}))
    new.sweeps.append(Sweep(Path("b"), run(B200, **stack), {8192: point(8192, 100)}))
    (other,) = decide(old, new, TWICE)["speed"]["others"]
    assert other["stack"]["torch"] == "2.10.0+cu129" and other["points"][0]["speedup"]["value"] == pytest.approx(1.3)


def test_a_full_decomposition_names_the_bucket_that_holds_back():
    a = decomposition(8192, attention=100, matmul=500, idle=200, copies=0)
    b = decomposition(8192, attention=44, matmul=220, idle=200, copies=0)
    old = box(light(run()), point(8192, 800), decompositions=[(light(run()), a)])
    new = box(light(run(B200)), point(8192, 464), decompositions=[(light(run(B200)), b)])
    (row,) = decide(old, new, TWICE)["speed"]["buckets"]
    assert row["holds_back"] == "idle" and row["ratios"]["matmul"] == pytest.approx(500 / 220)
    assert row["ratios"]["copies"] is None  # nothing over nothing is no ratio


def test_boxes_that_differ_are_refused_or_compared_with_the_list():
    old, new = box(run(**{"stack.torch": "2.10.0"}), point(8192, 100)), box(run(B200), point(8192, 50))
    refused = decide(old, new, TWICE)
    assert list(refused) == ["question", "gate", "comparable"] and refused["comparable"]["differences"]
    allowed = decide(old, new, Options(price_ratio=2.0, allow_mismatch=True))
    assert allowed["comparable"]["allowed"] and not allowed["comparable"]["ok"]
    assert "torch: 2.10.0 and 2.13.0" in allowed["verdict"][0]["sentence"]
    never = decide(box(run(**{"stack.cuda": None}), point(8192, 100)), new, Options(allow_mismatch=True))
    assert "speed" not in never


def test_an_allowed_batch_mismatch_is_compared_by_tokens():
    old, new = box(run(), point(8192, 100)), box(run(B200, **{"recipe.batch_size": 2}), point(8192, 100))
    result = decide(old, new, Options(price_ratio=2.0, allow_mismatch=True))
    assert result["speed"]["points"][0]["speedup"]["value"] == pytest.approx(2.0)


def test_a_fleet_of_measured_boxes():
    old, new = box(run(), point(262144, 40000)), box(run(B200), point(262144, 20000))
    result = decide(old, new, Options(price_ratio=2.0, fleet=(Crew(16), Crew(8)), tokens=1e9))
    rows = {r["fleet"]: r for r in result["fleet"]["rows"]}
    days = 1e9 / (262144 / 40 * 8) / 86400
    assert rows["old, as now"]["days"] == pytest.approx(days, rel=1e-3)
    assert rows["old"]["days"] == pytest.approx(days / 2, rel=1e-3)
    assert rows["new, at the measured 2.00"]["days"] == pytest.approx(days / 2, rel=1e-3)


def test_a_projection_of_a_box_that_measured_nothing_is_of_its_gpu():
    found = project(box(run()), gpus.by_key("B200"), TWICE, None)["projection"]
    assert found["picture"] is None and found["lines"]


@pytest.mark.parametrize("options", [TWICE, Options(), Options(price_ratio=2.0, doc_len=8192, needs=("fp4",))])
def test_json_holds_no_number_that_json_has_not(options):
    cases = [
        (box(run(), point(8192, 100)), box(run(B200), point(8192, 60))),
        (box(run(), point(8192, outcome="oom")), box(run(B200), point(8192, outcome="failed"))),
        (box(run(), point(8192, 100, steps=2, outcome="partial")), box(run(B200), point(8192, 60))),
        (read_box(PUBLISHED / "h200"), read_box(PUBLISHED / "h200")),
    ]
    for old, new in cases:
        json.dumps(decide(old, new, options), allow_nan=False)


def write(folder, base, times):
    """A result folder with real records."""
    folder.mkdir()
    lines = [base]
    for n, ms in times.items():
        steps = [ms * (1 + x) for x in NOISE]
        lines += [
            records.Step(
                run_id=base.run_id, seq_len=n, step=i + 2, warmup=False, exec_time_ms=t, peak_mem_gib=20 + n / 1e4
            )
            for i, t in enumerate(steps)
        ]
        lines.append(
            records.Summary(run_id=base.run_id, seq_len=n, n=len(steps), median_ms=ms, peak_mem_gib=20 + n / 1e4)
        )
    (folder / "sweep_1.jsonl").write_text("".join(records.dump(x) + "\n" for x in lines))
    return str(folder)


CPU = {"gpu.device": "cpu", "gpu.name": "EPYC", "gpu.capability": None, "stack.cuda": None, "stack.torch": "2.13.0+cpu"}


def test_command_without_arguments():
    started = time.monotonic()
    done = subprocess.run([sys.executable, ROOT / "should_upgrade.py"], capture_output=True, text=True, cwd="/")
    print(f"start to verdict: {time.monotonic() - started:.2f} s")
    assert (done.returncode, done.stderr) == (0, "")
    page = " ".join(done.stdout.split())
    order = [
        "lack something you need?",
        "Are they comparable? Yes",
        "How much faster?",
        "What fits?",
        "cost?",
        "Verdict",
    ]
    assert [page.index(text) for text in order] == sorted(page.index(text) for text in order)
    for text in ("break-even: 1.99-2.03x the speed", "loses: 1.69x the speed", "393,000", "18% more per token"):
        assert text in page


def test_command_as_json_is_what_the_page_says():
    code, page, _ = upgrade("--json")
    result = json.loads(page)
    assert code == 0 and list(result) == ["question", "gate", "comparable", "speed", "memory", "money", "verdict"]
    text = upgrade()[1]
    assert all(" ".join(v["sentence"].split()) in text for v in result["verdict"])


def test_command_imports_neither_torch_nor_matplotlib():
    check = "print({'torch', 'matplotlib', 'scipy'} & set(sys.modules))"
    code = f"import sys, should_upgrade; should_upgrade.main([]); {check}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("set()"), done.stdout[-200:]


def test_command_on_two_sweeps_of_one_cpu(tmp_path):
    times = {8192: 100.0, 32768: 410.0}
    old = write(tmp_path / "one", run(run_id="a1", **CPU), times)
    new = write(tmp_path / "two", run(run_id="b2", **CPU), {n: ms * 1.0005 for n, ms in times.items()})
    code, page, _ = upgrade(old, new, "--price-ratio", "1")
    assert code == 0 and "a CPU and no GPU" in page and page.count("~ [") == 4  # speed and money, both lengths
    assert "EPYC (OLD)" in page and "10, 10" in page


def test_command_refuses_another_stack_and_names_every_difference(tmp_path):
    other = CPU | {"stack.torch": "2.10.0+cpu", "stack.python": "3.11.2", "recipe.zero_stage": 2}
    old = write(tmp_path / "one", run(**CPU), {8192: 100.0})
    new = write(tmp_path / "two", run(run_id="b2", **other), {8192: 100.0})
    code, page, error = upgrade(old, new)
    assert code == 3 and "Are they comparable? No" in page and "--allow-mismatch" in error
    for text in ("torch: 2.13.0 and 2.10.0", "python: 3.12 and 3.11", "recipe zero_stage: 3 and 2"):
        assert f"DIFFERENT {text}" in page
    code, page, _ = upgrade(old, new, "--allow-mismatch")
    assert code == 0 and "DIFFERENT torch: 2.13.0 and 2.10.0" in page and "compares that too" in page


def test_command_with_the_same_folder_twice():
    code, page, _ = upgrade("results/published/h200", "results/published/h200", "--price-ratio", "1")
    assert code == 0 and "OLD and NEW are the same file" in page and "H200 SXM (NEW)" in page


def test_command_with_no_length_in_common(tmp_path):
    old, new = write(tmp_path / "one", run(), {8192: 2990.0}), write(tmp_path / "two", run(run_id="b"), {32768: 7160.0})
    code, page, error = upgrade(old, new, "--price-ratio", "2")
    assert code == 3 and error == "no length was measured on both boxes\n"
    assert "not run" in page and "no common length" in page


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["results/none", "results/published/b200"], 4, "results/none"),
        (["results/published", "results/published/b200"], 4, "results/published"),
        (["results/published/h200"], 2, "NEW is missing"),
        (["--price-ratio", "0"], 2, "not a number above zero"),
        (["--price-ratio", "-1"], 2, "not a number above zero"),
        (["--price-ratio", "nan"], 2, "not a number above zero"),
        (["--price-old", "2"], 2, "go together"),
        (["--price-old", "2", "--price-new", "4", "--price-ratio", "2"], 2, "give one"),
        (["--needs", "int4"], 2, "is not a need"),
        (["--doc-len", "1.5"], 2, "not a whole number"),
        (["--fleet", "7-1:3"], 2, "is not a fleet"),
        (["RTX PRO 6000", "B200", "--price-ratio", "3.4", "--fleet", "7+1:3+1"], 2, "--fleet-base"),
        (["RTX PRO 6000", "B200", "--fleet", "7+1:3+1", "--fleet-base", "3+1=8.8"], 2, "needs a price"),
    ],
)
def test_command_used_wrongly(args, code, text):
    got, _, error = upgrade(*args)
    assert got == code and text in error and "Traceback" not in error


def test_command_for_the_fleet_of_the_guide():
    code, page, _ = upgrade(
        "RTX PRO 6000", "B200", "--price-ratio", "3.4", "--fleet", "7+1:3+1", "--fleet-base", "3+1=8.8"
    )
    assert code == 0
    for text in ("3.77", "buys 13.6 RTX PRO 6000", "compute 4.47, bandwidth 4.47, for 3.40x the price",
                 "2.33x (equal time)", "3.97x (equal cost", "4.20x (equal time with those"):  # fmt: skip
        assert text in page


def test_help_names_the_exit_codes():
    code, page, _ = upgrade("--help")
    assert code == 0 and all(f"; {n} " in page for n in (1, 2, 3, 4))


def test_positions_between_the_ratios():
    result = decide(read_box(PUBLISHED / "h200"), read_box(PUBLISHED / "b200"), TWICE)
    at = {p["seq_len"]: p["position"] for p in result["speed"]["points"]}
    low, high = 8 / 4.8, 2250 / 989
    assert at[262144] == pytest.approx((852 / 419 - low) / (high - low), abs=0.01)
    assert at[8192] < 0 and not any(math.isnan(x) for x in at.values())


def test_the_page_says_why_a_length_failed_and_that_nothing_is_left():
    out = io.StringIO()
    old = box(run(), point(8192, 100), point(32768, outcome="failed", error="killed by signal 9"))
    result = decide(old, box(run(B200), point(32768, 100)), TWICE)
    Page(result, Console(file=out, width=200)).show()
    assert "H200 SXM failed at 32768: killed by signal 9" in out.getvalue()
    assert "No length was measured on both boxes" in out.getvalue()


def test_the_page_names_lengths_that_only_the_new_box_ran():
    out = io.StringIO()
    old = box(run(), point(8192, 100), point(32768, outcome="oom"))
    Page(decide(old, box(run(B200), point(8192, 60), point(32768, 100)), TWICE), Console(file=out, width=200)).show()
    assert "Only B200 SXM ran 32768; H200 SXM was out of memory there." in out.getvalue()
