"""Matmuls to time: in every format this torch has, the best of a search over shapes, and those of a model's step.

Shapes are (m, n, k) for a product of (m, k) and (k, n). Operands are random; a rate is 2 * m * n * k FLOPs over time.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from harness import gpus
from harness.measure import memory
from harness.measure.failures import first_line
from harness.measure.timing import Times, iterations_ms, summarise

Shape = tuple[int, int, int]
FINALISTS = 3
PASSES = ("forward", "input gradient", "weight gradient")


class CannotRun(RuntimeError):
    """The message begins with silicon, torch or kernel: what is missing."""


def tflops(shape: Shape, ms: float) -> float:
    return 2 * math.prod(shape) / ms / 1e9


def operands(fmt: str, shape: Shape, device: str, seed: int) -> Callable[[], torch.Tensor]:
    """The multiplication in this format into bf16. Raises CannotRun, and whatever torch raises.

    fp4 is MXFP4, an e8m0 scale for 32 values; nvfp4 has an e4m3 scale for 16, both in cuBLAS's blocked layout, whose
    tiles are 128 rows by 4 scales.
    """
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(seed)
    if fmt in ("fp4", "nvfp4"):
        a, b = (torch.randint(256, (x, k // 2), device=device, generator=generator).to(torch.uint8) for x in (m, n))
    else:
        a, b = (torch.randn(x, k, device=device, generator=generator).bfloat16() for x in (m, n))
    if fmt == "bf16":
        return lambda: a @ b.t()
    if fmt == "fp6" or not hasattr(F, "scaled_mm"):
        raise CannotRun(f"torch: {torch.__version__} has no {fmt} matmul")
    if fmt == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        scales, recipe, swizzle = [torch.ones(1, device=device)] * 2, F.ScalingType.TensorWise, None
    else:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
        block, dtype = {"fp4": (32, torch.float8_e8m0fnu), "nvfp4": (16, torch.float8_e4m3fn)}[fmt]
        sizes = [128 * math.ceil(x / 128) * 4 * math.ceil(k / block / 4) for x in (m, n)]
        scales = [torch.ones(size, device=device).to(dtype) for size in sizes]
        recipe, swizzle = getattr(F.ScalingType, f"BlockWise1x{block}"), F.SwizzleType.SWIZZLE_32_4_4
    return lambda: F.scaled_mm(
        a, b.t(), scales[0], recipe, scales[1], recipe, swizzle, swizzle,
        output_dtype=torch.bfloat16, use_fast_accum=fmt == "fp8",
    )  # fmt: skip


def candidates(seed: int, device: str, known: Shape | None) -> Iterator[Shape]:
    """Aligned shapes without end: this GPU's best published one, a cube, then random ones."""
    step, low, high = (128, 1, 6) if device == "cpu" else (256, 4, 64)  # up to 768, or 1024 to 16384
    yield from [known] if known else []
    yield (step * high // 2,) * 3
    rng = random.Random(seed)
    while True:
        yield tuple(step * rng.randint(low, high) for _ in range(3))


def timed(make: Callable, what: str, shape: Shape, seed: int, budget_ms: float, device: str) -> Times:
    """What `operands` or `as_autograd` makes, timed. Raises CannotRun when cuBLAS refuses this one shape."""
    try:
        return summarise(iterations_ms(make(what, shape, device, seed), device, budget_ms))
    except RuntimeError as error:
        if "CUBLAS_STATUS" not in str(error):
            raise
        raise CannotRun(f"kernel: {first_line(error)}") from error


def search(fmt: str, gpu: gpus.Gpu | None, budget_s: float, seed: int, device: str) -> Shape:
    """The fastest shape found in the time: a short look at each, a longer one at the best. What cuBLAS refuses is said
    and passed over; raises CannotRun when that is all, or when the format does not run."""
    if gpu and fmt in gpu.unsupported:
        raise CannotRun(f"silicon: the {gpu.label} has no {fmt}")
    try:
        operands(fmt, (256, 256, 256), device, seed)()
        memory.synchronize(torch.device(device).type)
    except CannotRun:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise CannotRun(f"kernel: {first_line(error)}") from error

    def rate(shape: Shape, budget_ms: float) -> float:
        return tflops(shape, timed(operands, fmt, shape, seed, budget_ms, device).median)

    found, deadline, told = {}, time.monotonic() + budget_s, time.monotonic()
    ceiling = gpu.ceilings.get(fmt) if gpu else None
    for shape in candidates(seed, device, ceiling and ceiling.shape):
        try:
            found[shape] = rate(shape, 20)
        except CannotRun as reason:
            refusal = reason
            print(f"# {fmt}: {shape} skipped, {reason}", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
        if found and time.monotonic() - told > 5:
            told, best = time.monotonic(), max(found, key=found.get)
            print(f"# {fmt}: {len(found)} shapes, best {found[best]:.1f} TFLOPS at {best}", file=sys.stderr, flush=True)
    if not found:
        raise refusal
    return max(sorted(found, key=found.get)[-FINALISTS:], key=lambda shape: rate(shape, 300))


def of_a_step(config: dict, tokens: int) -> list[tuple[str, str, int, Shape]]:
    """(weight, pass, how often in a step, shape) of a dense llama-like model. Raises ValueError for another kind."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if any("expert" in key and value for key, value in config.items()) or not all(config.get(k) for k in keys):
        raise ValueError("only dense llama-like models have these matmuls")
    h, inter, layers, heads, vocab = (config[k] for k in keys)
    head_dim = config.get("head_dim") or h // heads
    q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    weights = (
        ("q_proj", layers, q, h), ("k_proj v_proj", 2 * layers, kv, h), ("o_proj", layers, h, q),
        ("gate_proj up_proj", 2 * layers, inter, h), ("down_proj", layers, h, inter), ("lm_head", 1, vocab, h),
    )  # fmt: skip
    return [
        (name, which, times, shape)
        for name, times, out, into in weights
        for which, shape in zip(PASSES, ((tokens, out, into), (tokens, into, out), (out, into, tokens)), strict=True)
    ]


def as_autograd(which: str, shape: Shape, device: str, seed: int) -> Callable[[], torch.Tensor]:
    """One pass's matmul with the operands stored as autograd has them: the layout is part of the speed."""
    (m, n, k), generator = shape, torch.Generator(device).manual_seed(seed)
    turned_a, turned_b = which == "weight gradient", which == "forward"
    sizes = (k, m) if turned_a else (m, k), (n, k) if turned_b else (k, n)
    a, b = (torch.randn(size, device=device, generator=generator).bfloat16() for size in sizes)
    a, b = a.t() if turned_a else a, b.t() if turned_b else b
    return lambda: a @ b
