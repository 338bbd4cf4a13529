"""What several tests need: the project's root, and a sweep as a real process that can be watched and hurt."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
# The files that take longest, which are started first: one that starts last is waited for by itself.
LONG_FILES = ["faults", "training", "nodes", "gpu_suite", "fa4_compile", "companions", "readme", "attention", "install"]

# A shell's background job ignores Ctrl-C, and so would every program that the tests start in one.
signal.signal(signal.SIGINT, signal.default_int_handler)


def environment(**changed: str) -> dict[str, str]:
    """This process's variables without any of our settings, on the CPU."""
    from harness.measure.settings import SweepSettings

    ours = {name.upper() for name in SweepSettings.model_fields}
    return {k: v for k, v in os.environ.items() if k not in ours} | {"DS_ACCELERATOR": "cpu"} | changed


class SweepProcess:
    """A running sweep on two CPU ranks."""

    def __init__(self, results: Path, module: str = "harness.measure.sweep", **settings):
        self.results = results
        variables = {k.upper(): str(v) for k, v in settings.items()}
        # A lock file of its own: tests must not wait for a sweep of the user's.
        variables = {"RESULTS": str(results), "PRECISION": "0", "TMPDIR": str(results.parent)} | variables
        self.out = (results.parent / "sweep.out").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=environment(**variables),
            stdout=self.out,
            stderr=subprocess.STDOUT,
        )

    def file(self) -> Path | None:
        return next(iter(sorted(self.results.glob("cpu/sweep_*.jsonl"), reverse=True)), None)

    def records(self) -> list[dict]:
        found = []
        for line in self.file().read_text().splitlines() if self.file() else []:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def wait_for(self, timeout_s: float = 240, **fields) -> dict:
        """The newest record with these fields, once there is one that was not there when we were called."""
        seen = len(self.records())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for record in reversed(self.records()[seen:]):
                if all(record.get(k) == v for k, v in fields.items()):
                    return record
            assert self.process.poll() is None, self.output()
            time.sleep(0.05)
        raise AssertionError(f"no record with {fields} in {timeout_s} s:\n{self.output()}")

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find(self, word: str, **variables: str) -> psutil.Process:
        """The descendant whose command line has this word, and its environment these variables."""
        for p in self.tree():
            with contextlib.suppress(psutil.Error):
                if any(word in part for part in p.cmdline()) and variables.items() <= p.environ().items():
                    return p
        raise AssertionError(f"no process with {word} and {variables}")

    def rank(self, number: int) -> psutil.Process:
        return self.find("benchmark.py", LOCAL_RANK=str(number))

    def finish(self, timeout_s: float = 300) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def kill(self) -> None:
        for p in [*self.tree(), psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            with contextlib.suppress(psutil.Error):
                p.send_signal(signal.SIGKILL)


def alive(processes: list[psutil.Process], within_s: float = 15) -> list[psutil.Process]:
    """Those that still run after a while."""
    _, left = psutil.wait_procs(processes, timeout=within_s)
    return [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))  # stable: within a file nothing changes


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """What a test's code sets, such as where compiled ops are, is not the next test's."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def start_sweep(tmp_path):
    """start_sweep(SEQLENS="64 128", ...) -> SweepProcess; nothing of it outlives the test."""
    started: list[SweepProcess] = []

    def start(**settings) -> SweepProcess:
        started.append(SweepProcess(tmp_path / "results", **settings))
        return started[-1]

    yield start
    for sweep in started:
        sweep.kill()


@pytest.fixture(scope="session")
def python() -> str:
    return sys.executable
