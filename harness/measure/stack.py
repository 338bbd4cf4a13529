"""What this box runs: versions, host, environment. Nothing here holds a token, a home path or a user name.

python -m harness.measure.stack        prints the versions
"""

import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from harness import records
from harness.measure import attention

ROOT = Path(__file__).resolve().parents[2]
# What can change a step's time without being a setting of ours.
VARIABLES = re.compile(
    r"(NCCL|PYTORCH|TORCH|CUDA|CUBLAS|OMP|MKL|GOMP|KMP|OPENBLAS|FLASH_ATTENTION|FA|TRITON|DS|GLOO|UCX|FI)_|LD_PRELOAD$"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.I)


def use_venv_extensions() -> None:
    """DeepSpeed's compiled ops live in the virtual environment, and its ninja is found: call before a DeepSpeed op.

    A folder shared between stacks, as torch's default is, lets one load an op that another built.
    """
    if sys.prefix == sys.base_prefix:
        return
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    path, programs = os.environ.get("PATH", ""), str(Path(sys.prefix) / "bin")
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = programs + os.pathsep + path


def collect(backend: str | None = None) -> records.Stack:
    """Versions in this environment; with a backend, its attention package, else whichever is installed."""
    wanted = list(attention.PACKAGES) if backend is None else [backend]
    names = [attention.PACKAGES[b].distribution for b in wanted if b in attention.PACKAGES]
    found = [f"{name} {version}" for name in names if (version := attention.version(name))]
    return records.Stack(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        **{p.replace("-", "_"): attention.version(p) for p in ("transformers", "deepspeed", "liger-kernel", "triton")},
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        attention_package=found[0] if found else None,
    )


def host(nodes: list[str] | None = None) -> records.Host:
    """CPU, memory (GiB) and threads of this node; `nodes` are the names of all nodes, in rank order."""
    info, shm = Path("/proc/cpuinfo"), Path("/dev/shm")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)  # absent on Arm
    return records.Host(
        cpu=model[1].strip() if model else platform.processor() or platform.machine() or None,
        sockets=len(set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.M))) or None,
        cores=psutil.cpu_count(logical=False),
        ram_gib=round(psutil.virtual_memory().total / 2**30, 1),
        shm_gib=round(shutil.disk_usage(shm).total / 2**30, 2) if shm.is_dir() else None,
        omp_threads=torch.get_num_threads(),
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        nodes=nodes or [],
    )


def environment() -> dict[str, str]:
    """The variables that can change a step's time, made private."""
    chosen = {k: v for k, v in os.environ.items() if VARIABLES.match(k) and not SECRET.search(k)}
    return {name: private(value) for name, value in sorted(chosen.items())}


def private(text: str) -> str:
    """The text without home folders and, in paths, without the user's name."""
    text = re.sub(re.escape(str(Path.home())) + r"(?=[/:\s]|$)", "~", text)
    text = re.sub(r"/(home|Users)/[^/:\s]+|/root(?=[/:\s]|$)", "~", text)
    try:
        return re.sub(rf"(?<=/){re.escape(getpass.getuser())}(?=[/:\s]|$)", "~", text)
    except (KeyError, OSError):  # a user without a name, as in some containers
        return text


def git_commit() -> str | None:
    """Commit of this checkout, with `+changes` when tracked files differ; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def show(backend: str | None = None) -> None:
    """Prints the versions, one a line."""
    for key, value in collect(backend).model_dump().items():
        print(f"{key:18} {'-' if value is None else value}")


if __name__ == "__main__":
    show()
