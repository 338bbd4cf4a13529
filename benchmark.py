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

SHOWN = ("gpu", "stack", "attention", "model", "recipe", "format")  # parts of the run record
HIDDEN = {"uuids", "config", "left_out", "kept"}  # too long for a line, or said below


def header(trainer) -> str:
    """What runs here, for a person; the run record has all of it."""
    run, s = trainer.run, trainer.settings
    first = []
    if run.gpu.device == "cpu":
        figures = f"These figures describe this CPU ({run.gpu.name}) and the model {run.model.name}."
        first += [figures, "They say nothing of any GPU."]
    if run.format and run.format.emulated:
        first.append(EMULATED.format(run.dtype))
    lines = [" ".join(first)] if first else []
    for name in SHOWN:
        if part := getattr(run, name):
            facts = part.model_dump(exclude=HIDDEN, exclude_none=True)
            lines.append(f"{name}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
    lines.append(f"lengths: {' '.join(map(str, s.lengths))}; {s.steps} steps after {s.warmup_steps} warm-up")
    lines.append(f"records: {trainer.out.path}")
    notes = [*run.model.left_out, *run.notes]
    if run.format:
        notes += [f"bf16 stay: {n} x {why}" for why, n in Counter(run.format.kept.values()).items()]
    if not run.attention.kernels:
        notes.append("the profiler showed no attention kernel in the probe; the function called is as above")
    return "\n".join(f"# {line}" for line in [*lines, *(f"note: {note}" for note in notes)])


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
