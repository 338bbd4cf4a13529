"""The real training step on two CPU ranks: every recipe runs, and sharded loading changes nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from harness import flops, records
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


def save_model(folder, **changed) -> str:
    """The tiny shape, or a changed one, with real weights in that folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = flops.shape("tiny") | changed
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def launch(folder):
    """The output of the two ranks that go through all cases."""
    real = save_model(folder / "real")
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    done = subprocess.run(
        [*command, "tests.train_matrix", str(folder / "results"), real, save_model(folder / "large", **large)],
        cwd=ROOT,
        # Tensors are given back to the system when they are freed, so that what is resident is what is held.
        env=environment(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def cases(launch):
    """Name -> records of that case's run."""
    lines = [line[5:] for line in launch if line.startswith("CASE ")]
    return {c["name"]: [records.validate(r) for r in c["records"]] for c in map(json.loads, lines)}


def losses(run) -> list[float]:
    return [r.loss for r in run if r.record == "step"]


NAMES = ["zero2", "zero2 checkpointing", "zero2 offload", "zero2 accumulation", "zero2 packing", "zero3",
         "zero3 everything", "layers", "real unsharded", "real sharded", "real unsharded whole recipe",
         "real sharded whole recipe", "fp8", "fp8 rowwise", "fp8 whole recipe", "fp8 unsharded whole recipe",
         "sequence parallel"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_runs_with_a_finite_falling_loss(cases, name):
    found = losses(cases[name])
    assert len(found) >= 3
    assert all(map(math.isfinite, found))
    assert found[-1] < found[0]  # the same batch again and again
    assert 6 < found[0] < 8  # ln(1024) = 6.93 for a fresh model of 1024 words


def test_the_record_says_what_ran(cases):
    run = cases["zero3 everything"][0]
    assert (run.recipe.zero_stage, run.recipe.grad_accum, run.recipe.doc_len) == (3, 2, 20)
    assert run.recipe.optimizer == "DeepSpeedCPUAdam"
    assert not run.recipe.liger_applied
    assert any("Liger" in note for note in run.notes)
    assert run.attention.backend == "sdpa"
    assert any("flash" in k for k in run.attention.kernels)
    assert run.gpu.device == "cpu"
    assert run.gpu.peak_tflops is None
    assert run.model.parameters == cases["zero2"][0].model.parameters  # not zero under ZeRO-3 (case 37)
    assert cases["zero2"][0].recipe.optimizer != "DeepSpeedCPUAdam"
    assert cases["layers"][0].model.num_layers == 2
    text = records.dump(run)
    assert "/root" not in text
    assert "/home" not in text


@pytest.mark.parametrize("suffix", ["", " whole recipe"])
def test_sharded_loading_gives_the_same_loss(cases, suffix):
    sharded, whole = losses(cases["real sharded" + suffix]), losses(cases["real unsharded" + suffix])
    assert sharded[0] == pytest.approx(whole[0], abs=2e-3)  # before any update: the loaded weights alone
    common = min(len(sharded), len(whole))  # warm-up lasts as long as the times drift
    assert sharded[:common] == pytest.approx(whole[:common], abs=1e-2)


def test_no_rank_holds_more_of_a_model_than_its_part(launch):
    """On a CPU the device's memory is the host's too: half the weights each, and one tensor while it is divided."""
    loaded = [json.loads(line[7:]) for line in launch if line.startswith("LOADED ")]
    assert sorted(r["rank"] for r in loaded) == [0, 1]
    for r in loaded:
        assert r["model_mib"] > 200
        assert 0.45 < r["anonymous"] / r["model_mib"] < 0.6
        assert r["peak_anonymous"] / r["model_mib"] < 0.7
    assert {r["rank"]: r["mapped"] / r["model_mib"] > 0.5 for r in loaded} == {0: True, 1: False}  # one reads the files


@pytest.mark.parametrize(
    ("name", "in_bf16"),
    [("fp8", "real unsharded"), ("fp8 rowwise", "real unsharded"), ("fp8 whole recipe", "real sharded whole recipe")],
)
def test_fp8_trains_to_nearly_the_loss_of_bf16(cases, name, in_bf16):
    fp8, bf16 = losses(cases[name]), losses(cases[in_bf16])
    common = min(len(fp8), len(bf16))
    assert fp8[:common] == pytest.approx(bf16[:common], rel=0.01)
    assert fp8[:common] != bf16[:common]  # or nothing was rounded


def test_sharded_layers_in_fp8_are_the_unsharded_ones(cases):
    """Scales are of whole weights: a layer that was converted on a rank's part of one would give another loss."""
    sharded, whole = losses(cases["fp8 whole recipe"]), losses(cases["fp8 unsharded whole recipe"])
    assert sharded[0] == pytest.approx(whole[0], abs=2e-3)
    common = min(len(sharded), len(whole))
    assert sharded[:common] == pytest.approx(whole[:common], abs=1e-2)


@pytest.mark.parametrize("name", ["fp8", "fp8 rowwise", "fp8 whole recipe"])
def test_the_record_has_the_format(cases, name):
    """Seven linear layers in each of the tiny model's four; only the output layer stays."""
    run = cases[name][0]
    dtype = "fp8_rowwise" if "rowwise" in name else "fp8"
    assert (run.dtype, run.recipe.dtype, run.format.name, run.format.emulated) == (dtype, dtype, dtype, True)
    assert (run.format.converted, run.format.total) == (28, 29)
    assert run.format.kept == {"lm_head": "the output layer"}
    assert run.format.recipe == f"torchao 0.18.0 Float8Linear {'rowwise' if 'rowwise' in name else 'tensorwise'}"
    assert run.model.parameters == cases["real unsharded"][0].model.parameters
    assert (cases["zero2"][0].format, cases["zero2"][0].recipe.dtype, cases["zero2"][0].dtype) == (
        None,
        "bfloat16",
        "bf16",
    )


def test_checkpointing_changes_no_number(cases):
    assert losses(cases["zero2 checkpointing"])[0] == pytest.approx(losses(cases["zero2"])[0], abs=1e-4)


def test_rates_are_the_steps_own(cases):
    """TFLOPS, tokens and FLOPs by hand: two micro-steps of 64 tokens in documents of 20."""
    run, *rest = cases["zero3 everything"]
    step = next(r for r in rest if r.record == "step")
    summary = next(r for r in rest if r.record == "summary")
    pairs = 3 * 20**2 + 4**2  # 20 + 20 + 20 + 4
    attention = 2 * 6 * pairs * 32 * 4 * 4 / 1e12  # two micro-steps, head_dim 32, 4 heads, 4 layers
    assert summary.attention_tflop == pytest.approx(attention, rel=1e-2)
    total = summary.attention_tflop + summary.dense_tflop
    assert step.tflops == pytest.approx(total / step.exec_time_ms * 1e3, rel=2e-2)
    assert step.tokens_per_s_per_gpu == pytest.approx(2 * 64 / step.exec_time_ms * 1e3, rel=1e-4)
    assert step.fastest_rank_ms <= step.exec_time_ms
    parts = step.forward_ms + step.backward_ms + step.optimizer_ms
    assert parts == pytest.approx(step.exec_time_ms, rel=0.05)
    assert summary.n == 2
    assert summary.ci_low_ms is None  # two steps say nothing about their spread


def test_two_ranks_that_share_a_sequence_compute_its_loss(cases, folder):
    """Against the saved model itself, in one process without DeepSpeed, on the same tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "real", dtype=torch.bfloat16)
    ids = torch.randint(1024, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    run, *rest = cases["sequence parallel"]
    assert losses(cases["sequence parallel"])[0] == pytest.approx(whole, abs=2e-3)
    assert run.recipe.sp_size == 2
    step = next(r for r in rest if r.record == "step")
    assert step.tokens_per_s_per_gpu == pytest.approx(32 / step.exec_time_ms * 1e3, rel=1e-4)


def test_a_wrong_setting_that_only_the_ranks_show(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "benchmark.py"]
    done = subprocess.run([*command, "--sp-size=3", f"--results={folder}"], cwd=ROOT, env=environment(),
                          capture_output=True, text=True)  # fmt: skip
    assert "exitcode  : 2" in done.stderr
    assert "SP_SIZE=3 must divide the 1 ranks" in done.stderr
