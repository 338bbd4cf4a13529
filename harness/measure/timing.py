"""Time of one small operation by itself: triton's do_bench on a GPU, torch.utils.benchmark on a CPU.

do_bench uses device events, empties the L2 before each iteration and drops the gradients given to it. On a CPU neither
the cache is emptied nor are there events. The data are the caller's, and random: zeros and ones run faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harness.measure import memory


@dataclass(frozen=True)
class Times:
    """Of the iterations, in ms; low and high are the 2.5th and 97.5th percentile."""

    median: float
    mean: float
    low: float
    high: float
    n: int


def iterations_ms(
    run: Callable[[], object], device: str, budget_ms: float = 100, gradients: Sequence[torch.Tensor] = ()
) -> list[float]:
    """Times of single iterations over about `budget_ms`, after warm-up. `gradients`: tensors whose .grad is dropped."""
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        with torch.cuda.device(device):
            return do_bench(run, warmup=budget_ms / 4, rep=budget_ms, grad_to_none=gradients, return_mode="all")

    def once():
        for tensor in gradients:
            tensor.grad = None
        run()

    from torch.utils.benchmark import Timer

    once()
    timer = Timer("once()", globals={"once": once}, num_threads=torch.get_num_threads())
    return [seconds * 1e3 for seconds in timer.blocked_autorange(min_run_time=budget_ms / 1e3).times]


def back_to_back_ms(run: Callable[[], object], device: str, calls: int) -> float:
    """Mean ms of calls that follow each other without a wait of the host: between two events, on a CPU by the clock.

    One call alone would be timed with its launch, and a collective with how late the other ranks came to it.
    """
    memory.synchronize(device)
    clock = memory.PhaseClock(device)
    clock.mark("calls")
    for _ in range(calls):
        run()
    clock.mark("end")
    memory.synchronize(device)
    return clock.phases_ms()["calls"] / calls


def kernels_ms(
    run: Callable[[], object], device: str, gradients: Sequence[torch.Tensor] = (), calls: int = 10
) -> float | None:
    """Mean ms that the kernels of a call take by themselves, by the profiler; None without a GPU.

    What the call takes beyond it, the GPU waited for the host. The L2 is emptied as do_bench does it, and what that
    takes is subtracted.
    """
    if torch.device(device).type != "cuda":
        return None
    cache = torch.empty(2**28, dtype=torch.int8, device=device)

    def call():
        cache.zero_()
        for tensor in gradients:
            tensor.grad = None
        run()

    def total_us(work) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(calls):
                work()
            torch.cuda.synchronize(device)
        return sum(e.time_range.elapsed_us() for e in profiler.events() if not e.is_user_annotation)

    total_us(call)  # a session's first kernels can be lost
    return (total_us(call) - total_us(cache.zero_)) / calls / 1e3


def summarise(times: Sequence[float]) -> Times:
    low, high = np.percentile(times, [2.5, 97.5])
    return Times(float(np.median(times)), float(np.mean(times)), float(low), float(high), len(times))
