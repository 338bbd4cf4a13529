"""The run record that every result file starts with: what ran, on what, with which settings."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic_settings import BaseSettings

from harness import records
from harness.measure import stack


def run_record(kind: str, settings: BaseSettings, gpu: records.Gpu, backend: str | None = None, **more) -> records.Run:
    """`backend`: the attention used, None where it plays no part. `more`: further fields of records.Run."""
    plain = int | float | list | None
    chosen = {k: v if isinstance(v, plain) else stack.private(str(v)) for k, v in settings.model_dump().items()}
    return records.Run(
        kind=kind, run_id=records.new_run_id(), started=records.now(), settings=chosen, gpu=gpu,
        argv=[Path(sys.argv[0]).name, *map(stack.private, sys.argv[1:])],
        stack=stack.collect(backend), environment=stack.environment(), git_commit=stack.git_commit(),
        **({"host": stack.host()} | more),
    )  # fmt: skip


class Results(records.Writer):
    """A new file of the run's kind in the box's folder. What is kept is also printed, a JSON line each, and in `rows`.

    Its first line, and what is printed first, say what ran on what. `on_cpu`: what to say more without a GPU.
    """

    def __init__(self, run: records.Run, results: Path, on_cpu: str = ""):
        gpu, on_gpu = run.gpu, run.gpu.device == "cuda"
        super().__init__(records.new_file(results, gpu.name if on_gpu else "cpu", run.kind))
        self.rows: list = []
        self.write(run)
        if not on_gpu:
            print(f"# These figures describe this CPU ({gpu.name}) and no GPU{on_cpu}.")
        package = run.stack.attention_package or "no attention package"
        print(f"# {gpu.count} x {gpu.name}, torch {run.stack.torch}, {package}, {self.path}", flush=True)

    def keep(self, record) -> None:
        self.write(record)
        self.rows.append(record)
        print(records.dump(record), flush=True)
