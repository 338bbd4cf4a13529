"""The attention kernel alone: forward, backward and both, at the shape of one layer of Llama-3.1-8B.

    python bench_flash_attn.py                          # the attention this GPU would train with, 1024 to 32768 tokens
    python bench_flash_attn.py --attn all               # every kernel that runs here, in alternation on one GPU
    SEQLENS="8192 131072" MODEL=llama-3.1-70b python bench_flash_attn.py
    python bench_flash_attn.py --seqlens 256,512        # without a GPU: PyTorch's CPU attention, small sizes

Each kernel's output and gradients are first compared with fp32. Times are of single iterations on random data, the L2
emptied and the gradients dropped between them, by device events. `burst` is the first fraction of a second, `sustained`
the second half of SUSTAINED_S seconds without a pause, when power and heat have set the clocks; in a training step
expect the sustained rate or less. On a GPU the kernels' own time stands beside the call's: at short lengths the call is
mostly the host's launches, and then marked host-bound. Each result is one JSON line, also in
results/<gpu>/attention_<time>.jsonl:

    seqlen, fwd_ms, fwd_tflops, fwd_bwd_ms     causal forward: 4 * batch * s^2 * heads * head_dim / 2 FLOPs
    fwd_bwd_tflops                             the kernel's own count, 3.5 x forward: its backward recomputes the scores
    model_tflops                               the model's count, 3 x forward, which the step's TFLOPS and MFU use
The last two differ by 7/6 by convention alone. The ratio of two boxes is the same in both.

exit codes: 0 done; 1 a measurement failed (the reason is the last line); 2 wrong use or setting.
"""

import contextlib
import importlib
import sys
import time
from types import SimpleNamespace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import records
from harness.measure import attention, box, runs, telemetry
from harness.measure.failures import first_line
from harness.measure.model import attention_shape, hf_config
from harness.measure.settings import CPU_SEQLENS, Common, Lengths, load
from harness.measure.timing import iterations_ms, kernels_ms, summarise

ROUNDS = 3  # each kernel is timed so often, in turn with the others
KERNEL_COUNT, MODEL_COUNT = 3.5, 3  # FLOPs of forward and backward, in forwards
HOST_BOUND = 1.10  # a call that takes longer than this many times its kernels was timed with the host's launches


class AttentionSettings(Common):
    by_device: ClassVar = {"seqlens": ([2**n for n in range(10, 16)], CPU_SEQLENS), "sustained_s": (30.0, 0.0)}

    seqlens: Lengths = Field(None, description="lengths; None: 1024 to 32768 by doubling, without a GPU 256 512 1024")
    attn: Literal["auto", "all", "fa4", "fa3", "fa2", "sdpa"] = Field("auto", description="kernel; all compares them")
    model: str | None = Field(None, description="take heads and head_dim from this shape, folder or hub id")
    batch_size: int = Field(1, ge=1, description="sequences")
    heads: int = Field(32, ge=1, description="query heads")
    kv_heads: int = Field(8, ge=1, description="key and value heads")
    head_dim: int = Field(128, ge=8, description="width of a head")
    burst_ms: float = Field(600, gt=0, description="time per measured quantity, ms")
    sustained_s: float | None = Field(None, ge=0, description="seconds of sustained load; None: 30, without a GPU 0")

    def resolve(self, has_gpu: bool):
        """Defaults that depend on the device, and the model's shape. Raises ModelUnavailable."""
        super().resolve(has_gpu)
        if self.model:
            config, _ = hf_config(SimpleNamespace(model=self.model, weights="random", num_layers=None))
            self.heads, self.kv_heads, self.head_dim = attention_shape(config)
        return self

    @property
    def shape(self) -> dict[str, int]:
        return {"batch": self.batch_size, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}


def forward_tflop(batch: int, seqlen: int, heads: int, head_dim: int) -> float:
    """TFLOP of a causal forward: two matmuls of 2 * s^2 * head_dim FLOPs a head, half of them masked away."""
    return 4 * batch * seqlen**2 * heads * head_dim / 2 / 1e12


# One of PyTorch's own attentions; None: the one PyTorch chooses.
SDPA = {"sdpa": None, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}


def kernel(label: str, capability: tuple[int, int] | None):
    """attend(q, k, v) on (batch, heads, seqlen, head_dim) tensors. Raises AttentionUnavailable."""
    if label in SDPA:

        def attend(q, k, v):
            with sdpa_kernel(SDPA[label]) if SDPA[label] else contextlib.nullcontext():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    else:
        attention.require(label, capability)
        function = importlib.import_module(attention.PACKAGES[label].module).flash_attn_func

        def attend(q, k, v):
            out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # FlashAttention-4 gives (out, lse)

    return attend


def check(attend, s: AttentionSettings, device: str) -> float:
    """Largest relative error of output and gradients against fp32. Raises AttentionUnavailable when too large."""
    inputs = attention.random_inputs(device, seqlen=min(512, *s.seqlens), seed=s.seed, **s.shape)
    return attention.checked_error("it", attention.forward_backward(attend, *inputs), *inputs)


def closures(attend, leaves: list[torch.Tensor], grad: torch.Tensor) -> dict:
    out = attend(*leaves)
    return {
        "fwd": torch.no_grad()(lambda: attend(*leaves)),
        "bwd": lambda: out.backward(grad, retain_graph=True),
        "fwd_bwd": lambda: attend(*leaves).backward(grad),
    }


def figures(times: dict[str, list[float]], tflop: float) -> dict:
    """The record's figures from iteration times in ms; `tflop` is the forward's."""
    both = summarise(times["fwd_bwd"])
    found = {f"{what}_ms": summarise(values).median for what, values in times.items()}
    if "fwd_ms" in found:
        found["fwd_tflops"] = tflop / found["fwd_ms"] * 1e3
    rate = tflop / both.median * 1e3
    found |= {"fwd_bwd_tflops": KERNEL_COUNT * rate, "model_tflops": MODEL_COUNT * rate}
    return found | {"fwd_bwd_ms_low": both.low, "fwd_bwd_ms_high": both.high, "n": both.n}


def own_times(work: dict, found: dict, device: str, leaves: list[torch.Tensor]) -> dict:
    """The kernels' own time beside the call's, and whether the two differ by more than HOST_BOUND; {} without a GPU."""
    own = {f"{what}_kernel_ms": kernels_ms(work[what], device, leaves) for what in ("fwd", "fwd_bwd")}
    if None in own.values():
        return {}
    return own | {"host_bound": any(found[k.replace("_kernel", "")] > HOST_BOUND * ms for k, ms in own.items())}


def measure(ready: dict, s: AttentionSettings, seqlen: int, device: str, sampler: telemetry.Sampler):
    """Yields (kernel, mode, GPU state, figures): the bursts in alternation, then each kernel's sustained rate."""
    qkv, grad = attention.random_inputs(device, seqlen=seqlen, seed=s.seed, **s.shape)
    leaves = [t.requires_grad_() for t in qkv]
    work = {label: closures(attend, leaves, grad) for label, attend in ready.items()}
    times = {label: {"fwd": [], "bwd": [], "fwd_bwd": []} for label in work}
    tflop, states = forward_tflop(s.batch_size, seqlen, s.heads, s.head_dim), {}
    for _ in range(ROUNDS):
        for label in work:
            sampler.take()
            for what, run in work[label].items():
                times[label][what] += iterations_ms(run, device, s.burst_ms / ROUNDS, leaves)
            states[label] = telemetry.combine([sampler.take()])  # of the last round
    for label in work:
        found = figures(times[label], tflop)
        yield label, "burst", states[label], found | own_times(work[label], found, device, leaves)
    for label in work if s.sustained_s else ():
        start, late = time.monotonic(), []
        while not late or time.monotonic() - start < s.sustained_s:
            if time.monotonic() - start < s.sustained_s / 2:
                late.clear()  # the clocks are still falling
                sampler.take()
            late += iterations_ms(work[label]["fwd_bwd"], device, 1000, leaves)
        yield label, "sustained", telemetry.combine([sampler.take()]), figures({"fwd_bwd": late}, tflop)


def show(rows: list[records.AttentionTime]) -> None:
    table = Table(title="causal attention, bf16, median of single iterations", title_justify="left")
    numbers = {"fwd ms": "fwd_ms", "fwd TFLOPS": "fwd_tflops", "bwd ms": "bwd_ms", "fwd+bwd ms": "fwd_bwd_ms",
               "TFLOPS (3.5x)": "fwd_bwd_tflops", "TFLOPS (3x)": "model_tflops"}  # fmt: skip
    if any(r.host_bound is not None for r in rows):
        numbers |= {"fwd kernels ms": "fwd_kernel_ms", "fwd+bwd kernels ms": "fwd_bwd_kernel_ms"}
    for column in ("seqlen", "kernel", "mode", *numbers, "95 % of iterations ms", "SM MHz", ""):
        table.add_column(column, justify="left" if column in ("kernel", "mode") else "right")
    for r in (r for r in rows if r.error is None):
        values = [getattr(r, name) for name in numbers.values()]
        spread = f"{r.fwd_bwd_ms_low:.4g} - {r.fwd_bwd_ms_high:.4g}"
        clock = f"{r.gpu_state.sm_clock_mhz:.4g}" if r.gpu_state and r.gpu_state.sm_clock_mhz else ""
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        table.add_row(str(r.seqlen), r.backend, r.mode, *cells, spread, clock, "host-bound" if r.host_bound else "")
    console = Console(width=170, markup=False, emoji=False)  # a reason is a library's own text
    console.print(table)
    if any(r.host_bound for r in rows):
        console.print("host-bound: the call takes over 10 % longer than its kernels; it times the host's launches")
    for r in (r for r in rows if r.error):
        console.print(f"not measured: {r.error}")
    console.print("kernel count / model count = 3.5 / 3 = 7/6 = 1.167: the same time, counted in two ways")


def run_all(s: AttentionSettings, chosen: list[str], device: str, facts: dict) -> None:
    """Measures, keeps and shows everything. Exits 1 with the last of what could not be measured."""
    convention = "causal attention: kernel 3.5x, model 3x forward"
    backend = chosen[0] if len(chosen) == 1 else None
    run = runs.run_record("attention", s, box.gpu_record(device, [facts]), backend, flop_convention=convention)
    failed, ready, errors = [], {}, {}
    with (
        runs.Results(run, s.results, show, "; sustained only with SUSTAINED_S") as out,
        contextlib.closing(telemetry.Sampler(facts["uuid"])) as sampler,
    ):

        def keep(label: str, seqlen: int, **more) -> None:
            more |= s.shape | {"dtype": "bfloat16"}
            out.keep(records.AttentionTime(run_id=run.run_id, backend=label, seqlen=seqlen, **more))

        for label in chosen:
            try:
                attend = kernel(label, facts["capability"])
                errors[label], ready[label] = check(attend, s, device), attend
            except Exception as error:  # a package may fail in any way at its first call
                failed.append(f"{label}: {first_line(error)}")
                keep(label, s.seqlens[0], error=failed[-1])
        failed = [] if ready else failed  # with --attn all some are expected to be missing
        for seqlen in s.seqlens if ready else ():
            try:
                for label, mode, state, found in measure(ready, s, seqlen, device, sampler):
                    keep(label, seqlen, mode=mode, gpu_state=state, max_error=errors[label], **found)
            except torch.OutOfMemoryError as error:
                failed.append(f"seqlen {seqlen}: {first_line(error)}")
                keep(",".join(ready), seqlen, error=failed[-1])
    if failed:
        sys.exit(f"error: {failed[-1]}")


def main() -> int:
    s = load(AttentionSettings, description=__doc__)
    device = box.use_accelerator()
    facts = box.device_facts(device)
    with runs.errors_end_the_script():
        s.resolve(device == "cuda")
        chosen = [*attention.PACKAGES, *SDPA] if s.attn == "all" else [attention.choose(s.attn, facts["capability"])]
        run_all(s, chosen, device, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
