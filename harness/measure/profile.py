"""Profiled steps as a Chrome trace, which harness.kernels reads: a live run and `--trace FILE` are the same code.

The host's operators are recorded too: their ProfilerStep marks bound the steps, and without a GPU they are the work.
"""

import gzip
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from harness import kernels
from harness.measure import memory

# Kineto's top level names the machine and the file; a kept trace is made to be passed on.
_PRIVATE = re.compile(r'"(host_name|traceName)":\s*"(?:[^"\\]|\\.)*"')


def record(step: Callable[[], object], steps: int, device: str, keep: Path | None = None) -> kernels.Trace:
    """The trace of `steps` calls of `step`, each between device synchronisations, after one window thrown away: a
    session's first kernels can be lost, and starting the profiler costs time.

    keep: where the trace file (.json or .json.gz) stays, without the machine's name; None: nowhere. Raises OSError
    before anything runs where the temporary folder has no room; one that cannot be kept is only said.
    """
    if reason := memory.no_room(Path(tempfile.gettempdir())):
        raise OSError(f"{reason} for a trace in {tempfile.gettempdir()}; TMPDIR names another folder")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    for window in (1, steps):
        with profile(activities=activities) as profiler:
            for number in range(window):
                memory.synchronize(device)
                with record_function(f"ProfilerStep#{number}"):
                    step()
                    memory.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        if keep:
            _keep(_PRIVATE.sub(r'"\1": ""', exported.read_text(errors="replace")).encode(), keep)
        return kernels.read_trace(exported)


def _keep(trace: bytes, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if reason := memory.no_room(path.parent):
            raise OSError(reason)
        path.write_bytes(gzip.compress(trace, 6) if path.suffix == ".gz" else trace)
    except OSError as error:
        path.unlink(missing_ok=True)
        print(f"# the trace is not kept: {error}", flush=True)
