"""Where a training step's time goes: attention, matmul, other compute, optimizer, copies, communication, idle.

    for L in 0 1; do USE_LIGER=$L deepspeed --num_gpus=8 bench_decompose.py; done     # ZeRO-2 alone at 8192 tokens
    SEQ_LEN=131072 RECIPE=long-context deepspeed --num_gpus=8 bench_decompose.py      # the sweep's own recipe
    DS_ACCELERATOR=cpu deepspeed --num_gpus=2 bench_decompose.py                      # no GPU: by CPU operators
    python bench_decompose.py --trace trace.json.gz --step-ms 512                     # anyone's torch.profiler trace

The step time T is measured with the profiler off. Then a window is profiled on every rank, and T is split twice:
- two buckets as in the guide, by attention's share of the kernel time on the compute streams. What is no kernel there
  (idle gaps, copies, exposed communication) is spread over both;
- seven buckets by union of intervals, which spread nothing. Communication under a compute kernel is hidden, and its
  time belongs to that kernel; the rest is exposed, and contains waiting for slower ranks.
Each sums to T; figures are means over the ranks, with the range. Peak memory is the step's: buckets share it.

--trace takes one file per rank (repeat it), needs neither a GPU nor torch, and takes T from --step-ms or from the
trace's ProfilerStep marks. --save-trace FOLDER keeps the traces of a live run.

exit codes: 0 done; 1 a measurement failed (the reason is the last line); 2 wrong use or setting; 4 nothing usable in
the trace.
"""

import statistics
import sys
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from harness import flops, kernels, records
from harness.measure.settings import Settings, fail_setting, load


class DecomposeSettings(Settings):
    by_device: ClassVar = Settings.by_device | {"seq_len": (8192, 256)}

    recipe: Literal["long-context", "short-context"] = Field("short-context", description="see benchmark.py")
    profile_steps: int = Field(2, ge=1, description="steps in the profiled window")
    trace: list[Path] | None = Field(None, description="analyse this saved trace instead; one per rank")
    step_ms: float | None = Field(None, gt=0, description="the step time to split, for --trace")
    save_trace: Path | None = Field(None, description="keep each rank's trace in this folder")


def combine(splits: list[kernels.Split], step_ms: float, **known) -> records.Decomposition:
    """All ranks' splits as one record. `known`: run_id, seq_len, and what else the caller knows of the step."""
    tables = [s.full(step_ms) | {"hidden_communication": s.hidden * s.scale(step_ms)} for s in splits]
    by_rank = {name: [table[name] for table in tables] for name in tables[0]}
    full = {name: statistics.fmean(values) for name, values in by_rank.items()}
    hidden = full.pop("hidden_communication")
    share = statistics.fmean(s.attention_share for s in splits)
    two = {"attention": share * step_ms, "everything else": (1 - share) * step_ms}
    busy = statistics.fmean(s.busy * s.scale(step_ms) / step_ms for s in splits)

    first = splits[0]
    notes = list(dict.fromkeys(note for s in splits for note in s.notes))
    if busy < 0.5:
        notes.append(f"busy only {busy:.0%} of the step: the host is too slow, or each step compiles something (JIT)")
    if share > 0.95:
        notes.append(f"attention is {share:.0%} of the kernel time: is some other kernel taken for attention?")
    if not share:
        names = "; ".join(name[:60] for name, _ in first.longest[:3])
        notes.append(f"no attention kernel: if there should be one, no rule knows its name. The longest: {names}")
    if not first.on_gpu:
        notes.append("buckets are from CPU operators: their self time and intervals, slowed by the profiler alike")
    profiled = first.window / 1e6 / (first.steps or 1)
    if first.steps and abs(profiled / step_ms - 1) > 0.02:
        notes.append(f"a step took {profiled:.1f} ms under the profiler, {step_ms:.1f} ms without")
    return records.Decomposition(
        step_ms=step_ms,
        two=[records.Bucket(name=name, ms=ms) for name, ms in two.items()],
        full=[records.Bucket(name=name, ms=ms) for name, ms in full.items()],
        hidden_communication_ms=hidden,
        exposed_communication_ms=full["exposed_communication"],
        busy_share=busy,
        rank_range={name: (min(values), max(values)) for name, values in by_rank.items()},
        unmatched=[(name[:120], ns * first.scale(step_ms)) for name, ns in first.unmatched],
        method="kernels" if first.on_gpu else "cpu operators",
        notes=notes,
        **known,
    )


def add_rates(record: records.Decomposition, attention_tflop: float, dense_tflop: float, peak: float | None) -> None:
    """TFLOPS and MFU of the buckets that do model FLOPs (TFLOP per GPU and step; peak in TFLOPS or None)."""
    for buckets, dense in ((record.two, "everything else"), (record.full, "matmul")):
        for bucket in buckets:
            tflop = {"attention": attention_tflop, dense: dense_tflop}.get(bucket.name)
            if tflop and bucket.ms:
                bucket.tflops = tflop / bucket.ms * 1e3
                bucket.mfu = bucket.tflops / peak if peak else None


def show(record: records.Decomposition, ranks: int, total: records.Bucket, console: Console) -> None:
    """The two tables and what is to be said about them; without attention kernels the first would say nothing."""
    source = "GPU kernels" if record.method == "kernels" else "CPU operators, this says nothing of any GPU"
    for title, buckets in (("by share of kernel time", record.two), ("by union of intervals", record.full)):
        if buckets is record.two and not record.two[0].ms:
            continue
        table = Table(title=f"step of {record.step_ms:.3f} ms {title} ({source})", title_justify="left")
        over = [f"ms over {ranks} ranks"] if ranks > 1 and buckets is record.full else []
        for column in ("bucket", "ms", "% of step", "TFLOPS", "MFU %", *over):
            table.add_column(column, justify="left" if column == "bucket" else "right")
        for b in [*buckets, total]:
            tflops = "" if b.tflops is None else f"{b.tflops:.3g}"
            mfu = "" if b.mfu is None else f"{100 * b.mfu:.1f}"
            ends = record.rank_range.get(b.name, ())
            spread = [" - ".join(f"{ms:.3f}" for ms in ends) for _ in over]
            share = f"{100 * b.ms / record.step_ms:.1f}"
            table.add_row(b.name, f"{b.ms:.3f}", share, tflops, mfu, *spread, end_section=b is buckets[-1])
        console.print(table)
    hidden, exposed = (f"{x:.3f} ms" for x in (record.hidden_communication_ms, record.exposed_communication_ms))
    peak = "" if record.peak_mem_gib is None else f"; peak memory {record.peak_mem_gib:.1f} GiB"
    console.print(f"communication: {hidden} hidden, {exposed} exposed; busy {record.busy_share:.0%}{peak}")
    for name, ms in record.unmatched[:5]:
        console.print(f"no rule names: {ms:.3f} ms {name}")
    for note in record.notes:
        console.print(f"note: {note}")


def analyse(settings: DecomposeSettings, console: Console) -> int:
    """--trace: the splits of saved traces."""
    try:
        traces = [kernels.read_trace(path) for path in settings.trace]
        marked = [(max(e for _, e in t.marks) - t.marks[0][0]) / len(t.marks) / 1e6 for t in traces if t.marks]
        step_ms = settings.step_ms or max(marked, default=None)
        if step_ms is None:
            fail_setting("STEP_MS: the trace has no ProfilerStep marks, give the step time in ms")
        splits = [kernels.decompose(t) for t in traces]
        # Without a sequence length there are no FLOPs: the trace does not say what was trained.
        record = combine(splits, step_ms, run_id="trace", seq_len=0)
        show(record, len(traces), records.Bucket(name="total", ms=step_ms), console)
        for trace, split in zip(traces, splits, strict=True):
            split.check(trace.world_size)
    except OSError as error:
        fail_setting(f"TRACE={error.filename}: {error.strerror}")
    except kernels.ProfileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    return 0


def measure(trainer, seq_len: int, console: Console) -> None:
    """T without the profiler, a profiled window on every rank, and the record and tables on rank 0."""
    import torch.distributed as dist

    from harness.measure import profile

    settings, run = trainer.settings, trainer.run
    summary = trainer.measure(seq_len)
    batch = trainer.make_batch(seq_len)
    name = f"trace_{run.run_id}_{seq_len}_rank{trainer.rank}.json.gz"
    keep = settings.save_trace and settings.save_trace / name
    split = kernels.decompose(profile.record(lambda: trainer.step(batch), settings.profile_steps, trainer.device, keep))
    # A compiled graph may hold several layers' attention in fewer events.
    layers = 1 if settings.compile else 2 * run.model.num_layers * settings.grad_accum * settings.profile_steps
    split.check(run.world_size, min_attention=layers)
    splits: list = [None] * run.world_size
    dist.all_gather_object(splits, split)
    if not trainer.out:
        return
    record = combine(splits, summary.median_ms, run_id=run.run_id, seq_len=seq_len, peak_mem_gib=summary.peak_mem_gib)
    if count := flops.step_work(run, seq_len):
        add_rates(record, count.attention_tflop, count.dense_tflop, run.gpu.peak_tflops)
    trainer.write(record)
    total = records.Bucket(name="total", ms=summary.median_ms, tflops=summary.tflops, mfu=summary.mfu)
    show(record, run.world_size, total, console)
    low, high = (f"{x:.3f}" if x else "?" for x in (summary.ci_low_ms, summary.ci_high_ms))
    console.print(f"T: median of {summary.n} steps, 95 % interval {low} to {high} ms; records: {trainer.out.path}")


def main() -> int:
    settings, console = load(DecomposeSettings, description=__doc__), Console(width=110, markup=False, emoji=False)
    if settings.trace:
        return analyse(settings, console)
    from benchmark import header
    from harness.measure import session

    with session.run(settings, "decompose") as trainer:
        if trainer.out:
            print(header(trainer), flush=True)
        for seq_len in settings.lengths:
            measure(trainer, seq_len, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
