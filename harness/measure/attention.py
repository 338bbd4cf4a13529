"""Which attention kernel this box trains with, and the proof that it is the one that runs.

Three steps, each of which raises `AttentionUnavailable` rather than go on with another kernel:
`choose` decides by compute capability, `require` looks at the package, `probe` really calls it, forward and
backward, through the function Hugging Face's models use. `check_model` looks at the model once it is built.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace

import torch
import torch.nn.functional as F

# The settings' words -> transformers' names.
BACKENDS = {
    "fa4": "flash_attention_4",
    "fa3": "flash_attention_3",
    "fa2": "flash_attention_2",
    "sdpa": "sdpa",
}


@dataclass(frozen=True)
class Package:
    distribution: str  # the name pip knows; transformers checks it too
    module: str  # what transformers imports from
    install: str
    majors: frozenset[int]  # compute capability majors it trains on


# Majors: FlashAttention-4 has no backward on 8.x, and on 11.x and 12.x it runs other, untuned kernels under the same
# name; the FlashAttention-3 wheel holds code for sm_80 and sm_90a only, so anything newer fails at the first launch.
PACKAGES = {
    "fa4": Package("flash-attn-4", "flash_attn.cute", "./install.sh --force fa4", frozenset({9, 10})),
    "fa3": Package("flash-attn-3", "flash_attn_interface", "./install.sh --force fa3", frozenset({8, 9})),
    "fa2": Package("flash-attn", "flash_attn", "pip install flash-attn", frozenset({8, 9, 10, 12})),
}
# Kernels of torch's own attention: seen alone under another backend's name, they mean it was replaced.
SDPA_KERNELS = re.compile(r"pytorch_flash|fmha_cutlass|cudnn|_for_cpu|efficient_attention")
ATTENTION_KERNELS = re.compile(r"flash|fmha|sdpa|flex_attention|scaled_dot_product")
# bf16 keeps 8 bits (0.4 %); a wrong mask, a missing gradient or a wrong scale gives 10 % and more.
MAX_RELATIVE_ERROR = 0.03


class AttentionUnavailable(RuntimeError):
    """The asked attention cannot be used here. `kind`: attn_unavailable, abi_mismatch or attn_mismatch."""

    def __init__(self, message: str, kind: str = "attn_unavailable"):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Probe:
    function: str  # module.function that was really called
    kernels: list[str]  # attention kernels (operators on a CPU) seen by the profiler, in order
    max_error: float  # largest deviation of output and gradients from fp32, relative to the largest value


def choose(requested: str, capability: tuple[int, int] | None) -> str:
    """The backend for a GPU of this compute capability; None means no GPU.

    auto: 9.x fa3, 10.x fa4, all others sdpa. Raises AttentionUnavailable when the silicon cannot train with the
    backend asked for, ValueError for an unknown word.
    """
    if requested == "auto":
        return {9: "fa3", 10: "fa4"}.get(capability[0], "sdpa") if capability else "sdpa"
    if requested not in BACKENDS:
        raise ValueError(f"ATTN={requested}: use auto, {', '.join(BACKENDS)}")
    if requested == "sdpa":
        return requested
    if capability is None:
        raise AttentionUnavailable(f"{requested} needs an NVIDIA GPU and there is none here: use ATTN=sdpa or auto")
    majors = PACKAGES[requested].majors
    if capability[0] not in majors:
        fits = ", ".join(f"{m}.x" for m in sorted(majors))
        raise AttentionUnavailable(
            f"{requested} trains on compute capability {fits}, this GPU is {capability[0]}.{capability[1]}: "
            "use ATTN=sdpa or auto"
        )
    return requested


def require(backend: str, capability: tuple[int, int] | None) -> None:
    """Raises AttentionUnavailable, with what to do, unless the backend's package is usable by transformers here."""
    choose(backend, capability)
    if backend == "sdpa":
        return
    package = PACKAGES[backend]
    found = version(package.distribution)
    _check_owner(backend, package, found)
    try:
        module = importlib.import_module(package.module)
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            getattr(module, name)
    except Exception as error:  # a stale or foreign tree raises AttributeError, a wrong build ImportError or OSError
        raise _import_failure(package, found, error) from error
    from transformers import utils

    if not getattr(utils, f"is_flash_attn_{backend[-1]}_available")():
        why = "torch sees no GPU" if not torch.cuda.is_available() else "its check of names and owners fails"
        raise AttentionUnavailable(f"{package.distribution} {found} imports, but transformers refuses it: {why}")


def _check_owner(backend: str, package: Package, found: str | None) -> None:
    """The right distribution must be there, alone, and hold the module where transformers looks for it."""
    name = package.distribution
    if found is None:
        hub = " (the `kernels` package is here: transformers would quietly fetch another kernel)"
        raise AttentionUnavailable(
            f"{name} is not installed{hub if importlib.util.find_spec('kernels') else ''}: run {package.install}"
        )
    rival = {"fa4": "flash-attn", "fa2": "flash-attn-4"}.get(backend)
    if rival and version(rival):
        raise AttentionUnavailable(
            f"{name} {found} and {rival} {version(rival)} both write the folder flash_attn, the later install wins: "
            f"pip uninstall both, then {package.install}"
        )
    try:
        here = importlib.util.find_spec(package.module) is not None
    except Exception as error:  # the parent package is imported on the way
        raise _import_failure(package, found, error) from error
    if not here:
        other = " (only flash_attn_3.flash_attn_interface)" if importlib.util.find_spec("flash_attn_3") else ""
        raise AttentionUnavailable(
            f"{name} {found} is installed without the module {package.module}{other}, which transformers imports: "
            f"run {package.install}"
        )


def _import_failure(package: Package, found: str | None, error: Exception) -> AttentionUnavailable:
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if "undefined symbol" in text:
        return AttentionUnavailable(
            f"{package.distribution} {found} was built for another torch than {torch.__version__} "
            f"(CUDA {torch.version.cuda}): run {package.install} [{text}]",
            kind="abi_mismatch",
        )
    return AttentionUnavailable(
        f"{package.distribution} {found} is installed but cannot be imported: run {package.install} [{text}]"
    )


def version(distribution: str) -> str | None:
    """Installed version by pip's name; modules' own __version__ is wrong for FlashAttention-4."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe(backend: str, device, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, seqlen: int = 256) -> Probe:
    """One causal bf16 forward and backward through transformers' own attention function.

    Raises AttentionUnavailable when the call fails, another function or kernel runs (kind attn_mismatch), or the
    numbers are wrong against fp32.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, n, seqlen, head_dim) for n in (heads, kv_heads, kv_heads, heads)]  # q, k, v, grad of the output
    q, k, v, grad = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
    layer = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=BACKENDS[backend]),
        is_causal=True,
        num_key_value_groups=heads // kv_heads,
    )

    def run():
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        attention = ALL_ATTENTION_FUNCTIONS[BACKENDS[backend]]
        out, _ = attention(layer, *inputs, None, dropout=0.0, scaling=head_dim**-0.5)
        out.backward(grad.transpose(1, 2))  # the output is (batch, seqlen, heads, head_dim)
        return [out.detach().transpose(1, 2), *(t.grad for t in inputs)]

    try:
        function = _called_function(run)  # also compiles what has to be compiled
        kernels, results = _profiled(run, device)
    except Exception as error:
        raise AttentionUnavailable(_call_failure(backend, device, error)) from error
    owner = PACKAGES[backend].module if backend in PACKAGES else "torch"
    if not function or not function.startswith(owner):
        raise AttentionUnavailable(f"{backend} was asked for, {function or 'nothing known'} ran", "attn_mismatch")
    if device.type == "cuda" and backend != "sdpa" and kernels and all(map(SDPA_KERNELS.search, kernels)):
        raise AttentionUnavailable(f"{backend} was asked for, torch's own kernels ran: {kernels[0]}", "attn_mismatch")
    error = _error(results, q, k, v, grad)
    if not error <= MAX_RELATIVE_ERROR:
        raise AttentionUnavailable(f"{backend} computes wrong numbers here: {error:.1%} off fp32", "attn_mismatch")
    return Probe(function, kernels, error)


def _call_failure(backend: str, device: torch.device, error: Exception) -> str:
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "a CPU"
    package = PACKAGES.get(backend)
    name = f"{package.distribution} {version(package.distribution)}" if package else backend
    if backend == "fa4" and isinstance(error, AssertionError) and arch not in ("sm_90", "sm_100"):
        return f"{name} is too old for {arch}: run {package.install} [{text}]"
    return f"{name} fails at its first call on {arch} [{text}]"


def _called_function(run) -> str | None:
    """Name of the first attention function that `run` calls, seen by the interpreter and not read from a setting."""
    seen: list[str] = []

    def hook(frame, event, argument):
        if event == "call" and frame.f_code.co_name in ("flash_attn_func", "flash_attn_varlen_func"):
            seen.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call" and getattr(argument, "__name__", "") == "scaled_dot_product_attention":
            seen.append("torch.nn.functional.scaled_dot_product_attention")

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen[0] if seen else None


def _profiled(run, device: torch.device) -> tuple[list[str], list[torch.Tensor]]:
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        results = run()
        if cuda:
            torch.cuda.synchronize(device)
    names = [e.name for e in profiler.events() if not getattr(e, "is_user_annotation", False)]
    return list(dict.fromkeys(n for n in names if ATTENTION_KERNELS.search(n))), results


def _error(results: list[torch.Tensor], q, k, v, grad) -> float:
    """Largest |result - fp32| over output, dq, dk and dv, each relative to the largest fp32 value of its kind."""
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    out.backward(grad.float())
    pairs = zip(results, [out.detach(), *(t.grad for t in exact)], strict=True)
    return max(((got.float() - want).abs().max() / want.abs().max()).item() for got, want in pairs)


def check_model(model, backend: str) -> str | None:
    """None when the built model dispatches to what was asked for, else the mismatch in words."""
    asked = BACKENDS[backend]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    used = {str(getattr(c, "_attn_implementation", None)) for c in configs.values()}
    if used != {asked}:
        return f"{backend} ({asked}) was asked for, the model uses {', '.join(sorted(used))}"
    return None
