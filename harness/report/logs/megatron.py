"""Megatron-LM and what prints like it (Megatron-Bridge, Megatron-DeepSpeed, GPT-NeoX).

` iteration 10/ 50 | consumed samples: 5120 | elapsed time per iteration (ms): 13212.7 | global batch size: 512 | ...`

The time is a mean over the iterations since the line before; Megatron-Bridge's `Step Time :` says it once more.
"""

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader


class Megatron(Reader):
    name = "Megatron-LM"
    signs = ("elapsed time per iteration (",)
    kind = "mean"
    line = {
        "ms": rf"per iteration \(ms\):\s*{N} \|",
        "s": rf"per iteration \(s\):\s*{N} \|",
        "step": rf"iteration\s+{N}/",
        "global_batch": rf"global batch size:\s*{N} \|",
        "samples": rf"consumed samples:\s*{N} \|",
        "tokens": rf"consumed tokens:\s*{N} \|",
        "tflops": rf"TFLOP(?:/s/GPU\)|s):\s*{N} \|",
    }
    said = (" ......", "using world size:", "seq-length")
    facts = {
        "seq_len": rf"\bseq_length \.+ {N}\s",
        "gpus": rf"\bworld_size \.+ {N}\s|using world size: {N},",
        "precision": r"\b(bf16|fp16|fp8) \.+ (?:True|e4m3|hybrid)",
    }

    def read(self, text: str) -> dict | None:
        found = super().read(text)
        if found and found.get("samples") and found.get("tokens"):
            found["seq_len"] = round(found["tokens"] / found["samples"])
        return found
