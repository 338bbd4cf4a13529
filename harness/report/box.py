"""What the report knows of a box: its sweeps with their points, and what else was measured on it.

A figure that was not measured is None, and a length that gave none says why in `outcome` and `error`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness import gpus, records


@dataclass
class Point:
    """One length of a sweep. Times are of steady steps: no warm-up, no allocator retry, agreeing with their rate."""

    seq_len: int | None  # null: the log does not say
    outcome: Literal["measured", "partial", "oom", "failed", "not_run"]
    times_ms: tuple[float, ...] = ()  # empty where only a median is known
    median_ms: float | None = None
    ci_ms: tuple[float, float] | None = None  # 95 %
    n: int = 0
    weights: tuple[float, ...] = ()  # of times_ms: how many steps each is the mean of; none: equally many
    kind: Literal["step", "mean", "average"] = "step"  # what a time is; an average of the whole run has no interval
    per: Literal["step", "sample", "token", "token of a GPU"] = "step"  # what a time is of, where a step is not known
    tflops: float | None = None  # per GPU
    mfu: float | None = None  # 0..1 of the dense peak of the step's format
    peak_mem_gib: float | None = None
    peak_allocated_gib: float | None = None
    joules_per_token: float | None = None
    steady: bool | None = None
    throttled: bool | None = None
    failure_kind: str | None = None
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # by number of optimizer steps done, warm-up among them


@dataclass
class Sweep:
    file: Path
    run: records.Run
    points: dict[int | None, Point]  # ascending
    notes: list[str] = field(default_factory=list)


@dataclass
class Box:
    folder: Path
    name: str
    gpu: gpus.Gpu | None
    sweeps: list[Sweep] = field(default_factory=list)  # by file name: the newest last
    decompositions: list[tuple[records.Run, records.Decomposition]] = field(default_factory=list)
    attention: list[tuple[records.Run, records.AttentionTime]] = field(default_factory=list)
    ceilings: list[tuple[records.Run, records.Ceiling]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def named(gpu: gpus.Gpu) -> Box:
    """A GPU that only its name is known of: its specification, and nothing measured."""
    return Box(Path(), gpu.label, gpu)


class NothingUsable(ValueError):
    """No measurement in any file; the message says what was seen instead."""


class Missing(ValueError):
    """A fact no log says and the answer needs; the message is one line with what to write where."""


def specification(gpu: records.Gpu) -> gpus.Gpu | None:
    """What is known of a run's GPU; None for a CPU, a slice and an unknown one."""
    return gpus.identify(gpu.name, gpu.capability, gpu.memory_gib) if gpu.device == "cuda" and not gpu.mig else None
