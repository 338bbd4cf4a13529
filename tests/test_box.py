"""What this box says of itself where something is missing: no driver, no name, no repository, a disk half full."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from harness import flops, records
from harness.measure import attention, box, matmul, memory, result_file, stack, telemetry, verify
from tests import boxes
from tests.conftest import ROOT, environment
from tests.test_telemetry import Nvml, facts


def no_driver(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_without_a_driver_nothing_is_told_and_nothing_fails(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert box.visible_gpus() == []
    assert box.nvml_facts(["GPU-aa0"]) == {}
    sampler = telemetry.Sampler("GPU-aa0")
    assert set(sampler.take().values()) == {None}
    sampler.close()


def test_what_the_driver_tells_of_a_gpu(monkeypatch):
    answers = {"nvmlSystemGetDriverVersion": "580.1", "nvmlDeviceGetEnforcedPowerLimit": 700_000}
    Nvml(nvmlDeviceGetMaxClockInfo=None, **answers).install(monkeypatch)
    told = box.nvml_facts(["GPU-aa0"])
    assert told == {"driver": "580.1", "power_limit_w": 700, "max_sm_clock_mhz": None, "links": []}


def test_a_peak_by_hand_counts_without_a_gpu_too():
    cpu = facts(name="Some CPU", capability=None, uuid=None)
    assert box.gpu_record("cpu", [cpu]).peak_tflops is None
    record = box.gpu_record("cpu", [cpu], 1.5)
    assert (record.peak_tflops, record.peak_source) == (1.5, "PEAK_TFLOPS")


@pytest.mark.parametrize(
    ("states", "ancestor", "kinds"),
    [
        ([1] * 18, 20, ["NV18"]),
        ([1, 1, 0, 0], 20, ["NV2"]),
        ([], 20, ["PXB"]),  # no NVLink, or none that is up: how far apart on PCIe
        ([0, 0], 50, ["SYS"]),
        ([], None, ["?"]),
    ],
)
def test_link_kinds(monkeypatch, states, ancestor, kinds):
    def state(handle, link):
        if link >= len(states):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return states[link]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", state)
    Nvml(nvmlDeviceGetTopologyCommonAncestor=ancestor).install(monkeypatch)
    assert box.links([0, 1]) == kinds
    assert box.links([0]) == []


def test_processes_that_hold_a_gpu_are_named(monkeypatch):
    running = [SimpleNamespace(pid=4242, usedGpuMemory=int(10.2 * 2**30)), SimpleNamespace(pid=7, usedGpuMemory=None)]
    Nvml(nvmlDeviceGetIndex=1, nvmlDeviceGetComputeRunningProcesses=running).install(monkeypatch)
    assert telemetry.busy_processes([0]) == [
        "GPU 1: process 4242 holds 10.2 GiB",
        "GPU 1: process 7 holds unknown memory",
    ]
    Nvml(nvmlDeviceGetIndex=1, nvmlDeviceGetComputeRunningProcesses=None).install(monkeypatch)
    assert telemetry.busy_processes([0]) == []


def test_memory_is_waited_for(monkeypatch):
    used = iter([5 << 30, 3 << 30, 1 << 30])
    now = [0.0]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=next(used)))
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(telemetry, "time", clock)
    assert telemetry.wait_until_free([0], [1 << 29])
    assert now[0] == 1.0  # two looks half a second apart, then it was free
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=9 << 30))
    assert not telemetry.wait_until_free([0], [0], timeout_s=60)
    assert now[0] >= 61


def test_outside_a_virtual_environment_no_folder_is_chosen(monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    stack.use_venv_extensions()
    assert "TORCH_EXTENSIONS_DIR" not in os.environ


def test_a_user_without_a_name_and_a_folder_without_a_repository(monkeypatch, tmp_path):
    def nameless():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert stack.private("/home/someone/x and /data/y") == "~/x and /data/y"
    monkeypatch.setattr(stack, "ROOT", tmp_path)
    assert stack.git_commit() is None


def test_the_commit_is_this_checkouts():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("not a git checkout")
    assert stack.git_commit().removesuffix("+changes") == head.stdout.strip()


def test_a_package_from_elsewhere_is_no_proof_of_this_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(RuntimeError, match="torch comes from .* unset PYTHONPATH"):
        verify.verify("sdpa", gpu=False)


@pytest.mark.parametrize("module", ["verify", "stack"])
def test_modules_that_are_commands(module):
    flags = ["--help"] if module == "verify" else []
    command = [sys.executable, "-m", f"harness.measure.{module}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("--build-ops" if flags else "deepspeed ") in done.stdout


def test_half_a_record_is_an_error_and_costs_no_other(monkeypatch, tmp_path):
    record = records.NotRun(seq_len=64, reason="x")
    real, limit = os.write, [20]

    def short(descriptor, data):
        return real(descriptor, data[: limit[0]])

    with result_file.Writer(tmp_path / "x.jsonl") as out:
        monkeypatch.setattr(os, "write", short)
        with pytest.raises(OSError, match="only half a record"):
            out.write(record)
        limit[0] = None
        out.write(record)
    first, second = (tmp_path / "x.jsonl").read_text().splitlines()
    assert len(first) == 20 and records.parse(second) == record


def test_files_of_one_second_have_names_of_their_own_up_to_a_hundred(monkeypatch, tmp_path):
    class Still(datetime):
        @classmethod
        def now(cls, zone):
            return datetime(2026, 1, 2, tzinfo=UTC)

    monkeypatch.setattr(result_file, "datetime", Still)
    names = {result_file.new(tmp_path, "NVIDIA H200", "sweep").name for _ in range(99)}
    assert len(names) == 99 and {"sweep_20260102T000000Z.jsonl", "sweep_20260102T000000Z-2.jsonl"} <= names
    with pytest.raises(FileExistsError, match="a hundred sweep files"):
        result_file.new(tmp_path, "NVIDIA H200", "sweep")


def test_parameters_need_to_know_of_tied_embeddings():
    config = flops.shape("llama-3.1-8b")
    for key in ("tie_word_embeddings", "model_type"):  # the class of a model type that is known has a default
        config.pop(key, None)
    with pytest.raises(flops.Uncountable, match="tie_word_embeddings"):
        flops.parameters(config)


def test_a_step_that_cannot_be_counted_has_no_work():
    run = boxes.run("sweep", "r", boxes.H200)
    assert flops.step_work(run, 8192).total_tflop == pytest.approx(421.6, abs=0.05)
    run.model.config = {"model_type": "mamba"}
    assert flops.step_work(run, 8192) is None


def test_torchs_own_kernels_under_another_name_are_a_mismatch(monkeypatch):
    """case 9: the right function was called and PyTorch's kernel ran; only the profiler on a GPU sees it."""
    inputs = attention.random_inputs("cpu", 1, 16, 2, 2, 8, seed=0)
    monkeypatch.setattr(attention, "random_inputs", lambda *arguments, **more: inputs)
    monkeypatch.setattr(attention, "_called_function", lambda run: "flash_attn.cute.interface.flash_attn_func")
    monkeypatch.setattr(attention, "_profiled", lambda run, device: (["pytorch_flash::flash_fwd_kernel"], []))
    with pytest.raises(
        attention.AttentionUnavailable, match="fa4 was asked for, PyTorch's own pytorch_flash"
    ) as raised:
        attention.probe("fa4", "cuda")
    assert raised.value.kind == "attn_mismatch"


def test_resident_memory_where_there_is_no_proc(monkeypatch):
    assert memory.current_gib("cpu").reserved > 0

    def none(self, *arguments, **more):
        raise OSError(2, "No such file")

    monkeypatch.setattr(Path, "read_text", none)
    assert memory.peak_gib("cpu") == memory.Gib(None, None)


def test_a_long_search_says_where_it_is(monkeypatch, capsys):
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr(matmul.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(matmul, "operands", lambda fmt, shape, device, seed: lambda: None)
    monkeypatch.setattr(matmul, "candidates", lambda seed, device, known: iter([(256, 256, 256), (512, 512, 512)] * 50))
    monkeypatch.setattr(matmul, "iterations_ms", lambda run, device, budget_ms: [1.0])
    assert matmul.search("bf16", None, 30, 0, "cpu") in [(256, 256, 256), (512, 512, 512)]
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.startswith("# bf16: ") and "TFLOPS at" in line for line in said)
