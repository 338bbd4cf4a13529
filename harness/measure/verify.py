"""The installer's last steps: compile DeepSpeed's ops once, and prove that this stack can train.

    python -m harness.measure.verify --build-ops           compiles the ops into this virtual environment
    python -m harness.measure.verify --attn fa4 --gpu      fails unless this stack can train with fa4 on a GPU

Exit codes: 0 done; 1 a build or a check failed (the reason is the last line); 2 wrong use.
"""

import argparse
import contextlib
import glob
import os
import re
import shutil
import sys
from pathlib import Path

import torch

from harness.measure import attention, stack
from harness.measure.failures import named_line


def build_ops() -> None:
    """Compiles the ops that training loads, one after the other in this process, so that no rank has to.

    Ops of another torch and locks that no process holds are removed first. Raises RuntimeError with the compiler's
    first error.
    """
    stack.use_venv_extensions()
    from deepspeed.accelerator import get_accelerator

    accelerator, folder = get_accelerator(), Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    built_for, now = folder / "built_for", stack.collect("sdpa").model_dump_json()
    if not built_for.exists() or built_for.read_text() != now:
        for op in filter(Path.is_dir, folder.iterdir()):
            shutil.rmtree(op)
        built_for.write_text(now)
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
    """Imports what training imports, prints the stack and runs the attention. Raises whatever is wrong."""
    stack.show(backend)
    stack.use_venv_extensions()
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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build-ops", action="store_true", help="compile DeepSpeed's ops")
    what.add_argument("--attn", choices=list(attention.BACKENDS), help="prove that training with it works here")
    parser.add_argument("--gpu", action="store_true", help="with --attn: on a GPU, and fail if torch sees none")
    options = parser.parse_args(argv)
    try:
        if options.build_ops:
            build_ops()
        else:
            verify(options.attn, options.gpu)
    except Exception as error:  # an import of a broken stack raises anything
        print(f"error: {named_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
