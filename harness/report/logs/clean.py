"""A line of a log without what launchers and terminals put around it, and the numbers readers look for.

Taken off once, before any reader: ANSI colours, the rank or host a launcher writes in front (`0: `, `[rank3]:`,
`[default0]:`, `[1,0]<stdout>:`, `stdout: `, `node-1: `), commas between thousands. A `set -x` echo is no line of a log.
"""

from __future__ import annotations

import re

# A number; what has to follow it stands in each reader's pattern, so that half a number is none.
N = r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"

_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LAUNCHER = re.compile(
    r"\s*(?:\[(?:rank|default|local_rank)?\s?\d+\]:?|\[\d+,\d+\]<std(?:out|err)>:?|\d+:(?=\s)|std(?:out|err):"
    r"|\((?:\w+ )?pid=\d+[^)]*\)|[a-zA-Z][\w.-]*\d[\w.-]*:(?=\s)|[\w-]+\s+\|(?=\s))\s?"
)
_COMMA = re.compile(r",(?<=\d,)(?=\d{3}(?!\d))")  # begins with the comma: searched for as text, which is fast
_ECHO = re.compile(r"\s*\++ ")


def plain(raw: bytes) -> bytes:
    """The line without colours, which stand between the words that tell a format."""
    return _COLOUR.sub(b"", raw) if b"\x1b" in raw else raw


def clean(line: str) -> str:
    """A plain line as the trainer printed it; empty for an echo of a shell."""
    while found := _LAUNCHER.match(line):
        line = line[found.end() :]
    if _ECHO.match(line):
        return ""
    return _COMMA.sub("", line) if "," in line else line
