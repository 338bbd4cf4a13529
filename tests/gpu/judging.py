"""What holds of the records that first_look.sh's checks leave: rows of (check, figure, holds; None: not run)."""

from __future__ import annotations

import re

from harness import records
from tests.gpu import launches
from tests.gpu.launches import of, one

Row = tuple[str, str, bool | None]
# The setting's word -> what a record may call it.
WORDS = {"bf16": ("bf16", "bfloat16")}


def attention(check, found: list[records.Base]) -> list[Row]:
    """A row a length: every kernel that ran is under the peak, and takes no less than its kernels by themselves."""
    rows, timed = [], [r for r in of(found, "attention") if not r.error]
    peak = launches.gpu().bf16 if launches.gpu() else None
    for seqlen in sorted({r.seqlen for r in timed}):
        here = [r for r in timed if r.seqlen == seqlen]
        told = [f"{r.backend} {r.fwd_bwd_tflops:.4g}{' (host-bound)' if r.host_bound else ''}" for r in here]
        holds = launches.backend() in {r.backend for r in here}
        for r in here:
            own = r.fwd_bwd_ms if launches.REHEARSAL else r.fwd_bwd_kernel_ms
            holds &= 0 < r.fwd_bwd_tflops < (peak or float("inf")) and 0 < (own or 0) <= 1.05 * r.fwd_bwd_ms
        rows.append((f"attention at {seqlen}, TFLOPS", ", ".join(told), holds))
    absent = [(f"attention: {r.backend}", r.error, None) for r in of(found, "attention") if r.error]
    return [*(rows or [(check.name, "none ran", False)]), *absent]


def step(check, found: list[records.Base]) -> list[Row]:
    """The measured length, and whether NVML was reached by the UUIDs that torch gives."""
    run, steps = one(found, "run"), of(found, "step")
    rows = [(check.name, *launches.step_row(found))]
    if run.gpu.device == "cuda":
        silent = launches.silent_gauges(steps)
        told = f"{', '.join(run.gpu.uuids)}: driver {run.gpu.driver}" + (f", no {', '.join(silent)}" if silent else "")
        rows.append(("UUID to NVML", told, bool(run.gpu.uuids and run.gpu.driver and not silent)))
    return rows


def dtype(check, found: list[records.Base]) -> list[Row]:
    """The step, and that it ran in the format asked for: an unknown setting would train in bf16 and say nothing."""
    asked, ran = check.settings["dtype"], one(found, "run").recipe.dtype
    figure, holds = launches.step_row(found)
    if ran not in WORDS.get(asked, (asked,)):
        figure, holds = f"{figure}; it ran in {ran}", False
    return [(check.name, figure, holds)]


def refusal(lines: list[str]) -> str:
    """The reason in the output of a script that ended with exit code 2."""
    said = [line for line in lines if re.search(r"wrong setting: |DTYPE=", line)]
    said = said or [line for line in lines if line.strip()] or ["no reason was given"]
    return said[0].rpartition("wrong setting: ")[2].strip()


def decomposition(check, found: list[records.Base]) -> list[Row]:
    """No bucket is empty, and nothing above 2 % of the step is unnamed."""
    split = one(found, "decomposition")
    problems = launches.decomposition_problems(split, "cpu operators" if launches.REHEARSAL else "kernels")
    buckets = ", ".join(f"{b.name} {b.ms / split.step_ms:.0%}" for b in split.full if b.ms)
    return [("decomposition, nothing unnamed above 2 %", "; ".join([buckets, *problems]), not problems)]


def ceilings(check, found: list[records.Base]) -> list[Row]:
    """Formats run or say why; the bf16 matmul and the memory reach what their data sheet lets expect."""
    rows, gpu = {(r.what, r.name): r for r in of(found, "ceiling")}, launches.gpu()
    told = [f"{name} {r.value:.4g}" if r.value else f"{name}: {r.reason}" for (what, name), r in rows.items()
            if what == "matmul"]  # fmt: skip
    # fp6 has no operation in torch, MXFP4 none on NVIDIA GPUs; the others run where the silicon and torch have them.
    must = [rows["matmul", fmt] for fmt in ("bf16", "fp8", "nvfp4") if gpu and getattr(gpu, fmt)]
    holds = bool(rows["matmul", "bf16"].value) and all(r.value or r.reason.startswith("torch") for r in must)
    out = [("matmul formats run or say why", "; ".join(told)[:300], holds)]
    if not (gpu and gpu.bf16 and gpu.bandwidth_tb_s):
        return [*out, ("ceilings of the published ones", f"none of {launches.facts()['name']} are known", None)]
    rate, copy = rows["matmul", "bf16"].value / gpu.bf16, rows["memory", "copy"].value / gpu.bandwidth_tb_s / 1e3
    return [*out, ("bf16 matmul of the published peak, 60 to 100 %", f"{rate:.1%}", 0.6 <= rate <= 1),
            ("memory copy of the published bandwidth, 60 to 105 %", f"{copy:.1%}", 0.6 <= copy <= 1.05)]  # fmt: skip


def out_of_memory(check, found: list[records.Base]) -> list[Row]:
    """A real out-of-memory is called that, with Liger's kernels in the model."""
    wanted, got = {check.settings["seqlens"]: "gpu_oom"}, launches.outcomes(found)
    liger = [r.recipe.liger_applied for r in of(found, "run")]
    figure = ", ".join(f"{n}: {kind}" for n, kind in got.items()) + f"; Liger applied: {liger or 'no run began'}"
    return [(check.name, figure, got == wanted and liger == [True])]
