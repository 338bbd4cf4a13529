"""DeepSpeed's own timer: `.. RunningAvgSamplesPerSec=152.0, CurrSamplesPerSec=156.1, MemAllocated=1.75GB, ..`.

Older ones begin `0/46,` (epoch, step), newer ones `epoch=0/micro_step=10/global_step=5,`. The current rate is of one
step; the running average is not read. The pipeline engine says `steps: 10 loss: .. iter time (s): 1.2 samples/sec: 9`,
a mean over the steps since its line before.
"""

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader

_SAID = (" ......", "world_size")
_FACTS = {
    "global_batch": rf"\btrain_batch_size \.+ {N}\s",
    "gpus": rf"\bworld_size \.+ {N}\s",
    "grad_accum": rf"\bgradient_accumulation_steps \.+ {N}\s",
}


class DeepSpeed(Reader):
    name = "DeepSpeed"
    signs = ("RunningAvgSamplesPerSec=", "CurrSamplesPerSec=", ", SamplesPerSec=")
    line = {
        "samples_per_s": rf"(?:Curr|(?<![A-Za-z]))SamplesPerSec=(?:{N},|(\d+\.\d{{6,}})\s)",
        "step": rf"global_step={N},|\b\d+/{N}, \w*SamplesPerSec",
        "peak_allocated_gib": rf"MaxMemAllocated={N}GB",
    }
    said, facts = _SAID, _FACTS


class Pipeline(Reader):
    name = "DeepSpeed pipeline"
    signs = ("iter time (s):",)
    kind = "mean"
    line = {
        "s": rf"iter time \(s\): {N} samples",
        "samples_per_s": r"samples/sec: (\d+\.\d{3})\s",
        "step": rf"steps?: {N}\s",
    }
    said, facts = _SAID, _FACTS
