"""What this box runs: versions, host, environment. Nothing here holds a token, a home path or a user name.

python -m harness.measure.stack                  prints the stack
python -m harness.measure.stack --verify fa4     the installer's last step: fails unless it can train with fa4
"""

from __future__ import annotations

import argparse
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
    r"^(NCCL_|PYTORCH_|TORCH_NCCL|CUDA_|CUBLAS|OMP_|MKL_|GOMP_|KMP_|FLASH_ATTENTION_|FA_|TRITON_|DS_|NVTE_|GLOO_|LD_PRELOAD)"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.I)


def use_venv_extensions() -> None:
    """DeepSpeed's compiled ops live in the venv, and its ninja is found: call before importing deepspeed.

    The installer builds them there; a folder shared between stacks would let one load the other's op.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    binaries = str(Path(sys.prefix) / "bin")
    path = os.environ.get("PATH", "")
    if binaries not in path.split(os.pathsep):
        os.environ["PATH"] = binaries + os.pathsep + path


def collect(backend: str | None = None) -> records.Stack:
    """Versions in this environment; with a backend, its attention package, else whichever is installed."""
    packages = [attention.PACKAGES[backend]] if backend in attention.PACKAGES else []
    if backend is None:
        packages = list(attention.PACKAGES.values())
    found = [f"{p.distribution} {v}" for p in packages if (v := attention.version(p.distribution))]
    return records.Stack(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        transformers=attention.version("transformers"),
        deepspeed=attention.version("deepspeed"),
        liger_kernel=attention.version("liger-kernel"),
        triton=attention.version("triton"),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        attention_package=found[0] if found else None,
    )


def host(nodes: list[str] | None = None) -> records.Host:
    """CPU, memory and threads of this node, in GiB; `nodes` are the node names in rank order."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    shm = Path("/dev/shm")
    return records.Host(
        cpu=model[1].strip() if model else platform.processor() or platform.machine() or None,
        sockets=len(set(re.findall(r"^physical id\s*:\s*(\d+)", info, re.M))) or None,
        cores=psutil.cpu_count(logical=False),
        ram_gib=round(psutil.virtual_memory().total / 2**30, 1),
        shm_gib=round(shutil.disk_usage(shm).total / 2**30, 2) if shm.is_dir() else None,
        omp_threads=torch.get_num_threads(),
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        nodes=nodes or [],
    )


def environment() -> dict[str, str]:
    """The variables that can change a step's time, without secrets, home paths or user names."""
    chosen = {k: v for k, v in os.environ.items() if VARIABLES.match(k) and not SECRET.search(k)}
    return {k: _private(v) for k, v in sorted(chosen.items())}


def _private(value: str) -> str:
    value = value.replace(str(Path.home()), "~")
    value = re.sub(r"/(home|Users)/[^/:\s]+|/root\b", "~", value)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return value
    return re.sub(rf"(?<=/){re.escape(user)}(?=/|$)", "~", value)


def git_commit() -> str | None:
    """Commit of this checkout, with `+changes` when tracked files differ; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def verify(backend: str) -> list[str]:
    """Imports all that training imports and runs the attention; the problems found, none when all is well."""
    use_venv_extensions()
    import deepspeed  # noqa: F401  (raises when the CUDA toolkit is missing)
    import transformers.modeling_utils  # noqa: F401  (raises with a torchvision of another torch)

    cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else None
    try:
        attention.require(backend, capability)
        seen = attention.probe(backend, "cuda" if cuda else "cpu")
    except (attention.AttentionUnavailable, ValueError) as error:
        return [str(error)]
    print(f"attention  {backend}: {seen.function}, off fp32 by {seen.max_error:.2%}")
    print(f"           kernels: {', '.join(seen.kernels) or 'none seen'}")
    return []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", metavar="BACKEND", choices=list(attention.BACKENDS))
    parser.add_argument("--cuda", action="store_true", help="fail unless torch is a CUDA build")
    options = parser.parse_args(argv)
    for key, value in collect(options.verify).model_dump().items():
        print(f"{key:18} {value if value is not None else '-'}")
    problems = [f"torch {torch.__version__} has no CUDA"] if options.cuda and torch.version.cuda is None else []
    if options.verify and not problems:
        problems = verify(options.verify)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
