"""Every setting of the measuring scripts, each an environment variable (SEQ_LEN=8192) and a flag (--seq-len 8192).

A flag wins over the environment. A wrong value stops before anything is loaded, with exit code 2 and one line
that names the setting, the value and what is allowed. What a recipe decides is None until `load` has resolved it.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliImplicitFlag, NoDecode, SettingsConfigDict

GUIDE_SEQLENS = [8192, 32768, 65536, 131072, 196608, 262144]
CPU_SEQLENS = [256, 512, 1024]

# The two ways to train that are measured by name; anything else is "custom".
RECIPES = {
    "long-context": {"zero_stage": 3, "offload_optimizer": True, "grad_checkpoint": True, "use_liger": True},
    "short-context": {"zero_stage": 2, "offload_optimizer": False, "grad_checkpoint": False, "use_liger": False},
}

# Said first, where a device without fp8 matmuls rounds the operands to fp8 and multiplies them in bf16.
EMULATED = "DTYPE={} is emulated: the loss holds, the time says nothing of the format."


def split_lengths(value) -> list[int] | None:
    """A flag's or a variable's words -> lengths, ascending, each once."""
    if value is None:
        return None
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value)  # a flag comes as a list
    words = words.replace(",", " ").split()
    if words == ["guide"]:
        return GUIDE_SEQLENS
    if not words or not all(w.isdecimal() and int(w) > 1 for w in words):
        raise ValueError('allowed: lengths of 2 or more such as "8192 32768", or "guide"')
    return sorted({int(w) for w in words})


Lengths = Annotated[list[int] | None, NoDecode, BeforeValidator(split_lengths)]


class Common(BaseSettings):
    """What every measuring script asks for."""

    model_config = SettingsConfigDict(
        env_ignore_empty=True, cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True, extra="ignore"
    )
    by_device: ClassVar[dict[str, tuple]] = {}  # a setting's default with a GPU and without, for one that is None

    seed: int = Field(0, ge=0, description="of what is random")
    results: Path = Field(Path("results"), description="folder of the result folders")

    def resolve(self, has_gpu: bool):
        """Fill in what depends on there being a GPU, and return self."""
        for name, (with_gpu, without) in self.by_device.items():
            if getattr(self, name) is None:
                setattr(self, name, with_gpu if has_gpu else without)
        return self


class Settings(Common):
    """Settings of one benchmark launch."""

    by_device: ClassVar = {"model": ("llama-3.1-8b", "tiny"), "seq_len": (196608, 512)}

    seq_len: int | None = Field(None, gt=1, description="tokens per sequence; None: 196608, without a GPU 512")
    seqlens: Lengths = Field(
        None, description='several lengths in one launch, ascending: "8192 32768", or "guide" for the guide\'s six'
    )
    steps: int = Field(10, ge=1, description="timed steps per length")
    warmup_steps: int = Field(2, ge=0, description="steps before timing; more are added while steps still drift")
    precision: float = Field(
        1.0, ge=0, description="after 6 steps and 30 s stop where enough were timed for +- this many percent; 0 = never"
    )
    recipe: Literal["long-context", "short-context"] = Field(
        "long-context", description="long-context: ZeRO-3, checkpointing, CPU AdamW, Liger; short-context: ZeRO-2 alone"
    )
    zero_stage: int | None = Field(None, ge=0, le=3, description="DeepSpeed ZeRO stage; None: the recipe's")
    offload_optimizer: bool | None = Field(None, description="AdamW on the CPU; None: the recipe's")
    grad_checkpoint: bool | None = Field(None, description="activation checkpointing; None: the recipe's")
    use_liger: bool | None = Field(None, description="Liger fused kernels; None: the recipe's")
    model: str | None = Field(
        None, description="a shipped shape, a folder or a hub id; None: llama-3.1-8b, without a GPU tiny"
    )
    weights: Literal["auto", "real", "random"] = Field(
        "auto", description="auto takes real weights if they are on this machine, else random ones, and says which"
    )
    num_layers: int | None = Field(None, ge=1, description="use only this many layers, for a model that does not fit")
    batch_size: int = Field(1, ge=1, description="sequences per GPU and micro-step")
    grad_accum: int = Field(1, ge=1, description="micro-steps per optimizer step")
    dtype: Literal["bf16", "fp8", "fp8_rowwise", "mxfp8", "nvfp4"] = Field(
        "bf16", description="format of the linear layers' matmuls, by torchao; emulated where the device has no fp8"
    )
    compile: bool = Field(False, description="the DeepSpeed engine's torch.compile")
    doc_len: int | None = Field(None, ge=2, description="pack documents of this many tokens into each sequence")
    sp_size: int = Field(1, ge=1, description="ranks that share one sequence (DeepSpeed Ulysses)")
    attn: Literal["auto", "fa4", "fa3", "fa2", "sdpa"] = Field("auto", description="attention kernel")
    peak_tflops: float | None = Field(None, gt=0, description="dense peak per GPU, in DTYPE, if it is not in the table")
    deterministic: bool = Field(False, description="deterministic algorithms; slower, recorded")
    mem_debug: bool = Field(False, description="memory probes per stage and a snapshot on rank 0, also at an OOM")
    result_file: Path | None = Field(None, description="append to this file; run_sweep.sh sets it")
    sweep_key: str | None = Field(None, description="set by run_sweep.sh: which sweep this launch belongs to")

    @model_validator(mode="after")
    def _combinations(self):
        for name, value in RECIPES[self.recipe].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.doc_len and self.batch_size > 1:
            raise ValueError("DOC_LEN packs one long sequence; use it with BATCH_SIZE=1 and GRAD_ACCUM for more")
        if self.doc_len and self.sp_size > 1:
            raise ValueError("DOC_LEN and SP_SIZE do not go together: Ulysses drops the document mask")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("OFFLOAD_OPTIMIZER=1 needs ZERO_STAGE 1, 2 or 3")
        return self

    @property
    def recipe_name(self) -> str:
        """The recipe's name if every piece is as it says, else "custom"."""
        pieces = {name: getattr(self, name) for name in RECIPES[self.recipe]}
        return next((name for name, recipe in RECIPES.items() if recipe == pieces), "custom")

    @property
    def lengths(self) -> list[int]:
        """Ascending. `resolve` has filled in seq_len by then."""
        return self.seqlens or [self.seq_len]


class SweepSettings(Settings):
    """Settings of run_sweep.sh: those of benchmark.py, and how to go through the lengths."""

    gpus: int | None = Field(None, ge=1, description="GPUs, or CPU ranks; None: all visible, without a GPU 2")
    isolate: bool = Field(False, description="one launch per length, as the guide did")
    keep_going: CliImplicitFlag[bool] = Field(False, description="try the longer lengths after an out-of-memory")
    find_max: CliImplicitFlag[bool] = Field(False, description="then find the longest length that fits")
    granularity: int = Field(8192, ge=2, description="FIND_MAX stops when this many tokens are left between")
    timeout: float = Field(1800, gt=0, description="seconds without a finished step that count as a hang")
    start_timeout: float = Field(1800, gt=0, description="seconds of start-up (model load, op build) that count as one")
    hostfile: Path | None = Field(None, description="DeepSpeed hostfile, for several nodes")
    launcher_args: str = Field("", description='more arguments for the deepspeed launcher, e.g. "--launcher slurm"')
    fresh: CliImplicitFlag[bool] = Field(False, description="start a new result file instead of continuing")

    def resolve(self, has_gpu: bool):
        asked = self.seq_len is not None  # SEQ_LEN alone is a sweep over one length
        super().resolve(has_gpu)
        if not self.seqlens:
            self.seqlens = [self.seq_len] if has_gpu or asked else CPU_SEQLENS
        if self.hostfile and not self.hostfile.is_file():
            fail_setting(f"HOSTFILE={self.hostfile}: no such file")
        return self

    def benchmark_flags(self, lengths: list[int], **changed) -> list[str]:
        """benchmark.py's command line for these lengths. Flags and not variables: they reach every node as they are."""
        values = self.model_dump(include=set(Settings.model_fields), exclude_none=True) | changed
        values |= {"seqlens": " ".join(map(str, lengths))}
        values.pop("seq_len", None)
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def fail_setting(message: str):
    """One line to stderr and exit code 2."""
    print(f"wrong setting: {message}", file=sys.stderr)
    sys.exit(2)


def load(cls: type[Common] = Settings, argv: list[str] | None = None, description: str | None = None) -> Common:
    """Settings from the command line and the environment; exits 2 on a wrong one.

    DETERMINISTIC=1 also sets the variables that cuBLAS and FlashAttention want: call it before torch is imported.
    The launcher's own --local_rank is accepted and ignored: LOCAL_RANK says the same.
    `description` is what --help prints first (a script's docstring).
    """
    argv = [a for a in (sys.argv[1:] if argv is None else argv) if not a.startswith(("--local_rank", "--local-rank"))]
    named = type(cls.__name__, (cls,), {"__doc__": description}) if description else cls
    try:
        settings = named(_cli_parse_args=argv, _cli_prog_name=os.path.basename(sys.argv[0]))
        if getattr(settings, "deterministic", False):
            os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers hands it to the kernel
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch.use_deterministic_algorithms names it
        return settings
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).upper() if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ")
        value = first["input"]
        value = " ".join(map(str, value)) if isinstance(value, list) else value
        fail_setting(f"{name}={value}: {message}" if name else message)
