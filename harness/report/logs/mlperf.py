"""MLPerf training logs: `:::MLLOG {.., "key": "tracked_stats", "value": {"train_step_time": 0.4}, "metadata": {..}}`.

train_step_time is in seconds and throughput in samples/s of all GPUs, each a mean over the steps since the line before.
"""

from __future__ import annotations

import re

from pydantic_core import from_json

from harness.report.lines import number
from harness.report.logs.reader import Reader

# tracked_stats of the reference implementations and of submitters -> what they are here
_STATS = {
    "train_step_time": "s",
    "step_time": "s",
    "throughput": "samples_per_s",
    "samples_per_second": "samples_per_s",
    "samples_per_sec": "samples_per_s",
    "tokens_per_second": "tokens_per_s",
    "tokens_per_sec": "tokens_per_s",
}
_FACTS = {
    "submission_platform": "gpu",
    "submission_benchmark": "model",
    "global_batch_size": "global_batch",
    "max_sequence_length": "seq_len",
    "sequence_length": "seq_len",
    "gradient_accumulation_steps": "grad_accum",
}
_MODELS = {"llama31_8b": "llama-3.1-8b"}  # benchmarks whose shape is one that ships
# "1xXE9680Lx8H200-SXM-141GB": nodes x host x GPUs each; "2xNVIDIA GB200" has nodes alone
_COUNTS = re.compile(r"^(\d+)x[^x]+x(\d+)x?[A-Z]")
_GPU = re.compile(r"(?:(?:GB|GH|[ABHLV])\d{2,3}|MI\d{3})[A-Z]?(?![A-Za-z0-9])|RTX[ _-][\w ]+")


class MLPerf(Reader):
    name = "MLPerf"
    signs = (":::MLLOG",)
    kind = "mean"

    def read(self, text: str) -> dict | None:
        try:
            entry = from_json(text.partition(":::MLLOG")[2].strip())
            key, value = entry["key"], entry["value"]
        except (ValueError, KeyError, TypeError):
            return None
        if key == "tracked_stats" and isinstance(value, dict):
            found = {_STATS[k]: number(v) for k, v in value.items() if k in _STATS}
            meta = entry.get("metadata")
            step = number(meta.get("step")) if isinstance(meta, dict) else None
            if not all((x or 0) > 0 for x in found.values()):
                return None
            return found if step is None or not found else found | {"step": step}
        name = _FACTS.get(key) if isinstance(key, str) else None
        if name in ("gpu", "model") and isinstance(value, str):
            return _platform(value) if name == "gpu" else {"model": _MODELS.get(value, value)}
        return {name: number(value)} if name not in (None, "gpu", "model") and (number(value) or 0) > 0 else {}


def _platform(text: str) -> dict:
    """The GPU a platform's name has in it, and how many where it says both nodes and GPUs a node."""
    found = {}
    if gpu := _GPU.search(text):
        found["gpu"] = gpu[0]
    if counts := _COUNTS.match(text):
        found["gpus"] = int(counts[1]) * int(counts[2])
    return found
