"""The GPU suite without a GPU: what its command says here, its judgement of made-up records, part of it rehearsed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from harness import records
from tests import boxes
from tests.conftest import ROOT, environment
from tests.gpu import launches


def run_suite(*arguments: str, **variables: str):
    env = environment(**variables) | {"PYTHON": sys.executable}
    return subprocess.run(["bash", "tests/gpu/run.sh", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("mode", [[], ["--system"]])
def test_without_a_gpu_it_says_so_and_exits_with_the_skip_code(mode):
    done = run_suite(*mode)
    assert done.returncode == 77
    assert "need an NVIDIA GPU and there is none here" in done.stdout


def test_a_box_without_what_it_needs(tmp_path):
    """A stand-in nvidia-smi makes this a GPU box; then the interpreter, packages and torch's GPU are missing."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'\n")
    smi.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "PYTHON")}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "VENV": str(tmp_path / "none"), "CUDA_VISIBLE_DEVICES": "99,98"}

    def run(*arguments, **more):
        command = ["bash", "tests/gpu/run.sh", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env | more, capture_output=True, text=True)

    done = run()
    assert done.returncode == 2 and "run ./install.sh" in done.stderr
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = run("--system", PYTHON=str(bare))
    assert done.returncode == 2 and "lacks pytest, rich" in done.stderr
    done = run("--system", "-k", "test_attention_burst", PYTHON=sys.executable)
    assert done.returncode == 1 and "this torch cannot use it" in done.stdout + done.stderr


def test_every_test_is_marked_and_skips_with_a_reason():
    command, env = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"], environment()
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\n\d\d skipped in", done.stdout)
    assert "bash tests/gpu/run.sh" in done.stdout
    done = subprocess.run([*command, "-m", "not gpu"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 5  # nothing is left


TABLE_TEST = """
import pytest

def test_holds(check):
    check("the first", "1 ms", True)

def test_does_not(check):
    check("the second", "2 [ms]", False)
    check("the third", "3 ms", True)

def test_cannot():
    "the fourth"
    pytest.skip("no nvcc")

@pytest.mark.parametrize("word", ["a"])
def test_breaks(check, word):
    "the fifth"
    raise RuntimeError("gpu_oom: much")
"""


def test_the_table(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.gpu.conftest import *\n")
    (tmp_path / "test_rows.py").write_text(TABLE_TEST)
    env = environment(GPU_SUITE="rehearse", PYTHONPATH=str(ROOT), COLUMNS="100")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    rows = [[c.strip() for c in line.strip("│").split("│")] for line in done.stdout.splitlines() if line[:1] == "│"]
    assert rows == [
        ["the first", "1 ms", "yes"],
        ["the second", "2 [ms]", "NO"],
        ["the third", "3 ms", "yes"],
        ["the fourth", "no nvcc", "not run"],
        ["the fifth [a]", "RuntimeError: gpu_oom: much", "NO"],
    ]
    assert "2 yes, 2 NO, 1 not run" in done.stdout


@pytest.mark.slow
def test_a_rehearsal_of_what_a_cpu_can_do(tmp_path, pytestconfig):
    chosen = "test_attention or packing or compile"
    # What the compiler made is kept from one run of the tests to the next; it makes anew what has changed.
    kept = pytestconfig.cache.mkdir("inductor")
    variables = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(kept)}
    done = run_suite("--rehearse", "-k", f"({chosen}) and not burst", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "says nothing of any GPU" in done.stdout
    assert re.search(r"packed documents against each by itself +│ loss .* yes", done.stdout)
    assert re.search(r"compiled step +│ 64 tokens: .* yes", done.stdout)
    assert " 0 NO, 4 not run" in done.stdout  # the three FlashAttentions, and varlen


# Judging


def step(**changed) -> records.Step:
    state = {"sm_clock_mhz": 1980, "power_w": 650, "temperature_c": 60, "throttle": [], "energy_j": 300}
    known = {"run_id": "r", "seq_len": 8, "step": 1, "warmup": False, "loss": 2.0, "exec_time_ms": 100,
             "forward_ms": 30, "backward_ms": 50, "optimizer_ms": 20}  # fmt: skip
    known["gpu_state"] = records.GpuState(**state)
    return records.Step(**(known | changed))


def summary(**changed) -> records.Summary:
    known = {"run_id": "r", "seq_len": 8, "n": 3, "median_ms": 100, "tflops": 400, "mfu": 0.4, "peak_mem_gib": 40,
             "peak_allocated_gib": 35}  # fmt: skip
    return records.Summary(**(known | changed))


@pytest.fixture
def gpu_run():
    return boxes.run("sweep", "r", boxes.H200.model_copy(update={"memory_gib": 139.8}))


def test_figures_that_can_be_true(gpu_run):
    assert launches.step_problems(gpu_run, [step()], summary()) == []


@pytest.mark.parametrize(
    ("said", "steps", "changed"),
    [
        ("loss is not finite", {"loss": None}, {}),
        ("no TFLOPS", {}, {"tflops": None}),
        ("not between 0 and 1", {}, {"mfu": 1.04}),
        ("not between 0 and 1", {}, {"mfu": None}),
        ("no peak memory", {}, {"peak_mem_gib": None}),
        ("peak memory is not", {}, {"peak_allocated_gib": 41}),
        ("peak memory is not", {}, {"peak_allocated_gib": None}),
        ("peak memory is not", {}, {"peak_mem_gib": 150}),
    ],
)
def test_figures_that_cannot(gpu_run, said, steps, changed):
    (problem,) = launches.step_problems(gpu_run, [step(), step(**steps)], summary(**changed))
    assert said in problem


def test_a_gauge_that_one_step_lacks():
    silent = step(gpu_state=records.GpuState(sm_clock_mhz=1980, power_w=650, temperature_c=60, throttle=[]))
    assert launches.silent_gauges([step()]) == []
    assert launches.silent_gauges([step(), silent]) == ["energy_j"]
    assert len(launches.silent_gauges([step(gpu_state=None)])) == 5


def test_phases_against_the_step():
    assert launches.phase_gap([step(), step(optimizer_ms=10), step(optimizer_ms=23)]) == pytest.approx(0.1)


def test_the_last_outcome_of_a_length():
    failed = [records.Failure(seq_len=16, kind=kind, error="e") for kind in ("crashed", "gpu_oom")]
    found = [summary(seq_len=8), *failed, records.NotRun(seq_len=32, reason="r")]
    assert launches.outcomes(found) == {8: "summary", 16: "gpu_oom", 32: "not_run"}


def decomposition(full: dict, **changed) -> records.Decomposition:
    buckets = [records.Bucket(name=name, ms=ms) for name, ms in full.items()]
    two = [records.Bucket(name="attention", ms=20), records.Bucket(name="everything_else", ms=80)]
    known = {"run_id": "r", "seq_len": 8, "step_ms": 100, "full": buckets, "two": two}
    return records.Decomposition(**(known | changed))


GOOD = {"attention": 20, "matmul": 60, "optimizer": 10, "idle": 10}


@pytest.mark.parametrize(
    ("said", "full", "changed"),
    [
        (None, {}, {"unmatched": [("small", 1.9)]}),
        ("strange_kernel: 2.10 ms", {}, {"unmatched": [("strange_kernel", 2.1)]}),
        ("no attention", {"attention": 0, "idle": 30}, {}),
        ("do not sum", {"idle": 12}, {}),
        ("split by cpu operators", {}, {"method": "cpu operators"}),
    ],
)
def test_decompositions(said, full, changed):
    problems = launches.decomposition_problems(decomposition(GOOD | full, **changed), "kernels")
    assert (problems == []) if said is None else (len(problems) == 1 and said in problems[0])
