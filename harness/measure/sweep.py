"""Sweep benchmark.py over sequence lengths, and outlive whatever goes wrong with it.

    ./run_sweep.sh                                    # install if needed, then this
    SEQLENS=guide ./run_sweep.sh                      # the guide's six lengths
    SEQLENS="8192 32768" RECIPE=short-context ./run_sweep.sh
    FIND_MAX=1 SEQLENS="131072 262144" ./run_sweep.sh # ... then the longest length that fits

Every length ends in one record of results/<gpu>/sweep_<time>.jsonl: a summary, a failure or not_run. Run it again with
the same settings and it continues where it stopped.

exit codes: 0 every length was measured or is out of memory; 1 a measurement failed (the reason is the last line);
2 wrong use or setting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import flops, gpus, records
from harness.measure import box, failures, stack, telemetry
from harness.measure.launch import Launch, Tail, launcher_command
from harness.measure.settings import Settings, SweepSettings, fail_setting, load

TEARDOWN_S = 60  # for the launcher to end after its last summary
RESERVE_BYTES = 256 * 1024  # kept free beside the result file, so that a full disk can still be recorded
# What makes two sweeps the same: not where to write, nor how far to go.
IN_KEY = (set(Settings.model_fields) | {"isolate"}) - {"results", "result_file", "sweep_key"}
COLUMNS = ("seq_len", "TFLOPS/GPU", "MFU %", "step ms (median)", "95 % interval", "n", "peak GiB", "outcome")

# Piped output has no width of its own; 80 columns would break every line of the table.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


@dataclass
class Sweep:
    settings: SweepSettings
    device: str
    visible: box.Visible
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
            with records.Writer(self.file) as out:
                out.write(record)
        except OSError:
            reserve.unlink(missing_ok=True)
            with records.Writer(self.file) as out:
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
        before = [telemetry.used_bytes(h) for h in self.visible.handles]
        self.run, self.current, self.steps_done, self.return_code = None, lengths[0], 0, None
        if self.settings.hostfile:
            where = ["--hostfile", str(self.settings.hostfile.resolve())]
        elif self.device == "cpu":
            where = ["--num_gpus", str(self.ranks)]
        else:
            where = ["--include", "localhost:" + ",".join(map(str, self.visible.indices))]
        command = launcher_command("benchmark.py", flags, [*where, *self.settings.launcher_args.split()])
        tail = Tail(self.file)
        launch = Launch(command, environment, self.file.with_suffix(".log"))
        try:
            return self.watch(launch, tail, lengths)
        finally:
            launch.end()
            if not telemetry.wait_until_free(self.visible.handles, before):
                console.print("warning: GPU memory is still held after a minute; the next length may fail falsely")

    def watch(self, launch: Launch, tail: Tail, lengths: list[int]) -> failures.Cause | None:
        last = said = time.monotonic()
        errors: list[records.RankError] = []
        while True:
            code = launch.process.poll()  # before reading: what was written until the end is read then
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
                return failures.classify(launch.lines, code, errors, self.ranks)
            limit = self.settings.timeout if self.run else self.settings.start_timeout
            if left and now - last > limit:
                return failures.hang(launch.lines, limit, "step" if self.run else "start-up")
            if now - max(last, said) > (15 if now - last < 60 else 60):
                said = now
                what = "starting up" if self.run is None else f"{self.current}: step {self.steps_done}"
                console.print(f"  ... {what}, {now - last:.0f} s since the last record (log: {launch.log})")
            time.sleep(0.2)

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
            try:
                return flops.count(self.run.model.config, seq_len, doc_len=self.settings.doc_len).total_tflop
            except flops.Uncountable:
                return seq_len

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
                run_id=self.run.run_id if self.run else None,
                seq_len=seq_len,
                kind=cause.kind,
                rank=cause.rank,
                error=cause.error,
                return_code=self.return_code,
                steps_done=self.steps_done if self.current == seq_len else 0,
                advice=cause.advice,
            )
        )

    def skip(self, lengths: list[int], reason: str) -> None:
        for n in lengths:
            self.write(records.NotRun(seq_len=n, reason=reason))

    def find_max(self) -> None:
        """Probe for the longest length that fits, where the measured peaks predict it, then halve what is left."""
        step = self.settings.granularity
        capacity = self.run.gpu.memory_gib if self.run else None
        while True:
            good = sorted(n for n in self.outcomes if self.measured(n))
            bad = [n for n in self.out_of_memory() if not good or n > good[-1]]
            low, high = (good[-1] if good else 0), (min(bad) if bad else None)
            if high is not None and high - low <= step:
                console.print(f"longest length that fits: {low} tokens (granularity {step}; {high} does not)")
                return
            guess = predicted_limit([self.outcomes[n] for n in good], capacity)
            if high is None:
                probe = max(low + step, min(guess or 2 * low, 4 * low or step))
            else:
                probe = guess if guess and low + step <= guess <= high - step else (low + high) // 2
            probe = max(low + 1, round(probe / step) * step)
            if high is not None and not low < probe < high:
                probe = (low + high) // 2
            console.print(f"looking for the longest length: trying {probe} tokens")
            cause = self.launch([probe], steps=min(3, self.settings.steps), warmup_steps=1)
            if cause is None:
                capacity = self.run.gpu.memory_gib
                continue
            self.fail(probe, cause)
            if cause.kind not in failures.OUT_OF_MEMORY[self.device]:
                return

    # ---- what a person sees -------------------------------------------------------------------------------------

    def table(self) -> Table:
        who = self.visible.names[0] if self.visible.names else "CPU rank, no GPU"
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


def sweep_key(settings: SweepSettings, visible: box.Visible, ranks: int) -> str:
    """Equal for sweeps of which the second may continue the first: settings, stack, GPUs, ranks."""
    parts = [settings.model_dump(mode="json", include=IN_KEY), stack.collect().model_dump(), visible.uuids, ranks]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def earlier_outcomes(file: Path) -> tuple[str | None, dict[int, records.Base]]:
    """(sweep key, last outcome per length) of a sweep file; what cannot be read is passed over."""
    key, outcomes = None, {}
    with file.open("rb") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                record = records.parse(line)
                if isinstance(record, records.Plan):
                    key = record.sweep_key
                elif isinstance(record, records.Summary | records.Failure | records.NotRun):
                    outcomes[record.seq_len] = record
    return key, outcomes


def lock(names: list[str]) -> list:
    """Hold these devices until this process ends; exits 2 when another sweep holds one."""
    held = []
    for name in names:
        path = Path(tempfile.gettempdir()) / f"gpu-upgrade-sweep-{name}.lock"
        try:
            file = path.open("a")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail_setting(f"another sweep is running on {name}; wait for it or choose other GPUs (lock: {path})")
        held.append(file)
    return held


def plan_lines(sweep: Sweep, planned: list[int]) -> list[str]:
    """What is about to happen, what it needs at least, and about how long it takes."""
    s = sweep.settings
    lines = [
        f"lengths: {' '.join(map(str, planned))}; {s.steps} steps after {s.warmup_steps} warm-up"
        + (", one launch each" if s.isolate else ", one launch"),
        f"recipe: {s.recipe_name} (ZeRO-{s.zero_stage}, checkpointing {int(s.grad_checkpoint)}, CPU AdamW "
        f"{int(s.offload_optimizer)}, Liger {int(s.use_liger)}), model {s.model}, attention {s.attn}",
        f"longer than TIMEOUT={s.timeout:g} s for a step or START_TIMEOUT={s.start_timeout:g} s to start is a hang",
    ]
    gpu = gpus.identify(sweep.visible.names[0]) if sweep.visible.names else None
    try:
        config = flops.shape(s.model)
        for n in planned:
            tflop = flops.count(config, n, s.batch_size, s.doc_len).total_tflop * s.grad_accum / s.sp_size
            saved = config["num_hidden_layers"] * n * s.batch_size * config["hidden_size"] * 2 / 2**30 / s.sp_size
            took = f", about {tflop / gpu.bf16 / 0.4 * (s.steps + s.warmup_steps):.0f} s" if gpu and gpu.bf16 else ""
            lines.append(f"{n}: {tflop:.4g} TFLOP a step, at least {saved:.2f} GiB of saved activations{took}")
        if gpu and gpu.bf16:
            lines.append(
                "(times at 40 % of the peak; short lengths of a long-context recipe take several times as long)"
            )
    except (KeyError, flops.Uncountable):
        lines.append("expected memory and time: not known for this model before it is loaded")
    return lines


def prepare(settings: SweepSettings) -> tuple[Sweep, list]:
    """Find the devices, lock them, open or continue the result file. Exits 2 on what cannot work."""
    try:
        visible = box.visible_gpus() if os.environ.get("DS_ACCELERATOR") != "cpu" else box.Visible()
        device = box.use_accelerator()
    except (ValueError, RuntimeError) as error:
        fail_setting(str(error))
    settings.resolve(device == "cuda")
    if device == "cuda" and settings.gpus and settings.gpus > len(visible.indices) and not settings.hostfile:
        fail_setting(f"GPUS={settings.gpus}: {len(visible.indices)} are visible here")
    visible = visible.first(settings.gpus) if settings.gpus else visible
    ranks = len(visible.indices) if device == "cuda" else (settings.gpus or 2)
    if settings.hostfile:
        words = [w.split("=")[1] for line in settings.hostfile.read_text().splitlines()
                 for w in line.split("#")[0].split() if w.startswith("slots=")]  # fmt: skip
        ranks = sum(map(int, words)) or ranks
    held = lock(visible.uuids or ["cpu"])
    stack.use_venv_extensions()
    key = sweep_key(settings, visible, ranks)
    folder = settings.results / records.folder_name(visible.names[0] if visible.names else "cpu")
    for file in [] if settings.fresh else sorted(folder.glob("sweep_*.jsonl"), reverse=True):
        found, outcomes = earlier_outcomes(file)
        if found == key:
            return Sweep(settings, device, visible, ranks, file, key, outcomes), held
    file = records.new_file(settings.results, visible.names[0] if visible.names else "cpu", "sweep")
    sweep = Sweep(settings, device, visible, ranks, file, key)
    sweep.write(
        records.Plan(
            sweep_key=key,
            seq_lens=settings.seqlens,
            settings=settings.model_dump(mode="json", exclude={"results", "result_file", "hostfile"}),
            started=records.now(),
        )
    )
    return sweep, held


def main() -> int:
    settings = load(SweepSettings, description=__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as Ctrl-C does
    try:
        sweep, _held = prepare(settings)
    except OSError as error:
        console.print(f"cannot write under {settings.results}: {error.strerror or error}")
        return 1
    if sweep.device == "cpu":
        console.print(f"No GPU: these figures describe this CPU and the model {settings.model}, and no GPU.")
    for said in telemetry.busy_processes(sweep.visible.handles):
        console.print(f"warning: {said}; it will be measured too")
    shm = stack.host().shm_gib
    if shm is not None and shm < 1:
        console.print(f"warning: /dev/shm has {shm} GiB; NCCL and DeepSpeed want 1 GiB or more (--shm-size=16g)")
    planned = settings.seqlens
    done = [n for n in planned if sweep.final(n)]
    if done:
        console.print(f"continuing {sweep.file}: {' '.join(map(str, done))} done already (--fresh starts over)")
    if len(done) < len(planned):
        console.print("\n".join(plan_lines(sweep, [n for n in planned if n not in done])))
    with contextlib.suppress(OSError):
        sweep.file.with_suffix(".reserve").write_bytes(b"\0" * RESERVE_BYTES)
    reason = None
    try:
        sweep.measure(planned)
        if settings.find_max:
            sweep.find_max()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the records below are written in any case
        left = [n for n in planned if not sweep.final(n)]
        if left:
            sweep.fail(left[0], failures.Cause("interrupted", None, "interrupted by a signal"))
            sweep.skip(left[1:], "interrupted")
    except OSError as error:
        reason = f"{sweep.file}: {error.strerror or error}: what was measured is kept; free space and run again"
    finally:
        sweep.file.with_suffix(".reserve").unlink(missing_ok=True)
    console.print(sweep.table())
    console.print(f"records: {sweep.file}")
    reason = reason or sweep.exit_reason(planned)
    if reason:
        console.print(reason)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
