"""What a format is: which lines of a log are its own, and the figures and facts in them.

    class Mine(Reader):
        name = "MyTrainer"
        signs = ("step_ms=",)                                       # a line with none of them is not looked at
        line = {"step": rf"step={N}\\b", "ms": rf"step_ms={N}\\s"}    # -> one observation
        facts = {"global_batch": rf"batch size: {N}\\s"}             # anywhere before the lines it holds for
        said = ("batch size:",)                                     # the same, of lines with facts alone

One group a pattern is the value; SPEEDS says what a speed may be called and FACTS what else may be said. A Block
takes several lines; a reader that needs more than patterns overrides `read` and `end`.
"""

from __future__ import annotations

import math
import re
from typing import ClassVar, Literal

from harness.report.lines import number

# What a speed may be called -> what it gives the time of, and that time in ms; the best first. Of the whole box, but
# for the tokens of one GPU.
SPEEDS = {
    "ms": ("step", lambda x: x),
    "s": ("step", lambda x: 1e3 * x),
    "tokens_per_s_per_gpu": ("token of a GPU", lambda x: 1e3 / x),
    "tokens_per_s": ("token", lambda x: 1e3 / x),
    "samples_per_s": ("sample", lambda x: 1e3 / x),
    "steps_per_s": ("step", lambda x: 1e3 / x),
}
_TEXTS = {"gpu", "model", "precision", "software"}
FACTS = _TEXTS | {"gpus", "seq_len", "global_batch", "tokens_per_step", "grad_accum"}

Kind = Literal["step", "mean", "average"]


class Reader:
    """One file's lines of one format. kind: what an observation is, a step, a mean over the steps since the one
    before, or an average over the whole run."""

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]]
    said: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = "step"
    line: ClassVar[dict[str, str]] = {}
    facts: ClassVar[dict[str, str]] = {}
    note: ClassVar[str | None] = None  # what to know of every figure of this format
    _line: ClassVar[dict[str, re.Pattern]]
    _facts: ClassVar[dict[str, re.Pattern]]

    def __init_subclass__(cls):
        cls._line = {key: re.compile(pattern) for key, pattern in cls.line.items()}
        cls._facts = {key: re.compile(pattern) for key, pattern in cls.facts.items()}

    def read(self, text: str) -> dict | None:
        """A cleaned line with one of `signs` or `said` -> a dict with a speed, or with facts alone; None: it could not
        be read (two records in one line, a number cut off, nan)."""
        found = {}
        signs = max(map(text.count, self.signs))
        if signs == 1:
            found = found_in(text, self._line)
        elif not signs:
            return found_in(text, self._facts)
        return None if found.keys().isdisjoint(SPEEDS) else found

    def end(self) -> dict | None:
        """The last observation, where one takes several lines."""


class Block(Reader):
    """An observation of several lines, each with a part: one for the second time begins the next. A block that only
    says the one before again is none."""

    def __init__(self):
        self.block: dict = {}
        self.before: dict = {}

    def read(self, text: str) -> dict | None:
        found = found_in(text, self._line)
        if not found:
            return None if any(sign in text for sign in self.signs) else found_in(text, self._facts)
        done = self.end() if found.keys() & self.block.keys() else {}
        self.block |= found
        return done

    def end(self) -> dict:
        done, self.block = self.block, {}
        if done.items() <= self.before.items():
            return {}
        self.before = done
        return done


def found_in(text: str, patterns: dict[str, re.Pattern]) -> dict:
    found = {}
    for key, pattern in patterns.items():
        if match := pattern.search(text):
            value = match[match.lastindex]
            value = value.strip() if key in _TEXTS else number(value)
            if value or key == "step" and value is not None:
                found[key] = value
    return found


def whole(value: float | None) -> int | None:
    """The count that dividing two rounded figures means, if one fits: a whole number within 1 %; from a hundred on,
    where any would, a multiple of the power of two that is about 1 % of it, within 0.2 %."""
    if not value or not math.isfinite(value):
        return None
    unit = 1 if value < 100 else 2 ** int(math.log2(value / 100))
    near = round(value / unit) * unit
    return near if near and abs(value / near - 1) < (0.01 if unit == 1 else 0.002) else None
