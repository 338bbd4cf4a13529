"""A measuring script around its measurements: settings, the run record, the result file, and how an error ends it."""

import contextlib
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import records
from harness.measure import result_file, stack
from harness.measure.settings import Common


def run_record(kind: str, settings: Common, gpu: records.Gpu, backend: str | None = None, **more) -> records.Run:
    """`backend`: the attention used, None where it plays no part. `more`: further fields of records.Run."""
    plain = int | float | list | None
    chosen = {k: v if isinstance(v, plain) else stack.private(str(v)) for k, v in settings.model_dump().items()}
    return records.Run(
        kind=kind, run_id=secrets.token_hex(6), started=result_file.now(), settings=chosen, gpu=gpu,
        argv=[Path(sys.argv[0]).name, *map(stack.private, sys.argv[1:])],
        stack=stack.collect(backend), environment=stack.environment(), git_commit=stack.git_commit(),
        **({"host": stack.host()} | more),
    )  # fmt: skip


class Results(result_file.Writer):
    """A new file of the run's kind in the box's folder. What is kept is also printed, a JSON line each, and in `rows`.

    Its first line, and what is printed first, say what ran on what. `on_cpu`: what to say more without a GPU.
    Leaving it shows the rows, also when an error or Ctrl-C is why.
    """

    def __init__(self, run: records.Run, results: Path, show: Callable[[list], None], on_cpu: str = ""):
        gpu, on_gpu = run.gpu, run.gpu.device == "cuda"
        super().__init__(result_file.new(results, gpu.name if on_gpu else "cpu", run.kind))
        self.rows: list = []
        self.show = show
        self.write(run)
        if not on_gpu:
            print(f"# These figures describe this CPU ({gpu.name}) and no GPU{on_cpu}.")
        package = run.stack.attention_package or "no attention package"
        print(f"# {gpu.count} x {gpu.name}, torch {run.stack.torch}, {package}, {self.path}", flush=True)

    def keep(self, record) -> None:
        self.write(record)
        self.rows.append(record)
        print(records.dump(record), flush=True)

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.show(self.rows)


@contextlib.contextmanager
def errors_end_the_script() -> Iterator[None]:
    """Exit code 1 with the reason as the last line, for Ctrl-C too. A traceback only for an error without a `kind`.

    Under a launcher the process ends at once: the other ranks wait for this one, and it would wait for them.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        reason = str(error)
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted; what was measured is kept"
        elif not hasattr(error, "kind"):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}; what was measured is kept"
        sys.stdout.flush()
        print(f"error: {reason}", file=sys.stderr, flush=True)
        if "RANK" in os.environ:
            os._exit(1)
        sys.exit(1)
