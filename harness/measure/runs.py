"""The run record that every result file starts with: what ran, on what, with which settings."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic_settings import BaseSettings

from harness import records
from harness.measure import stack


def run_record(kind: str, settings: BaseSettings, gpu: records.Gpu, backend: str | None = None, **more) -> records.Run:
    """`backend`: the attention used, None where it plays no part. `more`: further fields of records.Run."""
    described = {
        "host": stack.host(),
        "stack": stack.collect(backend),
        "environment": stack.environment(),
        "git_commit": stack.git_commit(),
    }
    return records.Run(
        kind=kind,
        run_id=records.new_run_id(),
        started=records.now(),
        argv=[Path(sys.argv[0]).name, *map(stack.private, sys.argv[1:])],
        settings={
            k: v if v is None or isinstance(v, int | float | list) else stack.private(str(v))
            for k, v in settings.model_dump().items()
        },
        gpu=gpu,
        **(described | more),
    )


def open_file(run: records.Run, results: Path) -> records.Writer:
    """A new file of the run's kind in the box's folder, with the run record as its first line."""
    name = run.gpu.name if run.gpu.device == "cuda" else "cpu"
    writer = records.Writer(records.new_file(results, name, run.kind))
    writer.write(run)
    return writer
