"""MLPerf training logs: `:::MLLOG {.., "key": "tracked_stats", "value": {"train_step_time": 0.4}, "metadata": {..}}`.

train_step_time is in seconds and throughput in samples/s of all GPUs, each a mean over the steps since the line before.
"""

from __future__ import annotations

import re

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader

_ENDS = r"\s*[,}]"
_VALUE = r'",\s*"value":\s*'
_MODELS = {"llama31_8b": "llama-3.1-8b"}  # benchmarks whose shape is one that ships
_GPU = r"(?:(?:GB|GH|[ABHLV])\d{2,3}|MI\d{3})[A-Z]?(?![A-Za-z0-9])|RTX[ _-][\w ]+"
# "1xXE9680Lx8H200-SXM-141GB": nodes x host x GPUs each; "2xNVIDIA GB200" has nodes alone
_COUNTS = re.compile(rf'"submission_platform{_VALUE}"(\d+)x[^x"]+x(\d+)x?[A-Z]')


class MLPerf(Reader):
    """tracked_stats of the reference implementations and of submitters; one of a validation has other names."""

    name = "MLPerf"
    kind = "mean"
    signs = ('"train_step_time"', '"step_time"', '"throughput"', '"samples_per_sec', '"tokens_per_sec')
    line = {
        "s": rf'"(?:train_)?step_time":\s*{N}{_ENDS}',
        "samples_per_s": rf'"(?:throughput|samples_per_sec(?:ond)?)":\s*{N}{_ENDS}',
        "tokens_per_s": rf'"tokens_per_sec(?:ond)?":\s*{N}{_ENDS}',
        "step": rf'"step":\s*{N}{_ENDS}',
    }
    said = (":::MLLOG",)
    facts = {
        "gpu": rf'"submission_platform{_VALUE}"[^"]*?({_GPU})',
        "model": rf'"submission_benchmark{_VALUE}"([^"]+)"',
        "global_batch": rf'"global_batch_size{_VALUE}{N}{_ENDS}',
        "seq_len": rf'"(?:max_)?sequence_length{_VALUE}{N}{_ENDS}',
        "grad_accum": rf'"gradient_accumulation_steps{_VALUE}{N}{_ENDS}',
    }

    def read(self, text: str) -> dict | None:
        found = super().read(text) if ":::MLLOG" in text else {}
        if found and "model" in found:
            found["model"] = _MODELS.get(found["model"], found["model"])
        if counts := _COUNTS.search(text):
            found = (found or {}) | {"gpus": int(counts[1]) * int(counts[2])}
        return found
