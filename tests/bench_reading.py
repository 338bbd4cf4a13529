"""How fast the readers are beside plain json.loads, and how long it takes to a verdict. Nothing is asserted.

python tests/bench_reading.py [--records 1000000] [--lines 100000]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness import flops, records  # noqa: E402
from harness.report.reading import read_box  # noqa: E402


def write(path: Path, count: int) -> None:
    """A sweep of `count` step records over six lengths, as benchmark.py writes them."""
    run = records.Run(
        kind="sweep",
        run_id="bench",
        started="2026-01-01T00:00:00Z",
        gpu=records.Gpu(device="cuda", name="NVIDIA H200", count=8, peak_tflops=989),
        stack=records.Stack(python="3.12", torch="2.13.0+cu130"),
        model=records.Model(
            name="8b", weights="random", num_layers=32, parameters=1, config=flops.shape("llama-3.1-8b")
        ),
        recipe=records.Recipe(
            name="custom", zero_stage=3, offload_optimizer=True, grad_checkpoint=True, use_liger=True,
            liger_applied=True, batch_size=1, grad_accum=1, compile=False,
        ),
    )  # fmt: skip
    state = records.GpuState(sm_clock_mhz=1980, power_w=5200, temperature_c=61, throttle=[])
    lengths = [8192, 32768, 65536, 131072, 196608, 262144]
    with path.open("w") as out:
        out.write(records.dump(run) + "\n")
        for n in lengths:
            work = flops.count(run.model.config, n).total_tflop
            step = records.Step(
                run_id="bench", seq_len=n, step=0, warmup=False, exec_time_ms=work / 0.4, tflops=400, loss=1.5,
                peak_mem_gib=16.3, peak_allocated_gib=15.1, alloc_retries=0, gpu_state=state,
            )  # fmt: skip
            line = records.dump(step) + "\n"
            out.writelines(line.replace('"step": 0', f'"step": {i}') for i in range(count // len(lengths)))
            out.write(
                records.dump(records.Summary(run_id="bench", seq_len=n, n=count // 6, median_ms=work / 0.4)) + "\n"
            )


def log(path: Path, count: int) -> None:
    """A log of the longest lines there are, Megatron-LM's, all of another step."""
    line = (ROOT / "tests/data/logs/megatron_16x_h100_mixtral_8x7b.log").read_text().splitlines()[0] + "\n"
    head, tail = line.split("43/", 1)
    with path.open("w") as out:
        out.writelines(f"{head}{i}/{tail}" for i in range(1, count + 1))


def read_log(path: Path, count: int) -> None:
    """Prints time and memory of a log's reading, and of json.loads over the same bytes as strings."""
    log(path, count)
    tracemalloc.start()
    read_box(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.process_time()
    read_box(path)
    ours = time.process_time() - start
    strings = [json.dumps(line) for line in path.open()]
    start = time.process_time()
    for text in strings:
        json.loads(text)
    plain = time.process_time() - start
    size = path.stat().st_size / 1e6
    print(f"log         {count / ours:10,.0f} lines/s     {ours:6.2f} s for {count:,} lines, {size:.0f} MB, CPU time")
    print(f"            {ours / plain:10.1f} times json.loads of the same text, {peak / 2**20:.0f} MiB at most")


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--lines", type=int, default=100_000)
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sweep_bench.jsonl"
        write(path, count)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        points = read_box(path).sweeps[0].points
        ours = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        with path.open() as lines:
            for line in lines:
                json.loads(line)
        plain = time.perf_counter() - start
        steps, size = sum(p.n for p in points.values()), path.stat().st_size
    print(f"reader      {steps / ours:10,.0f} records/s   {ours:6.2f} s for {steps:,} steps, {size / 1e6:.0f} MB")
    print(f"json.loads  {steps / plain:10,.0f} records/s   {plain:6.2f} s")
    print(
        f"memory      {(after - before) / 1024:10.0f} MiB more than before, {steps * 32 / 2**20:.0f} of them step times"
    )
    with tempfile.TemporaryDirectory() as folder:
        read_log(Path(folder) / "run.log", parser.parse_args().lines)
    for script in ("should_upgrade.py", "plot_results.py --tables"):
        seconds = min(timed([sys.executable, *script.split()]) for _ in range(3))
        print(f"{script:24} {seconds:6.2f} s from start to result on the published data")


if __name__ == "__main__":
    main()
