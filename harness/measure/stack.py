"""What this box runs: versions, host, environment. Nothing here holds a token, a home path or a user name.

    python -m harness.measure.stack                        prints the stack
    python -m harness.measure.stack --build-ops            compiles DeepSpeed's ops into this virtual environment
    python -m harness.measure.stack --verify fa4 --gpu     fails unless this stack can train with fa4 on a GPU

Exit codes: 0 done; 1 a build or a check failed (the reason is the last line); 2 wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import glob
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
        transformers=attention.version("transformers"),
        deepspeed=attention.version("deepspeed"),
        liger_kernel=attention.version("liger-kernel"),
        triton=attention.version("triton"),
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


private = private


def git_commit() -> str | None:
    """Commit of this checkout, with `+changes` when tracked files differ; None outside a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def build_ops() -> None:
    """Compiles the ops that training loads, one after the other in this process, so that no rank has to.

    Ops of another torch and locks that no process holds are removed first. Raises RuntimeError with the compiler's
    first error.
    """
    use_venv_extensions()
    from deepspeed.accelerator import get_accelerator

    accelerator, folder = get_accelerator(), Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    built_for, stack = folder / "built_for", collect("sdpa").model_dump_json()
    if not built_for.exists() or built_for.read_text() != stack:
        for op in filter(Path.is_dir, folder.iterdir()):
            shutil.rmtree(op)
        built_for.write_text(stack)
    for lock in folder.glob("*/lock"):
        if not _held(lock):
            lock.unlink()  # torch would wait for it for ever
    builders = ["CPUAdamBuilder", "FusedAdamBuilder"] + ["ShareMemCommBuilder"] * (accelerator.device_name() == "cpu")
    for builder in builders:
        op = accelerator.create_op_builder(builder)
        print(f"  {op.name}", flush=True)
        try:
            op.load(verbose=False)
        except Exception as error:  # DeepSpeed raises whatever the compiler, the toolkit or ninja made it raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            first = next((line for line in lines[1:] if re.search(r"\berror\b|not found|cannot find", line)), lines[0])
            raise RuntimeError(f"building DeepSpeed's {op.name} failed: {first}") from error


def _held(lock: Path) -> bool:
    """Whether a live builder has it: torch keeps the file open while it builds."""
    for descriptor in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's process, or one that just ended
            if os.path.samefile(descriptor, lock):
                return True
    return False


def verify(backend: str, gpu: bool) -> None:
    """Imports what training imports and runs the attention. Raises whatever is wrong."""
    use_venv_extensions()
    import deepspeed  # raises where the CUDA toolkit is missing
    import transformers.modeling_utils  # raises where a torchvision of another torch is left over

    for module in (torch, transformers, deepspeed):
        if not Path(module.__file__).is_relative_to(sys.prefix):
            raise RuntimeError(
                f"{module.__name__} comes from {module.__file__}, not from {sys.prefix}: unset PYTHONPATH"
            )
    if gpu and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: check the driver")
    capability = torch.cuda.get_device_capability() if gpu else None
    attention.require(backend, capability)
    seen = attention.probe(backend, "cuda" if gpu else "cpu")
    source = getattr(sys.modules.get(seen.function.rpartition(".")[0]), "__file__", None) or "built in"
    print(f"attention          {backend}: {seen.function} ({source}), {seen.max_error:.2%} off fp32")
    print(f"kernels            {', '.join(seen.kernels) or 'none seen by the profiler'}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-ops", action="store_true", help="compile DeepSpeed's ops")
    parser.add_argument("--verify", metavar="BACKEND", choices=list(attention.BACKENDS), help="fa4, fa3, fa2 or sdpa")
    parser.add_argument("--gpu", action="store_true", help="with --verify: on a GPU, and fail if torch sees none")
    options = parser.parse_args(argv)
    try:
        if options.build_ops:
            build_ops()
            return 0
        for key, value in collect(options.verify).model_dump().items():
            print(f"{key:18} {'-' if value is None else value}")
        if options.verify:
            verify(options.verify, options.gpu)
    except (RuntimeError, ImportError, OSError) as error:
        print(f"error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
