"""How a sweep goes through its lengths: launches, retries, what is recorded of each, and the search for the longest."""

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import flops, records
from harness.measure import box, failures, result_file, telemetry
from harness.measure.launch import Launch, Tail, free_port, launcher_command, remove_shared_memory
from harness.measure.settings import SweepSettings

TEARDOWN_S = 60  # for the launcher to end after its last summary
COLUMNS = ("seq_len", "TFLOPS/GPU", "MFU %", "step ms (median)", "95 % interval", "n", "peak GiB", "outcome")

# Piped output has no width of its own; 80 columns would break every line of the table.
WIDTH = None if sys.stdout.isatty() else 140
console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=WIDTH)


@dataclass
class Sweep:
    settings: SweepSettings
    device: str
    visible: list[box.VisibleGpu]
    ranks: int
    file: Path
    key: str
    outcomes: dict[int, records.Base] = field(default_factory=dict)
    run: records.Run | None = None  # of the newest launch
    current: int | None = None  # the length being measured
    steps_done: int = 0
    return_code: int | None = None  # the launcher's; None when we ended it

    # ---- what is done -------------------------------------------------------------------------------------------

    def final(self, seq_len: int) -> bool:
        """Measured, or known not to fit: nothing that another run would change."""
        outcome = self.outcomes.get(seq_len)
        return isinstance(outcome, records.Summary) or (
            isinstance(outcome, records.Failure) and outcome.kind in failures.OUT_OF_MEMORY[self.device]
        )

    def out_of_memory(self) -> list[int]:
        return sorted(n for n in self.outcomes if self.final(n) and not self.measured(n))

    def measured(self, seq_len: int) -> bool:
        return isinstance(self.outcomes.get(seq_len), records.Summary)

    def write(self, record: records.Base) -> None:
        """Append; when the disk is full, give back the reserve and try once more."""
        if getattr(record, "seq_len", None) is not None:
            self.outcomes[record.seq_len] = record
        reserve = self.file.with_suffix(".reserve")
        try:
            with result_file.Writer(self.file) as out:
                out.write(record)
        except OSError:
            reserve.unlink(missing_ok=True)
            with result_file.Writer(self.file) as out:
                out.write(record)

    # ---- launching ----------------------------------------------------------------------------------------------

    def launch(self, lengths: list[int], **changed) -> failures.Cause | None:
        """Run benchmark.py once over these lengths; None when each got its summary, else why the next one did not."""
        flags = self.settings.benchmark_flags(lengths, result_file=self.file, sweep_key=self.key, **changed)
        environment = dict(os.environ, PYTHONUNBUFFERED="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
        if self.device == "cpu":
            environment |= {"DS_ACCELERATOR": "cpu"}
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self.ranks)))
        else:
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # --include says the same, and takes no UUIDs
        handles = [g.handle for g in self.visible]
        before = [telemetry.used_bytes(h) for h in handles]
        self.run, self.current, self.steps_done, self.return_code = None, lengths[0], 0, None
        if self.settings.hostfile:
            where = ["--hostfile", str(self.settings.hostfile.resolve())]
        elif self.device == "cpu":
            where = ["--num_gpus", str(self.ranks)]
        else:
            where = ["--include", "localhost:" + ",".join(str(g.index) for g in self.visible)]
        port = free_port()
        command = launcher_command("benchmark.py", flags, [*where, *self.settings.launcher_args.split()], port)
        tail = Tail(self.file)
        launch = Launch(command, environment, self.file.with_suffix(".log"))
        try:
            return self.watch(launch, tail, lengths)
        finally:
            launch.end()
            remove_shared_memory(port)
            if not telemetry.wait_until_free(handles, before):
                console.print("warning: GPU memory is still held after a minute; the next length may fail falsely")

    def watch(self, launch: Launch, tail: Tail, lengths: list[int]) -> failures.Cause | None:
        last = said = time.monotonic()
        errors: list[records.RankError] = []
        while True:
            code = launch.poll()  # before reading: what was written until the end is read then
            for record in tail.read():
                last = time.monotonic()
                self.take(record, lengths)
                if isinstance(record, records.RankError):
                    errors.append(record)
            left = [n for n in lengths if not self.measured(n)]
            now = time.monotonic()
            if not left and (code is not None or now - last > TEARDOWN_S):
                return None  # every step is there, whatever the teardown does
            self.current = left[0] if left else None
            if code is not None:
                self.return_code = code
                return failures.classify(launch.lines, code, errors, self.ranks, self.largest_tensor(self.current or 0))
            limit = self.settings.timeout if self.run else self.settings.start_timeout
            if left and now - last > limit:
                return failures.hang(launch.lines, limit, "step" if self.run else "start-up")
            if now - max(last, said) > (15 if now - last < 60 else 60):
                said = now
                what = "starting up" if self.run is None else f"{self.current}: step {self.steps_done}"
                console.print(f"  ... {what}, {now - last:.0f} s since the last record (log: {launch.log})")
            time.sleep(0.2)

    def largest_tensor(self, seq_len: int) -> int | None:
        """Elements: tokens x the model's largest width (mostly its vocabulary); 0 before the run began."""
        if not (self.run and self.run.model and self.run.recipe):
            return None if self.run else 0
        config = self.run.model.config.get("text_config") or self.run.model.config
        width = max(config.get(k) or 0 for k in ("vocab_size", "intermediate_size", "hidden_size"))
        return seq_len * self.run.recipe.batch_size * width or None

    def take(self, record: records.Base, lengths: list[int]) -> None:
        """Follow a launch's records: keep outcomes, show progress."""
        if isinstance(record, records.Run):
            self.run = record
            kernels = ", ".join(record.attention.kernels) or "kernels unseen"
            console.print(f"  {record.attention.backend} attention: {record.attention.function}, {kernels}")
            for note in record.notes:
                console.print(f"  note: {note}")
        elif isinstance(record, records.Step):
            self.current, self.steps_done = record.seq_len, record.step + 1
            what = f"{record.seq_len}: {'warm-up ' if record.warmup else ''}step {self.steps_done}"
            left = self.time_left(record, lengths)
            console.print(f"  {what}, {record.exec_time_ms:.0f} ms, {shown(record.tflops, '.4g')} TFLOPS, {left} left")
        elif isinstance(record, records.Summary):
            self.outcomes[record.seq_len] = record
            self.steps_done = 0

    def time_left(self, step: records.Step, lengths: list[int]) -> str:
        """At most this long: the steps still to come, scaled by FLOPs from the last one."""

        def work(seq_len: int) -> float:
            count = flops.step_work(self.run, seq_len)
            return count.total_tflop if count else seq_len

        per_length = self.settings.steps + self.settings.warmup_steps
        steps = max(0, per_length - step.step - 1)
        steps += sum(per_length * work(n) / work(step.seq_len) for n in lengths if n > step.seq_len)
        return f"at most {timedelta(seconds=round(steps * step.exec_time_ms / 1e3))}"

    # ---- the sweep ----------------------------------------------------------------------------------------------

    def measure(self, lengths: list[int]) -> None:
        """Give every length its outcome."""
        pending = [n for n in sorted(lengths) if not self.final(n)]
        alone = port_retried = False
        while pending:
            short = [n for n in self.out_of_memory() if n < pending[0]]
            if short and not self.settings.keep_going:
                self.skip(pending, f"{short[0]} tokens ran out of memory (KEEP_GOING=1 tries on)")
                return
            batch = pending[:1] if self.settings.isolate or alone else pending
            console.print(f"launching {self.ranks} ranks for {' '.join(map(str, batch))} tokens")
            cause = self.launch(batch)
            pending = [n for n in pending if not self.measured(n)]
            failed = next((n for n in batch if not self.measured(n)), None)
            if failed is None:
                alone = False
                continue
            if cause.kind == "port_in_use" and not port_retried:
                port_retried = True
                console.print("  the port was taken meanwhile: trying another")
                continue
            fits_not = cause.kind in failures.OUT_OF_MEMORY[self.device]
            if fits_not and failed != batch[0]:
                # Shorter lengths ran before it in this process; by itself it may fit.
                alone = True
                console.print(f"  {failed}: {cause.kind} after other lengths; once more by itself")
                continue
            alone = False
            self.fail(failed, cause)
            pending.remove(failed)
            if self.run is None or cause.kind == "disk_full":
                self.skip(pending, f"not tried: {cause.kind} at {failed} would be the same for every length")
                return

    def fail(self, seq_len: int, cause: failures.Cause) -> None:
        console.print(f"  {seq_len}: {cause.kind}: {cause.error}")
        self.write(
            records.Failure(
                run_id=self.run and self.run.run_id,
                seq_len=seq_len,
                return_code=self.return_code,
                steps_done=self.steps_done if self.current == seq_len else 0,
                advice=cause.advice,
                **vars(cause),
            )
        )

    def skip(self, lengths: list[int], reason: str) -> None:
        for n in lengths:
            self.write(records.NotRun(seq_len=n, reason=reason))

    def find_max(self) -> None:
        """Probe for the longest length that fits, where the measured peaks predict it, then halve what is left."""
        step = self.settings.granularity
        capacity = self.run.gpu.memory_gib if self.run else None
        limits = {*failures.OUT_OF_MEMORY[self.device], "kernel_limit"}
        while True:
            good = sorted(n for n in self.outcomes if self.measured(n))
            low = good[-1] if good else 0
            bad = {n: o.kind for n, o in self.outcomes.items() if n > low and getattr(o, "kind", None) in limits}
            high = min(bad, default=None)
            guess = predicted_limit([self.outcomes[n] for n in good], capacity)
            if high is not None and high - low <= step:
                verb, end = "fits", f"{high} does not"
                if bad[high] == "kernel_limit":
                    verb, end = "runs", f"a kernel fails at {high}; memory, by its fit, ends at {guess or '?'}"
                console.print(f"longest length that {verb}: {low} tokens (granularity {step}; {end})")
                return
            if high is None:
                probe = max(low + step, min(guess or 2 * low, 4 * low or step))
            else:
                probe = guess if guess and low + step <= guess <= high - step else (low + high) // 2
            probe = int(probe / step + 0.5) * step  # still between the two: they are more than a step apart
            console.print(f"looking for the longest length: trying {probe} tokens")
            cause = self.launch([probe], steps=min(3, self.settings.steps), warmup_steps=1)
            if cause is None:
                capacity = self.run.gpu.memory_gib
                continue
            self.fail(probe, cause)
            if cause.kind not in limits:
                return

    # ---- what a person sees -------------------------------------------------------------------------------------

    def table(self) -> Table:
        who = self.visible[0].name if self.visible else "CPU rank, no GPU"
        table = Table(title=f"{self.ranks} x {who}: {self.file}")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "outcome" else "right")
        for n, o in sorted(self.outcomes.items()):
            cells = [""] * 6
            if isinstance(o, records.Summary):
                interval = "?" if o.ci_low_ms is None else f"{o.ci_low_ms:.1f} to {o.ci_high_ms:.1f}"
                cells = [shown(o.tflops, ".4g"), shown(o.mfu and 100 * o.mfu, ".1f"), shown(o.median_ms, ".1f")]
                cells += [interval, str(o.n), shown(o.peak_mem_gib, ".2f")]
                said = "measured" + ", not steady" * (o.steady is False) + ", throttled" * bool(o.throttled)
            elif isinstance(o, records.Failure):
                said = o.kind if o.rank is None else f"{o.kind} on rank {o.rank}"
            else:
                said = f"not run: {o.reason}"
            table.add_row(str(n), *cells, said)
        return table

    def exit_reason(self, planned: list[int]) -> str | None:
        """None when every length was measured or does not fit; else the first that is neither, in words."""
        for n in planned:
            o = self.outcomes.get(n)
            if isinstance(o, records.Failure) and not self.final(n):
                return f"{n} tokens: {o.kind}: {o.error}" + (f" ({o.advice})" if o.advice else "")
            if o is None or (isinstance(o, records.NotRun) and not any(m < n for m in self.out_of_memory())):
                return f"{n} tokens: not run{f': {o.reason}' if o else ''}"
        return None


def shown(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)


def predicted_limit(points: list[records.Summary], capacity_gib: float | None) -> int | None:
    """Tokens at which a line through the two longest points' peaks reaches the capacity; None without a slope."""
    known = [p for p in points if p.peak_mem_gib is not None][-2:]
    if len(known) < 2 or capacity_gib is None:
        return None
    (a, b) = known
    slope = (b.peak_mem_gib - a.peak_mem_gib) / (b.seq_len - a.seq_len)
    return int(b.seq_len + (capacity_gib - b.peak_mem_gib) / slope) if slope > 0 else None
