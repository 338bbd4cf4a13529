"""Result files: results/<gpu>/<kind>_<timestamp>.jsonl, one record a line, written so that a killed process or a full
disk loses no more than the record it was at.

    path = result_file.new("results", "NVIDIA H200", "sweep")
    with result_file.Writer(path) as out:
        out.write(records.Step(run_id=..., seq_len=8192, ...))
"""

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from harness import records


class Writer(contextlib.AbstractContextManager):
    """Appends records, each with a single write, so that no killed process leaves two halves in one line.

    If the file ends in half a line (a writer was killed), a newline is put first, so the half is lost alone.
    Raises OSError when the disk is full: what was written before stays.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, record: records.Base) -> None:
        data = (records.dump(record) + "\n").encode()
        if os.write(self._fd, data) != len(data):
            os.write(self._fd, b"\n")  # raises ENOSPC when that is why; else ends the half line
            raise OSError(f"{self.path}: only half a record could be written")

    def close(self) -> None:
        os.close(self._fd)

    def __exit__(self, *exc) -> None:
        self.close()


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def folder(results: Path, gpu_name: str) -> Path:
    """The box's folder under `results`: `nvidia-h200` for an `NVIDIA H200`."""
    return results / (re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-") or "unknown")


def new(results: Path, gpu_name: str, kind: str) -> Path:
    """results/<gpu>/<kind>_<timestamp>.jsonl, never an existing one."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    base = folder(results, gpu_name)
    base.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = base / f"{kind}_{stamp}{suffix}.jsonl"
        with contextlib.suppress(FileExistsError):
            path.open("x").close()
            return path
    raise FileExistsError(f"{base}: a hundred {kind} files within one second")
