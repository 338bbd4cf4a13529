"""Composer and llm-foundry: a block of `Train throughput/tokens_per_sec: 6598.0451` lines after `[batch=1/3]:`.

Rates are of all GPUs, those under `device/` of one; GPUs, batch and length come from dividing them. Composer's
SpeedMonitor takes them over a window of the last batches.
"""

from __future__ import annotations

import re

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader, found_in

_R = r"(\d+\.\d{4})\s"  # as its console prints every rate: one that is cut short has fewer digits
_LINES = {
    "step": rf"\[batch={N}/",
    "steps_per_s": rf"throughput/batches_per_sec: {_R}",
    "samples_per_s": rf"throughput/samples_per_sec: {_R}",
    "tokens_per_s": rf"throughput/tokens_per_sec: {_R}",
    "tokens_per_s_per_gpu": rf"throughput/device/tokens_per_sec: {_R}",
    "flops": rf"throughput/device/flops_per_sec: {_R}",
}


class Composer(Reader):
    name = "Composer"
    signs = ("throughput/", "[batch=")
    kind = "mean"
    said = ("max_seq_len:", "global_train_batch_size:", "n_gpus:")
    facts = {
        "seq_len": rf"max_seq_len: {N}\s",
        "global_batch": rf"global_train_batch_size: {N}\s",
        "gpus": rf"n_gpus: {N}\s",
    }
    note = "rates over a window of the last batches: windows overlap, so an interval may be too narrow"
    patterns = {key: re.compile(pattern) for key, pattern in _LINES.items()}

    def __init__(self):
        self.block: dict = {}

    def read(self, text: str) -> dict | None:
        found = found_in(text, self.patterns)
        if "flops" in found:
            found["tflops"] = found.pop("flops") / 1e12
        done = {}
        if found.keys() & self.block.keys():  # a key for the second time: the next block
            done, self.block = self.block, {}
        self.block |= found
        return done

    def end(self) -> dict | None:
        return self.block
