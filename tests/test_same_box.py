"""Formats in the report: bf16 beside bf16, fp8 beside fp8, and what another format gives on the same box."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from harness import flops, gpus, records, stats
from harness.report import comparing
from harness.report.box import Sweep
from harness.report.decision import Options, decide, project
from harness.report.reading import read_box
from tests.boxes import write
from tests.handmade import NOISE, box, ceiling, decomposition, point, run, upgrade

B200 = "NVIDIA B200"


def fp8(base: records.Run, dtype="fp8", emulated=False, version="0.18.0") -> records.Run:
    """The same run with its linear layers in another format."""
    recipe = f"torchao {version} Float8Linear tensorwise"
    said = records.Format(
        name=dtype, recipe=recipe, emulated=emulated, converted=224, total=225, kept={"lm_head": "the output layer"}
    )
    change = {"recipe": base.recipe.model_copy(update={"dtype": dtype}), "format": said}
    return base.model_copy(update=change | {"run_id": f"{base.run_id}-{dtype}"})


def both(base: records.Run, bf16_ms: float, fp8_ms: float, **more):
    """A box with a sweep of each at 8192 tokens, fp8 measured last."""
    found = box(base, point(8192, bf16_ms))
    found.sweeps.append(Sweep(Path("later.jsonl"), fp8(base, **more), {8192: point(8192, fp8_ms)}))
    return found


def test_another_format_is_a_difference_by_that_name():
    old, new = run(), fp8(run(B200))
    pair = comparing.pair(box(old, point(8192, 100)), box(new, point(8192, 60)))
    assert not pair.comparable and not pair.never
    assert pair.differences == ["format: bf16 and fp8 (torchao 0.18.0 Float8Linear tensorwise)"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "fp8_rowwise"}, "format: fp8 (torchao"),
        ({"emulated": True}, "format: fp8 (torchao 0.18.0 Float8Linear tensorwise) and fp8, emulated (torchao"),
        ({"version": "0.17.0"}, "format: fp8 (torchao 0.18.0 Float8Linear tensorwise) and fp8 (torchao 0.17.0"),
    ],
)
def test_fp8_is_not_any_fp8(change, text):
    pair = comparing.pair(box(fp8(run()), point(8192, 100)), box(fp8(run(B200), **change), point(8192, 60)))
    assert len(pair.differences) == 1 and pair.differences[0].startswith(text)


def test_each_format_is_compared_with_itself():
    result = decide(both(run(), 100, 80), both(run(B200), 50, 32), Options())
    assert result["comparable"]["ok"] and result["comparable"]["recipe"]["dtype"] == "bfloat16"  # though fp8 is newer
    assert result["speed"]["points"][0]["speedup"]["value"] == pytest.approx(2)
    others = [(o["recipe"]["dtype"], o["points"][0]["speedup"]["value"]) for o in result["speed"]["others"]]
    assert others == [("fp8", pytest.approx(2.5))]
    # Beside the ratio of each format's own peaks, from the same sheets.
    assert result["speed"]["ratios"]["compute"] == pytest.approx(2250 / 989)
    only_fp8 = decide(box(fp8(run()), point(8192, 80)), box(fp8(run(B200)), point(8192, 32)), Options())
    assert only_fp8["speed"]["ratios"]["compute"] == pytest.approx(4500 / 1979)


def test_what_another_format_gives_on_each_box():
    rows = decide(both(run(), 100, 80), both(run(B200), 50, 50, emulated=True), Options())["formats"]
    assert [(r["side"], r["dtype"], r["format"]["emulated"]) for r in rows] == [
        ("old", "fp8", False),
        ("new", "fp8", True),
    ]
    gain = rows[0]["points"][0]["speedup"]
    bf16, eighty = ([ms * (1 + x) for x in NOISE] for ms in (100, 80))
    assert gain == dataclasses.asdict(stats.ratio_interval(bf16, eighty)) | {"significant": True}
    assert gain["value"] == pytest.approx(1.25) and gain["low"] > 1.2
    assert rows[1]["points"][0]["speedup"]["significant"] is False
    assert rows[0]["points"][0]["steps"] is None  # no step recorded a loss


def test_a_format_beside_another_recipe_says_nothing_of_the_format():
    found = box(run(), point(8192, 100))
    compiled = fp8(run(**{"recipe.compile": True}))
    found.sweeps.append(Sweep(Path("later.jsonl"), compiled, {8192: point(8192, 60)}))
    assert comparing.formats(found) == []
    kernel = fp8(run(attention=records.Attention(requested="sdpa", backend="sdpa")))
    found.sweeps.append(Sweep(Path("last.jsonl"), kernel, {8192: point(8192, 60)}))
    assert comparing.formats(found) == []
    assert "formats" not in decide(found, box(run(B200), point(8192, 50)), Options())


@pytest.mark.parametrize(
    ("steps", "ceilings", "said", "decides"),
    [
        ({}, {"fp8": 4000.0}, "runs, 4000 TFLOPS measured", "upgrade"),
        ({"fp8": 40}, {"fp8": None}, "runs, a training step measured with DTYPE=fp8 at 8192", "upgrade"),
        ({"mxfp8": 40}, {}, "runs, a training step measured with DTYPE=mxfp8", "upgrade"),
        ({"nvfp4": 40}, {}, "not measured", "beware"),
    ],
)
def test_the_gate_takes_a_measured_step_before_a_ceiling(steps, ceilings, said, decides):
    old = box(run("NVIDIA A100-SXM4-80GB", **{"gpu.capability": (8, 0)}), point(8192, 100))
    old.gpu = gpus.by_key("A100")
    new = box(run(B200), point(8192, 50))
    new.ceilings = [(run(B200), ceiling("fp8", value, reason="no kernel")) for value in ceilings.values()]
    for dtype, ms in steps.items():
        new.sweeps.append(Sweep(Path(dtype), fp8(run(B200), dtype), {8192: point(8192, ms, tflops=900.0)}))
    answer = decide(old, new, Options(needs=("fp8",)))["gate"]["needs"][0]
    assert answer["new_stack"].startswith(said) and answer["decides"] == decides


def test_an_emulated_or_failed_step_is_no_step():
    new = box(fp8(run(B200), emulated=True), point(8192, 50))
    new.sweeps.append(Sweep(Path("oom"), fp8(run(B200)), {8192: point(8192, outcome="oom")}))
    answer = decide(box(run(), point(8192, 100)), new, Options(needs=("fp8",)))["gate"]["needs"][0]
    assert answer["new_stack"] == "not measured"


def test_a_projection_follows_the_peaks_of_the_step():
    target, steps = gpus.by_key("B200"), [(fp8(run()), decomposition(8192, attention=100, matmul=300, idle=10))]
    old = box(fp8(run()), point(8192, 100), decompositions=steps)
    first = project(old, target, Options(), None)["projection"]["lines"][0]
    assert first["old_precision"] == first["new_precision"] == "fp8" and first["peaks"] == pytest.approx(4500 / 1979)
    old.sweeps.append(Sweep(Path("bf16"), run(), {8192: point(8192, 120)}))
    first = project(old, target, Options(), None)["projection"]["lines"][0]  # in bf16, where that was measured
    assert first["old_precision"] == "bf16" and first["peaks"] == pytest.approx(2250 / 989)


# ---- from files ------------------------------------------------------------------------------------------------------


def measured(folder: Path, base: records.Run, name: str, ms: float, first_loss: float, steps=10) -> None:
    """A sweep file: two warm-up steps and the rest timed, a loss that falls by 0.01 a step."""
    work, items = flops.step_work(base, 8192).total_tflop, [base]
    for i in range(steps + 2):
        t = ms * (1 + NOISE[i % 10])
        loss = {"loss": round(first_loss - 0.01 * i, 4)} if first_loss else {}
        items.append(records.Step(run_id=base.run_id, seq_len=8192, step=i, warmup=i < 2, exec_time_ms=t,
                                  tflops=work / t * 1e3, **loss))  # fmt: skip
    items.append(records.Summary(run_id=base.run_id, seq_len=8192, n=steps, median_ms=ms))
    write(folder / name, items)


def test_the_losses_stand_beside_each_other_after_as_many_steps(tmp_path):
    measured(tmp_path / "old", run(), "sweep_1.jsonl", 2000, 7.0)
    measured(tmp_path / "old", fp8(run()), "sweep_2.jsonl", 1600, 7.05, steps=12)  # two more than bf16
    measured(tmp_path / "new", run(B200), "sweep_1.jsonl", 1000, 7.0)
    assert read_box(tmp_path / "old").sweeps[1].points[8192].losses[14] == pytest.approx(7.05 - 0.13)
    code, page, _ = upgrade(str(tmp_path / "old"), str(tmp_path / "new"))
    assert code == 0
    assert "Same box, other format: H200 SXM, long-context in fp8 over bf16" in page
    assert "224 of 225 layers): 8192: 1.25 [" in page
    assert "Loss beside bf16's, after as many steps: 6.94 for 6.89 after 12 at 8192." in page
    _, text, _ = upgrade(str(tmp_path / "old"), str(tmp_path / "new"), "--json")
    row = json.loads(text)["formats"][0]["points"][0]
    assert (row["steps"], row["bf16_loss"], row["loss"]) == (12, pytest.approx(6.89), pytest.approx(6.94))


def test_two_folders_of_one_box_in_two_formats(tmp_path):
    measured(tmp_path / "bf16", run(), "sweep_1.jsonl", 2000, 7.0)
    measured(tmp_path / "fp8", fp8(run()), "sweep_1.jsonl", 1600, 7.0)
    folders = str(tmp_path / "bf16"), str(tmp_path / "fp8")
    code, page, error = upgrade(*folders)
    assert code == 3 and "--allow-mismatch" in error
    assert "DIFFERENT format: bf16 and fp8 (torchao 0.18.0 Float8Linear tensorwise)" in page
    code, page, _ = upgrade(*folders, "--allow-mismatch")
    assert code == 0 and "1.25 [" in page and "differ in format: bf16 and fp8" in page


def test_a_step_in_fp8_may_be_faster_than_the_peak_of_bf16(tmp_path):
    """1,200 TFLOPS on an H200: impossible in bf16 (989), 61 % of its fp8 peak."""
    ms = flops.step_work(run(), 8192).total_tflop / 1200 * 1e3
    for name, base in (("bf16", run()), ("fp8", fp8(run()))):
        measured(tmp_path / name, base, "sweep_1.jsonl", ms, 7.0)
    assert read_box(tmp_path / "bf16").sweeps[0].points[8192].failure_kind == "unit_error"
    assert read_box(tmp_path / "fp8").sweeps[0].points[8192].mfu == pytest.approx(1200 / 1979, rel=1e-3)


def test_a_record_from_before_formats_is_bf16():
    old = json.loads(records.dump(run()))
    del old["format"], old["recipe"]["dtype"]
    again = records.validate(old)
    assert again.dtype == "bf16" and again.format is None
    assert comparing.compare(again, run()) == ([], [], [])
