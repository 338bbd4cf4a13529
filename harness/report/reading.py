"""A box's result folder -> its sweeps, decompositions, attention times and ceilings, without torch.

    box = read_box("results/nvidia-h200")          # or one file; raises NothingUsable
    box.sweeps[-1].points[8192].median_ms, box.problems

Reads this project's records, and logs in the guide's form (lines.py). A sweep is the launches of one file with equal
configuration. What is skipped, repeated or contradictory is counted in `problems` or said in a point's `warnings`;
rates are recomputed from the step time, and one no GPU could reach voids its point. Files stream: only times are kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from math import nan
from pathlib import Path

from pydantic import ValidationError

from harness import records
from harness.report import lines, points
from harness.report.box import Box, NothingUsable, specification
from harness.report.lines import flag, number
from harness.report.points import Attempt

PEAKS = ("peak_mem_gib", "peak_allocated_gib")


def read_box(folder: str | Path) -> Box:
    """A result folder, or one file of it. Raises NothingUsable; damage that leaves something ends up in `problems`."""
    folder = Path(folder)
    box = Box(folder, "unknown", None)
    runs: dict[str, str] = {}  # run id -> the file that has it
    for path in _files(folder, box.problems):
        _File(path, box, runs).read()
    found = [s.run for s in box.sweeps] + [run for run, _ in [*box.decompositions, *box.attention, *box.ceilings]]
    if not found:
        raise NothingUsable(f"{folder}: nothing usable; {'; '.join(box.problems) or 'no .jsonl or .log file in it'}")
    names = Counter(run.gpu.name for run in found)
    if len(names) > 1:
        box.problems.append(f"several GPUs in one folder: {', '.join(sorted(names))}")
    gpu = next(run.gpu for run in found if run.gpu.name == names.most_common(1)[0][0])
    box.gpu = specification(gpu)
    box.name = box.gpu.label if box.gpu else gpu.name
    return box


def _files(folder: Path, problems: list[str]) -> list[Path]:
    """The files to read, in the order of their names, without copies."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise NothingUsable(f"{folder}: no such file or folder")
    own = sorted(folder.glob("*.jsonl"))
    # A launcher's raw log lies beside what rank 0 wrote: the same measurement once more.
    files = own + [f for f in sorted(folder.glob("*.log")) if not any(f.stem.startswith(o.stem) for o in own)]
    if not files and (inner := sorted({f.parent.name for f in folder.glob("*/*.jsonl")})):
        raise NothingUsable(f"{folder}: holds the folders of several boxes, name one: {', '.join(inner)}")
    first: dict[tuple[int, str], Path] = {}
    sizes = Counter(f.stat().st_size for f in files)
    kept = []
    for path in files:
        key = (path.stat().st_size, "" if sizes[path.stat().st_size] == 1 else _digest(path))
        if first.setdefault(key, path) is path:
            kept.append(path)
        else:
            problems.append(f"{path.name}: the same as {first[key].name}, read once")
    return kept


def _digest(path: Path) -> str:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "blake2b").hexdigest()


class _File:
    """One file: pieces -> attempts -> sweeps and records of the box."""

    def __init__(self, path: Path, box: Box, files_of_runs: dict[str, str]):
        self.path, self.box, self.files_of_runs = path, box, files_of_runs
        self.skipped: Counter[str] = Counter()
        self.strange: Counter[str] = Counter()  # keys of objects that are no record
        self.runs: dict[str, records.Run] = {}
        self.last_run: records.Run | None = None
        self.planned: dict[int, None] = {}
        self.attempts: dict[tuple, Attempt] = {}  # in the order of their last outcome
        self.current: Attempt | None = None  # of a log
        self.flushed = False  # the allocator gave memory back during the step whose record comes next
        self.record_line = 0

    def read(self) -> None:
        try:
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
        except OSError as error:
            self.box.problems.append(f"{self.path.name}: {error.strerror}")
        self.box.sweeps += points.sweeps(
            self.path, [*self.attempts.values()], self.last_run, [*self.planned], self.skipped
        )
        if self.strange:
            keys = self.strange.most_common(1)[0][0]
            what = f"objects that are no record of schema {records.SCHEMA}, most with the keys {keys}"
            self.skipped[what] = self.strange.total()
        if self.skipped:
            what = ", ".join(f"{count} {name}" for name, count in self.skipped.items())
            self.box.problems.append(f"{self.path.name}: left out {what}")

    def _own_record(self, piece: dict) -> None:
        try:
            record = records.validate(piece)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            kind = str(piece["record"])[:40]
            self.skipped[f"{kind} records not of schema {records.SCHEMA} ({where}: {first['msg']})"] += 1
            return
        run_id = getattr(record, "run_id", None)
        if isinstance(record, records.Run):
            if self.files_of_runs.setdefault(run_id, self.path.name) != self.path.name:
                self.skipped[f"runs that {self.files_of_runs[run_id]} has too"] += 1
            else:
                self.runs[run_id] = self.last_run = record
        elif isinstance(record, records.Plan):
            self.planned |= dict.fromkeys(record.seq_lens)
        elif run_id not in self.runs and not isinstance(record, (records.Failure, records.NotRun, records.RankError)):
            self.skipped[f"{record.record} records without their run"] += 1
        elif isinstance(record, records.AttentionTime):
            self.box.attention.append((self.runs[run_id], record))
        elif isinstance(record, records.Ceiling):
            self.box.ceilings.append((self.runs[run_id], record))
        elif isinstance(record, records.Decomposition):
            self.box.decompositions.append((self.runs[run_id], record))
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
        attempt = self.attempts.get((run.run_id, seq_len))
        if attempt is None:
            attempt = self.attempts[run.run_id, seq_len] = Attempt(seq_len, run)
        self._step(attempt, piece)

    def _log_step(self, piece: dict) -> None:
        attempt, step = self.current, number(piece["step"])
        if attempt is None or attempt.seq_len is None:
            self.skipped["steps before any seq_len header"] += 1
            return
        if step is not None and step < attempt.last[0]:  # a new run that no header announced
            attempt = self._begin(attempt.seq_len, attempt.env, attempt.gpu)
        self._step(attempt, piece)

    def _begin(self, seq_len: int | None, env: dict | None = None, gpu: dict | None = None) -> Attempt:
        self.current = self.attempts[len(self.attempts),] = Attempt(seq_len, env=env, gpu=gpu)
        return self.current

    def _step(self, attempt: Attempt, piece: dict) -> None:
        step, warmup, time = number(piece.get("step")), flag(piece.get("warmup")), number(piece.get("exec_time_ms"))
        flushed, self.flushed = self.flushed, False
        if step is None or warmup is None or time is None or time <= 0:
            self.skipped["steps with a value that is no finite number"] += 1
            return
        if step <= attempt.last[0]:
            self.skipped["repeats of a step"] += 1
            if step == attempt.last[0] and attempt.last[2]:
                attempt.times[-1] = max(time, attempt.times[-1])  # another rank's: a step lasts as long as its slowest
            return
        retries = piece.get("alloc_retries")
        retried = flushed or (retries is not None and (number(retries) or 0) > 0)
        attempt.seen += 1
        attempt.last = (step, time, not warmup and not retried)
        if warmup:
            return
        for name in PEAKS:
            if (said := piece.get(name)) is None:
                continue
            value = number(said)
            if value is None:
                self.skipped[f"{name} values that are no finite number"] += 1
            elif value > attempt.peaks.get(name, 0):
                attempt.peaks[name] = value
        if retried:
            attempt.retried += 1
            return
        rate = number(piece.get("tflops"))
        attempt.times.append(time)
        attempt.rates.append(nan if rate is None else rate)

    def _text(self, line: int, text: str) -> None:
        """Headers of the guide's logs, and what a launcher says between records."""
        if lines.FLUSHED.search(text):
            if line == self.record_line and self.current:  # glued to its record
                self.current.retry_last()
            else:
                self.flushed = True
        if found := lines.SECTION.search(text):
            self._begin(int(found[1]))
        elif found := lines.ENV.search(text):
            attempt = self.current
            if attempt is None or attempt.seen or attempt.env is not None or attempt.gpu is not None:
                attempt = self._begin(None)
            attempt.env = dict(pair.split("=", 1) for pair in found[1].split() if "=" in pair)
        elif found := lines.GPU.search(text):
            attempt = self.current
            if attempt is None or attempt.seen or attempt.gpu is not None:
                attempt = self._begin(None)
            attempt.gpu = lines.pairs(found[1])
            said = attempt.gpu.get("seq_len", "")
            if attempt.seq_len is None and said.isdecimal():
                attempt.seq_len = int(said)
            elif said.isdecimal() and int(said) != attempt.seq_len:
                self.skipped[f"sections headed both {attempt.seq_len} and {said}"] += 1
                attempt.seq_len = None
        elif self.current and (found := lines.OOM.search(text) or lines.ERROR.search(text)):
            self.current.oom |= found.re is lines.OOM
            self.current.error = self.current.error or text[found.start() :][:300]
