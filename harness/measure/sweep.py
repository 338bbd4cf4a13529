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

import contextlib
import fcntl
import hashlib
import json
import signal
import sys
import tempfile
from pathlib import Path

from harness import flops, gpus, records
from harness.measure import box, failures, formats, result_file, stack, telemetry
from harness.measure.launch import Tail
from harness.measure.lengths import Sweep, console
from harness.measure.settings import EMULATED, Settings, SweepSettings, fail_setting, load

RESERVE_BYTES = 256 * 1024  # kept free beside the result file, so that a full disk can still be recorded
# What makes two sweeps the same: not where to write, nor how far to go.
IN_KEY = (set(Settings.model_fields) | {"isolate"}) - {"results", "result_file", "sweep_key"}


def sweep_key(settings: SweepSettings, visible: list[box.VisibleGpu], ranks: int) -> str:
    """Equal for sweeps of which the second may continue the first: settings, stack, GPUs, ranks."""
    chosen, uuids = settings.model_dump(mode="json", include=IN_KEY), [g.uuid for g in visible]
    parts = [chosen, stack.collect().model_dump(), uuids, ranks]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def earlier_outcomes(file: Path) -> tuple[str | None, dict[int, records.Base]]:
    """(sweep key, last outcome per length) of a sweep file; what cannot be read is passed over."""
    key, outcomes = None, {}
    for record in Tail(file, start=0).read():
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
        f"{int(s.offload_optimizer)}, Liger {int(s.use_liger)}), model {s.model}, attention {s.attn}, {s.dtype}",
        f"longer than TIMEOUT={s.timeout:g} s for a step or START_TIMEOUT={s.start_timeout:g} s to start is a hang",
    ]
    gpu = gpus.identify(sweep.visible[0].name) if sweep.visible else None
    peak = gpu and (gpu.dense(s.dtype) or gpu.bf16)
    try:
        config = flops.shape(s.model)
        for n in planned:
            tflop = flops.count(config, n, s.batch_size, s.doc_len).total_tflop * s.grad_accum / s.sp_size
            saved = config["num_hidden_layers"] * n * s.batch_size * config["hidden_size"] * 2 / 2**30 / s.sp_size
            took = f", about {tflop / peak / 0.4 * (s.steps + s.warmup_steps):.0f} s" if peak else ""
            lines.append(f"{n}: {tflop:.4g} TFLOP a step, at least {saved:.2f} GiB of saved activations{took}")
        if peak:
            lines.append(
                "(times at 40 % of the peak; short lengths of a long-context recipe take several times as long)"
            )
    except (KeyError, flops.Uncountable):
        lines.append("expected memory and time: not known for this model before it is loaded")
    return lines


def prepare(settings: SweepSettings) -> tuple[Sweep, list]:
    """Find the devices, lock them, open or continue the result file. Exits 2 on what cannot work."""
    visible, device = box.visible_gpus(), box.use_accelerator()
    settings.resolve(device == "cuda")
    if device == "cuda" and settings.gpus and settings.gpus > len(visible) and not settings.hostfile:
        fail_setting(f"GPUS={settings.gpus}: {len(visible)} are visible here")
    visible = visible[: settings.gpus]
    capability = box.capability(visible)
    if (capability or device == "cpu") and (why := formats.refusal(settings, capability)):
        fail_setting(why)
    ranks = len(visible) if device == "cuda" else (settings.gpus or 2)
    if settings.hostfile:
        words = [w.split("=")[1] for line in settings.hostfile.read_text().splitlines()
                 for w in line.split("#")[0].split() if w.startswith("slots=")]  # fmt: skip
        ranks = sum(map(int, words)) or ranks
    held = lock([g.uuid for g in visible] or ["cpu"])
    stack.use_venv_extensions()
    key = sweep_key(settings, visible, ranks)
    name = visible[0].name if visible else "cpu"
    folder = result_file.folder(settings.results, name)
    for file in [] if settings.fresh else sorted(folder.glob("sweep_*.jsonl"), reverse=True):
        found, outcomes = earlier_outcomes(file)
        if found == key:
            return Sweep(settings, device, visible, ranks, file, key, outcomes), held
    file = result_file.new(settings.results, name, "sweep")
    sweep = Sweep(settings, device, visible, ranks, file, key)
    sweep.write(
        records.Plan(
            sweep_key=key,
            seq_lens=settings.seqlens,
            settings=settings.model_dump(mode="json", exclude={"results", "result_file", "hostfile"}),
            started=result_file.now(),
        )
    )
    return sweep, held


def main() -> int:
    settings = load(SweepSettings, description=__doc__)
    for number in (signal.SIGINT, signal.SIGTERM):  # in a background job too, where a shell sets the first to ignored
        signal.signal(number, signal.default_int_handler)
    try:
        sweep, _held = prepare(settings)
    except OSError as error:
        console.print(f"cannot write under {settings.results}: {error.strerror or error}")
        return 1
    capability = box.capability(sweep.visible)
    first = [f"No GPU: these figures describe this CPU and the model {settings.model}, and no GPU."]
    first = first if sweep.device == "cpu" else []
    if (capability or first) and formats.emulated(settings.dtype, capability):
        first.append(EMULATED.format(settings.dtype))
    if first:
        console.print(*first)
    for said in telemetry.busy_processes([g.handle for g in sweep.visible]):
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
