"""What a failed launch died of, from the errors its ranks wrote, its output and its return code.

One ordered table. Among everything that was said the earliest rule wins, and under one rule the earliest line:
one rank's out-of-memory makes the others fail in a collective, and only the first is the cause.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.failure_kinds import GPU_OOM, FailureKind
from harness.records import RankError

_DATA = tomllib.loads(Path(__file__).with_name("failures.toml").read_text(encoding="utf-8"))
ADVICE: dict[str, str] = _DATA["advice"]
# Kinds that mean "does not fit", on a GPU and on a machine without one.
OUT_OF_MEMORY = {"cuda": {"gpu_oom"}, "cpu": {"host_oom"}}

# No word of a hint before it: a mere mention of an error is none.
_UNHINTED = r"^(?:(?!(?i:\b(?:if|when|hints?|tips?|avoids?|try|helps?|against|prevents?|reduces?)\b)).)*?"
# Page-locked memory of the host: the drivers' errors are the same as for the GPU's.
_PINNED = r"(?:pin_memory|pinned (?:host )?memory|(?:cuda|hip)Host(?:M?[Aa]lloc|Register)|cudaMallocHost|bytes on host)"
_NO_ROOM = r"(?:out of memory|invalid argument|[Cc]ould not allocate|[Ff]ailed to alloc|ErrorMemoryAllocation)"

# These two are put together from parts; the others are data.
RULES: list[tuple[FailureKind, str]] = [
    ("host_oom", rf"{_UNHINTED}(?:{_PINNED}.*{_NO_ROOM}|{_NO_ROOM}.*{_PINNED})"),
    ("gpu_oom", rf"{_UNHINTED}{GPU_OOM}"),
    *map(tuple, _DATA["rules"]),
]
_COMPILED = [(kind, re.compile(pattern)) for kind, pattern in RULES]

# The echo of another rank's death, or of a half-made object: never the cause.
_ECHO = re.compile(
    r"Exception ignored in|has no attribute 'ds_opt_adam'|Connection (closed|reset) by peer|"
    r"Broken pipe|remote process exited|Socket Timeout|recvValue failed"
)
_RANK = re.compile(r"^\s*\[(?:rank|default)(\d+)\]:?\s*")
_ERROR_LINE = re.compile(
    r"^(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b(:|$)|^\w*error:|terminate called|Segmentation fault"
)


@dataclass(frozen=True)
class Cause:
    kind: FailureKind
    rank: int | None
    error: str  # the first error line of that rank

    @property
    def advice(self) -> str | None:
        return ADVICE.get(self.kind)


def _place(kind: str) -> int:
    """Of a kind's first rule; what only the program itself can name is as strong as the first of all."""
    return next((i for i, (named, _) in enumerate(RULES) if named == kind), 0)


def _rule(line: str, frame: str = "") -> int | None:
    """Of an error line, raised in `frame`: the lines of its traceback's last frame."""
    line += " (in pin_memory)" if "pin_memory" in frame else ""
    if is_echo(line):
        return None
    return next((i for i, (_, pattern) in enumerate(_COMPILED) if pattern.search(line)), None)


def first_line(error: Exception) -> str:
    """The first line of what an error says; its type's name when it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def named_line(error: Exception) -> str:
    """The same behind the type's name, as a traceback ends."""
    return f"{type(error).__name__}: {first_line(error)}"


def is_echo(error: str) -> bool:
    """Whether an error only says that another rank is gone."""
    return bool(_ECHO.search(error))


def classify(
    output: Iterable[str],
    return_code: int | None,
    rank_errors: Iterable[RankError] = (),
    world_size: int | None = None,
    elements: int | None = None,
) -> Cause:
    """The cause of a launch that did not finish its lengths.

    output: the launcher's lines; return_code: the launcher's, None when the sweep itself ended it; elements: of the
    largest tensor a step can have, 0 before the first one: no kernel's limit is reached under 2^31. None: not known.
    Never fails: what nothing names is `crashed`, or `launcher_died` when the launcher says all is well.
    """
    rank_errors = list(rank_errors)
    unsaid = Cause("crashed", None, f"no error line was seen (return code {return_code})")
    if return_code == 0:
        unsaid = Cause("launcher_died", None, "the launcher ended with 0 and left lengths without a result")
    said = _said(output, return_code, rank_errors)
    _, cause = min(said, key=lambda found: found[0], default=(0, unsaid))  # of equal ones the first
    if cause.kind == "kernel_limit" and elements is not None and elements < 2**31:
        return replace(cause, kind="crashed")
    silent = set(range(world_size or 0)) - {e.rank for e in rank_errors}
    if cause.rank is None and len(silent) == 1 and cause.kind in ("killed_sig9", "bus_error", "crashed"):
        # All others lost a peer: it is the one that could not say anything.
        return replace(cause, rank=silent.pop())
    return cause


def _said(output: Iterable[str], return_code: int | None, rank_errors: list[RankError]) -> Iterator[tuple[int, Cause]]:
    """(place of its rule, cause) of all that says why, in order; the lower the place, the stronger the evidence."""
    for e in rank_errors:
        rule = _rule(e.error, (e.traceback or "").rpartition('File "')[2])
        if e.kind:  # the program knows better than any pattern
            yield _place(e.kind), Cause(e.kind, e.rank, e.error)
        elif rule is not None:
            yield rule, Cause(RULES[rule][0], e.rank, e.error)
        elif not is_echo(e.error):
            yield _place("crashed"), Cause("crashed", e.rank, e.error)
    frames: dict[int | None, str] = {}  # by rank: the last one of the traceback that is being printed
    for raw in output:
        rank = int(m[1]) if (m := _RANK.match(raw)) else None
        line = _RANK.sub("", raw).strip()
        if line.startswith('File "') or rank in frames:
            frames[rank] = line if line.startswith('File "') else frames[rank] + line
        ends = _ERROR_LINE.search(line)
        rule = _rule(line, frames.pop(rank, "") if ends else "")
        if rule is not None:
            yield rule, Cause(RULES[rule][0], rank, line[:500])
        elif ends and not is_echo(line):
            yield len(RULES), Cause("crashed", rank, line[:500])
    if return_code in (-9, 137):
        text = f"the launcher was killed (return code {return_code})"
        yield _place("killed_sig9"), Cause("launcher_died", None, text)
    elif return_code == 247:  # 256 - 9: how the launcher passes a rank's SIGKILL on
        yield _place("killed_sig9"), Cause("killed_sig9", None, "a rank was killed with SIGKILL (return code 247)")


def hang(output: Iterable[str], timeout_s: float, waited_for: str = "step") -> Cause:
    """The cause when nothing happened for `timeout_s` seconds: a left build lock is told from any other hang."""
    last = [line for line in output if line.strip()][-5:]
    if any("as PyTorch extensions root" in line for line in last) and not any("Loading extension" in x for x in last):
        return Cause("hang_at_op_build", None, last[-1].strip()[:500])
    return Cause("timeout", None, f"no {waited_for} was finished within {timeout_s:g} s")
