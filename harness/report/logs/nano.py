"""nanoGPT and nanochat, and what prints like them (build-nanogpt, llm.c).

    iter 10: loss 3.2202, time 893.76ms, mfu 16.68%
    step 00004/21400 (0.02%) | loss: 8.893647 | dt: 989.44ms | tok/sec: 529,882 | mfu: 74.13

The time is of that iteration alone, although only every tenth may be printed. tok/sec is of all GPUs.
"""

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader


class NanoGPT(Reader):
    name = "nanoGPT"
    signs = (", time ",)
    line = {"ms": rf", time {N}ms[,\s]", "step": rf"\biter {N}:"}
    said = ("tokens per iteration will be:",)
    facts = {"tokens_per_step": rf"iteration will be: {N}\s"}


class Nanochat(Reader):
    name = "nanochat"
    signs = ("tok/s",)
    line = {
        "ms": rf"\bdt:? {N} ?ms|\| {N} ms \|",
        "tokens_per_s": rf"tok/sec:? {N} *[^\s\d.]|tok/sec:? (\d+\.\d\d)\s|{N} tok/s\b(?!ec)",
        "step": rf"\bstep:?\s+{N}[/ (|]",
    }
    said = ("otal batch size", "okens / micro-batch")
    facts = {"tokens_per_step": rf"otal batch size:? {N}\s", "seq_len": rf"micro-batch: \d+ x {N}\b"}
