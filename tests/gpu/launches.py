"""The real launches the checks look at, and how their records are judged.

GPU_SUITE, set by run.sh, says with what the suite runs: venv, system, or rehearse (on a CPU, with a tiny model).
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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


class LaunchError(RuntimeError):
    """What a launch died of; with its return code and the lines of its output."""

    def __init__(self, cause, returncode: int, lines: list[str]):
        super().__init__(f"{cause.kind}: {cause.error}")
        self.returncode, self.lines = returncode, lines


def launch(folder: Path, *command: str, limit_s: float = 900, **settings) -> list[records.Base]:
    """The records that a script of this project writes under `folder`; each of them has to validate.

    Skips when DeepSpeed, or the CUDA toolkit that it compiles its ops with, is missing; raises LaunchError with the
    cause of any other failure, TimeoutExpired when it is not done in `limit_s`: then none of its processes is left.
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
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        lines = process.communicate(timeout=limit_s)[0].splitlines()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too
        raise
    found = [records.parse(line) for file in sorted(folder.glob("*/*.jsonl")) for line in file.open()]
    if process.returncode:
        cause = next(iter(of(found, "failure")), None)
        cause = cause or failures.classify(lines, process.returncode, of(found, "rank_error"))
        if cause.kind == "toolkit_missing":
            pytest.skip(f"DeepSpeed's ops need the CUDA toolkit: {cause.error}")
        raise LaunchError(cause, process.returncode, lines)
    return found


def show(rows: list[tuple[str, str, bool | None]]) -> None:
    """The table: check, figure, holds or not; and what this box lacks."""
    where = "a rehearsal on this CPU, which says nothing of any GPU" if REHEARSAL else facts()["name"]
    table = Table("check", "figure", "holds", title=where, title_justify="left")
    words = {True: "yes", False: "NO", None: "not run"}
    for name, figure, holds in rows:
        table.add_row(escape(name), escape(figure), words[holds])
    console = Console(width=150, highlight=False)
    console.print(table)
    if absent := [told for module, told in OPTIONAL.items() if not there(module)]:
        console.print(f"absent here: {', '.join(absent)}")
    console.print(", ".join(f"{sum(row[2] is holds for row in rows)} {word}" for holds, word in words.items()))


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


def step_row(found: list[records.Base], seq_len: int | None = None) -> tuple[str, bool]:
    """(figure, holds) of the measured length, or of the only one."""
    got = one(found, "summary", seq_len)
    problems = step_problems(one(found, "run"), of(found, "step", seq_len), got)
    mfu, peak = ("unknown" if x is None else f"{x:{form}}" for x, form in ((got.mfu, ".1%"), (got.peak_mem_gib, ".1f")))
    rate = "unknown" if got.tflops is None else f"{got.tflops:.4g}"
    figure = f"{got.seq_len} tokens: {got.median_ms:.0f} ms, {rate} TFLOPS, MFU {mfu}, {peak} GiB"
    return "; ".join([figure, *problems]), not problems


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
