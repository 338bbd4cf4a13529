"""A box's result folder -> its sweeps, decompositions, attention times and ceilings, without torch.

    box = read_box("results/nvidia-h200")          # or one file; raises NothingUsable
    box.sweeps[-1].points[8192].median_ms, box.problems

Reads this project's records, logs in the guide's form (lines.py), and other trainers' logs (logs/). A sweep is the
launches of one file with equal configuration. What is skipped, repeated or contradictory is counted in `problems` or
said in a point's `warnings`; rates are recomputed from the step time, and one no GPU could reach voids its point. Files
stream: only times are kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from math import nan
from pathlib import Path

from pydantic import ValidationError

from harness import records
from harness.report import lines, logs, points
from harness.report.box import Box, NothingUsable, specification
from harness.report.lines import flag, number
from harness.report.logs import guide
from harness.report.points import Attempt

KEPT_LOSSES = 1000  # of a length; the rest of a long log is only timed


def read_box(folder: str | Path, facts: Sequence[str] = ()) -> Box:
    """A result folder, a log, or a folder of logs; facts: "gpus=8", what another trainer's log does not say.

    Raises NothingUsable, and ValueError for facts that are wrong; damage that leaves something ends up in `problems`.
    """
    folder = Path(folder)
    box = Box(folder, "unknown", None)
    runs: dict[str, str] = {}  # run id -> the file that has it
    for path in _files(folder, box.problems):
        _File(path, box, runs).read(facts)
    found = [s.run for s in box.sweeps] + [run for run, _ in [*box.decompositions, *box.attention, *box.ceilings]]
    if not found:
        formats = f"recognised are this project's records, the guide's logs, and {', '.join(logs.NAMES)}"
        why = "; ".join(box.problems) or "no .jsonl or .log file in it"
        raise NothingUsable(f"{folder}: nothing usable; {why}; {formats}")
    if facts and not any(run.source == "log" for run in found):
        raise ValueError(f"{folder} holds this project's records, which say it all: {facts[0]} is for other logs")
    names = Counter(run.gpu.name for run in found)
    if len(names) > 1:
        box.problems.append(f"several GPUs in one folder: {', '.join(sorted(map(str, names)))}")
    gpu = next(run.gpu for run in found if run.gpu.name == names.most_common(1)[0][0])
    box.gpu = specification(gpu)
    box.name = box.gpu.label if box.gpu else gpu.name or folder.stem
    return box


def _files(folder: Path, problems: list[str]) -> list[Path]:
    """The files to read, in the order of their names, without copies."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise NothingUsable(f"{folder}: no such file or folder")
    own = sorted(folder.glob("*.jsonl"))
    # A launcher's raw log lies beside what rank 0 wrote: the same measurement once more.
    others = sorted(f for f in folder.iterdir() if f.suffix[1:] in logs.SUFFIXES and f.is_file())
    files = own + [f for f in others if not any(f.stem.startswith(o.stem) for o in own)]
    if not own and (inner := sorted({f.parent.name for f in folder.glob("*/*.jsonl")})):
        raise NothingUsable(f"{folder}: holds the folders of several boxes, name one: {', '.join(inner)}")
    first: dict[bytes, Path] = {}
    for path in files:
        try:
            with path.open("rb") as data:
                digest = hashlib.file_digest(data, "blake2b").digest()
        except OSError:  # reading it will say why
            digest = bytes(path)
        if first.setdefault(digest, path) is not path:
            problems.append(f"{path.name}: the same as {first[digest].name}, read once")
    return list(first.values())


class _File:
    """One file: pieces -> attempts -> sweeps and records of the box."""

    def __init__(self, path: Path, box: Box, files_of_runs: dict[str, str]):
        self.path, self.box, self.files_of_runs = path, box, files_of_runs
        self.skipped: Counter[str] = Counter()
        self.strange: Counter[str] = Counter()  # keys of objects that are no record
        self.runs: dict[str, records.Run] = {}
        self.last_run: records.Run | None = None
        self.planned: list[int] = []
        self.attempts: dict[tuple, Attempt] = {}  # in the order of their last outcome
        self.current: Attempt | None = None  # of a log
        self.flushed = False  # the allocator gave memory back during the step whose record comes next
        self.record_line = 0

    def read(self, facts: Sequence[str]) -> None:
        foreign = None
        try:
            foreign = logs.read(self.path, facts, self.skipped, self.box.problems)
            if foreign is None:
                self._own()
        except OSError as error:
            self.box.problems.append(f"{self.path.name}: {error.strerror}")
        attempts = list(self.attempts.values())
        self.box.sweeps += foreign or points.sweeps(self.path, attempts, self.last_run, self.planned, self.skipped)
        if self.skipped:
            what = ", ".join(f"{count} {name}" for name, count in self.skipped.items())
            self.box.problems.append(f"{self.path.name}: left out {what}")

    def _own(self) -> None:
        """Records, or a log of the guide's."""
        for line, piece in lines.pieces(self.path, self.skipped):
            if isinstance(piece, str):
                self._text(line, piece)
            elif piece.get("record") == "step":
                self._own_step(piece)
            elif "record" in piece:
                self._own_record(piece)
            elif {"step", "exec_time_ms", "tflops"} <= piece.keys():
                self.record_line = line
                self._log_step(piece)
            else:
                self.strange[", ".join(piece)[:200]] += 1
        for keys, _ in self.strange.most_common(1):
            what = f"objects that are no record of schema {records.SCHEMA}, most with the keys {keys}"
            self.skipped[what] = self.strange.total()

    def _own_record(self, piece: dict) -> None:
        try:
            record = records.validate(piece)
        except ValidationError as error:
            first, kind = error.errors()[0], str(piece["record"])[:40]
            where = ".".join(map(str, first["loc"]))
            self.skipped[f"{kind} records not of schema {records.SCHEMA} ({where}: {first['msg']})"] += 1
            return
        run_id, box = getattr(record, "run_id", None), self.box
        lists = {"attention": box.attention, "ceiling": box.ceilings, "decomposition": box.decompositions}
        if isinstance(record, records.Run):
            if self.files_of_runs.setdefault(run_id, self.path.name) != self.path.name:
                self.skipped[f"runs that {self.files_of_runs[run_id]} has too"] += 1
            else:
                self.runs[run_id] = self.last_run = record
        elif isinstance(record, records.Plan):
            self.planned += record.seq_lens
        elif run_id not in self.runs and not isinstance(record, (records.Failure, records.NotRun, records.RankError)):
            self.skipped[f"{record.record} records without their run"] += 1
        elif record.record in lists:
            lists[record.record].append((self.runs[run_id], record))
        elif record.seq_len is not None:
            run = self.runs.get(run_id, self.last_run)
            key = (run and run.run_id, record.seq_len)
            attempt = self.attempts[key] = self.attempts.pop(key, None) or Attempt(record.seq_len, run)
            if isinstance(record, records.RankError):
                attempt.error = attempt.error or record.error
            else:
                attempt.outcome = record

    def _own_step(self, piece: dict) -> None:
        run, seq_len = self.runs.get(str(piece.get("run_id"))), piece.get("seq_len")
        if run is None or type(seq_len) is not int or seq_len < 1:
            self.skipped["steps without their run or length"] += 1
            return
        key = run.run_id, seq_len
        if key not in self.attempts:
            self.attempts[key] = Attempt(seq_len, run)
        self._step(self.attempts[key], piece)

    def _log_step(self, piece: dict) -> None:
        attempt, step = self._rejoined(self.current, number(piece["step"])), number(piece["step"])
        if attempt is None or attempt.seq_len is None:
            self.skipped["steps before any seq_len header"] += 1
            return
        if step is not None and step < attempt.last[0]:  # a new run that no header announced
            attempt = self._begin(attempt.seq_len, attempt.run)
        self._step(attempt, piece)

    def _rejoined(self, attempt: Attempt | None, step: float | None) -> Attempt | None:
        """The launch before, if this one goes on where it was: other headers in one run are of ranks that differ."""
        before = attempt and attempt.before
        if not before or attempt.seen:
            return attempt
        attempt.before = None
        length = attempt.seq_len in (None, before.seq_len)
        if not length or not before.run or before.error or step is None or step != before.last[0] + 1:
            return attempt
        heads = before.env | before.said, attempt.env | attempt.said
        parts = [f"{k} {heads[0].get(k)} and {x}" for k, x in heads[1].items() if x != heads[0].get(k)]
        before.run.mismatch = ", ".join(parts)
        self.attempts = {key: a for key, a in self.attempts.items() if a is not attempt}
        self.current = before
        return before

    def _step(self, attempt: Attempt, piece: dict) -> None:
        step, warmup, time = number(piece.get("step")), flag(piece.get("warmup")), number(piece.get("exec_time_ms"))
        flushed, self.flushed = self.flushed, False
        if step is None or warmup is None or time is None or time <= 0:
            self.skipped["steps with a value that is no finite number"] += 1
            return
        if step <= attempt.last[0]:
            self.skipped["repeats of a step"] += 1
            if step == attempt.last[0] and attempt.last[1]:
                attempt.times[-1] = max(time, attempt.times[-1])  # another rank's: a step lasts as long as its slowest
            return
        retried = flushed or (number(piece.get("alloc_retries")) or 0) > 0
        attempt.seen += 1
        attempt.last = step, not warmup and not retried
        if (loss := number(piece.get("loss"))) is not None and len(attempt.losses) < KEPT_LOSSES:
            attempt.losses[int(step) + 1] = loss
        if warmup:
            return
        for name in points.PEAKS:
            if (value := number(piece.get(name))) is not None:
                attempt.peaks[name] = max(value, attempt.peaks.get(name, 0))
        if retried:
            attempt.retried += 1
            return
        rate = number(piece.get("tflops"))
        attempt.times.append(time)
        attempt.rates.append(nan if rate is None else rate)

    def _begin(self, seq_len: int | None, run: records.Run | None = None) -> Attempt:
        self.current = self.attempts[len(self.attempts),] = Attempt(seq_len, run, of_log=True)
        return self.current

    def _text(self, line: int, text: str) -> None:
        """Headers of the guide's logs, and what a launcher says between records."""
        attempt = self.current
        if lines.FLUSHED.search(text):
            if line == self.record_line and attempt:  # glued to its record
                attempt.retry_last()
            else:
                self.flushed = True
        if found := guide.SECTION.search(text):
            self._begin(int(found[1]))
        elif found := guide.HEADER.search(text):
            said = guide.pairs(found[2])
            if attempt and said in (attempt.env, attempt.said):
                return  # another rank's
            if attempt is None or attempt.seen or attempt.run:
                before, attempt = attempt, self._begin(None)
                attempt.before = before
                attempt.env = dict(before.env) if before and not found[1] else {}
            if found[1]:
                attempt.env = said
            else:
                self._gpu_header(attempt, said)
        elif attempt and (found := lines.OOM.search(text) or lines.ERROR.search(text)):
            attempt.oom |= found.re is lines.OOM
            attempt.error = attempt.error or text[found.start() :][:300]

    def _gpu_header(self, attempt: Attempt, said: dict[str, str]) -> None:
        attempt.said = said
        seq_len = said.get("seq_len", "")
        if attempt.seq_len is None and seq_len.isdecimal():
            attempt.seq_len = int(seq_len)
        elif seq_len.isdecimal() and int(seq_len) != attempt.seq_len:
            self.skipped[f"sections headed both {attempt.seq_len} and {seq_len}"] += 1
            attempt.seq_len = None
        try:
            attempt.run = guide.guide_run(attempt.env, said, f"{self.path.stem}-{len(self.attempts)}")
        except ValueError as error:
            self.skipped[f"sections with {error}"] += 1
