"""What a run was made on, with and of: the parts of a run record (records.py). Null is unknown.

What must be equal on two boxes to compare them is decided in report/comparing.py. No torch here.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Base(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True, serialize_by_alias=True)


class Gpu(Base):
    """The devices of one run, all alike. On a machine without a GPU `device` is "cpu" and `name` the processor's.

    Null is what another trainer's log does not say."""

    device: Literal["cuda", "cpu"] | None
    name: str | None
    count: int | None
    capability: tuple[int, int] | None = None
    memory_gib: float | None = None
    sm_count: int | None = None
    uuids: list[str] = []
    mig: bool = False
    peak_tflops: float | None = Field(None, description="dense peak of the step's format, used for MFU; null = no MFU")
    peak_source: str | None = Field(None, description="where the peak came from, or why there is none")
    driver: str | None = None
    power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None
    links: list[str] = Field([], description="distinct link kinds between the GPUs, as nvidia-smi topo names them")


class Stack(Base):
    """Versions; everything here but `attention_package` must be equal on two boxes to compare them."""

    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    transformers: str | None = None
    deepspeed: str | None = None
    liger_kernel: str | None = None
    triton: str | None = None
    nccl: str | None = None
    attention_package: str | None = Field(None, description='e.g. "flash-attn-4 4.0.0b22"; null for sdpa')


class Attention(Base):
    requested: str = Field(description="the ATTN setting: auto, fa4, fa3, fa2, sdpa")
    backend: str = Field(description="what the model really dispatches to, in the setting's words")
    function: str | None = Field(None, description="module.function, never a path")
    kernels: list[str] = Field([], description="names of attention kernels seen in the probe of that function")
    mismatch: str | None = Field(None, description="set when what runs is not what was asked for")


class Model(Base):
    name: str
    weights: Literal["real", "random"] | None
    num_layers: int | None
    parameters: int | None
    config: dict = Field(description="the Hugging Face config as a dict: all that harness.flops needs")
    uncounted: str | None = Field(None, description="why FLOPs are null, when they are")
    left_out: list[str] = Field([], description="parts of the model that its FLOPs leave out, and why")


class Recipe(Base):
    """What is trained and how; must be equal on two boxes to compare them."""

    name: Literal["long-context", "short-context", "custom"]
    zero_stage: int
    offload_optimizer: bool
    grad_checkpoint: bool
    use_liger: bool = Field(description="asked for")
    liger_applied: bool = Field(description="really patched into the model")
    batch_size: int
    grad_accum: int
    compile: bool
    doc_len: int | None = None
    sp_size: int = 1
    dtype: str = Field("bfloat16", description="bfloat16, or what the linear layers multiply in: see Format")
    optimizer: str | None = Field(None, description="class really used, e.g. DeepSpeedCPUAdam")
    deterministic: bool = False


class Format(Base):
    """What the linear layers of a step multiply in, when DTYPE is not bf16; everything else stays bf16."""

    name: str = Field(description="the DTYPE setting: fp8, fp8_rowwise, mxfp8, nvfp4")
    recipe: str = Field(description="package, its version, layer and recipe")
    emulated: bool = Field(description="rounded to the format and multiplied in bf16: its loss, not its speed")
    converted: int = Field(description="layers in the format ...")
    total: int = Field(description="... of all that multiply by a matrix")
    kept: dict[str, str] = Field({}, description="layer that stays bf16 -> why")


class Job(Base):
    """What another trainer's log, or the box.toml beside it, says of the job; null is unknown."""

    trainer: str | None = Field(None, description="whose form the log has")
    software: str | None = None
    precision: str | None = None
    global_batch: int | None = Field(None, description="sequences of all GPUs a step")
    tokens_per_step: int | None = Field(None, description="tokens of all GPUs a step")
    grad_accum: int | None = None


class Host(Base):
    cpu: str | None = None
    sockets: int | None = None
    cores: int | None = None
    ram_gib: float | None = None
    shm_gib: float | None = None
    omp_threads: int | None = None
    affinity: int | None = Field(None, description="CPUs a rank may use")
    nodes: list[str] = Field([], description="node names, in rank order")
