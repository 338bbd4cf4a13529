"""Time of one small operation by itself: triton's do_bench on a GPU, torch.utils.benchmark on a CPU.

do_bench uses device events, empties the L2 before each iteration and drops the gradients given to it. On a CPU neither
the cache is emptied nor are there events. The data are the caller's, and random: zeros and ones run faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


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


def summarise(times: Sequence[float]) -> Times:
    low, high = np.percentile(times, [2.5, 97.5])
    return Times(float(np.median(times)), float(np.mean(times)), float(low), float(high), len(times))
