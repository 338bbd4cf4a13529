"""Composer and llm-foundry: a block of `Train throughput/tokens_per_sec: 6598.0451` lines after `[batch=1/3]:`.

Rates are of all GPUs, those under `device/` of one; GPUs, batch and length come from dividing them. Composer's
SpeedMonitor takes them over a window of the last batches.
"""

from harness.report.logs.clean import N
from harness.report.logs.reader import Block

_RATES = {
    "steps_per_s": "throughput/batches_per_sec:",
    "samples_per_s": "throughput/samples_per_sec:",
    "tokens_per_s": "throughput/tokens_per_sec:",
    "tokens_per_s_per_gpu": "throughput/device/tokens_per_sec:",
    "flops": "throughput/device/flops_per_sec:",
}


class Composer(Block):
    name = "Composer"
    kind = "mean"
    note = "rates over a window of the last batches: windows overlap, so an interval may be too narrow"
    signs = ("[batch=", *_RATES.values())
    # Its console prints every rate with four decimals: one that is cut short has fewer.
    line = {"step": rf"\[batch={N}/"} | {key: rf"{sign} (\d+\.\d{{4}})\s" for key, sign in _RATES.items()}
    said = ("max_seq_len:", "global_train_batch_size:", "n_gpus:")
    facts = {
        "seq_len": rf"max_seq_len: {N}\s",
        "global_batch": rf"global_train_batch_size: {N}\s",
        "gpus": rf"n_gpus: {N}\s",
    }

    def end(self) -> dict:
        done = super().end()
        return done | {"tflops": done["flops"] / 1e12} if "flops" in done else done
