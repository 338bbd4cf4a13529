"""Text of a result file or a log -> whole JSON objects and the text between them, through any damage.

A launcher's output has several ranks on one line, progress bars ended by carriage returns, warnings glued to records,
records cut in half. Everything that is complete is kept; what is not is counted by name in `skipped`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pydantic_core import from_json  # three times as fast as json.loads, and the same objects

from harness import failure_kinds

LINE_LIMIT = 1 << 22  # bytes; a longer line is cut there, so that a file without line ends needs no memory
TRIES = 10_000  # places of one line to look for an object at: nested braces could take for ever

FLUSHED = re.compile(r"allocator cache flush")
OOM = re.compile(failure_kinds.GPU_OOM)
ERROR = re.compile(r"\b\w*Error\b: .*|exits with return code = -?[1-9].*|\bKilled\b.*|\bBus error\b.*|\bERROR\b.*")

_DECODER = json.JSONDecoder()


def pieces(path: Path, skipped: Counter[str]) -> Iterator[tuple[int, dict | str]]:
    """(line number, object or text) in the file's order. Raises OSError."""
    with path.open("rb") as file:
        for line, raw in enumerate(iter(partial(file.readline, LINE_LIMIT), b""), 1):
            try:
                whole = from_json(raw) if raw[:1] == b"{" else None
            except ValueError:
                whole = None
            if isinstance(whole, dict):
                yield line, whole
            else:
                for piece in scan(raw.decode("utf-8", "replace"), skipped):
                    yield line, piece


def scan(line: str, skipped: Counter[str]) -> Iterator[dict | str]:
    """The pieces of one physical line; a carriage return ends a line too."""
    for part in re.split(r"[\r\n]+", line):
        done = look = tries = 0
        while (start := part.find("{", look)) >= 0 and tries < TRIES:
            tries += 1
            try:
                found, end = _DECODER.raw_decode(part, start)
            except (ValueError, RecursionError):
                look = start + 1
                continue
            yield from _text(part[done:start], skipped)
            yield found
            done = look = end
        yield from _text(part[done:], skipped)


def _text(text: str, skipped: Counter[str]) -> Iterator[str]:
    if text := text.strip():
        if '{"' in text:
            skipped["records cut in half"] += 1
        yield text


def number(value: object) -> float | None:
    """A finite number, also from a string; None for words, NaN, Infinity, true."""
    try:
        found = float(value) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def flag(value: object) -> bool | None:
    """true, "false", 1, "0"; None for anything else."""
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())
