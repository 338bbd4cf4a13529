"""torchtitan: `step: 10  loss: .. memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: 13.99%`.

tps is of one rank, a mean over the steps since its line before; every rank may print its own. Older ones say wps.
"""

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader


class Torchtitan(Reader):
    name = "torchtitan"
    signs = (" tps:", " wps:")
    kind = "mean"
    line = {
        "tokens_per_s_per_gpu": rf"ps:\s*{N}\s+(?:tflops|mfu)",
        "step": rf"step:\s*{N}\s",
        "tflops": rf"tflops:\s*{N}\s",
        "peak_mem_gib": rf"memory:\s*{N}GiB",
    }
    said = ("Training starts at step", "CUDA capacity:", "HIP capacity:")
    facts = {
        "gpu": r"(?:CUDA|HIP) capacity: (.+?) with ",
        "global_batch": rf"global batch size:? {N}\b",
        "seq_len": rf"sequence length:? {N}\b",
    }
