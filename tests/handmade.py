"""Boxes made by hand, for tests of the report: an H200-like and a B200-like one with steps and everything recorded."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import should_upgrade
from harness import flops, gpus, records, stats
from harness.report.box import Box, Point, Sweep

NOISE = (0.0, 0.004, -0.003, 0.002, -0.005, 0.001, 0.003, -0.002, 0.0, -0.001)  # relative, median 0


def run(gpu="NVIDIA H200", **change) -> records.Run:
    """A measured 8-GPU run. Dotted keys change parts: run(**{"stack.torch": "2.10.0", "world_size": 4})."""
    capability = (9, 0) if "H200" in gpu else (10, 0)
    base = records.Run(
        kind="sweep",
        run_id="a1",
        started="2026-03-04T05:06:07Z",
        settings={"SEQLENS": "8192"},
        world_size=8,
        gpu=records.Gpu(device="cuda", name=gpu, count=8, capability=capability),
        stack=records.Stack(python="3.12.12", torch="2.13.0+cu130", cuda="13.0", transformers="5.14.1"),
        attention=records.Attention(requested="auto", backend="fa3" if "H200" in gpu else "fa4"),
        model=records.Model(
            name="8b", weights="real", num_layers=32, parameters=8030261248, config=flops.shape("llama-3.1-8b")
        ),
        recipe=records.Recipe(
            name="long-context", zero_stage=3, offload_optimizer=True, grad_checkpoint=True, use_liger=True,
            liger_applied=True, batch_size=1, grad_accum=1, compile=False,
        ),
        flop_convention=flops.CONVENTION,
    )  # fmt: skip
    for key, value in change.items():
        part, _, name = key.rpartition(".")
        if part:
            base = base.model_copy(update={part: getattr(base, part).model_copy(update={name: value})})
        else:
            base = base.model_copy(update={name: value})
    return base


def light(base: records.Run) -> records.Run:
    """The same run in a recipe for short context."""
    recipe = {"name": "short-context", "zero_stage": 2, "offload_optimizer": False, "grad_checkpoint": False}
    return base.model_copy(update={"recipe": base.recipe.model_copy(update=recipe)})


def point(seq_len: int, ms: float | None = None, outcome="measured", steps=10, **more) -> Point:
    """`steps` times around ms; without ms a length that gave none."""
    if ms is None:
        return Point(seq_len, outcome, **more)
    times = tuple(ms * (1 + x) for x in NOISE[:steps])
    median, low, high = stats.median_interval(times)
    interval = None if low is None else (low, high)
    return Point(seq_len, outcome, times, median, interval, len(times), steady=True, throttled=False, **more)


def box(base: records.Run, *points: Point, name="sweep_1.jsonl", **more) -> Box:
    gpu = gpus.identify(base.gpu.name, base.gpu.capability) if base.gpu.device == "cuda" and not base.gpu.mig else None
    sweep = Sweep(Path(name), base, {p.seq_len: p for p in points})
    return Box(Path("."), gpu.label if gpu else base.gpu.name, gpu, [sweep], **more)


def decomposition(seq_len: int, step_ms: float | None = None, busy=None, **ms: float) -> records.Decomposition:
    """Two buckets named attention and everything_else, or any others as the full split."""
    named = [records.Bucket(name=k.replace("everything_else", "everything else"), ms=v) for k, v in ms.items()]
    two = set(ms) == {"attention", "everything_else"}
    rest = sum(ms.values()) - ms["attention"]
    halves = [records.Bucket(name="attention", ms=ms["attention"]), records.Bucket(name="everything else", ms=rest)]
    return records.Decomposition(
        run_id="d1", seq_len=seq_len, step_ms=step_ms or sum(ms.values()), two=halves, full=[] if two else named,
        busy_share=busy,
    )  # fmt: skip


def ceiling(name: str, value: float | None, **more) -> records.Ceiling:
    return records.Ceiling(run_id="c1", what="matmul", name=name, value=value, unit="TFLOPS", **more)


def upgrade(*args: str) -> tuple[int, str, str]:
    """should_upgrade.py in this process: exit code, standard output with its blanks folded, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = should_upgrade.main(list(args))
        except SystemExit as end:
            code = end.code
    return code, " ".join(out.getvalue().split()), err.getvalue()
