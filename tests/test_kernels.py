"""The rule table on real names, and the interval maths against hand-worked traces, brute force and another tool."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import kernels
from harness.kernels import Event, ProfileError, Trace, classify, decompose, exclusive, read_trace

HERE = Path(__file__).parent
TRACES = HERE.parents[1] / "shared" / "traces"  # real traces that are not part of the repository
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not beside this checkout")
US = 1000


def names(path):
    rows = (line.split("\t") for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return [(name, kind.split()[0]) for kind, name in rows]


@pytest.mark.parametrize("name, kind", names(HERE / "data" / "kernel_names.tsv"))
def test_kind_of_a_real_kernel(name, kind):  # case 67, 68
    assert classify(name) == kind
    assert kernels.match(name) is not None, "a rule names it, it is not merely left over"


def test_enough_real_names_of_every_kind():
    table = names(HERE / "data" / "kernel_names.tsv")
    assert len(table) >= 60
    assert {kind for _, kind in table} == {*kernels.KINDS, "annotation"}


@needs_traces
def test_the_names_that_came_with_the_traces():
    for name, kind in names(TRACES / "modern_kernel_names.tsv"):
        assert classify(name) == kind, name
    wanted = [
        ("gemm", "matmul"),
        ("nccl", "communication"),
        ("at::native::vectorized", "other"),
        ("AdamFunctor", "optimizer"),
    ]
    for name in (TRACES / "kernel_names.txt").read_text().splitlines():
        for part, kind in wanted:
            if part in name.replace("fbgemm", ""):
                assert classify(name) == kind, name
        assert name.startswith("#") or classify(name) not in ("attention", "annotation", "copy"), name


@pytest.mark.parametrize(
    "name, category, kind",
    [
        ("nccl:_all_gather_base", "gpu_user_annotation", "annotation"),
        ("FlashAttention region of mine", "gpu_user_annotation", "annotation"),
        ("flash_attn forward", "user_annotation", "annotation"),
        ("gloo:all_reduce", "user_annotation", "communication"),  # on a CPU it is the transfer itself
        ("gloo:all_reduce", None, "annotation"),
        ("Optimizer.step#AdamW.step", "user_annotation", "optimizer"),
        ("Optimizer.step#AdamW.step", "gpu_user_annotation", "annotation"),
        ("whatever the driver calls it", "gpu_memcpy", "copy"),
        ("fill", "gpu_memset", "copy"),
        ("_my_unheard_of_kernel", "kernel", "other"),
    ],
)
def test_category_decides_before_the_name(name, category, kind):
    assert classify(name, category) == kind


def kernel(name, start, end, stream=7, category="kernel"):
    return Event(name, category, round(start * US), round(end * US), stream, 0)


FLASH, GEMM, NCCL, ADAM = (
    "flash_fwd_kernel",
    "nvjet_tst_256x128",
    "ncclDevKernel_AllReduce",
    "multi_tensor_apply_kernel",
)
NORM, COPY = "_rms_norm_forward_kernel", "Memcpy HtoD (Pinned -> Device)"


def hand_worked(shift=0.0):
    """100 us, one step. Compute stream 7, NCCL on 20, copies on 30; the comments say who owns what."""
    return Trace(
        [
            kernel(GEMM, 0 + shift, 20),  # 20 matmul
            kernel(FLASH, 20, 40),  # 20 attention
            kernel(NCCL, 30, 60, 20),  # 10 under attention, 5 alone (40-45), 10 under the norm, 5 alone: 10 exposed
            kernel(NORM, 45, 55),  # 10 other
            kernel(COPY, 58, 70, 30, "gpu_memcpy"),  # 2 under communication, 10 alone
            kernel(ADAM, 75, 90),  # 15 optimizer; idle 70-75
            kernel(COPY, 80, 85, 30, "gpu_memcpy"),  # hidden under the optimizer
            kernel("nccl:all_reduce", 25, 100, 7, "gpu_user_annotation"),  # a frame, never counted
            Event("cudaLaunchKernel", "cuda_runtime", 0, 100 * US, 1),
        ],
        marks=[(0, 100 * US)],
        world_size=8,
    )


def test_hand_worked_trace():
    split = decompose(hand_worked())
    assert split.full(0.1) == pytest.approx(
        {"attention": 0.02, "matmul": 0.02, "other_compute": 0.01, "optimizer": 0.015, "copies": 0.01,
         "exposed_communication": 0.01, "idle": 0.015}, abs=1e-9)  # fmt: skip
    assert sum(split.full(0.1).values()) == pytest.approx(0.1, abs=1e-9)
    assert (split.hidden, split.time["communication"]) == (20 * US, 10 * US)
    assert split.busy == 85 * US
    # Compute stream: 20 attention of 65 us of kernels; the NCCL and copy streams are not counted.
    assert split.attention_share == pytest.approx(20 / 65)
    split.check(world_size=8, min_attention=1)


def test_carrying_to_a_step_measured_without_the_profiler():
    split = decompose(hand_worked())
    faster = split.full(0.095)  # kernels keep their time, idle is what is left: 95 - 85
    assert faster["attention"] == pytest.approx(0.02) and faster["idle"] == pytest.approx(0.01)
    shrunk = split.full(0.0425)  # half of the busy time: all shrink alike and nothing idles
    assert shrunk["attention"] == pytest.approx(0.01) and shrunk["idle"] == pytest.approx(0, abs=1e-12)
    trace = hand_worked()
    trace.marks = []  # unknown number of steps: shares of what the device did (0 to 90 us)
    assert decompose(trace).full(0.9)["attention"] == pytest.approx(0.2)


def test_several_steps_and_a_kernel_that_outlives_the_last_mark():
    trace = Trace(
        [kernel(GEMM, 10, 60), kernel(FLASH, 60, 90), kernel(GEMM, 90, 130)], [(0, 50 * US), (50 * US, 100 * US)]
    )
    split = decompose(trace)
    assert (split.window, split.steps) == (120 * US, 2)
    assert split.full(0.06) == pytest.approx(
        dict.fromkeys(kernels.BUCKETS, 0) | {"idle": 0, "attention": 0.015, "matmul": 0.045}, abs=1e-9
    )


def test_host_optimizer_is_not_idle():
    trace = Trace([kernel(GEMM, 0, 20), kernel(FLASH, 20, 40), kernel(COPY, 70, 80, 30, "gpu_memcpy")], [(0, 100 * US)])
    trace.events.append(Event("Optimizer.step#DeepSpeedCPUAdam.step", "user_annotation", 40 * US, 75 * US, 1))
    split = decompose(trace)
    full = split.full(0.1)
    assert full["optimizer"] == pytest.approx(0.03) and full["idle"] == pytest.approx(0.02)
    assert split.busy == 50 * US  # of the GPU


KIND = st.sampled_from(list(kernels.PRIORITY))
SPAN = st.tuples(st.integers(-20, 120), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(KIND, SPAN), max_size=25))
def test_exclusive_times_equal_a_count_by_the_microsecond(rows):
    spans = {}
    for kind, span in rows:
        spans.setdefault(kind, []).append(span)
    expected = dict.fromkeys([*kernels.PRIORITY, "idle"], 0)
    for tick in range(100):
        active = {kind for kind, (start, end) in rows if start <= tick < end}
        expected[next((k for k in kernels.PRIORITY if k in active), "idle")] += 1
    assert exclusive(spans, (0, 100)) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([FLASH, GEMM, NCCL, ADAM, NORM, COPY]), SPAN, st.integers(1, 3)),
        min_size=1,
        max_size=25,
    ),
    st.floats(1e-3, 1e6),
    st.integers(0, 3),
)
def test_buckets_sum_to_the_step_time(rows, step_ms, marks):
    events = [kernel(name, *span, stream) for name, span, stream in rows]
    try:
        split = decompose(Trace(events, [(i * 40 * US, (i + 1) * 40 * US) for i in range(marks)]))
    except ProfileError as err:
        assert err.reason in ("no durations", "no events")
        return
    full = split.full(step_ms)
    assert sum(full.values()) == pytest.approx(step_ms, abs=1e-3, rel=1e-9)
    assert min(full.values()) >= 0 and 0 <= split.attention_share <= 1
    assert split.hidden >= 0 and 0 <= split.busy <= split.window


@pytest.mark.parametrize(
    "trace, reason",
    [
        (Trace([]), "no events"),
        (Trace([kernel("gemm", 0, 9)], marks=[(10**9, 2 * 10**9)]), "no events"),  # all of it before the steps
        (Trace([Event("cudaLaunchKernel", "cuda_runtime", 0, 5), Event("aten::mm", "cpu_op", 0, 5)]), "no events"),
        (Trace([kernel(FLASH, 5, 5), kernel(GEMM, 5, 5)]), "no durations"),
        (Trace([kernel("nccl:all_reduce", 0, 9, 7, "gpu_user_annotation")]), "no events"),
        (Trace([kernel(GEMM, 200, 210)], [(0, 100 * US), (300 * US, 400 * US)]), None),
        (Trace([kernel(GEMM, 0, 9), kernel(NCCL, 0, 9)]), "no attention"),
        (Trace([kernel(FLASH, 0, 9), kernel(NCCL, 0, 9)]), "no matmul"),
        (Trace([kernel(FLASH, 0, 9), kernel(GEMM, 9, 18)]), "no communication"),
        (Trace([kernel(FLASH, 0, 9), kernel(GEMM, 9, 18), kernel(NCCL, 0, 9)]), "lost events"),
    ],
)
def test_what_is_missing_is_an_error_of_its_own(trace, reason):  # case 70
    try:
        decompose(trace).check(world_size=2, min_attention=2)
        pytest.fail("must raise")
    except ProfileError as err:
        assert err.reason == (reason or "no attention") and str(err).startswith(err.reason)


def test_unmatched_kernels_are_listed_longest_first():
    trace = Trace(
        [kernel("mystery_a", 0, 5), kernel("mystery_b", 5, 50), kernel(GEMM, 50, 60), kernel("mystery_a", 60, 63)]
    )
    assert decompose(trace).unmatched == [("mystery_b", 45 * US), ("mystery_a", 8 * US)]


def chrome(events):
    rows = [
        {"ph": "X", "cat": e.category, "name": e.name, "pid": 0, "tid": e.lane, "ts": e.start / US,
         "dur": (e.end - e.start) / US,
         "args": {"stream": e.lane, "device": e.device, "correlation": i} if e.device is not None else {}}
        for i, e in enumerate(events)
    ]  # fmt: skip
    return {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 8}, "traceEvents": rows}


@pytest.mark.parametrize("packed", [False, True])
def test_reading_a_chrome_trace(tmp_path, packed):
    base = 1_700_000_000_000_000_000  # a double of this many us keeps no nanoseconds
    text = (
        '{"distributedInfo": {"rank": 0, "world_size": 8}, "traceEvents": ['
        '{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},'
        '{"ph": "X", "cat": "Kernel", "name": "flash_fwd", "ts": 1700000000000000.001, "dur": 1.001,'
        '"args": {"stream": 7}},'
        '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 1700000000000000, "dur": 5, "tid": 1}]}'
    )
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = read_trace(path)
    assert (trace.events[0].start, trace.events[0].end) == (base + 1, base + 1002)
    assert trace.marks == [(base, base + 5000)] and trace.world_size == 8


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b'{"a": 1}', b"\x1f\x8b half", b'{"traceEvents": [{"ph": "X", "cat": "kernel"}]}']
)
def test_a_file_that_is_no_trace(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match="no trace: .*trace.json is no .whole. Chrome trace"):
        read_trace(path)


@pytest.fixture(scope="session")
def hta(request):
    """HolisticTraceAnalysis with the few of its dependencies that its analysis uses, outside this environment."""
    target = request.config.cache.mkdir("hta-0.5.0")
    packages = [
        "HolisticTraceAnalysis==0.5.0",
        "pandas==3.1.1",
        "plotly==7.1.0",
        "narwhals",
        "python-dateutil",
        "six",
        "psutil",
        "numpy",
    ]
    if not (target / "hta").is_dir():
        for tool in ([sys.executable, "-m", "pip", "install"], ["uv", "pip", "install", "--python", sys.executable]):
            try:
                done = subprocess.run(
                    [*tool, "--quiet", "--no-deps", "--target", target, *packages], capture_output=True, text=True
                )
            except FileNotFoundError:
                continue
            if done.returncode == 0:
                break
        else:
            pytest.skip("HolisticTraceAnalysis could not be installed from the package index")
    script = """
import json, sys
sys.path.insert(0, sys.argv[1])
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_dir=sys.argv[2], include_last_profiler_step=True)
row = t.get_temporal_breakdown(visualize=False).iloc[0].to_dict()
row["overlap"] = t.get_comm_comp_overlap(visualize=False).iloc[0].to_dict()["comp_comm_overlap_pctg"]
print("\\n" + json.dumps({k: float(v) for k, v in row.items()}))
"""

    def analyse(folder):
        done = subprocess.run([sys.executable, "-c", script, target, folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return analyse


def against(hta, folder, trace):
    """Our busy, idle, overlapped and exposed times of the device's extent, against theirs."""
    device = [e for e in trace.events if e.category in kernels.DEVICE]
    split = decompose(Trace(trace.events, [(min(e.start for e in device), max(e.end for e in device))]))
    theirs = hta(folder)
    compute = sum(split.time[k] for k in kernels.COMPUTE)
    assert split.window / US == pytest.approx(theirs["kernel_time(us)"], abs=1)
    assert (split.window - split.busy) / US == pytest.approx(theirs["idle_time(us)"], abs=1)
    assert split.busy / US == pytest.approx(theirs["kernel_time(us)"] - theirs["idle_time(us)"], abs=1)
    assert compute / US == pytest.approx(theirs["compute_time(us)"], abs=1)
    assert 100 * split.hidden / split.communication == pytest.approx(theirs["overlap"], abs=0.006)  # printed to 0.01 %
    exposed = split.communication * (1 - theirs["overlap"] / 100)
    assert split.time["communication"] == pytest.approx(exposed, abs=split.communication * 6e-5)


@needs_traces
def test_the_real_a100_trace_agrees_with_holistic_trace_analysis(hta, tmp_path):
    source = TRACES / "a100_rank0_sampled.json.gz"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    against(hta, tmp_path, read_trace(source))


def test_a_made_trace_agrees_with_holistic_trace_analysis(hta, tmp_path):
    import random

    rng = random.Random(5)
    events = [Event(f"ProfilerStep#{i}", "user_annotation", i * 4000 * US, (i + 1) * 4000 * US, 1) for i in range(2)]
    for stream, pool in ((7, [FLASH, GEMM, NORM, ADAM]), (20, [NCCL]), (30, [COPY])):
        at = 10
        while at < 7900:
            name, length = rng.choice(pool), rng.randint(5, 90)
            events.append(kernel(name, at, at + length, stream, "gpu_memcpy" if name == COPY else "kernel"))
            events.append(Event("cudaLaunchKernel", "cuda_runtime", (at - 2) * US, (at - 1) * US, 1))
            at += length + rng.choice([0, 0, rng.randint(1, 60)])
    data = chrome(events)
    for row in data["traceEvents"]:
        row["args"].setdefault("correlation", data["traceEvents"].index(row) - 1)
    (tmp_path / "rank0.json").write_text(json.dumps(data))
    against(hta, tmp_path, read_trace(tmp_path / "rank0.json"))
