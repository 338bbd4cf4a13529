"""The JSON-lines schema every script of this project writes and the report reads.

One object a line, told apart by its `record` key; every number is finite, an unknown value is null.
A result file is `results/<gpu>/<kind>_<timestamp>.jsonl`; it starts with a `run` record (a sweep's with the
`plan` before it). Rates: tflops is TFLOP per second and GPU; GiB is 2**30 bytes, GB is 10**9.

    from harness import records
    line = records.dump(records.Step(run_id=..., seq_len=8192, ...))
    record = records.parse(line)           # raises pydantic.ValidationError or ValueError

measure/result_file.py writes the files.

No torch here: the report runs on a laptop.
"""

import json
from typing import Annotated, Literal, Union

from pydantic import Field, TypeAdapter

from harness.failure_kinds import FailureKind
from harness.run_facts import Attention, Base, Format, Gpu, Host, Job, Model, Recipe, Stack

SCHEMA = 1


class Plan(Base):
    """First line of a sweep file: what was asked for, so that what is missing can be told from what failed."""

    record: Literal["plan"] = "plan"
    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    sweep_key: str = Field(description="hash of settings, stack and GPUs; a later run with the same one continues")
    seq_lens: list[int]
    settings: dict
    started: str


class Run(Base):
    """Everything needed to judge and repeat a measurement. A sweep file may hold several (one per launch)."""

    record: Literal["run"] = "run"
    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    kind: Literal["sweep", "attention", "ceilings", "decompose"]
    run_id: str
    started: str
    source: Literal["measured", "published", "log"] = "measured"
    sweep_key: str | None = None
    argv: list[str] = []
    settings: dict = {}
    gpu: Gpu
    stack: Stack
    host: Host = Host()
    world_size: int | None = 1
    attention: Attention | None = None
    model: Model | None = None
    recipe: Recipe | None = None
    format: Format | None = Field(None, description="null for bf16")
    job: Job | None = Field(None, description="in place of a recipe, where the source is another trainer's log")
    mismatch: str | None = Field(None, description="set when ranks of this run say different things")
    flop_convention: str | None = None
    environment: dict[str, str] = Field({}, description="NCCL_*, allocator, determinism and threading variables")
    memory_source: str | None = Field(None, description="what peak_mem_gib is on this device")
    git_commit: str | None = None
    notes: list[str] = []

    @property
    def dtype(self) -> str:
        """The step's format in DTYPE's words."""
        if self.job:
            return self.job.precision or "unknown"
        return self.recipe.dtype.replace("bfloat16", "bf16") if self.recipe else "bf16"


class GpuState(Base):
    """Worst over the ranks: lowest clock, highest temperature, every throttle reason; power summed over GPUs."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: list[str] | None = None
    energy_j: float | None = Field(None, description="of the interval, summed over GPUs, from the energy counter")


class Step(Base):
    record: Literal["step"] = "step"
    run_id: str
    seq_len: int
    step: int
    warmup: bool
    exec_time_ms: float = Field(description="slowest rank")
    tflops: float | None = None
    peak_mem_gib: float | None = Field(None, description="reserved, worst rank")
    peak_allocated_gib: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = Field(None, description="fraction of the peak, 0..1")
    loss: float | None = None
    alloc_retries: int | None = Field(None, description="allocator retries during this step, all ranks")
    fastest_rank_ms: float | None = None
    slowest_rank: int | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    gpu_state: GpuState | None = None
    node_states: dict[str, GpuState] | None = Field(None, description="per node, with more than one")


class Summary(Base):
    """The measured outcome of one length. Times are of the steady steps (not warm-up)."""

    record: Literal["summary"] = "summary"
    run_id: str
    seq_len: int
    n: int
    median_ms: float
    ci_low_ms: float | None = None
    ci_high_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_mem_gib: float | None = None
    peak_allocated_gib: float | None = None
    attention_tflop: float | None = Field(None, description="model TFLOP per GPU and step")
    dense_tflop: float | None = None
    warmup_steps: int = 0
    steady: bool | None = Field(None, description="false: still drifting, or the allocator retried")
    throttled: bool | None = None
    joules_per_token: float | None = None
    stopped_by: Literal["steps", "precision"] | None = None


class Failure(Base):
    record: Literal["failure"] = "failure"
    run_id: str | None = None
    seq_len: int
    kind: FailureKind
    rank: int | None = None
    error: str = Field(description="the first error line of that rank")
    return_code: int | None = None
    steps_done: int = 0
    advice: str | None = None


class NotRun(Base):
    record: Literal["not_run"] = "not_run"
    seq_len: int
    reason: str


class RankError(Base):
    """Written by the failing rank itself, before it dies; the sweep turns it into a Failure."""

    record: Literal["rank_error"] = "rank_error"
    run_id: str | None = None
    seq_len: int | None = None
    rank: int
    kind: FailureKind | None = Field(None, description="when the error itself says what it is")
    error: str
    traceback: str | None = None


class AttentionTime(Base):
    """bench_flash_attn.py: one backend at one length. The kernel's own count is 3.5x forward, the model's 3x."""

    record: Literal["attention"] = "attention"
    run_id: str
    backend: str
    seqlen: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool = True
    mode: Literal["burst", "sustained"] = "burst"
    fwd_ms: float | None = None
    bwd_ms: float | None = None
    fwd_bwd_ms: float | None = None
    fwd_tflops: float | None = None
    fwd_bwd_tflops: float | None = Field(None, description="kernel count, 3.5x forward")
    model_tflops: float | None = Field(None, description="model count, 3x forward: matches the step's")
    fwd_bwd_ms_low: float | None = Field(None, description="2.5th percentile of the iterations")
    fwd_bwd_ms_high: float | None = None
    n: int | None = None
    fwd_kernel_ms: float | None = Field(None, description="the kernels' own time, by the profiler")
    fwd_bwd_kernel_ms: float | None = None
    host_bound: bool | None = Field(None, description="a call takes over 10 % longer than its kernels")
    max_error: float | None = Field(None, description="of output and gradients against fp32, over the largest value")
    gpu_state: GpuState | None = None
    error: str | None = Field(None, description="why this backend gave no time")


class Ceiling(Base):
    """bench_ceilings.py: one thing the box can reach. `per_gpu` has one value a GPU, in device order."""

    record: Literal["ceiling"] = "ceiling"
    run_id: str
    what: Literal["matmul", "model_matmul", "memory", "collective"]
    name: str = Field(description="dtype, matmul of the model, copy/triad, or all_reduce/all_gather")
    value: float | None = Field(None, description="median over GPUs; null when it cannot run")
    unit: Literal["TFLOPS", "GB/s"]
    best: float | None = Field(None, description="highest of per_gpu")
    mean: float | None = Field(None, description="value by the mean of the iterations instead of their median")
    shape: list[int] | None = Field(None, description="M, N, K of the best matmul, or the message bytes")
    per_gpu: list[float] = []
    published: float | None = Field(None, description="the published ceiling of this GPU")
    unhealthy: bool | None = Field(None, description="some GPU under 60 % of what its kind reaches")
    reason: str | None = Field(None, description="why it cannot run: silicon, torch, or kernel")


class Bucket(Base):
    name: str
    ms: float
    tflops: float | None = None
    mfu: float | None = None


class Decomposition(Base):
    """bench_decompose.py: `two` and `full` each sum to step_ms; ranks are summarised by min and max."""

    record: Literal["decomposition"] = "decomposition"
    run_id: str
    seq_len: int
    step_ms: float
    peak_mem_gib: float | None = None
    two: list[Bucket] = Field(description="attention and everything else: the guide's split by compute-stream share")
    full: list[Bucket] = Field(description="the buckets of harness/kernels.py and idle, by intervals")
    hidden_communication_ms: float | None = None
    exposed_communication_ms: float | None = None
    busy_share: float | None = None
    rank_range: dict[str, tuple[float, float]] = Field({}, description="bucket -> (min, max) ms over ranks")
    unmatched: list[tuple[str, float]] = Field([], description="top kernels no rule named, with ms per step")
    method: str = Field("kernels", description='"kernels" on a GPU, "cpu operators" without one')
    notes: list[str] = []


Record = Annotated[
    Union[Plan, Run, Step, Summary, Failure, NotRun, RankError, AttentionTime, Ceiling, Decomposition],
    Field(discriminator="record"),
]
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def parse(line: str | bytes) -> Record:
    """One line to one record. Raises pydantic.ValidationError (a ValueError) naming the field that is wrong."""
    return _ADAPTER.validate_json(line)


def validate(obj: dict) -> Record:
    """The same for an object that is decoded already."""
    return _ADAPTER.validate_python(obj)


def dump(record: Base) -> str:
    """One line without the newline; bare NaN and Infinity cannot come out (`allow_nan=False`)."""
    return json.dumps(record.model_dump(mode="json"), allow_nan=False, ensure_ascii=False)
