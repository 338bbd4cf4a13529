"""What each GPU is: identification, dense peaks, memory, bandwidth, ceilings. The figures are in gpus.toml. No torch.

    from harness import gpus
    gpu = gpus.identify("NVIDIA H200", capability=(9, 0), memory_gib=139.8)     # None: not known, nothing is guessed
    tflops, why = gpus.peak("NVIDIA H200", (9, 0), 139.8, override=None)        # 989.0, "dense bf16 of the H200 ..."
    gpus.by_key("RTX PRO 6000")                                                 # what a person types

A name is matched as a whole, word for word: "NVIDIA GB200" is not a B200 with two letters more, "NVIDIA H200 NVL" is
another card than "NVIDIA H200", and a MIG slice is no whole GPU. Memory is what the device reports, never the number in
the name ("NVIDIA GH200 480GB" has 96 GB or 141 GB), and the capability has to fit.
"""

import difflib
import functools
import math
import re
import tomllib
from dataclasses import field
from os.path import commonprefix
from pathlib import Path

from pydantic.dataclasses import dataclass

DTYPES = ("bf16", "fp8", "fp6", "fp4", "nvfp4")
# The format of a training step (DTYPE) -> the dtype of the table that its matmuls run at.
MATMUL = {"bf16": "bf16", "fp8": "fp8", "fp8_rowwise": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}

# Device memory in GiB over the marketed GB. Measured: 0.93 (B300: 267 of 288) to 1.01 (GH200: 142.5 of 141).
_MEMORY_FIT = (0.88, 1.06)


@dataclass(frozen=True, config={"extra": "forbid"})
class Ceiling:
    """The best matmul anyone published for a dtype. `tflops` without sparsity; `shape` is M, N, K."""

    tflops: float
    shape: tuple[int, int, int]
    torch: str


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})
class Gpu:
    """Rates are dense TFLOPS per GPU; None is unknown, and also what is in `unsupported`: the silicon cannot do it."""

    key: str
    label: str
    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp6: float | None = None
    fp4: float | None = None
    nvfp4: float | None = None
    unsupported: frozenset[str]  # dtypes, or "nvlink"
    memory_gb: float  # marketed
    bandwidth_tb_s: float | None = None
    nvlink_gb_s: float | None = None  # both directions
    power_w: float | None = None
    ceilings: dict[str, Ceiling] = field(default_factory=dict)  # by dtype
    source: str

    def dense(self, step: str) -> float | None:
        """Dense TFLOPS of the matmuls of a training step in this format (DTYPE's words); None where not known."""
        return getattr(self, MATMUL[step]) if step in MATMUL else None


@functools.cache
def load() -> dict[str, Gpu]:
    """Every GPU of gpus.toml by its key. Raises TypeError or ValueError when the file has a wrong or missing key."""
    table = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return {key: _gpu(key, **row) for key, row in table.items()}


def _gpu(key: str, dense: dict, board: dict, **row) -> Gpu:
    figures = dense | board
    cannot = [name.removesuffix("_gb_s") for name, value in figures.items() if value is False]
    return Gpu(key=key, unsupported=cannot, **{name: value or None for name, value in figures.items()}, **row)


def identify(name: str, capability: tuple[int, int] | None = None, memory_gib: float | None = None) -> Gpu | None:
    """The GPU a driver calls `name`, or None when that is not known for sure.

    `capability` and `memory_gib` (total memory of the device) are checked when given; one that does not fit gives None.
    Where one name is sold with two memory sizes and `memory_gib` is not given, the one listed first (the usual one).
    """
    return _find(name, capability, memory_gib)[0]


def by_key(text: str) -> Gpu:
    """The GPU a person means by "B200", "8xH100 SXM5", "RTX4090" or a driver's name.

    Raises KeyError naming all, those like it first: where two cards are sold under a word, none is guessed.
    """
    known = list(load().values())
    typed = (gpu for gpu in known if _plain(text) in map(_plain, (gpu.key, gpu.label, *gpu.aliases)))
    if gpu := next(typed, None) or identify(text):
        return gpu
    labels, plain = {_plain(gpu.label): gpu.label for gpu in known}, _plain(text)
    close = difflib.get_close_matches(plain, labels, n=len(labels), cutoff=0.5)
    close.sort(key=lambda like: -len(commonprefix([like, plain])))
    meant = f"did you mean {', '.join(map(labels.get, close[:5]))}? " if close else ""
    raise KeyError(f"no GPU {text!r}; {meant}known are: {', '.join(labels.values())}")


def peak(
    name: str, capability: tuple[int, int] | None, memory_gib: float | None, override: float | None, step: str = "bf16"
) -> tuple[float | None, str]:
    """(dense TFLOPS for MFU, where it comes from), or (None, why there is none and what to do).

    `step` is the format of the training step (DTYPE): the peak is that format's, though attention and the output layer
    stay bf16. `override` is the user's PEAK_TFLOPS; it wins and is named as such. Raises ValueError if not above zero.
    """
    gpu, problem = _find(name, capability, memory_gib)
    if override is not None:
        if not (math.isfinite(override) and override > 0):
            raise ValueError(f"PEAK_TFLOPS={override}: a number above 0 is needed")
        table = f"the table has {gpu.dense(step):g} for {gpu.label}" if gpu and gpu.dense(step) else problem
        table = table or "none in the table"
        return float(override), f"PEAK_TFLOPS={override:g}, given by hand ({table})"
    dtype = MATMUL[step]
    if gpu is None or gpu.dense(step) is None:
        missing = "the {0} has no {1}" if gpu and dtype in gpu.unsupported else "no dense {1} figure is known for {0}"
        problem = problem or missing.format(gpu.label, dtype)
        return None, f"no MFU: {problem}; set PEAK_TFLOPS to its dense {dtype} TFLOPS to have one"
    return float(gpu.dense(step)), f"dense {dtype} of the {gpu.label}: {gpu.source}"


def _find(name: str, capability: tuple[int, int] | None, memory_gib: float | None) -> tuple[Gpu | None, str | None]:
    """(the GPU, None) or (None, what is wrong)."""
    words = _words(name)
    if "mig" in words:
        return None, f"{name!r} is a MIG slice, not a whole GPU"
    # Older drivers leave the vendor out of the name.
    found = [g for g in load().values() if any(words in (_words(n), _words(n)[1:]) for n in g.names)]
    if not found:
        return None, f"{name!r} is not in harness/gpus.toml"
    fitting = [g for g in found if None in (capability, g.capability) or tuple(capability) == g.capability]
    if not fitting:
        return None, f"{name!r} reports capability {capability}, {found[0].label} has {found[0].capability}"
    low, high = _MEMORY_FIT
    for gpu in fitting:
        if memory_gib is None or low * gpu.memory_gb <= memory_gib <= high * gpu.memory_gb:
            return gpu, None
    sizes = " or ".join(f"{g.memory_gb:g} GB" for g in fitting)
    return None, f"{name!r} reports {memory_gib:.1f} GiB of memory, not {sizes}: a slice or another variant"


def _words(name: str) -> tuple[str, ...]:
    return tuple(re.split(r"[\s_-]+", name.strip().lower()))


def _plain(typed: str) -> str:
    """A name without a count of GPUs, the vendor's words and a socket's revision, in one word."""
    text = re.sub(r"^\d+ *[x×] *", "", " ".join(_words(typed)))
    return re.sub(r"\b(nvidia|amd|instinct|geforce|tesla)\b|(?<=sxm)\d\b| ", "", text)
