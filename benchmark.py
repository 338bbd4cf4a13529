"""One DeepSpeed training step, measured: forward, backward and optimizer of a causal language model.

    deepspeed --num_gpus=8 benchmark.py                          # Llama-3.1-8B, 196608 tokens
    SEQ_LEN=32768 deepspeed --num_gpus=8 benchmark.py            # another length
    SEQLENS="8192 32768" RECIPE=short-context deepspeed --num_gpus=8 benchmark.py
    torchrun --nproc-per-node=8 benchmark.py --seq-len 8192      # torchrun works as well
    DS_ACCELERATOR=cpu deepspeed --num_gpus=2 benchmark.py       # no GPU: a tiny model on two CPU ranks

Every setting below is an environment variable too (SEQ_LEN for --seq-len). Each step is one JSON line on standard
output and in the result file under results/<gpu>/. run_sweep.sh runs this over many lengths and outlives what fails.

exit codes: 0 done; 1 a measurement failed (the reason is the last line); 2 wrong use or setting.
"""

import sys
from collections import Counter

from harness.measure.settings import EMULATED, Settings, load


def header(trainer) -> str:
    """What runs here, for a person; the run record has all of it."""
    run, s = trainer.run, trainer.settings
    g, st, r, a = run.gpu, run.stack, run.recipe, run.attention
    first = []
    if g.device == "cpu":
        first.append(
            f"These figures describe this CPU ({g.name}) and the model {run.model.name}. They say nothing of any GPU."
        )
    if run.format and run.format.emulated:
        first.append(EMULATED.format(run.dtype))
    lines = [f"# {' '.join(first)}"] if first else []
    peak = f"{g.peak_tflops:g} TFLOPS ({g.peak_source})" if g.peak_tflops else f"none, so no MFU: {g.peak_source}"
    capability = f", capability {g.capability[0]}.{g.capability[1]}" if g.capability else ""
    lines += [
        f"# gpu: {run.world_size} x {g.name}{capability}, {g.memory_gib:.0f} GiB; peak: {peak}",
        f"# stack: python {st.python}, torch {st.torch}, CUDA {st.cuda}, transformers {st.transformers}, "
        f"deepspeed {st.deepspeed}, liger-kernel {st.liger_kernel}, {st.attention_package or 'no attention package'}",
        f"# attention: {a.backend} ({a.requested} asked), {a.function}, kernels {', '.join(a.kernels) or 'unseen'}",
        f"# model: {run.model.name}, {run.model.num_layers} layers, {run.model.parameters / 1e6:,.1f} M parameters, "
        f"{run.model.weights} weights",
        f"# recipe: {r.name}: ZeRO-{r.zero_stage}, checkpointing {'on' if r.grad_checkpoint else 'off'}, "
        f"optimizer {r.optimizer}{' on the CPU' if r.offload_optimizer else ''}, "
        f"Liger {'on' if r.liger_applied else 'off'}, batch {r.batch_size}, accumulation {r.grad_accum}, "
        f"compile {'on' if r.compile else 'off'}, documents {r.doc_len or 'whole'}, SP {r.sp_size}",
        f"# lengths: {' '.join(map(str, s.lengths))}; {s.steps} steps after {s.warmup_steps} warm-up",
        f"# records: {trainer.out.path}",
    ]  # fmt: skip
    if f := run.format:
        kept = ", ".join(f"{n} x {why}" for why, n in Counter(f.kept.values()).items()) or "none"
        lines.append(f"# format: {f.name}, {f.recipe}, {f.converted} of {f.total} layers; bf16 stay: {kept}")
    if not a.kernels:
        lines.append("# note: the profiler showed no attention kernel in the probe; the function called is as above")
    if run.model.uncounted:
        lines.append(f"# note: no TFLOPS: {run.model.uncounted}")
    lines += [f"# note: {part}" for part in run.model.left_out]
    return "\n".join(lines + [f"# note: {note}" for note in run.notes])


def main() -> int:
    settings = load(Settings, description=__doc__)
    from harness.measure import session  # torch and DeepSpeed take seconds: --help and wrong settings need neither

    with session.run(settings, "sweep") as trainer:
        if trainer.out:
            print(header(trainer), flush=True)
        for seq_len in settings.lengths:
            trainer.measure(seq_len)
    return 0


if __name__ == "__main__":
    sys.exit(main())
