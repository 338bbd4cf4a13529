"""bench_flash_attn.py, bench_ceilings.py and bench_decompose.py: their formulas against independent counts, and each
of them as a real process on this CPU."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._python_dispatch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import bench_ceilings
import bench_decompose
import bench_flash_attn
from harness import flops, gpus, kernels, records
from harness.measure import attention, box, launch, matmul
from harness.measure.timing import Times
from tests.conftest import ROOT, alive, environment
from tests.test_kernels import COPY, FLASH, GEMM, NCCL, US, hand_worked, kernel

SMALL = ["--heads=4", "--kv-heads=2", "--head-dim=32", "--burst-ms=150"]


def run(script, *arguments, code=0, **variables):
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture
def main_of(monkeypatch):
    """main_of(module, *flags) -> exit code: main() in this process, where importing torch costs nothing more."""

    def call(module, *flags):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, flags)])
        monkeypatch.setattr("os.environ", environment())
        try:
            return module.main()
        except SystemExit as end:
            return end.code

    return call


def result(folder, kind):
    """The records of the only file of this kind; each line has to validate."""
    (path,) = folder.glob(f"cpu/{kind}_*.jsonl")
    first, *rest = [records.parse(line) for line in path.read_text().splitlines()]
    assert (first.record, first.kind) == ("run", kind)
    assert all(r.run_id == first.run_id for r in rest)
    return first, rest


# The attention kernel alone


@pytest.mark.parametrize("batch, heads, seqlen, head_dim", [(1, 32, 8192, 128), (2, 8, 512, 64)])
def test_flops_are_half_of_torchs_count_which_has_no_mask(batch, heads, seqlen, head_dim):
    shape = (batch, heads, seqlen, head_dim)
    forward, backward = sdpa_flop_count(*[shape] * 3), sdpa_backward_flop_count(*[shape] * 4)
    assert bench_flash_attn.forward_tflop(batch, seqlen, heads, head_dim) * 1e12 == pytest.approx(forward / 2)
    assert (forward + backward) / forward == bench_flash_attn.KERNEL_COUNT


def test_model_count_is_that_of_the_step():
    config = flops.shape("llama-3.1-8b")
    step = flops.count(config, 8192).attention_tflop / config["num_hidden_layers"]
    assert bench_flash_attn.MODEL_COUNT * bench_flash_attn.forward_tflop(1, 8192, 32, 128) == pytest.approx(step)


@pytest.mark.parametrize("tuple_", [False, True])
def test_flash_attention_packages_get_their_layout(monkeypatch, tuple_):
    """A stand-in for a FlashAttention package: (batch, seqlen, heads, head_dim) in and out, causal, maybe a tuple."""

    def flash_attn_func(q, k, v, causal=False):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
        return (out, None) if tuple_ else out

    monkeypatch.setattr(attention, "require", lambda word, capability: None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    settings = bench_flash_attn.AttentionSettings(_cli_parse_args=["--seqlens=96", *SMALL])
    attend = bench_flash_attn.kernel("fa3", (9, 0))
    assert bench_flash_attn.check(attend, settings, "cpu") < attention.MAX_RELATIVE_ERROR


def test_a_kernel_with_wrong_numbers_is_refused():
    settings = bench_flash_attn.AttentionSettings(_cli_parse_args=["--seqlens=96", *SMALL])

    def not_causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with pytest.raises(attention.AttentionUnavailable, match="wrong numbers"):
        bench_flash_attn.check(not_causal, settings, "cpu")


def test_flash_attn_on_this_cpu(tmp_path):
    flags = ["--seqlens=128,64", "--attn=all", "--sustained-s=0.3", *SMALL, f"--results={tmp_path}"]
    done = run("bench_flash_attn.py", *flags)
    assert done.stdout.startswith("# These figures describe this CPU")
    _, rows = result(tmp_path, "attention")
    reasons = {r.backend: r.error for r in rows if r.error}
    assert {"fa4", "fa3", "fa2"} <= set(reasons) and "needs an NVIDIA GPU" in reasons["fa3"]
    timed = [r for r in rows if not r.error]
    assert [(r.seqlen, r.mode) for r in timed if r.backend == "sdpa"] == [
        (64, "burst"), (64, "sustained"), (128, "burst"), (128, "sustained")]  # fmt: skip
    for r in timed:
        tflop = 4 * r.seqlen**2 * 4 * 32 / 2 / 1e12
        assert r.fwd_bwd_tflops == pytest.approx(3.5 * tflop / r.fwd_bwd_ms * 1e3)
        assert r.fwd_bwd_tflops / r.model_tflops == pytest.approx(7 / 6)
        assert r.mode == "sustained" or r.fwd_tflops == pytest.approx(tflop / r.fwd_ms * 1e3)
        assert r.fwd_bwd_ms_low <= r.fwd_bwd_ms <= r.fwd_bwd_ms_high and 0 < r.max_error < 0.03
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all({"seqlen", "fwd_ms", "fwd_tflops", "fwd_bwd_ms", "fwd_bwd_tflops"} <= set(line) for line in lines)
    assert "7/6" in done.stdout


def test_the_same_twice_agrees_within_the_printed_spread(tmp_path, main_of):
    """Another process may take the cores during one of the two, so a disagreement is looked at again."""
    for attempt in range(4):
        spans = []
        for which in "ab":
            folder = tmp_path / f"{attempt}{which}"
            flags = ["--seqlens=256", "--seed=3", *SMALL, "--burst-ms=600", f"--results={folder}"]
            assert main_of(bench_flash_attn, *flags) == 0
            row = result(folder, "attention")[1][0]
            spans.append((row.fwd_bwd_ms_low, row.fwd_bwd_ms, row.fwd_bwd_ms_high))
        (low_a, a, high_a), (low_b, b, high_b) = spans
        if low_b <= a <= high_b and low_a <= b <= high_a:
            return
    raise AssertionError(f"medians outside each other's spread: {spans}")


def test_a_length_without_memory_is_a_record_and_the_reason(tmp_path, main_of, monkeypatch):
    def measure(ready, s, seqlen, *_):
        if seqlen == 128:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore of it")
        yield "sdpa", "burst", None, bench_flash_attn.figures({"fwd_bwd": [2.0, 2.0]}, 1.0)

    monkeypatch.setattr(bench_flash_attn, "measure", measure)
    ended = main_of(bench_flash_attn, "--seqlens=64,128,192", *SMALL, f"--results={tmp_path}")
    assert ended == "error: seqlen 128: CUDA out of memory"  # which sys.exit prints, with exit code 1
    rows = result(tmp_path, "attention")[1]
    assert [(r.seqlen, r.error is None) for r in rows] == [(64, True), (128, False), (192, True)]


def test_flash_attn_takes_the_shape_of_a_model(tmp_path, main_of):
    assert main_of(bench_flash_attn, "--seqlens=64", "--burst-ms=20", "--model=tiny", f"--results={tmp_path}") == 0
    config, row = flops.shape("tiny"), result(tmp_path, "attention")[1][0]
    assert (row.heads, row.kv_heads) == (config["num_attention_heads"], config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert row.head_dim == head_dim


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["--attn=fa3"], 1, "needs an NVIDIA GPU"),
        (["--seqlens=many"], 2, "SEQLENS=many"),
        (["--attn=fast"], 2, "ATTN=fast"),
        (["--model=./nothing-here"], 1, "nothing-here"),
    ],
)
def test_flash_attn_says_what_is_wrong_in_one_line(tmp_path, main_of, capsys, flags, code, message):
    assert main_of(bench_flash_attn, *flags, f"--results={tmp_path}") == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    flags = ["--seqlens=64,128", "--sustained-s=60", *SMALL, f"--results={tmp_path}"]
    command = [sys.executable, "bench_flash_attn.py", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if '"burst"' in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.strip().splitlines()[-1] == "error: interrupted; what was measured is kept"
    assert not alive(children) and "burst" in out
    assert [r.mode for r in result(tmp_path, "attention")[1]] == ["burst"]


# The box's ceilings


@pytest.mark.parametrize("name", ["llama-3.1-8b", "tiny"])
def test_the_models_matmuls_are_all_its_dense_flops(name):
    config, tokens = flops.shape(name), 4096
    total = sum(times * 2 * m * n * k for _, _, times, (m, n, k) in matmul.of_a_step(config, tokens))
    assert total / 1e12 == pytest.approx(flops.count(config, tokens).dense_tflop)


def test_matmuls_of_an_unknown_kind_of_model_are_refused():
    with pytest.raises(ValueError):
        matmul.of_a_step({"hidden_size": 64, "num_hidden_layers": 2}, 128)
    with pytest.raises(ValueError):
        matmul.of_a_step(flops.shape("llama-3.1-8b") | {"num_local_experts": 8}, 128)


@pytest.mark.parametrize("which", matmul.PASSES)
def test_a_pass_has_the_shape_and_the_strides_of_autograd(which):
    """Against the calls autograd makes for y = linear(x, w)."""
    (shape,) = [s for name, p, _, s in matmul.of_a_step(flops.shape("tiny"), 96) if name == "down_proj" and p == which]
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                seen.append([(tuple(t.shape), t.stride()) for t in args])
            return func(*args, **(kwargs or {}))

    config = flops.shape("tiny")
    x = torch.randn(96, config["intermediate_size"]).bfloat16().requires_grad_()
    w = torch.randn(config["hidden_size"], config["intermediate_size"]).bfloat16().requires_grad_()
    with Spy():
        F.linear(x, w).backward(torch.randn(96, config["hidden_size"]).bfloat16())
        autograd = {"forward": seen[0], "input gradient": seen[1], "weight gradient": seen[2]}
        if autograd["input gradient"][0][0][0] != 96:  # autograd may compute the weight's gradient first
            autograd["input gradient"], autograd["weight gradient"] = seen[2], seen[1]
        matmul.as_autograd(which, shape, "cpu", 0)()
    assert seen[3] == autograd[which]


def test_fp8_multiplies_right():
    shape, kept = (64, 96, 128), {}
    real = F.scaled_mm

    def spy(a, b, *rest, **named):
        kept.update(a=a, b=b)
        return real(a, b, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_mm", spy)
        got = matmul.operands("fp8", shape, "cpu", 0)()
    want = kept["a"].float() @ kept["b"].float()
    assert got.shape == (64, 96) and got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("fmt, scale_sizes", [("nvfp4", (256 * 32, 384 * 32)), ("fp4", (256 * 16, 384 * 16))])
def test_fp4_operands_are_packed_and_scaled_as_cublas_wants(monkeypatch, fmt, scale_sizes):
    """A scale per 16 (nvfp4) or 32 values of K = 512, rows in tiles of 128; torch's own shape check agrees for nvfp4
    (for MXFP4 its check without a device forgets that two values share a byte)."""
    real, seen = F.scaled_mm, []

    def on_no_device(a, b, sa, ra, sb, rb, swa, swb, **named):
        seen.append(((a.shape, b.shape), (sa.numel(), sb.numel())))
        a, b, sa, sb = (t.to("meta") for t in (a, b, sa, sb))
        return real(a, b, sa, ra, sb, rb, swa, swb, **named) if fmt == "nvfp4" else None

    monkeypatch.setattr(F, "scaled_mm", on_no_device)
    out = matmul.operands(fmt, (256, 384, 512), "cpu", 0)()
    assert seen == [(((256, 256), (256, 384)), scale_sizes)]
    assert out is None or out.shape == (256, 384)


@pytest.mark.parametrize(
    "fmt, gpu, reason",
    [
        ("fp4", "H200", "silicon: the H200 SXM has no fp4"),
        ("nvfp4", "A100", "silicon: the A100"),
        ("fp8", "A100", "silicon: the A100"),
        ("fp6", None, "torch: "),
        ("nvfp4", None, "kernel: "),
    ],
)
def test_a_format_that_cannot_run_says_why(fmt, gpu, reason):
    with pytest.raises(matmul.CannotRun, match=re.escape(reason)):
        matmul.search(fmt, gpu and gpus.by_key(gpu), 0.1, 0, "cpu")


def test_candidates_are_aligned_and_the_same_for_a_seed():
    import itertools

    known = gpus.by_key("H200").ceilings["fp8"].shape
    first, again = (list(itertools.islice(matmul.candidates(7, "cuda:0", known), 50)) for _ in range(2))
    assert first == again and first[0] == known
    assert all(x % 256 == 0 and 1024 <= x <= 16384 for shape in first for x in shape)


def test_the_matmuls_of_a_step_have_no_sum_when_one_is_missing(monkeypatch):
    settings = bench_ceilings.CeilingSettings(_cli_parse_args=["--model=tiny", "--seq-len=64"])
    team, ran = bench_ceilings.Team("cpu"), []

    def timed(make, which, shape, *_):
        ran.append(shape)
        if len(ran) == 18 + 7:  # in the second round
            raise torch.OutOfMemoryError("out of memory")
        return Times(1.0, 1.0, 1.0, 1.0, 1)

    monkeypatch.setattr(matmul, "timed", timed)
    whole, broken = (list(bench_ceilings.model_matmuls(settings, team)) for _ in range(2))
    total = flops.count(flops.shape("tiny"), 64).dense_tflop
    calls = sum(times for _, _, times, _ in matmul.of_a_step(flops.shape("tiny"), 64))
    assert whole[-1]["name"] == "tiny step at 64" and whole[-1]["value"] == pytest.approx(total / calls * 1e3)
    assert len(whole) == 19 and len(broken) == 18 and broken[6]["reason"] == "kernel: out of memory"


@pytest.mark.parametrize(
    "values, expected, sick",
    [
        ([74.0], 794.5, True),  # case 28: a GEMM of 74 TFLOPS on an H100 SXM
        ([700, 690, 280, 701], None, True),  # one rank at 40 % of the others
        ([700, 690, 695, 701], 794.5, False),
        ([480], 794.5, False),
        ([476], 794.5, True),
        ([700], None, None),  # nothing to compare with
    ],
)
def test_unhealthy_is_under_60_percent_of_its_kind_or_of_the_box(values, expected, sick):
    assert bench_ceilings.over_gpus(values, expected)["unhealthy"] is sick


def test_a_reason_is_shown_as_the_library_wrote_it(capsys):
    said = "kernel: [/usr/lib/x.so] wants [float8] :b:"
    row = {"run_id": "x", "what": "matmul", "name": "fp8", "unit": "TFLOPS", "reason": said}
    bench_ceilings.show([records.Ceiling(**row)])
    assert said in capsys.readouterr().out


def test_bus_bandwidth_factors():
    assert bench_ceilings.bus_factor("all_reduce", 8) == 1.75 and bench_ceilings.bus_factor("all_gather", 8) == 0.875


def test_ranks_wait_longer_than_a_search_takes(monkeypatch):
    """torch's own limit for a gloo group is half an hour, BUDGET_S may be more."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    real, limits = dist.all_gather_object, []

    def spy(values, value, group=None):
        limits.append((group or dist.group.WORLD)._get_backend(torch.device("cpu")).options._timeout)
        real(values, value, group)

    monkeypatch.setattr(dist, "all_gather_object", spy)
    try:
        assert bench_ceilings.Team("cpu").each(str.upper) == ["CPU"]
        assert limits == [timedelta(hours=2)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model, reason", [("qwen3-30b-a3b", "dense"), ("gpt-5", "llama-3.1-8b")])
def test_a_model_without_known_matmuls_stops_before_anything_is_measured(tmp_path, main_of, capsys, model, reason):
    assert main_of(bench_ceilings, f"--model={model}", f"--results={tmp_path}") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"MODEL={model}" in line and reason in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error, last",
    [
        (KeyboardInterrupt(), "error: interrupted; what was measured is kept"),
        (box.MixedGpus("unlike GPUs"), "error: unlike GPUs"),
        (RuntimeError("broken"), "error: RuntimeError: broken; what was measured is kept"),
    ],
)
def test_an_error_keeps_the_table_and_ends_with_the_reason(tmp_path, main_of, capsys, monkeypatch, error, last):
    def measure(*_):
        yield {"what": "memory", "name": "copy", "unit": "GB/s", "value": 10.0}
        raise error

    monkeypatch.setattr(bench_ceilings, "measure", measure)
    assert main_of(bench_ceilings, f"--results={tmp_path}") == 1
    out, err = capsys.readouterr()
    assert "what this box reaches" in out and len(result(tmp_path, "ceilings")[1]) == 1
    assert err.splitlines()[-1] == last and ("Traceback" in err) == ("broken" in last)


A_RANK = """
import threading, time
from harness.measure import runs
threading.Thread(target=time.sleep, args=[99]).start()
with runs.errors_end_the_script():
    raise RuntimeError("broken")
"""


def test_a_rank_with_an_error_ends_at_once():
    """Whatever still runs in it: the others wait for this rank, and it would wait for them."""
    start = time.monotonic()
    assert "error: RuntimeError: broken" in run("-c", A_RANK, code=1, RANK="1").stderr.splitlines()[-1]
    assert time.monotonic() - start < 90


@pytest.mark.slow
def test_ceilings_under_the_launcher(tmp_path):
    flags = ["--budget-s=0.3", "--memory-mib=8", "--message-mib=1", f"--results={tmp_path}"]
    command = launch.launcher_command("bench_ceilings.py", flags, ["--num_gpus", "2"])
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    head, rows = result(tmp_path, "ceilings")
    assert head.world_size == 2 and head.gpu.count == 2
    by_name = {(r.what, r.name): r for r in rows}
    bf16 = by_name["matmul", "bf16"]
    assert (
        len(bf16.per_gpu) == 2
        and min(bf16.per_gpu) <= bf16.value <= bf16.best
        and all(x % 128 == 0 for x in bf16.shape)
    )
    assert by_name["matmul", "fp6"].reason.startswith("torch: ") and by_name["matmul", "fp6"].value is None
    assert by_name["memory", "triad"].value > 0 and len(by_name["memory", "copy"].per_gpu) == 2
    assert [r.shape for r in rows if r.name == "all_gather"] == [[2**14], [2**17], [2**20]]
    assert all(r.value > 0 for r in rows if r.what == "collective")
    matmuls = [r for r in rows if r.what == "model_matmul"]
    assert len(matmuls) == 6 * 3 + 1 and min(r.value for r in matmuls[:-1]) <= matmuls[-1].value


# Where a step's time goes


def test_ranks_are_averaged_and_their_range_kept():
    other = kernels.Trace([kernel(GEMM, 0, 30), kernel(FLASH, 30, 70), kernel(NCCL, 60, 90, 20)], [(0, 100 * US)])
    splits = [kernels.decompose(t) for t in (hand_worked(), other)]
    record = bench_decompose.combine(splits, 0.1, run_id="x", seq_len=8192)
    full = {b.name: b.ms for b in record.full}
    assert full["matmul"] == pytest.approx(0.025) and full["attention"] == pytest.approx(0.03)
    assert full["exposed_communication"] == pytest.approx((0.01 + 0.02) / 2)
    assert record.hidden_communication_ms == pytest.approx((0.02 + 0.01) / 2)
    assert record.rank_range["attention"] == pytest.approx((0.02, 0.04))
    assert record.rank_range["hidden_communication"] == pytest.approx((0.01, 0.02))
    assert record.busy_share == pytest.approx((0.85 + 0.9) / 2)
    for buckets in (record.two, record.full):
        assert sum(b.ms for b in buckets) == pytest.approx(0.1, abs=1e-3 * 1e-3)
    records.parse(records.dump(record))


def test_rates_of_the_buckets():
    """The guide's H200 at 8192 tokens: 421.6 TFLOP in all, 12.5 % of them attention, 447 and 463 TFLOPS."""
    count = flops.count(flops.shape("llama-3.1-8b"), 8192)
    attention_ms, rest_ms = count.attention_tflop / 447 * 1e3, count.dense_tflop / 463 * 1e3
    trace = kernels.Trace(
        [kernel(FLASH, 0, attention_ms * 1e3), kernel(GEMM, attention_ms * 1e3, (attention_ms + rest_ms) * 1e3)]
    )
    record = bench_decompose.combine([kernels.decompose(trace)], attention_ms + rest_ms, run_id="x", seq_len=8192)
    bench_decompose.add_rates(record, count.attention_tflop, count.dense_tflop, 989)
    assert [round(b.tflops) for b in record.two] == [447, 463]
    assert [round(100 * b.mfu) for b in record.two] == [45, 47]
    assert [b.name for b in record.full if b.tflops] == ["attention", "matmul"]


@pytest.mark.parametrize("box", ["h200", "b200"])
def test_buckets_are_called_as_in_the_published_results(box):
    """The report compares buckets by name, and a measured box is compared with a published one."""
    lines = (ROOT / f"results/published/{box}/decompose_guide.jsonl").read_text().splitlines()
    (published,) = [r for r in map(records.parse, lines) if r.record == "decomposition"]
    ours = bench_decompose.combine([kernels.decompose(hand_worked())], 0.1, run_id="x", seq_len=8192)
    assert [b.name for b in ours.two] == [b.name for b in published.two]


def test_a_step_that_is_mostly_idle_is_said_to_be():  # case 58
    trace = kernels.Trace([kernel(GEMM, 0, 20), kernel(FLASH, 20, 40)], [(0, 100 * US)])
    record = bench_decompose.combine([kernels.decompose(trace)], 0.1, run_id="x", seq_len=1)
    assert any("JIT" in note for note in record.notes)


def write_trace(path, events, marks=True):
    rows = [
        {"ph": "X", "cat": e.category, "name": e.name, "ts": e.start / US, "dur": (e.end - e.start) / US, "tid": 1,
         "args": {"stream": e.lane, "device": 0}}
        for e in events
    ]  # fmt: skip
    rows += [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 100, "tid": 9}] * marks
    path.write_text(json.dumps({"traceEvents": rows, "distributedInfo": {"world_size": 2}}))
    return path


def printed(text, table="intervals"):
    """{bucket: ms} of a printed table."""
    part = text.split(f"by {'union of intervals' if table == 'intervals' else 'share of kernel time'}")[1]
    part = part.split("step of")[0]
    return {name: float(ms) for name, ms in re.findall(r"│ ([\w ]+?) +│ +([\d.]+) │", part)}


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_saved_trace_needs_no_torch(tmp_path):
    path = write_trace(tmp_path / "trace.json", hand_worked().events)
    done = run("-c", WITHOUT_TORCH, "bench_decompose.py", "--trace", path, "--step-ms", "100")
    # 100 ms for a window of 0.1 ms: kernels keep their time, so the rest is idle.
    assert printed(done.stdout)["attention"] == pytest.approx(0.02) and printed(done.stdout)["idle"] == pytest.approx(
        99.915
    )
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    two = run("bench_decompose.py", "--trace", path, "--trace", packed)
    full = printed(two.stdout)
    assert full == {"attention": 0.02, "matmul": 0.02, "other_compute": 0.01, "optimizer": 0.015, "copies": 0.01,
                    "exposed_communication": 0.01, "idle": 0.015, "total": 0.1}  # fmt: skip
    assert two.stdout.count("over 2 ranks") == 1 and "ranks" not in done.stdout


@pytest.mark.parametrize(
    "events, flags, code, message",
    [
        ([kernel(FLASH, 0, 50), kernel(NCCL, 0, 9)], [], 4, "no matmul"),
        ([kernel(FLASH, 0, 50), kernel(GEMM, 50, 60), kernel(COPY, 0, 9, 3, "gpu_memcpy")], [], 4, "no communication"),
        ([kernel(FLASH, 5, 5)], [], 4, "no durations"),
        ([], [], 4, "no events"),
        (hand_worked().events, ["--step-ms=0"], 2, "STEP_MS"),
    ],
)
def test_traces_that_cannot_be_split(tmp_path, events, flags, code, message):  # case 70
    path = write_trace(tmp_path / "trace.json", events)
    done = run("bench_decompose.py", "--trace", path, *flags, code=code)
    assert message in done.stderr.strip().splitlines()[-1]


def test_a_model_without_attention_has_its_table(tmp_path):
    path = write_trace(
        tmp_path / "trace.json", [kernel(GEMM, 0, 50), kernel("selective_scan", 50, 60), kernel(NCCL, 60, 70)]
    )
    done = run("bench_decompose.py", "--trace", path)
    table = printed(done.stdout)
    assert (table["attention"], table["matmul"], table["total"]) == (0, 0.05, 0.1)
    assert "note: no attention kernel" in done.stdout and "selective_scan" in done.stdout


def test_wrong_use_of_trace(tmp_path):
    assert "TRACE" in run("bench_decompose.py", "--trace", tmp_path / "none.json", code=2).stderr
    unmarked = write_trace(tmp_path / "trace.json", hand_worked().events, marks=False)
    assert "STEP_MS" in run("bench_decompose.py", "--trace", unmarked, code=2).stderr
    (tmp_path / "half.json").write_text(unmarked.read_text()[:-20])
    assert "Chrome trace" in run("bench_decompose.py", "--trace", tmp_path / "half.json", code=4).stderr


@pytest.mark.slow
def test_live_on_two_ranks_and_the_same_from_the_saved_traces(tmp_path):
    flags = [
        "--steps=4",
        "--seq-len=128",
        "--precision=0",
        f"--save-trace={tmp_path / 'traces'}",
        f"--results={tmp_path}",
    ]
    # torchrun starts in a fifth of the time; the flag is what DeepSpeed's launcher adds.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "bench_decompose.py"]
    run(*torchrun, "--local_rank=0", *flags, OMP_NUM_THREADS="1")
    head, rows = result(tmp_path, "decompose")
    assert head.recipe.name == "short-context" and head.world_size == 2
    (record,) = [r for r in rows if r.record == "decomposition"]
    (summary,) = [r for r in rows if r.record == "summary"]
    assert record.step_ms == summary.median_ms and record.method == "cpu operators"
    live = {b.name: b.ms for b in record.full}
    assert sum(live.values()) == pytest.approx(record.step_ms, abs=1e-3)
    assert sum(b.ms for b in record.two) == pytest.approx(record.step_ms, abs=1e-3)
    assert all(live[name] > 0 for name in ("attention", "matmul", "optimizer", "exposed_communication", "idle"))
    for name, (low, high) in record.rank_range.items():
        assert low <= live.get(name, record.hidden_communication_ms) <= high
    attention_tflop = flops.count(head.model.config, 128).attention_tflop
    assert record.two[0].tflops == pytest.approx(attention_tflop / record.two[0].ms * 1e3)

    traces = sorted((tmp_path / "traces").iterdir())
    assert len(traces) == 2
    again = run("bench_decompose.py", *(f"--trace={t}" for t in traces), f"--step-ms={record.step_ms}")
    assert printed(again.stdout) == pytest.approx(live | {"total": record.step_ms}, abs=1e-3)
    two = {b.name: b.ms for b in record.two} | {"total": record.step_ms}
    assert printed(again.stdout, "share") == pytest.approx(two, abs=1e-3)
