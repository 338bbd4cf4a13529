"""How a sweep starts: what it refuses, what it warns of, which launcher it calls on which devices."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from harness import records
from harness.measure import box, launch, lengths, stack, sweep, telemetry
from harness.measure.failures import Cause
from harness.measure.settings import SweepSettings, load
from tests.conftest import environment
from tests.test_telemetry import Nvml


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """No lock shared with a sweep of the user's, none of the user's settings, and the signals as they were."""
    monkeypatch.setattr("os.environ", environment(TMPDIR=str(tmp_path)))
    monkeypatch.setattr(sweep.tempfile, "gettempdir", lambda: str(tmp_path))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def gpu_box(monkeypatch):
    """Two H200 by a stand-in NVML, and a torch that could use them."""

    def install(**answers):
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        Nvml(**answers).install(monkeypatch)
        monkeypatch.setattr(box, "has_gpu", lambda: True)

    return install


def settings(tmp_path, *flags: str) -> SweepSettings:
    return load(SweepSettings, [f"--results={tmp_path / 'results'}", "--seqlens=64 128", *flags])


def refused(capsys, asked: SweepSettings) -> str:
    with pytest.raises(SystemExit) as ended:
        sweep.prepare(asked)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("visible", "flags", "said"),
    [("MIG-1", [], "MIG slice"), ("7", [], "no GPU '7'"), ("0,1", ["--gpus=3"], "GPUS=3: 2 are visible here")],
)
def test_devices_that_are_not_there(gpu_box, monkeypatch, capsys, tmp_path, visible, flags, said):
    gpu_box()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert said in refused(capsys, settings(tmp_path, *flags))


def test_a_hostfile_that_is_not_there(capsys, tmp_path):
    assert "HOSTFILE=" in refused(capsys, settings(tmp_path, f"--hostfile={tmp_path / 'none'}"))


def test_ranks_are_the_hostfiles_slots(tmp_path):
    (tmp_path / "hostfile").write_text("# the two nodes\nboxa slots=8\nboxb slots=4 # half of it\n\n")
    prepared, held = sweep.prepare(settings(tmp_path, f"--hostfile={tmp_path / 'hostfile'}"))
    assert prepared.ranks == 12
    assert len(held) == 1


class Recorded:
    """A launcher that ends at once; `commands` has how it was called."""

    commands: list = []

    def __init__(self, command, environment, log):
        self.lines: list[str] = []
        self.commands.append((command[command.index("--master_port") + 2 :], environment))

    def end(self):
        pass


def launched(monkeypatch, prepared: sweep.Sweep) -> tuple[list[str], dict]:
    monkeypatch.setattr(lengths, "Launch", Recorded)
    monkeypatch.setattr(prepared, "watch", lambda launch, tail, wanted: None)
    assert prepared.launch([64]) is None
    return Recorded.commands[-1]


def test_the_launcher_on_gpus_by_index(gpu_box, monkeypatch, tmp_path):
    """cases 23, 24: --include with indices; a UUID in the variable never reaches the launcher."""
    gpu_box(nvmlDeviceGetMemoryInfo=type("Memory", (), {"used": 0}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa1")
    prepared, _ = sweep.prepare(settings(tmp_path, "--launcher-args=--bind_cores_to_rank"))
    command, env = launched(monkeypatch, prepared)
    assert command[:3] == ["--include", "localhost:1", "--bind_cores_to_rank"]
    assert "CUDA_VISIBLE_DEVICES" not in env and env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "DS_ACCELERATOR" not in env


def test_the_launcher_on_several_nodes_and_on_cpus(monkeypatch, tmp_path):
    prepared, _ = sweep.prepare(settings(tmp_path, "--gpus=3"))
    command, env = launched(monkeypatch, prepared)
    assert command[:2] == ["--num_gpus", "3"] and env["DS_ACCELERATOR"] == "cpu" and env["OMP_NUM_THREADS"]
    (tmp_path / "hostfile").write_text("boxa slots=8\n")
    monkeypatch.setattr(sweep, "lock", lambda names: [])
    more = [f"--hostfile={tmp_path / 'hostfile'}", "--launcher-args=--launcher slurm"]
    prepared, _ = sweep.prepare(settings(tmp_path, *more))
    command, _ = launched(monkeypatch, prepared)
    assert command[:4] == ["--hostfile", str(tmp_path / "hostfile"), "--launcher", "slurm"]


def test_memory_that_is_not_given_back_is_said(gpu_box, monkeypatch, tmp_path, capsys):
    gpu_box(nvmlDeviceGetMemoryInfo=type("Memory", (), {"used": 0}))
    prepared, _ = sweep.prepare(settings(tmp_path))
    monkeypatch.setattr(telemetry, "wait_until_free", lambda handles, before: False)
    launched(monkeypatch, prepared)
    assert "still held after a minute" in capsys.readouterr().out


def test_the_plan_on_a_known_gpu_and_for_an_unknown_model(gpu_box, tmp_path):
    gpu_box()
    prepared, _ = sweep.prepare(settings(tmp_path, "--seqlens=8192"))
    plan = "\n".join(sweep.plan_lines(prepared, [8192]))
    # The published total; 12 steps at 40 % of 989 TFLOPS.
    assert "8192: 421.6 TFLOP a step" in plan and f"about {421.6 / 989 / 0.4 * 12:.0f} s" in plan
    prepared.settings.model = "some/model"
    assert "not known for this model before it is loaded" in sweep.plan_lines(prepared, [8192])[-1]


def run_main(monkeypatch, tmp_path, *flags: str, results=None) -> int:
    """main() in this process with launches that measure nothing and fail."""
    argv = ["sweep", f"--results={results or tmp_path / 'results'}", "--seqlens=64 128", *flags]
    monkeypatch.setattr(sys, "argv", argv)
    return sweep.main()


def test_results_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_main(monkeypatch, tmp_path, results=tmp_path / "file") == 1
    assert f"cannot write under {tmp_path / 'file'}" in capsys.readouterr().out


def test_warnings_before_the_start_and_a_disk_that_fills(gpu_box, monkeypatch, tmp_path, capsys):
    """case 14, and a GPU that others use."""
    gpu_box()
    monkeypatch.setattr(telemetry, "busy_processes", lambda handles: ["GPU 1: process 4242 holds 10.2 GiB"])
    host = stack.host().model_copy(update={"shm_gib": 0.06})
    monkeypatch.setattr(stack, "host", lambda: host)

    def full(self, planned):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep.Sweep, "measure", full)
    assert run_main(monkeypatch, tmp_path) == 1
    said = capsys.readouterr().out
    assert "warning: GPU 1: process 4242 holds 10.2 GiB; it will be measured too" in said
    assert "/dev/shm has 0.06 GiB" in said
    assert "No space left on device: what was measured is kept" in said.splitlines()[-1]
    assert not list(tmp_path.glob("results/*/*.reserve"))


def test_an_interrupt_records_what_was_not_measured(monkeypatch, tmp_path, capsys):
    def interrupted(self, planned):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.Sweep, "measure", interrupted)
    assert run_main(monkeypatch, tmp_path) == 1
    (file,) = tmp_path.glob("results/cpu/sweep_*.jsonl")
    _, failed, not_run = [records.parse(line) for line in file.read_text().splitlines()]
    assert (failed.seq_len, failed.kind, not_run.seq_len) == (64, "interrupted", 128)
    assert capsys.readouterr().out.splitlines()[-1].startswith("64 tokens: interrupted")


@pytest.fixture
def measured(tmp_path):
    """A sweep whose launches are chosen: sweep(outcome of each length, ...)."""

    def make(outcome, *flags: str, **gpu):
        prepared, _ = sweep.prepare(settings(tmp_path, *flags))
        facts = {"device": "cpu", "name": "x", "count": 2, "memory_gib": 10.0} | gpu
        run = records.Run(kind="sweep", run_id="r", started="", gpu=records.Gpu(**facts),
                          stack=records.Stack(python="3", torch="2"))  # fmt: skip
        tried = []

        def launch(wanted, **changed):
            prepared.run = run
            for n in wanted:
                tried.append(n)
                if (cause := outcome(n)) is not None:
                    return cause
                prepared.write(records.Summary(run_id="r", seq_len=n, n=3, median_ms=n, peak_mem_gib=1.0))
            return None

        prepared.launch = launch
        return prepared, tried

    return make


def test_the_search_ends_at_a_failure_that_is_no_out_of_memory(measured):
    crashed = Cause("crashed", 0, "ValueError: x")
    prepared, tried = measured(lambda n: crashed if n > 128 else None, "--granularity=64")
    prepared.measure([64, 128])
    prepared.find_max()
    assert tried == [64, 128, 256]
    assert prepared.outcomes[256].kind == "crashed"


def test_the_search_halves_between_lengths_that_no_step_of_the_granularity_divides(measured):
    oom = Cause("host_oom", 0, "MemoryError")
    prepared, tried = measured(lambda n: oom if n > 210 else None, "--granularity=100")
    prepared.measure([64, 128, 290])
    prepared.find_max()
    fits, fails = 128, 290
    for probe in tried[3:]:  # after 290 and its repetition by itself
        if fits < probe < fails:
            fits, fails = (probe, fails) if probe <= 210 else (fits, probe)
    assert fails - fits <= 100 and all(128 < probe < 290 for probe in tried[4:])


def test_a_length_that_nothing_says_anything_of(measured):
    prepared, _ = measured(lambda n: None)
    assert prepared.exit_reason([64]) == "64 tokens: not run"


def test_time_left_of_a_model_that_cannot_be_counted_goes_by_tokens(measured):
    prepared, _ = measured(lambda n: None, "--steps=4", "--warmup-steps=0")
    model = records.Model(name="x", weights="random", num_layers=1, parameters=1, config={"model_type": "mamba"})
    prepared.run = records.Run(kind="sweep", run_id="r", started="", model=model,
                               gpu=records.Gpu(device="cpu", name="x", count=1),
                               stack=records.Stack(python="3", torch="2"))  # fmt: skip
    step = records.Step(run_id="r", seq_len=64, step=1, warmup=False, exec_time_ms=1000)
    # two steps of 64 left, then four of 128, each twice as long
    assert prepared.time_left(step, [64, 128]) == "at most 0:00:10"


def test_what_a_launcher_said_last_is_there_when_it_has_ended(tmp_path):
    """Its last line is why it failed; on a busy machine it is read after the process is gone."""

    class Behind(launch.Launch):
        def _read(self):
            time.sleep(0.5)
            super()._read()

    command = [sys.executable, "-c", "print('MissingCUDAException: CUDA_HOME does not exist'); raise SystemExit(1)"]
    started = Behind(command, environment(), tmp_path / "log")
    while (code := started.poll()) is None:
        time.sleep(0.01)
    assert (code, started.lines) == (1, ["MissingCUDAException: CUDA_HOME does not exist"])
    started.end()
