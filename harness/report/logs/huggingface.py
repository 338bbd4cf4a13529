"""The Hugging Face Trainer and LLaMA-Factory, whose speeds are averages over the whole run.

train_samples_per_second in all_results.json, trainer_state.json, a printed dict or the `***** train metrics *****`
block; where a run never came to its end, the rate of its progress bar (`10/100 [00:31<04:43, 3.15s/it]`), or the
elapsed times in trainer_log.jsonl.
"""

from harness.report.logs.clean import N
from harness.report.logs.reader import Block, Reader

# A printed dict ends a number with a comma or brace; the last of a JSON file and those of a block end their line.
_IS = rf"(?:'\s*:\s*{N}[,}}]|\"?\s*[:=]\s*{N}[,}}\s])"


class HuggingFace(Block):
    """A run says its rates up to three times, in a dict, a block and a file."""

    name = "Hugging Face Trainer"
    kind = "average"
    signs = ("train_samples_per_second", "train_steps_per_second")
    line = {"samples_per_s": rf"\btrain_samples_per_second{_IS}", "steps_per_s": rf"\btrain_steps_per_second{_IS}"}
    said = ("Total train batch size", "Gradient Accumulation steps")
    facts = {
        "global_batch": rf"Total train batch size .*= {N}\s",
        "grad_accum": rf"Gradient Accumulation steps = {N}\s",
    }


class Bar(Reader):
    name = "a progress bar of tqdm"
    signs = ("s/it", "it/s")
    kind = "average"
    note = "the last rate of a progress bar, smoothed, with whatever the bar waited for"
    line = {
        "s": rf"^\s*\d+%\|.*\d/\d+ \[[\d:]+<[\d:?]+, +{N}s/it",  # one with a name is of a download, a map, ...
        "steps_per_s": rf"^\s*\d+%\|.*\d/\d+ \[[\d:]+<[\d:?]+, +{N}it/s",
        "total": rf"\d/{N} \[",
    }

    def __init__(self):
        self.last: dict = {}

    def read(self, text: str) -> dict | None:
        found = super().read(text) or {}
        if found and found.get("total", 0) >= self.last.get("total", 0):  # not the bar of an evaluation
            self.last = found
        return {}

    def end(self) -> dict | None:
        return self.last


class LlamaFactory(Reader):
    name = "LLaMA-Factory"
    signs = ('"current_steps"',)
    kind = "average"
    note = "elapsed times are whole seconds: an average from the first line to the last"
    line = {"step": rf'"current_steps": {N}[,}}]', "ms": r'"elapsed_time": "(?:(\d+) days?, )?(\d+):(\d+):(\d+)"'}

    def __init__(self):
        self.ends: list[tuple[float, float]] = []

    def read(self, text: str) -> dict | None:
        step, elapsed = (pattern.search(text) for pattern in self._line.values())
        if not (step and elapsed):
            return None
        if '"loss"' not in text:  # a line of an evaluation
            return {}
        days, hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
        now = float(step[1]), ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        done = {}
        if self.ends and now[0] <= self.ends[-1][0]:
            done, self.ends = self.end(), []
        self.ends = [*self.ends[:1], now]
        return done

    def end(self) -> dict | None:
        if len(self.ends) < 2 or self.ends[1][1] <= self.ends[0][1]:
            return {}
        (first, before), (last, after) = self.ends
        return {"ms": 1e3 * (after - before) / (last - first)}
