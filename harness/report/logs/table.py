"""A table as a tracker exports it: CSV or TSV with a header, one row a step.

A column is known by its name without its run ("brave-fox-7 - throughput/tokens_per_sec" is tokens_per_sec), in lower
case, words joined by "_". A time needs its unit in the name. What is not known is listed; two columns that say
different speeds are an error.
"""

from __future__ import annotations

import csv
import re

from harness.report.lines import number
from harness.report.logs.reader import SPEEDS, Reader

_STEP = r"(?:step|it|iter|iteration|batch)"
_TIME = rf"(?:{_STEP}|exec)_?tim(?:e|ing)|time_per_{_STEP}|time_metrics_end_to_end|dt"
_UNITS = {"ms": "ms|msec|milliseconds", "s": "s|sec|secs|seconds|in_s"}
_TOKENS, _PER_S, _EACH = r"tok(?:en)?s?", r"_(?:per_)?(?:s|sec|second)", r"_(?:per_)?(?:gpu|device|rank)"
# Speeds are known by the end of a name, whatever group they are logged in; the first that matches counts.
_SPEEDS = [
    *((rf"(?:{_TIME})_(?:{units})|(?:{units})_(?:per_)?{_STEP}", name) for name, units in _UNITS.items()),
    (rf"device_{_TOKENS}{_PER_S}|{_TOKENS}(?:{_PER_S}{_EACH}|{_EACH}{_PER_S})|throughput_tps", "tokens_per_s_per_gpu"),
    (rf"{_TOKENS}{_PER_S}", "tokens_per_s"),
    (rf"(?:samples?|sequences?|examples?){_PER_S}", "samples_per_s"),
    (rf"(?:steps?|iters?|iterations?|it|batch(?:es)?){_PER_S}", "steps_per_s"),
]
_OTHERS = {
    "step": r"_?(?:(?:trainer_)?global_|train_)?(?:steps?|iter|iteration)|current_steps",
    "global_batch": r"global_batch(?:_size)?|gbs",
    "seq_len": r"(?:max_)?seq_?len(?:gth)?|(?:max_)?sequence_length",
    "gpus": r"gpus|num_gpus|n_gpus|world_size",
}
_ELSE = ("eval", "val", "validation", "test", "running", "avg")  # names that begin so speak of something else
_SPREAD = 0.01  # two columns of one speed may differ by rounding


def column(name: str) -> str | None:
    """What a column is, by SPEEDS and FACTS; None: not known. Raises ValueError for a time without a unit."""
    short = name.strip().rpartition(" - ")[2].lower()
    words = re.sub(r"[^a-z0-9]+", "_", short).strip("_")
    if words.split("_")[0] in _ELSE or re.search("__m(?:in|ax)$", short):  # a tracker's, beside the value
        return None
    for known, pattern in _OTHERS.items():
        if re.fullmatch(pattern, words):
            return known
    for pattern, known in _SPEEDS:
        if re.search(rf"(?:^|_)(?:{pattern})$", words):
            return known
    if re.search(rf"(?:^|_)(?:{_TIME})$", words):
        raise ValueError(f'column "{name}" has no unit: call it {name}_ms or {name}_s')
    return None


def _cells(line: str, delimiter: str) -> list[str]:
    """Empty for a line that is no row: damage, or a binary file."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


class Table(Reader):
    name = "a CSV or TSV table"
    signs = ()

    def __init__(self, columns: list[str | None], names: list[str], delimiter: str):
        self.columns, self.names, self.delimiter = columns, names, delimiter
        unknown = [n for n, c in zip(names, columns, strict=True) if c is None]
        self.note = f"columns not used: {', '.join(unknown)[:300]}" if unknown else None

    @classmethod
    def of(cls, header: str) -> Table | None:
        """The reader for this first line; None when it is no header with a speed in it."""
        delimiter = "\t" if "\t" in header else ","
        names = [n.strip() for n in _cells(header.lstrip("\ufeff").strip(), delimiter)]
        if len(names) < 2 or not all(names) or any(re.search(r"[|={}]|: ", n) for n in names):
            return None
        columns = [column(n) for n in names]
        return cls(columns, names, delimiter) if SPEEDS.keys() & {*columns} else None

    def read(self, text: str) -> dict | None:
        """A row. Raises ValueError when two columns give one speed two values."""
        cells = _cells(text.strip("\r\n"), self.delimiter)
        if len(cells) != len(self.columns) or not text.endswith("\n"):
            return None
        found: dict = {}
        said: dict = {}  # what a column gives -> its name and value, a speed's in ms
        for cell, known, name in zip(cells, self.columns, self.names, strict=True):
            value = number(cell.strip().replace(",", "")) if known else None
            if value is None or value < 0 or (value == 0 and known != "step"):
                continue
            given, ms = SPEEDS.get(known, (None, float))  # two speeds of one thing are one time
            before, other = said.setdefault(given or (known,), (ms(value), name))
            if abs(ms(value) - before) > _SPREAD * before:
                raise ValueError(f'columns "{other}" and "{name}" contradict: {before:g} and {ms(value):g}')
            found.setdefault(known, value)
        return None if found.keys().isdisjoint(SPEEDS) else found
