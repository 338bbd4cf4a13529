"""The first look at a GPU box without a GPU: what its command says here, and its judgement of made-up records."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from harness import gpus, records
from harness.measure.settings import Settings
from tests import boxes
from tests.conftest import ROOT, environment
from tests.gpu import first_look, judging, launches
from tests.test_gpu_suite import GOOD, decomposition, step, summary


def shell(*arguments: str, **variables: str):
    command, env = ["bash", "tests/gpu/first_look.sh", *arguments], environment(PYTHON=sys.executable) | variables
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_without_a_gpu_it_says_what_it_would_run_and_exits_with_the_skip_code(hidden):
    done = shell(CUDA_VISIBLE_DEVICES=hidden)
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("skipped: these checks need an NVIDIA GPU and there is none here")
    assert all(f"\n  {check.name}\n    " in done.stdout for check in first_look.CHECKS)
    assert 'ATTN=all SEQLENS="1024 8192 32768"' in done.stdout
    for dtype, compiled in {"bf16": 0, "fp8": 0, "fp8_rowwise": 0, "mxfp8": 1, "nvfp4": 1}.items():
        assert f" DTYPE={dtype} COMPILE={compiled} deepspeed --num_gpus=1 benchmark.py\n" in done.stdout


def test_the_plan_needs_nothing_but_python():
    code = (
        "import sys; sys.path.insert(0, '.'); from tests.gpu import first_look; sys.exit(first_look.main(['--plan']))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "bench_ceilings.py" in done.stdout, done.stderr


def test_every_setting_is_one():
    """A misspelt variable would be ignored by the scripts, and the check would be of something else."""
    import bench_ceilings
    import bench_flash_attn

    own = {
        "bench_flash_attn.py": bench_flash_attn.AttentionSettings,
        "bench_ceilings.py": bench_ceilings.CeilingSettings,
    }
    for check in first_look.CHECKS:
        known = set(own.get(check.program, Settings).model_fields) | {"dtype"}
        assert set(check.settings) <= known and hasattr(judging, check.judge)


@pytest.mark.slow
def test_a_rehearsal_of_the_attention(tmp_path):
    done = shell("--rehearse", "attention", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which says nothing of any" in done.stdout and "3 yes, 0 NO, 0 not run" in done.stdout


# Running


@pytest.fixture
def looked(monkeypatch):
    """looked(outcome, *words) -> (exit code, rows of the table); outcome(check, folder, limit_s) stands for look."""

    def call(outcome, *words):
        rows = []
        monkeypatch.setattr(first_look, "look", outcome)
        monkeypatch.setattr(launches, "show", rows.extend)
        return first_look.main(list(words)), rows

    return call


def test_the_exit_code_is_the_tables(looked):
    assert looked(lambda check, *_: [(check.name, "x", True)])[0] == 0
    assert looked(lambda check, *_: [(check.name, "x", None)])[0] == 0
    code, rows = looked(lambda check, *_: [(check.name, "x", "fp8" not in check.name)])
    assert code == 1 and len(rows) == len(first_look.CHECKS)


def test_only_what_is_named_and_a_word_that_names_nothing(looked, capsys):
    assert len(looked(lambda check, *_: [(check.name, "x", True)], "mxfp8", "ceilings")[1]) == 2
    assert looked(None, "everything")[0] == 2 and "no check's name" in capsys.readouterr().out


def test_it_stops_by_itself(looked, monkeypatch):
    now, limits = [0.0], []
    monkeypatch.setattr(first_look, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(check, folder, limit_s):
        limits.append(limit_s)
        now[0] += 200
        return [(check.name, "x", True)]

    code, rows = looked(slow)
    assert limits == [460, 260, 60] and code == 0
    assert {row[1:] for row in rows[3:]} == {("no time was left", None)} and len(rows) == len(first_look.CHECKS)


def by_name(word: str) -> first_look.Check:
    return next(check for check in first_look.CHECKS if word in check.name)


@pytest.fixture
def h200(monkeypatch):
    facts = {"name": "NVIDIA H200", "capability": (9, 0), "memory_gib": 139.8}
    monkeypatch.setattr(launches, "facts", lambda: facts)
    monkeypatch.setattr(launches, "gpu", lambda: gpus.by_key("H200"))
    monkeypatch.setattr(launches, "backend", lambda: "fa3")


@pytest.mark.parametrize(
    ("error", "word", "figure", "holds"),
    [
        (("x", 2, ["noise", "[rank0]: wrong setting: DTYPE=mxfp8: needs 10.x, this is 9.0"]), "mxfp8",
         "refused: DTYPE=mxfp8: needs 10.x, this is 9.0", None),
        (("x", 2, ["Traceback", "RefusedError: DTYPE=nvfp4 needs torchao"]), "nvfp4",
         "refused: RefusedError: DTYPE=nvfp4 needs torchao", None),
        (("x", 1, ["boom"]), "mxfp8", "crashed: x", False),
        (("x", 2, ["wrong setting: ATTN"]), "long-context", "crashed: x", False),
    ],
)  # fmt: skip
def test_a_refused_format_is_no_failure_and_anything_else_is(h200, tmp_path, monkeypatch, error, word, figure, holds):
    said, code, lines = error

    def launch(*_, **__):
        raise launches.LaunchError(SimpleNamespace(kind="crashed", error=said), code, lines)

    monkeypatch.setattr(launches, "launch", launch)
    check = by_name(word)
    assert first_look.look(check, tmp_path, 60) == [(check.name, figure, holds)]


def test_a_check_that_takes_too_long(h200, tmp_path, monkeypatch):
    def launch(*_, limit_s, **__):
        raise subprocess.TimeoutExpired("x", limit_s)

    monkeypatch.setattr(launches, "launch", launch)
    ((_, figure, holds),) = first_look.look(by_name("ceilings"), tmp_path, 42)
    assert figure == "not done in the 42 s that were left" and holds is False


RANKS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open(os.environ["RESULTS"] + "/pid", "w").write(str(child.pid))
time.sleep(600)
"""


def test_nothing_is_left_of_a_launch_that_took_too_long(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        launches.launch(tmp_path, "-c", RANKS, limit_s=3)
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 15
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its launch"
        time.sleep(0.1)
    assert os.getpid() != pid


# Judging


def timed(backend="fa3", seqlen=8192, **changed) -> records.AttentionTime:
    known = {"run_id": "r", "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
             "fwd_bwd_ms": 1.0, "fwd_bwd_kernel_ms": 0.98, "fwd_bwd_tflops": 600.0, "host_bound": False}  # fmt: skip
    return records.AttentionTime(backend=backend, seqlen=seqlen, **(known | changed))


@pytest.mark.parametrize(
    ("rows", "holds"),
    [
        ([timed(), timed("sdpa", fwd_bwd_tflops=300)], True),
        ([timed("sdpa")], False),  # the GPU's own is missing
        ([timed(), timed("sdpa", fwd_bwd_tflops=1200)], False),  # above the peak of 989
        ([timed(fwd_bwd_kernel_ms=None)], False),
        ([timed(fwd_bwd_kernel_ms=1.2)], False),  # kernels that take longer than the call around them
        ([timed(fwd_bwd_kernel_ms=0.4, host_bound=True)], True),
    ],
)
def test_attention(h200, rows, holds):
    ((name, figure, got),) = judging.attention(by_name("attention"), rows)
    assert (name, got) == ("attention at 8192, TFLOPS", holds) and f"{rows[0].backend} 600" in figure
    assert ("(host-bound)" in figure) is any(r.host_bound for r in rows)


def test_attention_that_is_not_here_is_said(h200):
    rows = judging.attention(by_name("attention"), [timed(seqlen=1024), timed(), timed("fa4", error="not installed")])
    assert [row[2] for row in rows] == [True, True, None] and rows[2][1] == "not installed"
    assert judging.attention(by_name("attention"), [timed("fa4", error="x")])[0][1:] == ("none ran", False)


def measured(dtype: str = "bfloat16", **changed) -> list[records.Base]:
    run = boxes.run("sweep", "r", boxes.H200.model_copy(update={"memory_gib": 139.8, "uuids": ["GPU-aa0"]} | changed))
    run.recipe = run.recipe.model_copy(update={"dtype": dtype})
    return [run, step(), summary()]


def test_a_step_and_its_gauges():
    found = measured(driver="580.1")
    rows = judging.step(by_name("long-context"), found)
    assert [row[2] for row in rows] == [True, True] and "GPU-aa0: driver 580.1" in rows[1][1]
    assert judging.step(by_name("long-context"), measured())[1][2] is False  # NVML did not answer
    found[1] = step(gpu_state=None)
    assert "no sm_clock_mhz" in judging.step(by_name("long-context"), found)[1][1]
    found[2] = summary(mfu=1.2)
    assert judging.step(by_name("long-context"), found)[0][2] is False


@pytest.mark.parametrize(
    ("word", "ran", "holds"),
    [("DTYPE=bf16", "bfloat16", True), ("DTYPE=bf16", "bf16", True), ("fp8_rowwise", "fp8_rowwise", True),
     ("fp8_rowwise", "fp8", False), ("mxfp8", "bfloat16", False)],
)  # fmt: skip
def test_a_step_runs_in_the_format_that_was_asked_for(word, ran, holds):
    ((_, figure, got),) = judging.dtype(by_name(word), measured(ran))
    assert got is holds and ("it ran in" in figure) is not holds


def test_a_decomposition():
    check = by_name("decomposition")
    assert judging.decomposition(check, [decomposition(GOOD)])[0][2] is True
    ((_, figure, holds),) = judging.decomposition(check, [decomposition(GOOD, unmatched=[("strange", 2.1)])])
    assert holds is False and "strange: 2.10 ms" in figure


def ceiling(what, name, **more) -> records.Ceiling:
    return records.Ceiling(run_id="r", what=what, name=name, unit="TFLOPS", **more)


@pytest.mark.parametrize(
    ("bf16", "fp8", "copy", "holds"),
    [
        ({"value": 750}, {"value": 1400}, 4300, [True, True, True]),
        ({"value": 500}, {"value": 1400}, 4300, [True, False, True]),
        ({"value": 1100}, {"value": 1400}, 6000, [True, False, False]),
        ({"value": 750}, {"reason": "kernel: CUBLAS_STATUS"}, 4300, [False, True, True]),
        ({"value": 750}, {"reason": "torch: none"}, 4300, [True, True, True]),
    ],
)
def test_ceilings(h200, bf16, fp8, copy, holds):
    found = [ceiling("matmul", "bf16", **bf16), ceiling("matmul", "fp8", **fp8),
             ceiling("matmul", "nvfp4", reason="silicon: none"), ceiling("memory", "copy", value=copy)]  # fmt: skip
    assert [row[2] for row in judging.ceilings(None, found)] == holds


@pytest.mark.parametrize(
    ("kind", "liger", "holds"), [("gpu_oom", True, True), ("crashed", True, False), ("gpu_oom", False, False)]
)
def test_out_of_memory(kind, liger, holds):
    run = measured()[0]
    run.recipe = run.recipe.model_copy(update={"liger_applied": liger})
    found = [run, records.Failure(seq_len=262144, kind=kind, error="e")]
    ((_, figure, got),) = judging.out_of_memory(by_name("out-of-memory"), found)
    assert got is holds and f"262144: {kind}" in figure
    assert judging.out_of_memory(by_name("out-of-memory"), found[1:])[0][2] is False
