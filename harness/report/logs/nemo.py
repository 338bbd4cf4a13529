"""NeMo (Lightning): `Training epoch 0, iteration 120/149 | global_step: 120 | .. | train_step_timing in s: 0.0315`.

Its progress bar says `global_step=9.000, .., train_step_timing in s=12.30]` and is printed again and again.
"""

from __future__ import annotations

import re

from harness.report.logs.clean import N
from harness.report.logs.reader import Reader

_ENDS = r"(?=[\s,|\]])"
_LAST = re.compile(rf"train_step_timing in s[:=]\s*{N}\s*$")


class Nemo(Reader):
    name = "NeMo"
    signs = ("train_step_timing in s",)
    line = {
        "s": rf"train_step_timing in s[:=]\s*{N}{_ENDS}",
        "step": rf"global_step[:=]\s*{N}{_ENDS}|\biteration {N}/|\| {N}/",
        "global_batch": rf"global_batch_size[:=]\s*{N}{_ENDS}",
        "tflops": rf"TFLOPS_per_GPU[:=]\s*{N}{_ENDS}",
    }

    def __init__(self):
        self.more = False  # a line went on after its time, so one that ends there was cut

    def read(self, text: str) -> dict | None:
        last = bool(_LAST.search(text))
        if last and self.more:
            return None
        found = super().read(text)
        self.more |= bool(found) and not last
        return found
