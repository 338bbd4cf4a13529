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
collective    bus bandwidth as nccl-tests defines it: calls back to back, by the slowest rank.

A GPU under 60 % of what its kind is known to reach, or of this box's median, is called unhealthy: find out why before
comparing anything measured on it. Each row is also a JSON line in results/<gpu>/ceilings_<time>.jsonl.

exit codes: 0 done; 1 a measurement failed (the reason is the last line); 2 wrong use or setting.
"""

import contextlib
import functools
import math
import os
import statistics
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from pydantic import Field
from rich.console import Console
from rich.table import Table

from harness import flops, gpus, records
from harness.measure import box, matmul, runs
from harness.measure.failures import first_line
from harness.measure.settings import Common, fail_setting, load
from harness.measure.timing import back_to_back_ms, iterations_ms, summarise

UNHEALTHY = 0.6


class CeilingSettings(Common):
    by_device: ClassVar = {"budget_s": (60, 2), "model": ("llama-3.1-8b", "tiny"), "seq_len": (8192, 256),
                           "message_mib": (1024, 8)}  # fmt: skip

    budget_s: float | None = Field(None, gt=0, description="search per format, seconds; None: 60, without a GPU 2")
    model: str | None = Field(None, description="a shipped shape; None: llama-3.1-8b, without a GPU tiny")
    seq_len: int | None = Field(None, gt=1, description="tokens of the model's matmuls; None: 8192, without a GPU 256")
    batch_size: int = Field(1, ge=1, description="sequences per GPU")
    memory_mib: float | None = Field(None, gt=0, description="array; None: 8 L2 and at least 1024, without a GPU 64")
    message_mib: float | None = Field(None, gt=0, description="largest message; None: 1024, without a GPU 8")

    def resolve(self, has_gpu: bool):
        super().resolve(has_gpu)
        if self.memory_mib is None:
            l2_mib = torch.cuda.get_device_properties(0).L2_cache_size / 2**20 if has_gpu else 0
            self.memory_mib = max(1024, 8 * l2_mib) if has_gpu else 64
        return self


class Team:
    """The GPUs to measure: one per rank under a launcher, else all that this process sees. Without any, the CPU."""

    def __init__(self, device: str):
        self.device, self.rank, self.world = device, 0, 1
        self.launched = "RANK" in os.environ
        indices = [int(os.environ["LOCAL_RANK"])] if self.launched else range(torch.cuda.device_count())
        self.mine = [f"cuda:{i}" for i in indices] if device == "cuda" else ["cpu"]
        if self.launched:
            if device == "cuda":
                torch.cuda.set_device(self.mine[0])
            # What the ranks tell each other goes over gloo: waiting in NCCL would keep the waiting GPUs busy.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(hours=2))
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def share(self, value) -> list:
        """Every rank's value, in rank order."""
        values = [value] * self.world
        if self.launched:
            dist.all_gather_object(values, value)
        return values

    def each(self, measure) -> list:
        """measure(device) on every GPU, one after the other; all ranks get all results."""
        seen = []
        for turn in range(self.world):
            seen += self.share([measure(device) for device in self.mine] if turn == self.rank else None)[turn]
        return seen

    def first(self, measure):
        """measure(device) on the first GPU alone, or the text of CannotRun; all ranks get it."""
        try:
            value = measure(self.mine[0]) if self.rank == 0 else None
        except (matmul.CannotRun, torch.OutOfMemoryError) as reason:
            value = "kernel: " * isinstance(reason, torch.OutOfMemoryError) + first_line(reason)
        return self.share(value)[0]


def bandwidth(mib: float, device: str) -> dict[str, float]:
    """GB/s of copy (reads and writes one array) and triad (reads two, writes one), fp32."""
    n = int(mib * 2**20 / 4)
    a, b, c = (torch.randn(n, device=device) for _ in range(3))

    def rate(arrays: int, run) -> float:
        return arrays * 4 * n / summarise(iterations_ms(run, device, 200)).median / 1e6

    return {"copy": rate(2, lambda: c.copy_(a)), "triad": rate(3, lambda: torch.add(a, b, alpha=3.0, out=c))}


def bus_factor(name: str, n: int) -> float:
    """Bytes that cross a link, over the message: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    return {"all_reduce": 2, "all_gather": 1}[name] * (n - 1) / n


def collective(name: str, message: int, team: Team) -> float:
    """Bus bandwidth in GB/s for `message` bytes over all ranks, by the slowest rank's 20 calls back to back."""
    whole = torch.randn(message // 2 // team.world * team.world, device=team.mine[0]).bfloat16()
    part = whole[: len(whole) // team.world].clone()
    gather = functools.partial(dist.all_gather_into_tensor, whole, part)
    run = functools.partial(dist.all_reduce, whole) if name == "all_reduce" else gather
    back_to_back_ms(run, team.device, 5)  # all_reduce grows the values n-fold each time; bf16 holds 8**25
    team.share(None)
    slowest = max(team.share(back_to_back_ms(run, team.device, 20)))
    return bus_factor(name, team.world) * 2 * len(whole) / slowest / 1e6


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
    """Each of the model's matmuls on the first GPU, and, if all ran, what the dense part of a step could reach."""
    flop, spent, complete = 0.0, 0.0, True
    for name, which, times, shape in matmul.of_a_step(flops.shape(s.model), s.seq_len * s.batch_size):
        row = {"what": "model_matmul", "name": f"{name}, {which}", "unit": "TFLOPS", "shape": list(shape)}
        seen = team.first(functools.partial(matmul.timed, matmul.as_autograd, which, shape, s.seed, 200))
        if isinstance(seen, str):
            complete = False
            yield row | {"reason": seen}
            continue
        flop, spent = flop + times * 2 * math.prod(shape), spent + times * seen.median
        yield row | {"value": matmul.tflops(shape, seen.median)}
    if complete:
        name = f"{s.model} step at {s.seq_len}"
        yield {"what": "model_matmul", "name": name, "unit": "TFLOPS", "value": flop / spent / 1e9}


def show(rows: list[records.Ceiling]) -> None:
    console = Console(width=150, markup=False, emoji=False)  # a reason is a library's own text
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
    facts = team.each(lambda mine: box.device_facts(device, torch.device(mine).index or 0))
    record = box.gpu_record(device, facts)
    gpu = gpus.identify(record.name, record.capability, record.memory_gib) if device == "cuda" else None
    run = runs.run_record("ceilings", s, record, world_size=team.world)
    out = runs.Results(run, s.results, show) if team.rank == 0 else None
    with out or contextlib.nullcontext():
        for fields in measure(s, team, gpu):
            if out:
                out.keep(records.Ceiling(run_id=run.run_id, **fields))
    team.share(None)  # nobody leaves while another still needs the group
    if team.launched:
        dist.destroy_process_group()


def main() -> int:
    s = load(CeilingSettings, description=__doc__)
    device = box.use_accelerator()
    s.resolve(device == "cuda")
    try:
        matmul.of_a_step(flops.shape(s.model), s.seq_len)
    except (KeyError, ValueError) as error:
        fail_setting(f"MODEL={s.model}: {error.args[0]}")
    with runs.errors_end_the_script():
        run_all(s, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
