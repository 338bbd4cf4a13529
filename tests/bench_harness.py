"""Two ratios that show what the harness costs, measured side by side on this machine.

    python -m tests.bench_harness

1. A step as benchmark.py measures it over the same step in a bare DeepSpeed loop (two CPU ranks, alternating).
2. A sweep of four lengths in one launch over the same sweep with ISOLATE=1 (wall time, start to end).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import ROOT, environment

PAIRS = 100


def alternate() -> None:
    """On each of two ranks: the harness's step and a bare one in turn; rank 0 prints the medians."""
    import torch.distributed as dist

    from harness.measure import box, session, stack
    from harness.measure.launch import remove_shared_memory
    from harness.measure.settings import Settings

    stack.use_venv_extensions()
    box.use_accelerator()
    settings = Settings(_cli_parse_args=[], seq_len=512, results=Path(sys.argv[2])).resolve(False)
    trainer = session.start(settings, "sweep", "cpu")
    batch, engine = trainer.make_batch(512), trainer.engine
    measured, bare = [], []
    for number in range(PAIRS + 5):
        step = trainer.timed_step(batch, 512, number, warmup=False)
        dist.barrier()
        start = time.perf_counter()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        elapsed = [0.0] * dist.get_world_size()
        dist.all_gather_object(elapsed, (time.perf_counter() - start) * 1e3)
        if number >= 5:
            measured.append(step.exec_time_ms)
            bare.append(max(elapsed))
    if trainer.out:
        low, middle, high = statistics.quantiles([x / y for x, y in zip(measured, bare, strict=True)], n=4)
        print(
            f"RESULT step: {statistics.median(measured):.1f} ms measured, {statistics.median(bare):.1f} ms bare; "
            f"median ratio of {PAIRS} pairs {middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        )
    dist.barrier()
    dist.destroy_process_group()
    remove_shared_memory(os.environ["MASTER_PORT"])


def sweep_seconds(folder: str, isolate: int) -> float:
    variables = {"SEQLENS": "64 128 192 256", "STEPS": "5", "ISOLATE": str(isolate), "FRESH": "1", "RESULTS": folder}
    start = time.monotonic()
    command = [sys.executable, "-m", "harness.measure.sweep"]
    subprocess.run(command, cwd=ROOT, env=environment(**variables), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        env = environment(OMP_NUM_THREADS=str(max(1, os.cpu_count() // 2)))
        done = subprocess.run([*command, "tests.bench_harness", "--rank", folder], cwd=ROOT, env=env,
                              capture_output=True, text=True)  # fmt: skip
        found = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        print(found[0] if found else done.stderr[-2000:], flush=True)
        together, apart = sweep_seconds(folder, 0), sweep_seconds(folder, 1)
        print(f"four lengths: {together:.1f} s in one launch, {apart:.1f} s isolated: ratio {together / apart:.2f}")


if __name__ == "__main__":
    alternate() if "--rank" in sys.argv else main()
