"""Logs of other trainers: which format a file has, told from its text and never from its name, and its sweeps.

    found = logs.read(path, typed=["gpus=8"], skipped=Counter(), problems=[])     # None: none of these formats

A format is one file here with one class (reader.py says what it needs) and one name in FORMATS. The guide's logs are
records between headers, which reading.py reads; guide.py has its headers.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

from harness.report.box import Sweep
from harness.report.lines import LINE_LIMIT
from harness.report.logs import composer, deepspeed, huggingface, megatron, mlperf, nano, nemo, table, torchtitan
from harness.report.logs.clean import clean, plain
from harness.report.logs.facts import given
from harness.report.logs.gather import Gathering, sweeps

FORMATS = (
    mlperf.MLPerf, torchtitan.Torchtitan, megatron.Megatron, nemo.Nemo, deepspeed.DeepSpeed, deepspeed.Pipeline,
    composer.Composer, nano.NanoGPT, nano.Nanochat, huggingface.HuggingFace, huggingface.LlamaFactory, huggingface.Bar,
)  # fmt: skip
NAMES = [f.name for f in (*FORMATS, table.Table)]
SUFFIXES = ("log", "txt", "out", "err", "csv", "tsv", "json")


def read(path: Path, typed: list[str], skipped: Counter[str], problems: list[str]) -> list[Sweep] | None:
    """The sweeps of a log; None when a line of it is of this project or the guide, or no line is of any format.

    Raises OSError, and ValueError for facts or columns that are wrong. Memory holds the times alone.
    """
    with path.open("rb") as file:
        lines = map(plain, iter(partial(file.readline, LINE_LIMIT), b""))
        if reader := table.Table.of(plain(file.readline(LINE_LIMIT)).decode("utf-8", "replace")):
            every = [Gathering(reader)]
            for raw in lines:
                every[0].take(reader.read(raw.decode("utf-8", "replace")))
        else:
            file.seek(0)
            every = [Gathering(f()) for f in FORMATS]
            if not _read_lines(lines, every):
                return None
    for gathering in every:
        gathering.take(gathering.reader.end() or {})
    best, *others = sorted(every, key=Gathering.worth, reverse=True)
    if not best.launches:
        return None
    for other in others:
        if count := sum(len(x.times) for x in other.launches):
            skipped[f"observations of {other.reader.name}, as {best.reader.name} says more"] += count
    for gathering in every:
        if gathering.lost:
            skipped[f"lines of {gathering.reader.name} that are cut, doubled or without a figure"] += gathering.lost
    return sweeps(path, best, given(path, typed), problems)


def _read_lines(lines, every: list[Gathering]) -> bool:
    """Each line to the formats that have a sign of it; a carriage return ends one too. False: a line is of this
    project or the guide."""
    takers: dict[bytes, list[Gathering]] = {}  # a line goes to all that share its first sign
    signs = [(sign, g) for g in every for sign in g.reader.signs]
    for sign, gathering in signs + [(sign, g) for g in every for sign in g.reader.said]:
        takers.setdefault(sign.encode(), []).append(gathering)
    for raw in lines:
        if b'"record"' in raw or b'"exec_time_ms"' in raw or b"# gpu=" in raw:
            return False
        for part in raw.splitlines(keepends=True):
            if mark := next((sign for sign in takers if sign in part), None):
                text = clean(part.decode("utf-8", "replace"))
                for gathering in takers[mark] if text else ():
                    gathering.take(gathering.reader.read(text))
    return True
