"""Synchronisation, peak memory and the clock between the parts of a step, on a GPU and on a CPU.

On a CPU "memory" is the resident set of the process, whose peak Linux keeps and lets us reset.
"""

import contextlib
import gc
import re
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

PHASES = ("forward", "backward", "optimizer")
SOURCE = {
    "cuda": "torch's caching allocator: reserved (and allocated), peak of the timed steps, worst rank",
    "cpu": "resident set of the rank's process (VmHWM), peak of the timed steps, worst rank; no GPU memory",
}


# Free disk asked for before a snapshot or a trace is written, whose size nobody knows before; chosen, not measured.
ROOM_GIB = 2


@dataclass
class Gib:
    reserved: float | None
    allocated: float | None


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset(device: str) -> None:
    """Forget the peak so far, and give back what is only cached."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # not Linux, or a hardened container: the peak then includes loading
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, see proc(5)


def peak_gib(device: str) -> Gib:
    """Peak since `reset`, GiB."""
    if device == "cuda":
        return Gib(torch.cuda.max_memory_reserved() / 2**30, torch.cuda.max_memory_allocated() / 2**30)
    return Gib(_resident("VmHWM"), None)


def current_gib(device: str) -> Gib:
    if device == "cuda":
        return Gib(round(torch.cuda.memory_reserved() / 2**30, 3), round(torch.cuda.memory_allocated() / 2**30, 3))
    return Gib(_resident("VmRSS"), None)


def _resident(key: str) -> float | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    except OSError:
        return None
    return round(int(found[1]) / 2**20, 3) if found else None


def alloc_retries(device: str) -> int | None:
    """How often the allocator had to free its cache and try again; each is a silent stall."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if device == "cuda" else None


def start_history(device: str) -> None:
    if device == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def no_room(folder: Path) -> str | None:
    """Why nothing large should be written there, or None. What is measured goes to small files, which need the rest."""
    free = shutil.disk_usage(folder).free / 2**30
    return None if free >= ROOM_GIB else f"No space left on device: {free:.2f} GiB free, {ROOM_GIB} GiB are asked for"


def dump_history(device: str, path: Path) -> str:
    """Write the allocator's history for pytorch.org/memory_viz and stop it; says what was done. Raises no OSError."""
    if device != "cuda":
        return "no memory snapshot: the CPU has no caching allocator"
    try:
        if not (reason := no_room(path.parent)):
            torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        reason = str(error)
        path.unlink(missing_ok=True)  # half of it is of no use, and the records need the room
    torch.cuda.memory._record_memory_history(enabled=None)
    return f"no memory snapshot: {reason}" if reason else f"memory snapshot: {path}"


class PhaseClock:
    """Time between named borders of a step, without stopping the device: events on a GPU, wall clock on a CPU."""

    def __init__(self, device: str):
        self.device = device
        self.marks: list[tuple[str, object]] = []

    def mark(self, name: str) -> None:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds in each phase, summed over micro-steps. The device must be synchronised by now."""
        phases: Counter[str] = Counter()
        for (name, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            phases[name] += begin.elapsed_time(end) if self.device == "cuda" else (end - begin) * 1e3
        return phases
