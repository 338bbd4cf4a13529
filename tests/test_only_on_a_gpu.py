"""What only a GPU shows: faults found by reading, each with a stand-in for the part that a CPU lacks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
import torch.distributed as dist

import bench_ceilings
import bench_flash_attn
from harness import records
from harness.measure import attention, box, matmul, memory, profile, runs, session, stack, telemetry, timing, training
from harness.measure.settings import Settings, load
from tests import standins
from tests.conftest import ROOT, environment
from tests.test_attention import BATCH, run_with
from tests.test_loop import make  # noqa: F401 (a fixture)
from tests.test_telemetry import Nvml

# ZeRO: what DeepSpeed does not do unless told


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, True), (2, True), (3, True)])
def test_communication_overlaps_at_every_stage(monkeypatch, stage, overlaps):
    """Through DeepSpeed's own reading of the config: left out, it is off at stages 1 and 2."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    settings = Settings(_cli_parse_args=[], zero_stage=stage, offload_optimizer=False, seq_len=64)
    read = DeepSpeedZeroConfig(**session.deepspeed_config(settings, "cuda")["zero_optimization"])
    assert bool(read.overlap_comm) is overlaps
    assert read.contiguous_gradients


# Packed documents with PyTorch's attention


def started_with(monkeypatch, device: str, capability, **facts) -> list[str]:
    """The backend that session.start goes on with; what comes after would need the process group."""
    import deepspeed

    seen, facts = [], {"name": "x", "capability": capability, "memory_gib": 64.0, "uuid": None} | facts

    class WentOnError(Exception):
        pass

    def stop(*_):
        raise WentOnError

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(box, "device_facts", lambda device, index=0: facts)
    monkeypatch.setattr(attention, "require", lambda backend, capability: seen.append(backend))
    monkeypatch.setattr(deepspeed, "init_distributed", stop)
    settings = Settings(_cli_parse_args=[], doc_len=8192, seqlens=[8192, 262144], attn="sdpa").resolve(False)
    with pytest.raises(WentOnError):
        session.start(settings, "sweep", device)
    return seen


def test_documents_on_a_gpu_have_no_mask(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert started_with(monkeypatch, "cuda", (12, 0)) == ["varlen"]


def test_a_mask_that_takes_the_memory_is_refused_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # 262144 tokens squared are 64 GiB of bytes, and twice that in bf16.
    with pytest.raises(attention.AttentionUnavailable, match=r"262144 tokens: .* takes 192.0 GiB .* 64.0 GiB") as error:
        started_with(monkeypatch, "cpu", None)
    assert error.value.kind == "wrong_setting"
    assert started_with(monkeypatch, "cpu", None, memory_gib=400.0) == ["sdpa"]
    monkeypatch.setenv("LOCAL_SIZE", "2")  # the ranks share it
    with pytest.raises(attention.AttentionUnavailable, match="200.0 GiB that a rank has"):
        started_with(monkeypatch, "cpu", None, memory_gib=400.0)


@pytest.mark.parametrize("capability", [None, (7, 5)])
def test_documents_where_torch_has_no_kernel_for_them(capability):
    with pytest.raises(attention.AttentionUnavailable, match="NVIDIA GPU|compute capability 7.5"):
        attention.require("varlen", capability)


VARLEN = """
import torch.nn.attention.varlen, varlen_standin
torch.nn.attention.varlen.varlen_attn = varlen_standin.varlen_attn
varlen_standin.__name__ = "torch.nn.attention.varlen"  # what the probe reads

def loss(model, inputs):
    value = model(**inputs).loss
    value.backward()
    return [value.item(), *(layer.self_attn.k_proj.weight.grad.norm().item() for layer in model.model.layers)]

attention.require("varlen", (9, 0))
result = {}
for name, settings in (("packed", {"doc_len": 16}), ("whole", {"batch_size": 2})):
    varlen_standin.CALLS.clear()
    model = build("varlen")
    result[name] = {"used": loss(model, batch("varlen", **settings)), "calls": list(varlen_standin.CALLS),
                    "mask": loss(build("sdpa"), batch("sdpa", **settings)),
                    "mismatch": attention.check_model(model, "varlen")}
attention.attend_documents(None, *[torch.randn(1, n, 40, 16) for n in (4, 2, 2)], None, sliding_window=8)
result["window"] = varlen_standin.CALLS[-1]["arguments"]["window"]
probe = attention.probe("varlen", "cpu", heads=4, kv_heads=2, head_dim=32, seqlen=64)
result["probe"] = [probe.function, probe.max_error]
"""


@pytest.fixture(scope="module")
def varlen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    standins.module(folder, "varlen_standin", (standins.HERE / "varlen.py").read_text())
    return run_with(folder, BATCH + VARLEN)


@pytest.mark.parametrize("name", ["packed", "whole"])
def test_documents_by_offsets_are_what_a_mask_gives(varlen, name):
    """transformers' real model, with torch's function replaced by one that takes each document by itself."""
    run = varlen[name]
    assert run["used"] == pytest.approx(run["mask"], rel=1e-5) and run["mismatch"] is None
    assert len(run["calls"]) == 2  # one a layer
    for call in run["calls"]:
        tokens, offsets = (40, [0, 16, 32, 40]) if name == "packed" else (80, [0, 40, 80])
        assert call["q"] == [tokens, 4, 16] and call["k"] == [tokens, 2, 16]  # GQA heads not repeated
        arguments = call["arguments"]
        assert arguments["cu_seqlens_q"] == arguments["cu_seqlens_k"] == ["Tensor", "torch.int32", offsets]
        assert arguments["max_seqlen_q"] == arguments["max_seqlen_k"] == ["int", None, 16 if name == "packed" else 40]
        assert arguments["causal"][2] and arguments["softmax_scale"][2] == pytest.approx(16**-0.5)


def test_a_sliding_window_and_the_name_of_what_ran(varlen):
    assert varlen["window"][2] == [7, 0]  # the token itself and 7 before it, nothing after
    function, error = varlen["probe"]
    assert function == "torch.nn.attention.varlen.varlen_attn" and error < attention.MAX_RELATIVE_ERROR


def test_torchs_varlen_attention_takes_what_it_is_given():
    """The stand-in has the parameters of the pinned torch's function."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    real = inspect.signature(varlen_attn).parameters
    space: dict = {}
    source = (
        (standins.HERE / "varlen.py").read_text().replace("from attend import", "from tests.standins.attend import")
    )
    exec(source, space)
    for name, parameter in inspect.signature(space["varlen_attn"]).parameters.items():
        assert (real[name].kind, real[name].default) == (parameter.kind, parameter.default)


# Collectives


@pytest.mark.parametrize(("name", "ms", "busbw"), [("all_reduce", 0.5, 2 * 7 / 8), ("all_gather", 0.5, 7 / 8)])
def test_collectives_are_timed_back_to_back_between_two_events(monkeypatch, name, ms, busbw):
    """20 calls without the host between them; 8 MiB in 0.5 ms are 16.8 GB/s, times nccl-tests' factor for 8 ranks."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 20 * ms

    team = SimpleNamespace(device="cuda", mine=["cpu"], world=8)
    team.share = lambda value: log.append("share") or [value, None if value is None else value / 2]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("wait"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: log.append("call"))
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda whole, part: log.append("call"))
    got = bench_ceilings.collective(name, 8 * 2**20, team)
    assert got == pytest.approx(8 * 2**20 / (ms / 1e3) / 1e9 * busbw)  # by the slowest rank
    assert log[-24:-2] == ["event", *["call"] * 20, "event"]
    assert log.count("call") > 20  # some before, which are not timed


# The attention kernel alone


def test_the_kernels_own_time(monkeypatch):
    """10 calls, each of two kernels of 30 and 10 us, after 5 us that empty the cache."""
    events: list = []

    def event(us, note=False):
        events.append(SimpleNamespace(is_user_annotation=note, time_range=SimpleNamespace(elapsed_us=lambda: us)))

    class Profile:
        def __init__(self, activities):
            events.clear()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            event(1e6, note=True)  # a frame around the others

        def events(self):
            return list(events)

    def run():
        assert leaf.grad is None
        event(30), event(10)

    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.ones(1)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: SimpleNamespace(zero_=lambda: event(5)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    assert timing.kernels_ms(run, "cuda:0", [leaf]) == pytest.approx(0.040)
    assert timing.kernels_ms(run, "cpu") is None


@pytest.mark.parametrize(("share", "bound"), [(0.5, True), (0.95, False), (None, None)])
def test_a_call_much_longer_than_its_kernels_is_marked(monkeypatch, capsys, share, bound):
    settings = bench_flash_attn.AttentionSettings(_cli_parse_args=["--heads=2", "--kv-heads=2", "--head-dim=16"])
    settings.sustained_s = 0
    monkeypatch.setattr(bench_flash_attn, "iterations_ms", lambda *_: [0.2, 0.2])
    monkeypatch.setattr(bench_flash_attn, "kernels_ms", lambda *_: share and 0.2 * share, raising=False)
    ready = {"sdpa": bench_flash_attn.kernel("sdpa", None)}
    ((label, mode, _, found),) = bench_flash_attn.measure(ready, settings, 64, "cpu", telemetry.Sampler(None))
    shape = settings.shape | {"run_id": "r", "dtype": "bfloat16", "seqlen": 64}
    row = records.AttentionTime(backend=label, mode=mode, **shape, **found)
    assert row.host_bound is bound
    assert row.fwd_bwd_kernel_ms == (share and pytest.approx(0.2 * share))
    bench_flash_attn.show([row])
    out = capsys.readouterr().out
    assert ("host-bound:" in out) is bool(bound) and ("fwd kernels" in out) is (share is not None)


def test_what_was_not_measured_is_said_and_what_to_do(monkeypatch, capsys):
    """--attn all on a Hopper with FlashAttention-3 alone."""
    monkeypatch.setattr(attention, "version", lambda name: "3.0.0" if name == "flash-attn-3" else None)
    with pytest.raises(attention.AttentionUnavailable) as reason:
        attention.require("fa4", (9, 0))
    assert str(reason.value).endswith("run ./install.sh --force fa4, which adds it beside flash-attn-3")
    with pytest.raises(attention.AttentionUnavailable, match="force fa4$"):
        attention.require("fa4", (10, 0))
    shape = {"run_id": "r", "dtype": "bfloat16", "seqlen": 64, "batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 8}
    bench_flash_attn.show([records.AttentionTime(backend="fa4", error=f"fa4: {reason.value}", **shape)])
    assert f"not measured: fa4: {reason.value}" in capsys.readouterr().out.replace("\n", " ")


# A step's energy, and its kernels


def test_nvml_is_asked_before_the_ranks_meet(make, monkeypatch):  # noqa: F811
    trainer, log = make(), []
    monkeypatch.setattr(dist, "barrier", lambda: log.append("barrier"))
    monkeypatch.setattr(trainer.sampler, "take", lambda: log.append("nvml") or dict.fromkeys(telemetry.READINGS))
    monkeypatch.setattr(training.time, "perf_counter", lambda: log.append("clock") or 1.0 * len(log))
    trainer.timed_step(trainer.make_batch(64), 64, 0, warmup=False)
    assert log[:3] == ["nvml", "barrier", "clock"] and log[-1] == "nvml"


# Ceilings


def refusing(*bad):
    """operands(...) of a cuBLASLt that refuses these shapes."""

    def operands(fmt, shape, device, seed):
        if shape in bad:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(...)`\nmore")
        return lambda: None

    return operands


def test_a_shape_that_cublas_refuses_is_skipped_and_said(monkeypatch, capsys):
    good, bad, clock = (512, 512, 512), (768, 768, 768), iter(range(100))
    monkeypatch.setattr(matmul, "operands", refusing(bad))
    monkeypatch.setattr(matmul, "candidates", lambda *_: iter([bad, good, bad]))
    monkeypatch.setattr(matmul, "iterations_ms", lambda *_: [1.0])
    monkeypatch.setattr(matmul.time, "monotonic", lambda: next(clock))
    assert matmul.search("fp8", None, 5, 0, "cpu") == good
    assert f"# fp8: {bad} skipped, kernel: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED" in capsys.readouterr().err


def test_when_all_shapes_are_refused_that_is_the_reason(monkeypatch):
    bad, clock = (768, 768, 768), iter(range(100))
    monkeypatch.setattr(matmul, "operands", refusing(bad))
    monkeypatch.setattr(matmul, "candidates", lambda *_: iter([bad] * 50))
    monkeypatch.setattr(matmul.time, "monotonic", lambda: next(clock))
    with pytest.raises(matmul.CannotRun, match="kernel: CUDA error: CUBLAS_STATUS"):
        matmul.search("fp8", None, 5, 0, "cpu")


def test_a_refused_matmul_of_the_model_is_a_row_with_its_reason(monkeypatch):
    settings = bench_ceilings.CeilingSettings(_cli_parse_args=["--model=tiny", "--seq-len=64"])
    lm_head = matmul.of_a_step(bench_ceilings.flops.shape("tiny"), 64)[15][3]
    monkeypatch.setattr(matmul, "as_autograd", refusing(lm_head))
    monkeypatch.setattr(matmul, "iterations_ms", lambda *_: [1.0])
    rows = list(bench_ceilings.model_matmuls(settings, bench_ceilings.Team("cpu")))
    assert rows[15]["reason"].startswith("kernel: CUDA error: CUBLAS")
    assert [n for n, r in enumerate(rows) if "value" not in r] == [15] and len(rows) == 18


def test_an_error_of_the_gpu_itself_is_no_refusal(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(matmul, "operands", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        matmul.timed(matmul.operands, "fp8", (8, 8, 8), 0, 1, "cpu")


# Determinism


DETERMINISTIC = """
import os, sys
import {script}
from harness.measure.settings import load
load({script}.{cls})
names = ("FLASH_ATTENTION_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")
print("torch" in sys.modules, *map(os.environ.get, names))
"""


@pytest.mark.parametrize(("script", "cls"), [("benchmark", "Settings"), ("bench_decompose", "DecomposeSettings")])
def test_deterministic_kernels_are_asked_for_before_torch_is_there(script, cls):
    def said(**variables):
        code = DETERMINISTIC.format(script=script, cls=cls)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(**variables), text=True,
                              capture_output=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert said(DETERMINISTIC="1", FLASH_ATTENTION_DETERMINISTIC="0") == ["False", "1", ":4096:8"]
    assert said(DETERMINISTIC="1", CUBLAS_WORKSPACE_CONFIG=":16:8") == ["False", "1", ":16:8"]
    assert said() == ["False", "None", "None"]


def test_the_record_says_that_they_were():
    settings = load(Settings, ["--deterministic=1", "--seq-len=64"])
    gpu = records.Gpu(device="cpu", name="x", count=1)
    run = runs.run_record("sweep", settings, gpu)
    assert run.environment["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    assert run.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert stack.environment() == run.environment and run.settings["deterministic"] is True


# Which GPUs


def test_minus_one_hides_every_gpu(monkeypatch):
    Nvml().install(monkeypatch)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert box.visible_gpus() == [] and box.use_accelerator() == "cpu"
    monkeypatch.delenv("DS_ACCELERATOR")  # which that call has set
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")  # CUDA stops reading there
    assert [g.index for g in box.visible_gpus()] == [1]


@pytest.mark.parametrize("told", ["aa1", "GPU-aa1"])
def test_a_uuid_reaches_nvml_with_its_prefix_and_without(monkeypatch, told):
    Nvml(nvmlSystemGetDriverVersion="580.1").install(monkeypatch)
    asked = []
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: asked.append(uuid) or 1)
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=2**37, multi_processor_count=132)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**vars(properties), uuid=told)
    )
    assert box.device_facts("cuda")["uuid"] == "GPU-aa1"
    telemetry.Sampler(told, period_s=1000).close()
    assert box.nvml_facts([told])["driver"] == "580.1"
    assert asked == ["GPU-aa1"] * 2
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert [g.index for g in box.visible_gpus()] == [1]


# A disk that is full


@pytest.fixture
def free_gib(monkeypatch):
    """free_gib(x): what the disk says from then on."""
    return lambda gib: monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(total=2**40, used=0, free=int(gib * 2**30))
    )


@pytest.fixture
def snapshot(monkeypatch):
    """What the allocator's snapshot does, set by the test; records the calls."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    return calls


def full_disk(path):
    Path(path).write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_snapshot_is_not_started_on_a_full_disk(tmp_path, free_gib, snapshot):
    free_gib(0.5)
    said = memory.dump_history("cuda", tmp_path / "x.pickle")
    assert said.startswith("no memory snapshot: No space left on device: 0.50 GiB free")
    assert snapshot == [{"enabled": None}]  # only stopped
    free_gib(50)
    assert memory.dump_history("cuda", tmp_path / "x.pickle").startswith("memory snapshot: ")


def test_a_disk_that_fills_up_under_a_snapshot_costs_nothing_else(tmp_path, free_gib, snapshot, monkeypatch):
    free_gib(50)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full_disk)
    assert "No space left" in memory.dump_history("cuda", tmp_path / "x.pickle")
    assert list(tmp_path.iterdir()) == [] and snapshot == [{"enabled": None}]


def test_a_failing_ranks_reason_is_written_before_its_snapshot(make, monkeypatch):  # noqa: F811
    trainer = make(mem_debug=True)
    at_the_dump = []
    monkeypatch.setattr(trainer, "dump_memory", lambda: at_the_dump.append(trainer.out.path.read_text()))
    monkeypatch.setattr(session, "start", lambda settings, what, device: trainer)
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    monkeypatch.setattr(box, "use_accelerator", lambda: "cpu")
    with pytest.raises(SystemExit), session.run(trainer.settings, "sweep"):
        raise MemoryError("much")
    assert '"rank_error"' in at_the_dump[0]


def test_a_trace_is_not_started_without_room(free_gib):
    free_gib(1)
    steps = []
    with pytest.raises(OSError, match="No space left on device: 1.00 GiB free.*TMPDIR"):
        profile.record(lambda: steps.append(1), 1, "cpu")
    assert not steps


def test_a_trace_that_cannot_be_kept_is_still_split(tmp_path, free_gib, monkeypatch, capsys):
    asked = []

    def usage(folder):
        asked.append(Path(folder))
        return SimpleNamespace(free=2**30 if tmp_path in asked[-1].parents else 2**40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    x = torch.randn(64, 64)
    trace = profile.record(lambda: x @ x, 1, "cpu", tmp_path / "kept" / "trace.json.gz")
    assert any(e.name == "aten::mm" for e in trace.events)
    assert "# the trace is not kept: No space left on device" in capsys.readouterr().out
    assert not (tmp_path / "kept" / "trace.json.gz").exists()
