"""Settings: variables and flags, recipes, and one clear line for what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

import benchmark
from harness.measure import sweep
from harness.measure.settings import GUIDE_SEQLENS, Settings, SweepSettings, load
from tests.conftest import ROOT, environment


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in SweepSettings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def test_flag_wins_over_variable_and_launchers_flag_is_accepted(monkeypatch):
    monkeypatch.setenv("SEQ_LEN", "8192")
    monkeypatch.setenv("STEPS", "")
    s = load(Settings, ["--local_rank=3", "--seq-len=4096"])
    assert (s.seq_len, s.steps) == (4096, 10)


def test_recipes_and_their_pieces(monkeypatch):
    pieces = ("zero_stage", "offload_optimizer", "grad_checkpoint", "use_liger")
    heavy, light = load(Settings, []), load(Settings, ["--recipe", "short-context"])
    assert [getattr(heavy, p) for p in pieces] == [3, True, True, True]
    assert [getattr(light, p) for p in pieces] == [2, False, False, False]
    assert (heavy.recipe_name, light.recipe_name) == ("long-context", "short-context")
    monkeypatch.setenv("USE_LIGER", "0")
    assert load(Settings, []).recipe_name == "custom"


def test_lengths(monkeypatch):
    monkeypatch.setenv("SEQLENS", "1024, 256 512")
    assert load(SweepSettings, []).lengths == [256, 512, 1024]
    assert load(SweepSettings, ["--seqlens", "guide"]).lengths == GUIDE_SEQLENS
    monkeypatch.delenv("SEQLENS")
    assert load(SweepSettings, []).resolve(has_gpu=True).lengths == [196608]
    assert load(SweepSettings, []).resolve(has_gpu=False).lengths == [256, 512, 1024]
    assert load(SweepSettings, ["--seq-len=77"]).resolve(has_gpu=False).lengths == [77]
    assert load(Settings, []).resolve(has_gpu=True).model == "llama-3.1-8b"
    assert load(Settings, []).resolve(has_gpu=False).model == "tiny"


def test_a_sweeps_flags_give_the_benchmark_the_same_settings(tmp_path):
    s = load(SweepSettings, ["--seqlens=8 16", "--doc-len=4", "--recipe=short-context", "--peak-tflops=100"])
    flags = s.resolve(False).benchmark_flags([16], result_file=tmp_path / "x", steps=3)
    b = load(Settings, flags).resolve(False)
    assert (b.lengths, b.doc_len, b.zero_stage, b.peak_tflops, b.steps) == ([16], 4, 2, 100, 3)
    assert b.result_file == tmp_path / "x"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("STEPS", "0", "STEPS=0: Input should be greater than or equal to 1"),
        ("SEQ_LEN", "8k", "SEQ_LEN=8k: Input should be a valid integer"),
        ("ZERO_STAGE", "4", "ZERO_STAGE=4"),
        ("RECIPE", "fast", "'long-context' or 'short-context'"),
        ("ATTN", "flash", "ATTN=flash"),
        ("SEQLENS", "8192 1", 'SEQLENS=8192 1: allowed: lengths of 2 or more such as "8192 32768", or "guide"'),
        ("PEAK_TFLOPS", "-1", "PEAK_TFLOPS=-1"),
        ("PRECISION", "nan", "PRECISION=nan"),
    ],
)
@pytest.mark.parametrize("module", [benchmark, sweep])
def test_a_wrong_value_is_one_line_and_exit_2(module, name, value, said, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["as a command"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


@pytest.mark.parametrize("command", [["benchmark.py"], ["-m", "harness.measure.sweep"]])
def test_a_wrong_value_given_to_the_real_command(command):
    command, env = [sys.executable, *command], environment(STEPS="0")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "STEPS=0: Input should be greater than or equal to 1" in line


@pytest.mark.parametrize(
    "flags",
    [["--doc-len=8", "--batch-size=2"], ["--zero-stage=0", "--offload-optimizer=1"], ["--sp-size=2", "--doc-len=8"]],
)
def test_settings_that_do_not_go_together(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        load(Settings, flags)
    assert capsys.readouterr().err.startswith("wrong setting: ")
