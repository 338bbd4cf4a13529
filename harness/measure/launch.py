"""One run of the DeepSpeed launcher: started in a process group of its own, watched, and ended without a trace.

Every rank stays in the launcher's process group. A guard in that group kills it when this process is gone, however
it went: the guard reads a pipe of which we hold the other end.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import psutil

from harness import records

ROOT = Path(__file__).resolve().parents[2]

# read returns at the end of file, when the process that started us has ended; then the whole group goes.
_GUARD = 'exec 3<&0; (read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'
KEPT_LINES = 5000  # of the output's end, and as many of its start: the first error comes early


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def remove_shared_memory(port: int | str) -> None:
    """Remove what DeepSpeed's CPU communication left in /dev/shm for this master port: it never does so itself, and
    some tens of MiB a rank and launch fill it up. Call when the ranks have ended, or no longer need it by name."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def launcher_command(script: str, flags: list[str], where: list[str], port: int | None = None) -> list[str]:
    """DeepSpeed's launcher. where: --num_gpus, --include or --hostfile; port: None takes a free one."""
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.runner", "--master_port", str(port or free_port())]
    return [*launcher, *where, str(ROOT / script), *flags]


class Launch:
    """A running launcher. Its output goes to the log file and is kept for the diagnosis."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path):
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self.log = log
        self.process = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.ExitStack() as stack:
            log = None
            with contextlib.suppress(OSError):
                log = stack.enter_context(self.log.open("a"))
            for line in self.process.stdout:
                (self._head if len(self._head) < KEPT_LINES else self._tail).append(line.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # a full disk must not stop the reading
                    if log:
                        log.write(line)
                        log.flush()

    def poll(self) -> int | None:
        """The launcher's return code once it has ended, and `lines` is complete, but for ranks that outlive it."""
        code = self.process.poll()
        if code is not None:
            self._reader.join(timeout=2)
        return code

    @property
    def lines(self) -> list[str]:
        """What the launcher and its ranks printed: the start and the end."""
        return [*self._head, *self._tail]

    def members(self) -> list[psutil.Process]:
        """Processes of the group that still run."""
        found = []
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(p.pid) == self.process.pid and p.status() != psutil.STATUS_ZOMBIE:
                    found.append(p)
        return found

    def end(self, patience_s: float = 10) -> None:
        """Interrupt, then kill whatever is left of the group, and wait until it is gone."""
        if self.process.poll() is None:
            # The launcher ends its ranks on SIGINT, on other nodes too.
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.poll()
            if not self.members() or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.process.stdin.close()
        self._reader.join(timeout=5)


class Tail:
    """New whole records of a file that others append to, from `start` (bytes; None: its present end) on."""

    def __init__(self, path: Path, start: int | None = None):
        self.path = path
        self._offset = path.stat().st_size if start is None else start
        self._rest = b""

    def read(self) -> list[records.Base]:
        with self.path.open("rb") as f:
            f.seek(self._offset)
            data = f.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # half a line that a killed writer left
                found.append(records.parse(line))
        return found
