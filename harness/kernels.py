"""Kernel names -> kinds, and the events of a profiled window -> the buckets of a training step.

    trace = read_trace("trace.json.gz")     # any torch.profiler Chrome trace; torch is not needed
    split = decompose(trace)                # exact, in nanoseconds
    split.check(world_size=8)               # raises the ProfileError that says what is missing
    split.full(T)                           # {bucket: ms}, summing to the step time T in ms
    split.attention_share                   # of the kernel time on the compute streams

A moment that several kinds of work share goes to one of them, the first of PRIORITY. Communication under a compute
kernel is hidden, so the bucket `exposed_communication` is |union(communication) - union(compute)|; `idle` is what
nothing covers. A collective's kernel also waits for its peers: exposed time is waiting plus moving bytes.

T is measured with the profiler off. How the window's buckets become T's:
- on a GPU the profiler slows the host, not the kernels: a bucket keeps its time per step and idle is the rest of T;
  buckets that together exceed T are shrunk by one factor and leave no idle;
- on a CPU, and in a trace without ProfilerStep marks, a bucket is its share of the window, times T.
"""

import gzip
import json
import re
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np

COMPUTE = ("attention", "matmul", "optimizer", "other")
KINDS = (*COMPUTE, "communication", "copy")
PRIORITY = (*KINDS, "host_optimizer")
ANNOTATION = "annotation"  # a frame around other events; never counted

_RULES = tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))["rules"]
RULES = [(kind, re.compile(pattern, re.IGNORECASE | re.VERBOSE)) for kind, pattern in _RULES]

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}  # Kineto categories of GPU work, new and old
HOST_OPTIMIZER = re.compile(r"Optimizer\.step#\w*CPU")  # DeepSpeedCPUAdam: the GPU waits for it
BUCKETS = {
    "attention": ("attention",), "matmul": ("matmul",), "other_compute": ("other",),
    "optimizer": ("optimizer", "host_optimizer"), "copies": ("copy",), "exposed_communication": ("communication",),
}  # fmt: skip


class ProfileError(ValueError):
    """The profile cannot be split into buckets. `reason` is one of: no trace, no events, no durations, no attention,
    no matmul, no communication, lost events."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class Event(NamedTuple):
    name: str
    category: str  # Kineto's: kernel, gpu_memcpy, gpu_memset, cpu_op, user_annotation, ...
    start: int  # ns
    end: int
    lane: object = 0  # CUDA stream or CPU thread
    device: object = None


@dataclass
class Trace:
    events: list[Event]
    marks: list[tuple[int, int]] = field(default_factory=list)  # ProfilerStep spans in ns, in order
    world_size: int | None = None


def match(name: str, category: str | None = None) -> str | None:
    """The kind a rule gives, or None when no rule names this kernel. `category`: Kineto's."""
    category = category or ""
    if category == "user_annotation" and name.startswith(("gloo:", "Optimizer.step#")):
        return "communication" if name[0] == "g" else "optimizer"  # on a CPU they are the work: nothing runs below
    if "annotation" in category:
        return ANNOTATION
    if category in DEVICE - {"kernel"}:
        return "copy"
    return next((kind for kind, rule in RULES if rule.search(name)), None)


def classify(name: str, category: str | None = None) -> str:
    """One of KINDS, or "annotation". What no rule names is "other", and listed in `Split.unmatched`."""
    return match(name, category) or "other"


def read_trace(path: str | Path) -> Trace:
    """A Chrome trace of torch.profiler, json or json.gz. Raises ProfileError "no trace", or OSError if unreadable."""
    raw = Path(path).read_bytes()
    try:
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        data = json.loads(raw, parse_float=Decimal)  # 1e15 us in a float has no nanoseconds left
        data = data if isinstance(data, dict) else {"traceEvents": data}
        events = [
            Event(
                str(row.get("name")), str(row["cat"]).lower(), start := int(row["ts"] * 1000),
                start + max(0, int((row.get("dur") or 0) * 1000)),
                (row.get("args") or {}).get("stream", row.get("tid")), (row.get("args") or {}).get("device"),
            )
            for row in data["traceEvents"] if row.get("ph") == "X" and "cat" in row
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile) as err:
        raise ProfileError("no trace", f"{path} is no (whole) Chrome trace: {type(err).__name__} {err}") from err
    marks = [(e.start, e.end) for e in events if e.name.startswith("ProfilerStep") and "gpu" not in e.category]
    return Trace(events, sorted(marks), (data.get("distributedInfo") or {}).get("world_size"))


def exclusive(spans: dict[str, list[tuple[int, int]]], window: tuple[int, int]) -> dict[str, int]:
    """ns of `window` that each kind of PRIORITY gets, and "idle"; the values sum to the window exactly.

    `spans` may overlap, nest and reach out of the window.
    """
    clipped = {k: np.clip(np.array(spans.get(k) or np.empty((0, 2)), dtype=np.int64), *window) for k in PRIORITY}
    edges = np.unique(np.concatenate([np.array(window, dtype=np.int64), *(s.ravel() for s in clipped.values())]))
    widths, taken, out = np.diff(edges), np.zeros(len(edges) - 1, dtype=bool), {}
    for kind, span in clipped.items():
        opened, closed = (np.bincount(np.searchsorted(edges, column), minlength=len(edges)) for column in span.T)
        active = np.cumsum(opened - closed)[:-1] > 0
        out[kind] = int(widths[active & ~taken].sum())
        taken |= active
    return out | {"idle": int(widths[~taken].sum())}


@dataclass
class Split:
    """One rank's window. Times in ns."""

    window: int
    steps: int | None  # None: the trace has no marks
    on_gpu: bool
    time: dict[str, int]  # by PRIORITY and "idle", summing to the window
    communication: int  # its union, hidden and exposed
    attention_share: float  # of the kernel time on the compute streams (of operator self time on a CPU)
    counts: Counter  # events by kind
    unmatched: list[tuple[str, int]]  # the longest names no rule matches
    longest: list[tuple[str, int]]
    notes: list[str] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """Union of everything on the device."""
        return self.window - self.time["idle"] - self.time["host_optimizer"]

    @property
    def hidden(self) -> int:
        return self.communication - self.time["communication"]

    def scale(self, step_ms: float) -> float:
        """ms of the step for a ns of the window; see the module's docstring."""
        if not (self.on_gpu and self.steps):
            return step_ms / self.window
        return min(1e-6 / self.steps, step_ms / (self.window - self.time["idle"]))

    def full(self, step_ms: float) -> dict[str, float]:
        """Seven buckets in ms by union of intervals, summing to step_ms."""
        scale = self.scale(step_ms)
        out = {bucket: sum(self.time[k] for k in kinds) * scale for bucket, kinds in BUCKETS.items()}
        return out | {"idle": max(0.0, step_ms - sum(out.values()))}

    def check(self, world_size: int | None = None, min_attention: int = 0) -> None:
        """Raises ProfileError: a training step's bucket is empty, or has under `min_attention` attention kernels.

        Without that number attention may be missing: not every model has it.
        """
        longest = "; ".join(f"{name[:70]} ({ns / 1e6:.3f} ms)" for name, ns in self.longest[:3])
        what = f"of {self.counts.total()} events; a name missing in kernels.toml? Longest: {longest}"
        kinds = ["attention"] * bool(min_attention) + ["matmul"] + ["communication"] * ((world_size or 1) > 1)
        for kind in kinds:
            if not self.counts[kind]:
                raise ProfileError(f"no {kind}", what)
        if (found := self.counts["attention"]) < min_attention:
            raise ProfileError("lost events", f"{found} attention kernels where {min_attention} ran; run again")


def decompose(trace: Trace) -> Split:
    """Splits the window from the first to the last mark, or all that the device did where that ends later.

    A trace with device events is split by them alone, on the device with most; one without by its CPU operators.
    Raises ProfileError for "no events" and "no durations".
    """
    work, notes = [e for e in trace.events if e.category in DEVICE], []
    if on_gpu := bool(work):
        devices = Counter(e.device for e in work).most_common()
        work = [e for e in work if e.device == devices[0][0]]
        notes = [f"only device {devices[0][0]} of {len(devices)} in the trace is counted"] * (len(devices) > 1)
    elif any(e.category.startswith(("cuda_", "hip_")) for e in trace.events):
        raise ProfileError("no events", "kernels were launched, none was recorded: CUPTI did not attach (no rights?)")
    else:
        work = [e for e in trace.events if e.category in ("cpu_op", "operator", "user_annotation")]
    rule = {key: match(*key) for key in {e[:2] for e in work}}
    work = [e for e in work if rule[e[:2]] != ANNOTATION]
    if not work:
        raise ProfileError("no events", "the profile holds no kernel and no operator")
    if not any(e.end > e.start for e in work):
        raise ProfileError("no durations", f"all {len(work)} events last 0 us")

    by_kind: dict[str, list[Event]] = defaultdict(list)
    by_name: Counter[tuple[str, str]] = Counter()
    for event in work:
        by_kind[rule[event[:2]] or "other"].append(event)
        by_name[event[:2]] += event.end - event.start
    window = min(e.start for e in work), max(e.end for e in work)
    if trace.marks:
        marked = trace.marks[0][0], max(end for _, end in trace.marks)
        window = marked if window[1] <= marked[1] or not on_gpu else window
    spans = {kind: [e[2:4] for e in events] for kind, events in by_kind.items()}
    host = [e for e in trace.events if on_gpu and "gpu" not in e.category and HOST_OPTIMIZER.match(e.name)]
    spans["host_optimizer"] = [e[2:4] for e in host]

    lanes: Counter[str] = Counter()
    for lane in {e.lane for kind in ("attention", "matmul") for e in by_kind[kind]}:
        lanes.update(exclusive({k: [e[2:4] for e in by_kind[k] if e.lane == lane] for k in COMPUTE}, window))
    longest = [(key, ns) for key, ns in by_name.most_common() if ns]
    time = exclusive(spans, window)
    if time["idle"] == window[1] - window[0]:
        raise ProfileError("no events", "nothing ran inside the marked steps")
    return Split(
        window=window[1] - window[0],
        steps=len(trace.marks) or None,
        on_gpu=on_gpu,
        time=time,
        communication=exclusive({"communication": spans.get("communication", [])}, window)["communication"],
        attention_share=lanes["attention"] / max(1, sum(lanes[k] for k in COMPUTE)),
        counts=Counter({kind: len(events) for kind, events in by_kind.items()}),
        unmatched=[(key[0], ns) for key, ns in longest if rule[key] is None][:10],
        longest=[(key[0], ns) for key, ns in longest[:10]],
        notes=notes,
    )
