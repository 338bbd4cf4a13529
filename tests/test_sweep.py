"""How a sweep goes through its lengths, with launches whose ends are chosen; the real ones are in test_faults.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import records
from harness.measure import box, result_file, sweep
from harness.measure.failures import Cause
from harness.measure.settings import SweepSettings, load
from tests.conftest import environment

OOM = Cause("gpu_oom", 1, "torch.OutOfMemoryError: CUDA out of memory.")


def summary(n: int, gib: float | None = None) -> records.Summary:
    return records.Summary(run_id="r", seq_len=n, n=10, median_ms=n / 10, ci_low_ms=1, ci_high_ms=2, peak_mem_gib=gib)


class Scripted(sweep.Sweep):
    """`fits(n, alone)` decides what a length does: None measures it, a Cause ends the launch there."""

    def launch(self, lengths, **changed):
        self.launches.append(list(lengths))
        self.run = self.run_record
        for n in lengths:
            cause = self.fits(n, len(lengths) == 1)
            if cause:
                return cause
            self.write(summary(n, self.gib(n)))
        return None


def scripted(folder, fits, seqlens="8192 16384 32768 65536", flags=(), gib=lambda n: None, capacity=140.0):
    settings = load(SweepSettings, [f"--seqlens={seqlens}", *flags]).resolve(True)
    s = Scripted(settings, "cuda", [], 8, result_file.new(folder, "x", "sweep"), "key")
    s.fits, s.gib, s.launches = fits, gib, []
    gpu = records.Gpu(device="cuda", name="x", count=8, memory_gib=capacity)
    s.run_record = records.Run(
        kind="sweep", run_id="r", started="", gpu=gpu, stack=records.Stack(python="3", torch="2")
    )
    return s


@pytest.fixture
def make(tmp_path):
    return partial(scripted, tmp_path)


def kinds(s) -> dict[int, str]:
    found = {}
    for line in s.file.read_text().splitlines():
        r = json.loads(line)
        assert r["seq_len"] not in found or r["record"] == "summary"
        found[r["seq_len"]] = r.get("kind", r["record"])
    return found


def test_one_launch_for_all_and_isolate_one_each(make):
    s = make(lambda n, alone: None)
    s.measure(s.settings.seqlens)
    assert s.launches == [[8192, 16384, 32768, 65536]]
    assert set(kinds(s).values()) == {"summary"}
    assert s.exit_reason(s.settings.seqlens) is None
    s = make(lambda n, alone: None, flags=["--isolate=1"])
    s.measure(s.settings.seqlens)
    assert s.launches == [[8192], [16384], [32768], [65536]]


def test_out_of_memory_in_a_shared_launch_is_tried_alone(make):
    s = make(lambda n, alone: OOM if n == 32768 and not alone else None)
    s.measure(s.settings.seqlens)
    assert s.launches == [[8192, 16384, 32768, 65536], [32768], [65536]]
    assert set(kinds(s).values()) == {"summary"}


def test_after_out_of_memory_the_longer_ones_are_not_run(make):
    s = make(lambda n, alone: OOM if n >= 32768 else None)
    s.measure(s.settings.seqlens)
    assert kinds(s) == {8192: "summary", 16384: "summary", 32768: "gpu_oom", 65536: "not_run"}
    assert s.exit_reason(s.settings.seqlens) is None  # that is what was to be found out
    s = make(lambda n, alone: OOM if n == 32768 else None, flags=["--keep-going"])
    s.measure(s.settings.seqlens)
    assert kinds(s) == {8192: "summary", 16384: "summary", 32768: "gpu_oom", 65536: "summary"}


def test_too_little_host_memory_is_no_verdict_on_the_gpu(make):
    s = make(lambda n, alone: Cause("killed_sig9", None, "killed") if n == 16384 else None)
    s.measure(s.settings.seqlens)
    assert kinds(s) == {8192: "summary", 16384: "killed_sig9", 32768: "summary", 65536: "summary"}
    assert s.exit_reason(s.settings.seqlens).startswith("16384 tokens: killed_sig9")


def test_a_launch_that_never_starts_is_not_tried_for_every_length(make):
    s = make(lambda n, alone: Cause("attn_unavailable", 0, "AttentionUnavailable: fa4"))
    s.run_record = None
    s.measure(s.settings.seqlens)
    assert len(s.launches) == 1
    assert kinds(s) == {8192: "attn_unavailable", 16384: "not_run", 32768: "not_run", 65536: "not_run"}
    assert s.exit_reason(s.settings.seqlens)


def test_a_taken_port_is_tried_again_once(make):
    s = make(lambda n, alone: Cause("port_in_use", None, "errno 98") if len(s.launches) == 1 else None)
    s.measure(s.settings.seqlens)
    assert len(s.launches) == 2
    assert set(kinds(s).values()) == {"summary"}
    s = make(lambda n, alone: Cause("port_in_use", None, "errno 98"), seqlens="8192")
    s.measure(s.settings.seqlens)
    assert kinds(s) == {8192: "port_in_use"}


def test_the_longest_length_is_found_where_the_peaks_predict_it(make):
    """The published line: 12.6 GiB + 0.43 MiB a token; 140 GiB hold 296 k tokens."""

    def gib(n):
        return 12.6 + 0.00043 * n

    s = make(lambda n, alone: OOM if gib(n) > 137 else None, "131072 262144", gib=gib)
    s.measure(s.settings.seqlens)
    s.find_max()
    fits = max(n for n, k in kinds(s).items() if k == "summary")
    assert 137 - 0.00043 * 8192 < gib(fits) <= 137
    assert len(s.launches) <= 6  # halving alone from 0 or doubling would take more
    probes = [x for [x] in s.launches[1:]]
    assert all(p % 8192 == 0 for p in probes)


def test_a_kernels_limit_is_found_as_one(make, capsys):
    """The memory would hold far more: the search ends at the kernel's limit and says that it is one."""
    failed = Cause("kernel_limit", 0, "RuntimeError: CUDA error: an illegal memory access was encountered")
    s = make(lambda n, alone: failed if n > 150_000 else None, "65536 131072", gib=lambda n: 12.6 + 0.00043 * n)
    s.measure(s.settings.seqlens)
    s.find_max()
    runs = max(n for n, k in kinds(s).items() if k == "summary")
    assert 150_000 - 8192 < runs <= 150_000
    fails = min(n for n, k in kinds(s).items() if k == "kernel_limit")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"longest length that runs: {runs} tokens (granularity 8192; a kernel fails at {fails}")
    assert 290_000 < int(said.rpartition(" ")[2].strip(")")) < 300_000  # (140 - 12.6) / 0.00043
    assert s.exit_reason(s.settings.seqlens) is None
    planned = make(lambda n, alone: failed if n == 65536 else None)
    planned.measure(planned.settings.seqlens)
    assert planned.exit_reason(planned.settings.seqlens).startswith("65536 tokens: kernel_limit")


def test_the_largest_tensor_of_a_step(make):
    s = make(lambda n, alone: None)
    assert s.largest_tensor(8192) == 0  # nothing has run
    s.run = s.run_record
    assert s.largest_tensor(8192) is None
    recipe = records.Recipe(
        name="custom", zero_stage=3, offload_optimizer=False, grad_checkpoint=True, use_liger=True, liger_applied=True,
        batch_size=2, grad_accum=1, compile=False,
    )  # fmt: skip
    for config in ({"vocab_size": 128256, "hidden_size": 4096}, {"text_config": {"vocab_size": 128256}}):
        model = records.Model(name="m", weights="random", num_layers=1, parameters=1, config=config)
        s.run = s.run_record.model_copy(update={"model": model, "recipe": recipe})
        assert s.largest_tensor(8192) == 8192 * 2 * 128256
        assert s.largest_tensor(8372) > 2**31 > s.largest_tensor(8371)


def test_the_longest_length_below_the_first_planned_one(make):
    s = make(lambda n, alone: OOM if n > 5000 else None, "65536", flags=["--granularity=1024"])
    s.measure(s.settings.seqlens)
    s.find_max()
    fits = max(n for n, k in kinds(s).items() if k == "summary")
    assert 5000 - 1024 <= fits <= 5000


@given(limit=st.integers(1, 300_000), first=st.integers(2, 300_000), step=st.integers(2, 40_000), peaks=st.booleans())
def test_the_search_ends_within_the_granularity_wherever_the_limit_is(limit, first, step, peaks):
    with TemporaryDirectory() as folder:
        s = scripted(
            Path(folder), lambda n, alone: OOM if n > limit else None, str(first), [f"--granularity={step}"],
            gib=lambda n: 10 + n / 3000 if peaks else None, capacity=10 + 300_000 / 3000,
        )  # fmt: skip
        s.measure(s.settings.seqlens)
        s.find_max()
    probes = [n for [n] in s.launches]
    assert len(set(probes)) == len(probes) and all(n >= 2 for n in probes)
    assert all(n % step == 0 for n in probes[1:])
    fits, fits_not = (max((n for n in probes if n <= limit), default=0), min(n for n in probes if n > limit))
    assert 0 < fits_not - fits <= step
    assert len(probes) <= 2 + 2 * np.log2(300_000 / step + 2) + 2


def test_the_launcher_gets_the_very_gpus_that_are_visible(make, monkeypatch):
    """case 24: by index, since the launcher reads no UUIDs; not the first ones, and not the variable."""
    from harness.measure import lengths, telemetry

    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa4,GPU-aa6")
    monkeypatch.setattr(telemetry, "used_bytes", lambda handle: 0)
    monkeypatch.setattr(lengths.Sweep, "watch", lambda self, launch, tail, wanted: None)

    class Noted:
        def __init__(self, command, environment, log):
            seen.append((command, environment))

        def end(self):
            pass

    monkeypatch.setattr(lengths, "Launch", Noted)
    s = make(lambda n, alone: None)
    s.visible = [box.VisibleGpu(n, n, f"GPU-aa{n}", "NVIDIA H200") for n in (4, 6)]
    sweep.Sweep.launch(s, [8192])
    [(command, environment)] = seen
    assert command[command.index("--include") + 1] == "localhost:4,6"
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_key_changes_with_what_matters_only(make):
    def key(*flags):
        return sweep.sweep_key(load(SweepSettings, list(flags)).resolve(False), [], 2)

    assert key() == key("--results=elsewhere") == key("--keep-going") == key("--timeout=5") == key("--fresh")
    assert len({key(), key("--steps=3"), key("--recipe=short-context"), key("--seqlens=64"), key("--seed=1")}) == 5


def test_a_damaged_file_is_continued_as_far_as_it_can_be_read(make, tmp_path):
    s = make(lambda n, alone: None)
    s.write(records.Plan(sweep_key="abc", seq_lens=[1], settings={}, started=""))
    s.write(summary(8192))
    with s.file.open("a") as f:
        f.write('{"record": "summary", "seq_len": 16384, "n"')
    s.write(records.NotRun(seq_len=32768, reason="x"))
    key, outcomes = sweep.earlier_outcomes(s.file)
    assert key == "abc"
    assert {n: o.record for n, o in outcomes.items()} == {8192: "summary", 32768: "not_run"}


def test_the_environment_of_tests_has_none_of_our_settings():
    assert "SEQ_LEN" not in environment()


def test_brackets_in_an_error_are_shown_as_they_are(make, capsys):
    """torch's own prefix, and what would close a rich tag that was never opened."""
    error = "[rank0]: OSError: [/usr/lib/libx.so]: cannot open"
    s = make(lambda n, alone: Cause("crashed", 0, error), seqlens="8192")
    s.measure(s.settings.seqlens)
    assert f"8192: crashed: {error}" in capsys.readouterr().out
