"""Which attention kernel this box trains with, and the proof that it is the one that runs.

Three steps, each of which raises `AttentionUnavailable` rather than go on with another kernel:
`choose` decides by compute capability, `require` looks at the package, `probe` really calls it, forward and
backward, through the function Hugging Face's models use. `check_model` looks at the model once it is built.
"""

import functools
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from harness import kernels
from harness.measure.failures import named_line

# The settings' words -> transformers' names.
BACKENDS = {
    "fa4": "flash_attention_4", "fa3": "flash_attention_3", "fa2": "flash_attention_2", "sdpa": "sdpa",
    "varlen": "sdpa_varlen",  # sdpa's for packed documents on a GPU; we give it this name, no setting does
}  # fmt: skip


@dataclass(frozen=True)
class Package:
    distribution: str  # the name pip knows; transformers checks it too
    module: str  # what transformers imports from
    install: str
    majors: tuple[int, ...]  # compute capability majors it trains on


# Majors: FlashAttention-4 has no backward on 8.x, and on 11.x and 12.x it runs other, untuned kernels under the same
# name; the FlashAttention-3 wheel holds code for sm_80 and sm_90a only, so anything newer fails at the first launch.
PACKAGES = {
    "fa4": Package("flash-attn-4", "flash_attn.cute", "./install.sh --force fa4", (9, 10)),
    "fa3": Package("flash-attn-3", "flash_attn_interface", "./install.sh --force fa3", (8, 9)),
    "fa2": Package("flash-attn", "flash_attn", "pip install flash-attn", (8, 9, 10, 12)),
}
# Kernels of torch's own attention: seen alone under another backend's name, they mean it was replaced.
SDPA_KERNELS = re.compile(r"pytorch_flash|fmha_cutlass|cudnn")
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
    """The backend for a GPU of this compute capability (None: no GPU); auto: 9.x fa3, 10.x fa4, all others sdpa.

    Raises AttentionUnavailable when the silicon cannot train with the backend asked for, KeyError for an unknown word.
    """
    if requested == "auto":
        return {9: "fa3", 10: "fa4"}.get(capability[0], "sdpa") if capability else "sdpa"
    if requested == "sdpa":
        return requested
    if capability is None:
        raise AttentionUnavailable(f"{requested} needs an NVIDIA GPU and there is none here: use ATTN=sdpa or auto")
    if requested == "varlen":
        if capability[0] < 8 or not importlib.util.find_spec("torch.nn.attention.varlen"):
            raise AttentionUnavailable(
                f"DOC_LEN with sdpa needs torch's varlen_attn, which {torch.__version__} on compute capability "
                f"{capability[0]}.{capability[1]} has not: take a GPU of 8.0 or later and torch 2.13"
            )
        return requested
    majors = PACKAGES[requested].majors
    if capability[0] not in majors:
        fits = ", ".join(f"{major}.x" for major in majors)
        raise AttentionUnavailable(
            f"{requested} trains on compute capability {fits} and this GPU is {capability[0]}.{capability[1]}: "
            "use ATTN=sdpa or auto"
        )
    return requested


def for_documents(backend: str, capability: tuple[int, int] | None, longest: int, memory_gib: float) -> str:
    """The backend for packed documents in sequences of up to `longest` tokens; sdpa knows no documents.

    On a GPU that is varlen. On a CPU it is sdpa with a mask, refused (AttentionUnavailable, kind wrong_setting) where
    it takes over half of the memory that a rank has (`memory_gib`): the rest is for the model.
    """
    if backend != "sdpa" or capability:
        return "varlen" if backend == "sdpa" else backend
    mask_gib = 3 * longest**2 / 2**30  # a byte a pair, and two of the bf16 copy that torch's kernel makes of it
    if mask_gib > memory_gib / 2:
        raise AttentionUnavailable(
            f"DOC_LEN with {longest} tokens: on a CPU the mask of the documents takes {mask_gib:.1f} GiB or more, over "
            f"half of the {memory_gib:.1f} GiB that a rank has; use shorter lengths",
            "wrong_setting",
        )
    return backend


def attend_documents(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, cu_seq_lens_q=None,
    max_length_q=None, **_,
):  # fmt: skip
    """transformers' attention function for varlen: (batch, heads, seqlen, head_dim) in, the output transposed.

    Causal within each document of the int32 offsets `cu_seq_lens_q`; without them each sequence is one.
    """
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to import, and few need it

    batch, _, seqlen, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=query.device)
        max_length_q = seqlen
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling,
        window_size=((sliding_window or 0) - 1, 0), enable_gqa=True,
    )  # fmt: skip
    return out.unflatten(0, (batch, seqlen)), None


def require(backend: str, capability: tuple[int, int] | None) -> None:
    """Raises AttentionUnavailable, with what to do, unless the backend's package is usable by transformers here."""
    choose(backend, capability)
    if backend == "varlen":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(BACKENDS[backend], attend_documents)
    if backend not in PACKAGES:
        return
    package = PACKAGES[backend]
    name, found = package.distribution, version(package.distribution)
    if found is None:
        # With that package transformers fetches a community kernel instead, and only warns.
        hub = ", and the `kernels` package here would replace it quietly" if importlib.util.find_spec("kernels") else ""
        beside = ", which adds it beside flash-attn-3" if backend == "fa4" and capability[0] == 9 else ""
        raise AttentionUnavailable(f"{name} is not installed{hub}: run {package.install}{beside}")
    rival = {"fa4": "flash-attn", "fa2": "flash-attn-4"}.get(backend, "")
    if rival and version(rival):
        raise AttentionUnavailable(
            f"{name} {found} and {rival} {version(rival)} write the same folder and the later install wins: "
            f"pip uninstall both, then {package.install}"
        )
    try:
        module = importlib.import_module(package.module)
        _ = module.flash_attn_func, module.flash_attn_varlen_func
    except Exception as error:  # a foreign tree raises AttributeError, a wrong build ImportError or OSError
        line, kind = named_line(error), "attn_unavailable"
        if "undefined symbol" in line:
            kind, line = "abi_mismatch", f"built for another torch than {torch.__version__}, {line}"
        elif isinstance(error, ModuleNotFoundError) and importlib.util.find_spec("flash_attn_3"):
            line += "; only flash_attn_3.flash_attn_interface is there, which transformers does not look for"
        message = f"{name} {found} is installed but cannot be imported ({line}): run {package.install}"
        raise AttentionUnavailable(message, kind) from error
    from transformers import utils

    if not getattr(utils, f"is_flash_attn_{backend[-1]}_available")():
        why = "torch sees no GPU" if not torch.cuda.is_available() else f"{name} does not own {package.module}"
        raise AttentionUnavailable(f"{name} {found} imports, but transformers does not take it: {why}")


def version(distribution: str) -> str | None:
    """Installed version by pip's name; flash_attn.cute's own __version__ is always 0.0.0."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe(backend: str, device, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, seqlen: int = 256) -> Probe:
    """One causal bf16 forward and backward through transformers' own attention function.

    Raises AttentionUnavailable when the call fails, something else runs, or the numbers are wrong (attn_mismatch).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    device, package = torch.device(device), PACKAGES.get(backend)
    inputs = random_inputs(device, 1, seqlen, heads, kv_heads, head_dim, seed=0)
    config = SimpleNamespace(_attn_implementation=BACKENDS[backend])
    layer = SimpleNamespace(config=config, is_causal=True, num_key_value_groups=heads // kv_heads)

    def attend(q, k, v):
        function = ALL_ATTENTION_FUNCTIONS[BACKENDS[backend]]
        out, _ = function(layer, q, k, v, None, dropout=0.0, scaling=head_dim**-0.5)
        return out.transpose(1, 2)  # it gives (batch, seqlen, heads, head_dim)

    try:
        function = _called_function(lambda: forward_backward(attend, *inputs))  # also compiles what has to be compiled
        seen, results = _profiled(lambda: forward_backward(attend, *inputs), device)
    except Exception as error:
        gpu = torch.cuda.is_available()
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if gpu else "the CPU"
        name = f"{package.distribution} {version(package.distribution)}" if package else backend
        what = f"fails at its first call on {arch}"
        if backend == "fa4" and isinstance(error, AssertionError):  # early betas knew sm_100 and not sm_103
            what = f"is too old for {arch}: run {package.install}"
        raise AttentionUnavailable(f"{name} {what} [{named_line(error)}]") from error
    if not function.startswith(package.module if package else "torch"):
        raise AttentionUnavailable(f"{backend} was asked for, {function} was called", "attn_mismatch")
    if package and seen and device.type == "cuda" and all(map(SDPA_KERNELS.search, seen)):
        raise AttentionUnavailable(f"{backend} was asked for, PyTorch's own {seen[0]} ran", "attn_mismatch")
    return Probe(function, seen, checked_error(backend, results, *inputs))


def random_inputs(
    device, batch: int, seqlen: int, heads: int, kv_heads: int, head_dim: int, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """([q, k, v], the output's gradient): bf16, normal, (batch, heads, seqlen, head_dim), with the strides that a
    model's projections leave."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(batch, seqlen, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, grad = [torch.randn(s, device=device, generator=generator).bfloat16().transpose(1, 2) for s in shapes]
    return qkv, grad


def forward_backward(attend, qkv: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, dq, dk and dv of attend(q, k, v)."""
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = attend(*leaves)
    out.backward(grad)
    return [out.detach(), *(t.grad for t in leaves)]


def _called_function(run) -> str:
    """module.function of the first attention function that `run` calls, as the interpreter sees it."""
    called: list[str] = []

    def hook(frame, event, argument):  # pragma: no cover (runs on a CPU too, but no tracer sees a profile hook)
        if event == "call" and frame.f_code.co_name in ("flash_attn_func", "flash_attn_varlen_func", "varlen_attn"):
            called.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call" and getattr(argument, "__name__", "") == "scaled_dot_product_attention":
            called.append("torch.nn.functional.scaled_dot_product_attention")

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called[0] if called else "no known attention function"


def _profiled(run, device: torch.device) -> tuple[list[str], list[torch.Tensor]]:
    """(attention kernels in order of appearance, what `run` returned)."""
    cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        results = run()
        if cuda:
            torch.cuda.synchronize(device)
    names = dict.fromkeys(e.name for e in profiler.events() if cuda or e.name.startswith("aten::"))
    return [name for name in names if kernels.classify(name) == "attention"], results


def relative_error(results: list[torch.Tensor], qkv: list[torch.Tensor], grad: torch.Tensor) -> float:
    """Largest |result - fp32| of output, dq, dk and dv, each over the largest fp32 value of its own."""
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    exact = forward_backward(attend, [t.float() for t in qkv], grad.float())
    pairs = zip(results, exact, strict=True)
    return max(((got.float() - want).abs().max() / want.abs().max()).item() for got, want in pairs)


def checked_error(name: str, results: list[torch.Tensor], qkv: list[torch.Tensor], grad: torch.Tensor) -> float:
    """`relative_error`; raises AttentionUnavailable when it is too large for bf16."""
    off = relative_error(results, qkv, grad)
    if not off <= MAX_RELATIVE_ERROR:
        raise AttentionUnavailable(f"{name} computes wrong numbers here: {off:.1%} off fp32", "attn_mismatch")
    return off


def check_model(model, backend: str) -> str | None:
    """None when the built model dispatches to what was asked for, else the mismatch in words."""
    asked = BACKENDS[backend]
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    used = {str(c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")}
    return None if used == {asked} else f"{backend} ({asked}) was asked for, the model uses {', '.join(sorted(used))}"
