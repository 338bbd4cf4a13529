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
    every = [Gathering(f()) for f in FORMATS]
    takers: dict[str, list] = {}  # a line goes to all that share its first sign
    for part in ("signs", "said"):
        for g in every:
            for sign in getattr(g.reader, part):
                takers.setdefault(sign, []).append(g.line if part == "signs" else g.tell)
    signs = [(sign, sign.encode(), takes) for sign, takes in takers.items()]
    rows = None
    with path.open("rb") as file:
        for number, raw in enumerate(map(plain, iter(partial(file.readline, LINE_LIMIT), b""))):
            if b'"record"' in raw or b'"exec_time_ms"' in raw or b"# gpu=" in raw:  # this project's, or the guide's
                return None
            if number == 0 and (reader := table.Table.of(raw.decode("utf-8", "replace"))):
                rows = Gathering(reader)
                every.append(rows)
            elif rows:
                rows.line(raw.decode("utf-8", "replace"))
            else:
                _line(raw, signs)
    for gathering in every:
        if last := gathering.reader.end():
            gathering.take(last)
    found = [g for g in sorted(every, key=Gathering.worth, reverse=True) if g.launches]
    if not found:
        return None
    best, *others = found
    made = sweeps(path, best, given(path, typed), problems)
    for other in others:
        count = sum(len(x.times) for x in other.launches)
        skipped[f"observations of {other.reader.name}, as {best.reader.name} says more"] += count
    for gathering in every:
        if gathering.lost:
            skipped[f"lines of {gathering.reader.name} that are cut, doubled or without a figure"] += gathering.lost
    return made


def _line(raw: bytes, signs: list) -> None:
    """One physical line to the first format it has a sign of; a carriage return ends a line too."""
    hit = next(((sign, takes) for sign, mark, takes in signs if mark in raw), None)
    if not hit:
        return
    text = raw.decode("utf-8", "replace")
    for part in text.replace("\r", "\n").splitlines(keepends=True) if "\r" in text else (text,):
        if not (part := clean(part)):
            continue
        takes = hit[1] if hit[0] in part else next((t for s, _, t in signs if s in part), ())
        for take in takes:
            take(part)
