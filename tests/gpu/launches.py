"""The real launches the checks look at, and how their records are judged.

GPU_SUITE, set by run.sh, says with what the suite runs: venv, system, or rehearse (on a CPU, with a tiny model).
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import gpus, records
from harness.measure import attention, box, failures
from tests.conftest import ROOT, environment

MODE = os.environ.get("GPU_SUITE", "")
REHEARSAL = MODE == "rehearse"
DEVICE = "cpu" if REHEARSAL else "cuda"
SHORT, LONG = (64, 256) if REHEARSAL else (4096, 16384)  # at LONG the logits, not the optimizer, make the peak
SWEEP = ("-m", "harness.measure.sweep")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
# Optional packages: what pip calls them, and what their absence leaves out.
OPTIONAL = {
    "deepspeed": "deepspeed (every training step)",
    "accelerate": "accelerate (the long-context recipe)",
    "liger_kernel": "liger-kernel (Liger; the other checks do without)",
    "flash_attn_interface": "flash-attn-3",
    "flash_attn": "flash-attn-4",
}


def there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def only_on_a_gpu() -> None:
    if REHEARSAL:
        pytest.skip("a CPU has no such thing")


@functools.cache
def facts() -> dict:
    return box.device_facts(DEVICE)


@functools.cache
def gpu() -> gpus.Gpu | None:
    return None if REHEARSAL else gpus.identify(facts()["name"], facts()["capability"], facts()["memory_gib"])


@functools.cache
def backend() -> str:
    """What training takes here; with the box's own packages PyTorch's attention, where the GPU's own is not there."""
    chosen = attention.choose("auto", facts()["capability"])
    try:
        attention.require(chosen, facts()["capability"])
    except attention.AttentionUnavailable:
        return "sdpa" if MODE == "system" else chosen
    return chosen


def model_name() -> str:
    """The guide's model where two layers' step at LONG fits without Liger (about 55 GiB), else a smaller one."""
    return "tiny" if REHEARSAL else "llama-3.1-8b" if facts()["memory_gib"] > 70 else "llama-3.2-1b"


def launch(folder: Path, *command: str, **settings) -> list[records.Base]:
    """The records that a script of this project writes under `folder`; each of them has to validate.

    Skips when DeepSpeed, or the CUDA toolkit that it compiles its ops with, is missing; raises RuntimeError with the
    cause of any other failure.
    """
    defaults = {}
    if "-m" in command:  # a training step
        if not there("deepspeed"):
            pytest.skip("deepspeed is not installed")
        defaults = {"model": model_name(), "num_layers": 2, "weights": "random", "attn": backend(), "gpus": 1,
                    "steps": 3, "warmup_steps": 1, "precision": 0, "start_timeout": 400, "timeout": 200,
                    "use_liger": "" if there("liger_kernel") else 0}  # fmt: skip
    variables = {k.upper(): str(v) for k, v in (defaults | settings).items()}
    env = environment(**variables, RESULTS=str(folder), PYTHONUNBUFFERED="1")
    if not REHEARSAL:
        import torch

        del env["DS_ACCELERATOR"]
        gc.collect()
        torch.cuda.empty_cache()  # of this process: the launch needs the memory
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    found = [records.parse(line) for file in sorted(folder.glob("*/*.jsonl")) for line in file.open()]
    if done.returncode:
        cause = next((r for r in found if r.record == "failure"), None)
        cause = cause or failures.classify((done.stdout + done.stderr).splitlines(), done.returncode)
        if cause.kind == "toolkit_missing":
            pytest.skip(f"DeepSpeed's ops need the CUDA toolkit: {cause.error}")
        raise RuntimeError(f"{cause.kind}: {cause.error}")
    return found


def of(found: list[records.Base], record: str, seq_len: int | None = None) -> list:
    return [r for r in found if r.record == record and seq_len in (None, getattr(r, "seq_len", None))]


def one(found: list[records.Base], record: str, seq_len: int | None = None):
    (only,) = of(found, record, seq_len)
    return only


def outcomes(found: list[records.Base]) -> dict[int, str]:
    """Length -> summary, not_run or the kind of its failure; the last record counts."""
    ends = [r for r in found if r.record in ("summary", "failure", "not_run")]
    return {r.seq_len: getattr(r, "kind", r.record) for r in ends}


def step_problems(run: records.Run, steps: list[records.Step], summary: records.Summary) -> list[str]:
    """What is wrong with a measured length; nothing when its figures can be true."""
    on_gpu, problems = run.gpu.device == "cuda", []
    if not all(s.loss is not None and math.isfinite(s.loss) for s in steps):
        problems.append("a loss is not finite")
    if not (summary.tflops and summary.tflops > 0):
        problems.append("no TFLOPS")
    if run.gpu.peak_tflops and not (summary.mfu and 0 < summary.mfu < 1):
        problems.append(f"MFU {summary.mfu} is not between 0 and 1")
    if not summary.peak_mem_gib:
        problems.append("no peak memory")
    elif on_gpu and not 0 < (summary.peak_allocated_gib or 0) <= summary.peak_mem_gib <= run.gpu.memory_gib:
        problems.append("peak memory is not: allocated <= reserved <= the GPU's")
    return problems


def silent_gauges(steps: list[records.Step]) -> list[str]:
    """Parts of the GPU's state that some step lacks."""
    gauges = ("sm_clock_mhz", "power_w", "temperature_c", "throttle", "energy_j")
    return [g for g in gauges if any(s.gpu_state is None or getattr(s.gpu_state, g) is None for s in steps)]


def phase_gap(steps: list[records.Step]) -> float:
    """The largest part of a step's time that its phases miss or have too much."""
    return max(abs(s.forward_ms + s.backward_ms + s.optimizer_ms - s.exec_time_ms) / s.exec_time_ms for s in steps)


def apart(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b))


def decomposition_problems(d: records.Decomposition, method: str) -> list[str]:
    buckets = {b.name: b.ms for b in d.full}
    problems = [f"split by {d.method}"] if d.method != method else []
    problems += ["buckets do not sum to T" for b in (d.two, d.full) if apart(sum(x.ms for x in b), d.step_ms) > 1e-3]
    problems += [f"no {name}" for name in ("attention", "matmul", "optimizer") if not buckets[name] > 0]
    return problems + [f"{name[:60]}: {ms:.2f} ms" for name, ms in d.unmatched if ms > 0.02 * d.step_ms]
