"""first_look.sh's checks: what is launched, how much time is left, and the table; judging.py says what holds.

python -m tests.gpu.first_look --plan      the commands, with nothing but the standard library
python -m tests.gpu.first_look [WORD ...]  run those with one of the words in their name; run.sh does this
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 460  # of the 8 minutes; the rest is for the last table
LEAST_S = 30  # nothing that trains is done sooner
DTYPES = {"bf16": 0, "fp8": 0, "fp8_rowwise": 0, "mxfp8": 1, "nvfp4": 1}  # COMPILE: the last two need it


class Check(NamedTuple):
    name: str
    judge: str  # a function of judging.py
    program: str
    settings: dict


TWO_LAYERS = {"model": "llama-3.1-8b", "num_layers": 2, "weights": "random", "seq_len": 8192, "steps": 3}
SHORT = TWO_LAYERS | {"recipe": "short-context"}
CHECKS = [
    Check("attention side by side", "attention", "bench_flash_attn.py",
          {"attn": "all", "seqlens": "1024 8192 32768", "burst_ms": 200, "sustained_s": 0}),
    Check("long-context step", "step", "benchmark.py", TWO_LAYERS | {"recipe": "long-context"}),
    *(Check(f"short-context step, DTYPE={word}", "dtype", "benchmark.py", SHORT | {"dtype": word, "compile": compiled})
      for word, compiled in DTYPES.items()),
    Check("decomposition", "decomposition", "bench_decompose.py", SHORT | {"seq_len": 16384}),
    Check("ceilings", "ceilings", "bench_ceilings.py", {"budget_s": 2, "seq_len": 1024}),
    # 70,000 bf16 values a token and layer are kept for the backward, so eight layers want 290 GB beside the model.
    Check("out-of-memory with Liger", "out_of_memory", "run_sweep.sh",
          SHORT | {"num_layers": 8, "seqlens": 262144, "use_liger": 1}),
]  # fmt: skip
REHEARSED = {"model": "tiny", "num_layers": 1, "seq_len": 64, "seqlens": "64 128 256", "budget_s": 0.2, "burst_ms": 50}


def plan() -> str:
    def command(check: Check) -> str:
        words = [f'{k.upper()}="{v}"' if " " in str(v) else f"{k.upper()}={v}" for k, v in check.settings.items()]
        program = {"benchmark.py": "deepspeed --num_gpus=1 benchmark.py", "run_sweep.sh": "./run_sweep.sh",
                   "bench_decompose.py": "deepspeed --num_gpus=1 bench_decompose.py"}  # fmt: skip
        return " ".join([*words, program.get(check.program, f"python {check.program}")])

    return "\n".join(f"  {check.name}\n    {command(check)}" for check in CHECKS)


def look(check: Check, folder: Path, limit_s: float) -> list[tuple[str, str, bool | None]]:
    """The check's rows: name, figure, holds (None: not run)."""
    import pytest

    from harness.measure.launch import launcher_command
    from tests.gpu import judging, launches

    settings = dict(check.settings)
    if launches.REHEARSAL:
        settings |= {k: v for k, v in REHEARSED.items() if k in settings}
        settings |= {"attn": "sdpa"} if check.judge == "attention" else {}
    elif launches.model_name() != "llama-3.1-8b" and "model" in settings:
        settings["model"] = launches.model_name()
    launched = {"run_sweep.sh": launches.SWEEP, "bench_ceilings.py": (check.program,)}
    command = launched.get(check.program) or (check.program,)
    if check.program in ("benchmark.py", "bench_decompose.py"):
        command = launcher_command(check.program, [], ["--num_gpus", "1"])[1:]
    try:
        if launches.REHEARSAL and check.judge == "out_of_memory":
            return [(check.name, "a CPU has no such thing", None)]
        found = launches.launch(folder, *command, limit_s=limit_s, **settings)
        return getattr(judging, check.judge)(check, found)
    except pytest.skip.Exception as reason:
        return [(check.name, str(reason), None)]
    except subprocess.TimeoutExpired:
        return [(check.name, f"not done in the {limit_s:.0f} s that were left", False)]
    except launches.LaunchError as error:
        if error.returncode == 2 and "dtype" in settings:
            return [(check.name, f"refused: {judging.refusal(error.lines)}", None)]
        return [(check.name, str(error), False)]


def main(words: list[str]) -> int:
    if words == ["--plan"]:
        print(plan())
        return 0
    from tests.gpu import launches

    chosen = [c for c in CHECKS if not words or any(word in c.name for word in words)]
    if not chosen:
        print(f"no check's name has {' or '.join(words)} in it; there are: {', '.join(c.name for c in CHECKS)}")
        return 2
    rows, deadline = [], time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as place:
        for number, check in enumerate(chosen):
            left = deadline - time.monotonic()
            if left < LEAST_S:
                rows.append((check.name, "no time was left", None))
                continue
            print(f"{check.name} ... ({left:.0f} s left)", flush=True)
            rows += look(check, Path(place) / str(number), left)
    launches.show(rows)
    return int(any(holds is False for _, _, holds in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
