"""What this box can reach at all: matmul per format, the model's own matmuls, memory and collectives.

    python bench_ceilings.py                            # every visible GPU in turn
    deepspeed --num_gpus=8 bench_ceilings.py            # the same, and then the collectives between them
    BUDGET_S=300 SEQ_LEN=32768 python bench_ceilings.py # a longer search; the model's matmuls at another length
    DS_ACCELERATOR=cpu deepspeed --num_gpus=2 bench_ceilings.py     # no GPU: small sizes

matmul        the best of a search over aligned shapes on the first GPU, then that shape on every GPU; MAMF's rules:
              warm-up, L2 emptied, random data, median and mean of the iterations. A format that cannot run says why:
              silicon (this GPU has no such units), torch (no such operation) or kernel (the call's own message). That
              is the answer to "does my stack support this format?".
model_matmul  every matmul of one training step at SEQ_LEN, forward and backward; the last row is all of them together,
              the ceiling of the dense part of a step.
memory        copy (two streams) and triad (three) over arrays of several times the L2.
collective    bus bandwidth as nccl-tests defines it, by the slowest rank.

A GPU under 60 % of what its kind is known to reach, or of this box's median, is called unhealthy: find out why before
comparing anything measured on it. Each row is also a JSON line in results/<gpu>/ceilings_<time>.jsonl.

exit codes: 0 done; 1 a measurement failed (the reason is the last line); 2 wrong use or setting.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field
from pydantic_settings import BaseSettings
from rich.console import Console
from rich.table import Table

from harness import flops, gpus, records
from harness.measure import box, matmul, memory, runs
from harness.measure.settings import Settings, fail_setting, load
from harness.measure.timing import iterations_ms, summarise

UNHEALTHY = 0.6


class CeilingSettings(BaseSettings):
    model_config = Settings.model_config

    budget_s: float | None = Field(None, gt=0, description="search per format, seconds; None: 60, without a GPU 2")
    model: str | None = Field(None, description="a shipped shape; None: llama-3.1-8b, without a GPU tiny")
    seq_len: int | None = Field(None, gt=1, description="tokens of the model's matmuls; None: 8192, without a GPU 256")
    batch_size: int = Field(1, ge=1, description="sequences per GPU")
    memory_mib: float | None = Field(None, gt=0, description="array; None: 8 L2 and at least 1024, without a GPU 64")
    message_mib: float | None = Field(None, gt=0, description="largest message; None: 1024, without a GPU 8")
    seed: int = Field(0, ge=0, description="of shapes and data")
    results: Path = Field(Path("results"), description="folder of the result folders")

    def resolve(self, has_gpu: bool) -> None:
        l2 = torch.cuda.get_device_properties(0).L2_cache_size / 2**20 if has_gpu else 0
        defaults = {"budget_s": (60, 2), "model": ("llama-3.1-8b", "tiny"), "seq_len": (8192, 256),
                    "memory_mib": (max(1024, 8 * l2), 64), "message_mib": (1024, 8)}  # fmt: skip
        for name, (gpu, cpu) in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, gpu if has_gpu else cpu)


class Team:
    """The GPUs to measure: one per rank under a launcher, else all that this process sees. Without any, the CPU."""

    def __init__(self, device: str):
        self.device, self.launched = device, "RANK" in os.environ
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        indices = [local] if self.launched else range(torch.cuda.device_count())
        self.mine = [f"cuda:{i}" for i in indices] if device == "cuda" else ["cpu"]
        if self.launched:
            if device == "cuda":
                torch.cuda.set_device(local)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(hours=2))
            self.control = dist.new_group(backend="gloo")  # waiting in NCCL would keep the waiting GPUs busy

    def share(self, value) -> list:
        """Every rank's value, in rank order."""
        values = [value] * self.world
        if self.launched:
            dist.all_gather_object(values, value, self.control)
        return values

    def each(self, measure) -> list:
        """measure(device) on every GPU, one after the other; all ranks get all results."""
        mine = []
        for turn in range(self.world):
            if turn == self.rank:
                mine = [measure(device) for device in self.mine]
            self.share(None)  # a barrier
        return list(itertools.chain(*self.share(mine)))

    def first(self, measure):
        """measure(device) on the first GPU alone, or the text of CannotRun; all ranks get it."""
        try:
            value = measure(self.mine[0]) if self.rank == 0 else None
        except (matmul.CannotRun, torch.OutOfMemoryError) as reason:
            value = str(reason).splitlines()[0]
        return self.share(value)[0]


def bandwidth(mib: float, device: str) -> dict[str, float]:
    """GB/s of copy (reads and writes one array) and triad (reads two, writes one), fp32."""
    n = int(mib * 2**20 / 4)
    a, b, c = (torch.randn(n, device=device) for _ in range(3))
    work = {"copy": (2, lambda: c.copy_(a)), "triad": (3, lambda: torch.add(a, b, alpha=3.0, out=c))}
    ms = {name: summarise(iterations_ms(run, device, 200)).median for name, (_, run) in work.items()}
    return {name: arrays * 4 * n / ms[name] / 1e6 for name, (arrays, _) in work.items()}


def bus_factor(name: str, n: int) -> float:
    """Bytes that cross a link, over the message: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return {"all_reduce": 2, "all_gather": 1}[name] * (n - 1) / n


def collective(name: str, message: int, team: Team) -> float:
    """Bus bandwidth in GB/s for `message` bytes over all ranks, by the slowest rank of each of 20 iterations."""
    whole = torch.randn(message // 2 // team.world * team.world, device=team.mine[0]).bfloat16()
    part = whole[: len(whole) // team.world].clone()
    reduce, gather = (
        functools.partial(dist.all_reduce, whole),
        functools.partial(dist.all_gather_into_tensor, whole, part),
    )
    run, times = reduce if name == "all_reduce" else gather, []
    for _ in range(5 + 20):  # all_reduce grows the values n-fold each time; bf16 holds 8**25
        team.share(None)
        memory.synchronize(team.device)
        start = time.perf_counter()
        run()
        memory.synchronize(team.device)
        times.append(time.perf_counter() - start)
    slowest = [max(row) for row in zip(*team.share(times), strict=True)][5:]
    return bus_factor(name, team.world) * 2 * len(whole) / statistics.median(slowest) / 1e9


def over_gpus(per_gpu: list[float], expected: float | None) -> dict:
    """A Ceiling's figures over the GPUs. Unhealthy: one under 60 % of `expected` or of this box's median."""
    median = statistics.median(per_gpu)
    references = [r for r in (expected, median if len(per_gpu) > 1 else None) if r]
    sick = any(v < UNHEALTHY * r for v in per_gpu for r in references) if references else None
    return {"value": median, "best": max(per_gpu), "per_gpu": per_gpu, "published": expected, "unhealthy": sick}


def measure(s: CeilingSettings, team: Team, gpu: gpus.Gpu | None) -> Iterator[dict]:
    """The fields of each Ceiling, on every rank alike."""
    for fmt in gpus.DTYPES:
        row = {"what": "matmul", "name": fmt, "unit": "TFLOPS"}
        shape = team.first(functools.partial(matmul.search, fmt, gpu, s.budget_s, s.seed))
        if isinstance(shape, str):
            yield row | {"reason": shape}
            continue
        seen = team.each(functools.partial(matmul.timed, matmul.operands, fmt, shape, s.seed, 1000))
        known = gpu.ceilings.get(fmt) if gpu else None
        figures = over_gpus([matmul.tflops(shape, t.median) for t in seen], known and known.tflops)
        mean = statistics.median(matmul.tflops(shape, t.mean) for t in seen)
        yield row | {"shape": list(shape), "mean": mean} | figures
    yield from model_matmuls(s, team)
    seen = team.each(functools.partial(bandwidth, s.memory_mib))
    expected = gpu.bandwidth_tb_s * 1e3 if gpu and gpu.bandwidth_tb_s else None
    for name in seen[0]:
        row = {"what": "memory", "name": name, "unit": "GB/s", "shape": [int(s.memory_mib * 2**20)]}
        yield row | over_gpus([rates[name] for rates in seen], expected)
    for name in ("all_reduce", "all_gather"):
        row = {"what": "collective", "name": name, "unit": "GB/s"}
        if team.world == 1:
            yield row | {"reason": "needs several ranks: deepspeed --num_gpus=8 bench_ceilings.py"}
            continue
        for message in (int(s.message_mib * 2**20 / part) for part in (64, 8, 1)):
            yield row | {"shape": [message], "value": collective(name, message, team)}


def model_matmuls(s: CeilingSettings, team: Team) -> Iterator[dict]:
    """Each of the model's matmuls on the first GPU, and their sum: what the dense part of a step could reach."""
    flop = spent = 0.0
    for name, which, times, shape in matmul.of_a_step(flops.shape(s.model), s.seq_len * s.batch_size):
        row = {"what": "model_matmul", "name": f"{name}, {which}", "unit": "TFLOPS", "shape": list(shape)}
        seen = team.first(functools.partial(matmul.timed, matmul.as_autograd, which, shape, s.seed, 200))
        if isinstance(seen, str):
            yield row | {"reason": f"kernel: {seen}"}
            continue
        flop, spent = flop + times * 2 * math.prod(shape), spent + times * seen.median
        yield row | {"value": matmul.tflops(shape, seen.median)}
    if spent:
        name = f"{s.model} step at {s.seq_len}"
        yield {"what": "model_matmul", "name": name, "unit": "TFLOPS", "value": flop / spent / 1e9}


def show(rows: list[records.Ceiling], console: Console) -> None:
    table = Table(title="what this box reaches, medians", title_justify="left")
    for column in ("what", "name", "value", "unit", "mean", "M x N x K, or bytes", "min - max over GPUs", "published"):
        table.add_column(column, justify="right" if column in ("value", "mean", "published") else "left")
    table.add_column()  # what there is to say
    for r in rows:
        value, mean, published = ("" if x is None else f"{x:.4g}" for x in (r.value, r.mean, r.published))
        spread = f"{min(r.per_gpu):.4g} - {max(r.per_gpu):.4g}" if len(r.per_gpu) > 1 else ""
        shape, said = " x ".join(map(str, r.shape or ())), r.reason or ("UNHEALTHY" if r.unhealthy else "")
        table.add_row(r.what, r.name, value, r.unit, mean, shape, spread, published, said)
    console.print(table)
    for r in (r for r in rows if r.unhealthy):
        low = min(r.per_gpu)
        slow = f"GPU {r.per_gpu.index(low)} reaches {low:.4g} {r.unit}"
        console.print(f"unhealthy: {r.name}: {slow}; compare nothing yet")


def run_all(s: CeilingSettings, device: str) -> None:
    team = Team(device)
    here = [box.device_facts(device, int(d[5:] or 0)) for d in team.mine]
    record = box.gpu_record(device, list(itertools.chain(*team.share(here))))
    gpu = gpus.identify(record.name, record.capability, record.memory_gib) if device == "cuda" else None
    run = runs.run_record("ceilings", s, record, world_size=team.world)
    out = runs.Results(run, s.results) if team.rank == 0 else None
    try:
        for fields in measure(s, team, gpu):
            if out:
                out.keep(records.Ceiling(run_id=run.run_id, **fields))
    finally:
        if out:
            show(out.rows, Console(width=150))
    if team.launched:
        dist.barrier(team.control)
        dist.destroy_process_group()


def main() -> int:
    s = load(CeilingSettings, description=__doc__)
    device = box.use_accelerator()
    s.resolve(device == "cuda")
    if s.model not in flops.shapes():
        fail_setting(f"MODEL={s.model}: allowed are {', '.join(flops.shapes())}")
    try:
        run_all(s, device)
    except BaseException as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        if not isinstance(error, KeyboardInterrupt | box.MixedGpus):
            traceback.print_exc()
        sys.stdout.flush()
        print(f"error: {reason}; what was measured is kept", file=sys.stderr, flush=True)
        os._exit(1)  # the other ranks wait for this one, and it would wait for them
    return 0


if __name__ == "__main__":
    sys.exit(main())
