"""The reader against logs and records as they really end up on disk. Expected values are worked out by hand here."""

import json
import statistics

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness import flops, records
from harness.report.box import NothingUsable
from harness.report.reading import read_box

ENV = (
    "# env: python=3.12.9 torch={torch} cuda=13.0 transformers=5.14.1 deepspeed=0.19.2 "
    "liger-kernel=0.8.0 flash-attn-3=3.0.0"
)
GPU = (
    "# gpu=NVIDIA H200 attn_backend=flash_attention_3 liger=1 gc=1 offload_optim=1 zero=3 model_size=8b "
    "world_size=8 batch_size=1 seq_len={n}"
)
TFLOP = {8192: 421.6, 32768: 2319.9, 65536: 6328.7, 262144: 65847.0}  # as published, model TFLOP of a step


def head(n=8192, torch="2.13.0+cu130"):
    return f"===== seq_len={n} =====\n{ENV.format(torch=torch)}\n{GPU.format(n=n)}\n"


def step(i, ms, n=8192, warmup=False, mem="16.3"):
    return (
        f'{{"step": {i}, "warmup": {json.dumps(warmup)}, "exec_time_ms": "{ms:.2f}", '
        f'"tflops": "{TFLOP[n] / ms * 1e3:.2f}", "peak_mem_gib": "{mem}"}}'
    )


def steps(times, n=8192, warmups=2):
    return "".join(step(i, ms, n, i < warmups) + "\n" for i, ms in enumerate(times))


USUAL = [9100.0, 3100.0, *(2990.0 + i for i in range(10))]


def read(tmp_path, text, name="results_h200.log"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_box(tmp_path)


def only(box):
    assert len(box.sweeps) == 1, [s.run.stack for s in box.sweeps]
    return box.sweeps[0].points


def test_a_log_of_the_guide(tmp_path):
    box = read(tmp_path, head() + steps(USUAL))
    run, point = box.sweeps[0].run, only(box)[8192]
    assert (box.name, box.gpu.key, box.problems) == ("H200 SXM", "h200-sxm", [])
    assert (run.gpu.name, run.gpu.count, run.attention.backend) == ("NVIDIA H200", 8, "fa3")
    assert run.stack.attention_package == "flash-attn-3 3.0.0"
    assert (run.recipe.zero_stage, run.recipe.offload_optimizer, run.recipe.name) == (3, True, "long-context")
    assert point.outcome == "measured" and point.n == 10 and point.warnings == []
    assert point.times_ms == tuple(USUAL[2:])
    assert point.median_ms == 2994.5
    assert point.ci_ms[0] < 2994.5 < point.ci_ms[1]
    assert point.tflops == pytest.approx(421.6 / 2.9945, rel=1e-3)
    assert point.mfu == pytest.approx(421.6 / 2.9945 / 989, rel=1e-3)
    assert point.peak_mem_gib == 16.3


def test_several_ranks_on_one_line(tmp_path):  # case 40
    lines = steps(USUAL).splitlines()
    text = head() + "".join(line + line + "\n" for line in lines[:5])
    text += lines[5] + "[rank5]:[W511 07:20:54.1 ProcessGroupNCCL.cpp:1218] Warning: barrier\n" + "".join(lines[6:])
    box = read(tmp_path, text)
    assert only(box)[8192].times_ms == tuple(USUAL[2:])
    assert box.problems == ["results_h200.log: left out 5 repeats of a step"]


def test_carriage_returns_and_a_glued_allocator_warning(tmp_path):  # cases 41, 64
    bar = "Loading weights:  50%|#####     | 2/4 [00:01<00:01,  1.0it/s]\rLoading weights: 100%|##########| 4/4\r"
    warning = (
        "[2026-03-04 05:06:09,001] [WARNING] [stage3.py:2236:step] 2 pytorch allocator cache flushes since last step. "
    )
    lines = steps(USUAL).splitlines()
    lines[0] = bar + lines[0] + warning  # during warm-up: nothing to leave out
    lines[4] += warning  # glued to its record
    lines[7] = warning + "\n" + lines[7]  # on a line of its own, before the record of its step
    point = only(read(tmp_path, head() + "\n".join(lines)))[8192]
    assert point.times_ms == tuple(t for i, t in enumerate(USUAL) if i >= 2 and i not in (4, 7))
    assert point.warnings == ["2 steps left out: the allocator had to free and retry"]


@pytest.mark.parametrize("old, new", [("tflops", "tflops_per_gpu"), ("exec_time_ms", "step_time_s")])
def test_a_renamed_key(tmp_path, old, new):  # case 44
    text = head() + steps(USUAL).replace(old, new)
    box = read(tmp_path, text)
    assert only(box)[8192].outcome == "failed"
    keys = "step, warmup, exec_time_ms, tflops, peak_mem_gib".replace(old, new)
    assert f"12 objects that are no record of schema 1, most with the keys {keys}" in box.problems[0]


def test_nothing_usable_says_what_was_seen(tmp_path):  # case 44
    with pytest.raises(NothingUsable, match="12 objects .* step, warmup, step_time_s, tflops, peak_mem_gib"):
        read(tmp_path, steps(USUAL).replace("exec_time_ms", "step_time_s"))
    with pytest.raises(NothingUsable, match=r"no \.jsonl or \.log file"):
        (tmp_path / "results_h200.log").unlink()
        read_box(tmp_path)
    with pytest.raises(NothingUsable, match="no such file"):
        read_box(tmp_path / "nowhere")
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "sweep_1.jsonl").touch()
    with pytest.raises(NothingUsable, match="folders of several boxes, name one: h200"):
        read_box(tmp_path)


def test_a_schema_from_the_future(tmp_path):
    run = json.loads(records.dump(_run())) | {"schema": 2}
    with pytest.raises(NothingUsable, match="run records not of schema 1"):
        read(tmp_path, json.dumps(run) + "\n", "sweep_a.jsonl")


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", '"nan"', '"inf"', '"fast"', "null", "true", "-3", "0", '""', "[1]", "1e999"],
)
def test_times_that_are_no_number(tmp_path, value):  # case 46
    bad = f'{{"step": 4, "warmup": false, "exec_time_ms": {value}, "tflops": Infinity, "peak_mem_gib": "16.3"}}'
    lines = steps(USUAL).splitlines()
    lines[4] = bad
    box = read(tmp_path, head() + "\n".join(lines))
    assert only(box)[8192].times_ms == tuple(t for i, t in enumerate(USUAL) if i >= 2 and i != 4)
    assert box.problems == ["results_h200.log: left out 1 steps with a value that is no finite number"]


def test_words_in_the_other_numbers(tmp_path):
    text = head() + steps(USUAL).replace('"16.3"', '"n/a"').replace('"tflops": "1', '"tflops": "one ')
    point = only(read(tmp_path, text))[8192]
    assert point.n == 10 and point.peak_mem_gib is None
    assert point.tflops == pytest.approx(421.6 / 2.9945, rel=1e-3)


def test_half_a_line_and_a_run_glued_to_it(tmp_path):  # case 47
    text = head() + steps(USUAL[:7]) + '{"step": 7, "warm' + head(32768) + steps([8000.0 + i for i in range(12)], 32768)
    text += '{"step": 12, "warmup": false, "exec_time_ms": "79'
    box = read(tmp_path, text)
    short, whole = only(box)[8192], only(box)[32768]
    assert (short.times_ms, short.warnings) == (tuple(USUAL[2:7]), ["incomplete (7 of 12 steps)"])
    assert (whole.n, whole.median_ms, whole.warnings) == (10, 8006.5, [])
    assert box.problems == ["results_h200.log: left out 2 records cut in half"]


@pytest.mark.parametrize(
    "text", [b"", b"\n\n", b"\x00" * 4096, b"{" * 3000, b'{"a":' * 3000, b"\xff\xfe{\x00", b"[1]\n{}\n"]
)
def test_no_log_at_all(tmp_path, text):
    with pytest.raises(NothingUsable):
        read(tmp_path, text)


def test_half_a_record_glued_to_a_whole_one(tmp_path):  # case 47
    lines = steps(USUAL).splitlines()
    lines[5] = lines[5][:30] + lines[6]
    del lines[6]
    box = read(tmp_path, head() + "\n".join(lines))
    assert only(box)[8192].times_ms == tuple(t for i, t in enumerate(USUAL) if i >= 2 and i != 5)


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_other_line_ends(tmp_path, end):
    text = (head() + steps(USUAL)).replace("\n", end).encode()
    assert only(read(tmp_path, text))[8192].times_ms == tuple(USUAL[2:])


def test_steps_of_a_length_whose_header_was_lost(tmp_path):
    rest = "".join(step(i, 7000.0 + i, 32768) + "\n" for i in range(5, 12))
    point = only(read(tmp_path, head() + steps(USUAL[:5]) + rest))[8192]
    assert point.times_ms == tuple(USUAL[2:5])
    assert point.warnings == ["7 steps left out: their time and their rate disagree"]


@pytest.mark.parametrize("ms, word", [(2.99, "over the peak of 989"), (2990e3, "under 1 % of the peak of 989")])
def test_another_unit(tmp_path, ms, word):  # case 77
    text = head() + "".join(
        f'{{"step": {i}, "warmup": false, "exec_time_ms": "{ms}", "tflops": "n/a", "peak_mem_gib": "16.3"}}\n'
        for i in range(5)
    )
    point = only(read(tmp_path, text))[8192]
    assert (point.outcome, point.failure_kind, point.median_ms, point.times_ms) == ("failed", "unit_error", None, ())
    assert word in point.error


def test_another_flop_convention_is_said(tmp_path):
    text = head() + "".join(
        f'{{"step": {i}, "warmup": false, "exec_time_ms": "3000", "tflops": "{421.6 / 3 * 1.3:.2f}"}}\n'
        for i in range(5)
    )
    point = only(read(tmp_path, text))[8192]
    assert point.tflops == pytest.approx(140.53, rel=1e-3)
    assert point.warnings == ["the logged rate is 1.300 times the recomputed one: another FLOP convention?"]


def test_a_lost_digit_is_seen_by_the_rate(tmp_path):
    text = (head() + steps(USUAL)).replace('"2994.00"', '"294.00"')
    point = only(read(tmp_path, text))[8192]
    assert 294.0 not in point.times_ms and point.n == 9
    assert point.warnings == ["1 steps left out: their time and their rate disagree"]


def test_out_of_memory_beside_lengths_that_ran(tmp_path):  # case 78
    error = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB."
    text = (
        head()
        + steps(USUAL)
        + head(262144)
        + error
        + "\n"
        + head(65536)
        + "RuntimeError: NCCL timed out\n"
        + head(32768)
    )
    points = only(read(tmp_path, text))
    assert {n: p.outcome for n, p in points.items()} == {
        8192: "measured",
        32768: "failed",
        65536: "failed",
        262144: "oom",
    }
    assert points[262144].error.startswith("torch.OutOfMemoryError")
    assert points[65536].error == "RuntimeError: NCCL timed out"
    assert points[32768].error == "it began and no step was logged"


def test_repeated_runs_are_never_mixed(tmp_path):  # case 80
    again = [t + 100 for t in USUAL]
    box = read(tmp_path, head() + steps(USUAL) + head() + steps(again) + head() + steps(USUAL[:4]))
    assert only(box)[8192].times_ms == tuple(again[2:])
    assert box.sweeps[0].notes == ["8192: 3 runs in results_h200.log, number 2 is used"]


def test_a_step_that_goes_back_starts_a_run(tmp_path):  # case 80
    again = [t + 100 for t in USUAL]
    assert only(read(tmp_path, head() + steps(USUAL) + steps(again)))[8192].times_ms == tuple(again[2:])


def test_two_stacks_in_one_file_are_two_sweeps(tmp_path):  # cases 75, 80
    box = read(tmp_path, head(torch="2.10.0+cu129") + steps([t * 1.2 for t in USUAL]) + head() + steps(USUAL))
    assert [(s.run.stack.torch, s.points[8192].median_ms) for s in box.sweeps] == [
        ("2.10.0+cu129", pytest.approx(1.2 * 2994.5)),
        ("2.13.0+cu130", 2994.5),
    ]


def test_the_same_file_twice(tmp_path):  # case 80
    (tmp_path / "copy.log").write_text(head() + steps(USUAL))
    box = read(tmp_path, head() + steps(USUAL))
    assert only(box)[8192].n == 10
    assert box.problems == ["results_h200.log: the same as copy.log, read once"]


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "sweep_1.jsonl").mkdir()
    box = read(tmp_path, head() + steps(USUAL))
    assert only(box)[8192].n == 10 and box.problems == ["sweep_1.jsonl: Is a directory"]


def test_too_few_steps(tmp_path):  # case 82
    oom = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.0 GiB\n"
    text = head() + steps(USUAL) + head(32768) + steps(USUAL[:4], 32768) + head(65536) + steps([1e4] * 4, 65536) + oom
    points = only(read(tmp_path, text))
    assert (points[32768].outcome, points[32768].n, points[32768].ci_ms) == ("partial", 2, None)
    assert points[65536].outcome == "oom"


def test_teardown_errors_do_not_void_the_steps(tmp_path):  # case 54
    point = only(read(tmp_path, head() + steps(USUAL) + "RuntimeError: gloo: connection closed\n"))[8192]
    assert point.outcome == "measured" and "connection closed" in point.warnings[0]


def test_sections_that_contradict_themselves_are_left_out(tmp_path):
    other = f"===== seq_len=8192 =====\n{ENV.format(torch='2.13.0')}\n{GPU.format(n=32768)}\n"
    box = read(tmp_path, head() + steps(USUAL) + other + steps([8000.0] * 6, 32768))
    assert list(only(box)) == [8192] and "headed both 8192 and 32768" in box.problems[0]
    bare = "===== seq_len=32768 =====\n" + steps([8000.0] * 6, 32768)
    assert list(only(read(tmp_path, head() + steps(USUAL) + bare))) == [8192]


def _run(**change):
    config = flops.shape("llama-3.1-8b")
    base = records.Run(
        kind="sweep",
        run_id="a1",
        started="2026-01-01T00:00:00Z",
        world_size=8,
        gpu=records.Gpu(device="cuda", name="NVIDIA H200", count=8, capability=(9, 0), peak_tflops=989),
        stack=records.Stack(python="3.12.9", torch="2.13.0+cu130", cuda="13.0"),
        model=records.Model(name="8b", weights="random", num_layers=32, parameters=1, config=config),
        recipe=records.Recipe(
            name="custom", zero_stage=3, offload_optimizer=True, grad_checkpoint=True, use_liger=False,
            liger_applied=False, batch_size=1, grad_accum=1, compile=False,
        ),
    )  # fmt: skip
    return base.model_copy(update=change)


def _steps(times, run_id="a1", n=8192, warmups=2, **extra):
    return [
        records.Step(run_id=run_id, seq_len=n, step=i, warmup=i < warmups, exec_time_ms=t, **extra)
        for i, t in enumerate(times)
    ]


def _summary(times, run_id="a1", n=8192, **extra):
    return records.Summary(run_id=run_id, seq_len=n, n=len(times), median_ms=statistics.median(times), **extra)


def _write(path, items):
    path.write_text("".join((i if isinstance(i, str) else records.dump(i)) + "\n" for i in items))


def test_own_records(tmp_path):
    plan = records.Plan(sweep_key="k", seq_lens=[8192, 32768, 65536, 262144], settings={}, started="now")
    oom = records.Failure(run_id="a1", seq_len=262144, kind="gpu_oom", error="CUDA out of memory")
    skip = records.NotRun(seq_len=65536, reason="stopped")
    done = _summary(USUAL[2:], peak_mem_gib=16.3, steady=True, throttled=False, joules_per_token=0.5)
    _write(tmp_path / "sweep_1.jsonl", [plan, _run(), *_steps(USUAL, peak_mem_gib=20), done, oom, skip])
    points = only(read_box(tmp_path))
    assert {n: p.outcome for n, p in points.items()} == {
        8192: "measured",
        32768: "not_run",
        65536: "not_run",
        262144: "oom",
    }
    assert points[8192].times_ms == tuple(USUAL[2:]) and points[8192].peak_mem_gib == 16.3
    assert (points[8192].steady, points[8192].throttled, points[8192].joules_per_token) == (True, False, 0.5)
    assert points[65536].error == "stopped" and points[32768].error == "planned, never reached"


def test_the_last_outcome_of_a_length_counts(tmp_path):
    oom = records.Failure(run_id="a1", seq_len=8192, kind="gpu_oom", error="CUDA out of memory")
    again = [t + 10 for t in USUAL]
    alone = [_run(run_id="a2"), *_steps(again, "a2"), _summary(again[2:], "a2")]
    _write(tmp_path / "sweep_1.jsonl", [_run(), *_steps(USUAL[:4]), oom, *alone])
    box = read_box(tmp_path)
    assert only(box)[8192].times_ms == tuple(again[2:]) and "2 runs" in box.sweeps[0].notes[0]
    _write(tmp_path / "sweep_1.jsonl", [*alone, _run(), *_steps(USUAL[:4]), oom])
    assert only(read_box(tmp_path))[8192].outcome == "oom"
    _write(tmp_path / "sweep_1.jsonl", [_run(), *_steps(USUAL[:4]), *alone, oom])  # said only after the other ended
    assert only(read_box(tmp_path))[8192].outcome == "oom"


def test_a_launch_that_was_killed(tmp_path):  # cases 47, 57
    _write(tmp_path / "sweep_1.jsonl", [_run(), *_steps(USUAL[:8]), records.dump(_steps(USUAL)[8])[:90]])
    box = read_box(tmp_path)
    point = only(box)[8192]
    assert (point.outcome, point.n, point.warnings) == ("partial", 6, ["incomplete (8 steps and no summary)"])
    assert "cut in half" in box.problems[0]


def test_retried_steps_and_lost_ones(tmp_path):  # case 64
    items = _steps(USUAL, alloc_retries=0)
    items[5] = items[5].model_copy(update={"alloc_retries": 2})
    del items[9]
    _write(tmp_path / "sweep_1.jsonl", [_run(), *items, _summary(USUAL[2:], steady=False)])
    point = only(read_box(tmp_path))[8192]
    assert point.times_ms == tuple(t for i, t in enumerate(USUAL) if i >= 2 and i not in (5, 9))
    assert point.steady is False
    assert point.warnings == [
        "1 steps left out: the allocator had to free and retry",
        "1 of the 10 steps could not be read",
    ]


def test_the_launchers_log_beside_the_records_is_not_read_again(tmp_path):
    _write(tmp_path / "sweep_1.jsonl", [_run(), *_steps(USUAL), _summary(USUAL[2:])])
    (tmp_path / "sweep_1.log").write_text(head() + steps([t + 500 for t in USUAL]))
    assert only(read_box(tmp_path))[8192].times_ms == tuple(USUAL[2:])


def test_a_run_in_two_files_counts_once(tmp_path):
    items = [_run(), *_steps(USUAL), _summary(USUAL[2:])]
    _write(tmp_path / "sweep_1.jsonl", items)
    _write(tmp_path / "sweep_2.jsonl", items + [records.NotRun(seq_len=65536, reason="x")])
    box = read_box(tmp_path)
    assert len(box.sweeps) == 1 and "1 runs that sweep_1.jsonl has too" in box.problems[0]


def test_an_unknown_gpu_and_a_slice_have_no_mfu(tmp_path):
    gpu = records.Gpu(device="cuda", name="NVIDIA Q9000", count=8)
    for device in (gpu, _run().gpu.model_copy(update={"mig": True, "peak_tflops": None})):
        _write(tmp_path / "sweep_1.jsonl", [_run(gpu=device), *_steps(USUAL), _summary(USUAL[2:])])
        box = read_box(tmp_path)
        assert box.gpu is None and only(box)[8192].mfu is None and only(box)[8192].tflops > 100


SECTIONS = {
    8192: [9100.0, 3100.0, *(2990.0 + i for i in range(6))],
    32768: [8500.0, 7200.0, *(7160.0 + i for i in range(6))],
}
GOOD = "".join(head(n) + steps(times, n) for n, times in SECTIONS.items())
JUNK = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["\r", "\n", "{", "}", '"', "===== seq_len=", "[rank1]: Error: ", GOOD[:400], GOOD[-300:], "NaN"]),
)
DAMAGE = st.lists(
    st.tuples(st.sampled_from(["cut", "insert", "double"]), st.integers(0, len(GOOD)), st.integers(0, 600), JUNK),
    min_size=1,
    max_size=8,
)


def damaged(changes):
    text = GOOD
    for kind, start, length, junk in changes:
        end = start + length
        if kind == "cut":
            text = text[:start] + text[end:]
        elif kind == "insert":
            text = text[:start] + junk + text[start:]
        else:
            text = text[:end] + text[start:]
    return text


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAMAGE)
@example([("cut", GOOD.index('"exec_time_ms": "2992') + 18, 1, "")])
@example([("cut", GOOD.index('"step": 3'), GOOD.rindex('"step": 5') - GOOD.index('"step": 3'), "")])
def test_damage_never_makes_a_number(tmp_path, changes):
    """Whatever happens to a log: no traceback, and every time is one that was logged for that very length."""
    text = damaged(changes)
    try:
        box = read(tmp_path, text)
    except NothingUsable as error:
        assert "\n" not in str(error)
        return
    for sweep in box.sweeps:
        for n, point in sweep.points.items():
            for ms in point.times_ms:
                known = any(abs(ms - true) <= 0.011 * true for true in SECTIONS.get(n, []))
                unchecked = any("unchecked" in w for w in point.warnings)  # the header's model was cut
                assert known or unchecked, (n, ms, point)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=600), st.integers(0, 4000), st.integers(0, 4000))
def test_damaged_records_never_raise(tmp_path, junk, start, length):
    whole = [_run(), *_steps(USUAL), _summary(USUAL[2:])]
    data = "".join(records.dump(i) + "\n" for i in whole).encode()
    (tmp_path / "sweep_1.jsonl").write_bytes(data[:start] + junk + data[start + length :])
    try:
        box = read_box(tmp_path)
    except NothingUsable:
        return
    for sweep in box.sweeps:
        for point in sweep.points.values():
            assert set(point.times_ms) <= set(USUAL)


def test_a_model_that_no_shipped_shape_has(tmp_path):
    box = read(tmp_path, (head() + steps(USUAL)).replace("model_size=8b", "model_size=13b"))
    point = only(box)[8192]
    assert box.sweeps[0].run.model.uncounted == "no shipped shape is a llama of 13b"
    assert point.n == 10 and any("not known" in text and "as logged, unchecked" in text for text in point.warnings)
    assert point.tflops == pytest.approx(421.6 / 2.9945, rel=1e-2)  # the log's own


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("RuntimeError: Triton Error [CUDA]: out of memory", "oom"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom"),
        ("torch.AcceleratorError: HIP error: out of memory", "oom"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.", "failed"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "failed"),
    ],
)
def test_out_of_memory_in_a_log_is_what_it_is_in_a_launch(tmp_path, error, outcome):
    point = only(read(tmp_path, head() + steps(USUAL) + head(262144) + error + "\n"))[262144]
    assert point.outcome == outcome and point.error in error


def test_one_file_of_a_box_and_a_folder_of_two_gpus(tmp_path):
    (tmp_path / "a.log").write_text(head() + steps(USUAL))
    (tmp_path / "b.log").write_text((head() + steps(USUAL)).replace("gpu=NVIDIA H200", "gpu=NVIDIA H100 80GB HBM3"))
    alone = read_box(tmp_path / "a.log")
    assert (alone.name, alone.problems, len(alone.sweeps)) == ("H200 SXM", [], 1)
    assert read_box(tmp_path).problems == ["several GPUs in one folder: NVIDIA H100 80GB HBM3, NVIDIA H200"]


def test_the_first_rank_error_is_that_of_a_length_without_an_outcome(tmp_path):
    first, second = (
        records.RankError(run_id="a1", seq_len=8192, rank=rank, error=f"RuntimeError: {text}")
        for rank, text in ((3, "the link fell asleep"), (0, "connection closed"))
    )
    _write(tmp_path / "sweep_1.jsonl", [_run(), *_steps(USUAL[:4]), first, second])
    assert only(read_box(tmp_path))[8192].error == "RuntimeError: the link fell asleep"
