"""Made-up result folders of two boxes, for the tests of what is made from them."""

from pathlib import Path

import numpy as np

from harness import flops, records

CONFIG = flops.shape("llama-3.1-8b")
H200 = records.Gpu(device="cuda", name="NVIDIA H200", count=8, capability=(9, 0), peak_tflops=989)
B200 = records.Gpu(device="cuda", name="NVIDIA B200", count=8, capability=(10, 0), peak_tflops=2250)
CPU = records.Gpu(device="cpu", name="Some CPU", count=2)


def run(kind: str, run_id: str, gpu: records.Gpu, torch: str = "2.13.0+cu130", liger: bool = False) -> records.Run:
    return records.Run(
        kind=kind,
        run_id=run_id,
        started="2026-01-01T00:00:00Z",
        settings={"steps": 10},
        world_size=8,
        gpu=gpu,
        stack=records.Stack(python="3.12", torch=torch, cuda="13.0"),
        attention=records.Attention(requested="auto", backend="fa4" if gpu is B200 else "fa3"),
        model=records.Model(name="llama-3.1-8b", weights="random", num_layers=32, parameters=1, config=CONFIG),
        recipe=records.Recipe(
            name="custom", zero_stage=2, offload_optimizer=False, grad_checkpoint=False, use_liger=liger,
            liger_applied=liger, batch_size=1, grad_accum=1, compile=False,
        ),
        flop_convention=flops.CONVENTION,
    )  # fmt: skip


def write(path: Path, items: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(records.dump(item) + "\n" for item in items))


def sweep(folder: Path, gpu: records.Gpu, rates: dict[int, float], failed: dict[int, str], *, seed=0, steps=10, **more):
    """A sweep with the TFLOPS wanted at each length, 1 % noise; failed: length -> kind, "" for never reached."""
    rng, run_id = np.random.default_rng(seed), f"{folder.name}-sweep"
    plan = records.Plan(sweep_key="k", seq_lens=[*rates, *failed], settings={}, started="now")
    items: list = [plan, run("sweep", run_id, gpu, **more)]
    for n, rate in rates.items():
        typical = flops.count(CONFIG, n).total_tflop / rate * 1e3
        times = (typical * (1 + 0.01 * rng.normal(size=steps))).tolist()
        common = {"run_id": run_id, "seq_len": n, "peak_mem_gib": 12 + 0.0004 * n}
        items += [
            records.Step(**common, step=i, warmup=False, exec_time_ms=t, tflops=rate * typical / t)
            for i, t in enumerate(times)
        ]
        items.append(records.Summary(**common, n=steps, median_ms=float(np.median(times)), steady=True))
    items += [records.Failure(run_id=run_id, seq_len=n, kind=k, error="boom") for n, k in failed.items() if k]
    write(folder / "sweep_1.jsonl", items)


def decomposed(folder: Path, gpu: records.Gpu, speed: float) -> None:
    """Two decomposed steps, without and with Liger."""
    buckets = {"attention": 120, "matmul": 500, "optimizer": 40, "exposed_communication": 60, "idle": 30}
    for liger, name in ((False, "off"), (True, "on")):
        full = [records.Bucket(name=k, ms=ms / speed) for k, ms in buckets.items()]
        two = [records.Bucket(name="attention", ms=150 / speed), records.Bucket(name="everything else", ms=600 / speed)]
        run_id = f"{folder.name}-{name}"
        found = records.Decomposition(
            run_id=run_id, seq_len=8192, step_ms=750 / speed, two=two, full=full, peak_mem_gib=80 if liger else 99
        )
        write(folder / f"decompose_{name}.jsonl", [run("decompose", run_id, gpu, liger=liger), found])


def attention(folder: Path, gpu: records.Gpu, speed: float) -> None:
    run_id, fixed = (
        f"{folder.name}-attention",
        {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16"},
    )
    items = [
        records.AttentionTime(
            run_id=run_id, backend=backend, seqlen=n, mode=mode, fwd_tflops=300 * speed * slower,
            fwd_bwd_tflops=400 * speed * slower, model_tflops=343 * speed * slower, **fixed,
        )
        for n in (1024, 8192)
        for mode in ("burst", "sustained")
        for backend, slower in (("sdpa", 0.5), ("fa4" if gpu is B200 else "fa3", 1.0))
    ]  # fmt: skip
    write(folder / "attention_1.jsonl", [run("attention", run_id, gpu), *items])
