"""Other trainers' logs: every public one gives the value worked out by hand, and two of them give an answer."""

import json
from collections import Counter

import pytest

import plot_results
from harness.report import logs, rates
from harness.report.box import NothingUsable
from harness.report.reading import read_box
from tests.conftest import ROOT
from tests.handmade import upgrade

DATA = ROOT / "tests" / "data" / "logs"
GB200, GB300 = DATA / "mlperf_8x_gb200_llama31_8b.log", DATA / "mlperf_8x_gb300_llama31_8b.log"


def samples(p, run):  # of all GPUs, a second
    return run.job.global_batch / p.median_ms * 1e3 if p.per == "step" else 1e3 / p.median_ms


def tokens(p, run):  # of one GPU, a second
    return 1e3 / p.median_ms


def per_gpu(p, run):
    return rates.tokens_per_s(run, p)


def ms(p, run):
    return p.median_ms


# file, format, kept, left out, what, wanted; the last column of the table the logs came with
ROWS = [
    ("mlperf_8x_gb200_llama31_8b", "MLPerf", 50, 0, ms, 404.19,
     {"global_batch": 16, "seq_len": 8192, "gpu": "NVIDIA GB200"}),
    ("mlperf_8x_gb300_llama31_8b", "MLPerf", 50, 0, ms, 345.56,
     {"global_batch": 16, "seq_len": 8192, "gpu": "NVIDIA GB200"}),
    ("mlperf_8x_h200_llama2_70b_lora", "MLPerf", 5, 0, ms, 3150.22,
     {"global_batch": 8, "gpus": 8, "gpu": "NVIDIA H200"}),
    ("mlperf_8x_mi350x_llama31_8b", "MLPerf", 14, 0, samples, 24.992,
     {"global_batch": 32, "seq_len": 8192, "grad_accum": 2}),
    ("mlperf_8x_mi355x_llama31_8b", "MLPerf", 14, 0, samples, 30.657, {"global_batch": 32, "seq_len": 8192}),
    ("torchtitan_8x_b200", "torchtitan", 2, 0, tokens, 10028, {"gpus": None, "seq_len": None, "global_batch": None}),
    ("megatron_16x_h100_mixtral_8x7b", "Megatron-LM", 3, 0, ms, 5533.8, {"global_batch": 128, "gpus": None}),
    ("nanogpt_a100", "nanoGPT", 15, 1, ms, 894.64, {"global_batch": None, "tokens_per_step": None}),
    ("deepspeed_timer", "DeepSpeed", 6, 0, samples, 155.78, {"global_batch": None}),
    ("hf_trainer_stdout", "Hugging Face Trainer", 1, 0, samples, 20.32, {"global_batch": 64}),
    ("nanochat_a100", "nanochat", 7, 0, ms, 992.91, {"tokens_per_step": 524288}),
    ("nemo", "NeMo", 6, 0, ms, 31.60, {"global_batch": 1}),
    ("megatron_bridge", "Megatron-LM", 2, 0, ms, (13212.7 + 14260.3) / 2, {"global_batch": 512}),
    ("composer_console", "Composer", 1, 0, per_gpu, 412.4, {"gpus": 16, "seq_len": 2048, "global_batch": 64}),
    ("hf_train_metrics", "Hugging Face Trainer", 1, 0, samples, 4.103, {"global_batch": 8}),
]  # fmt: skip


def facts(sweep):
    run = sweep.run
    return run.job.model_dump() | {"gpu": run.gpu.name, "gpus": run.world_size, "seq_len": next(iter(sweep.points))}


def only(path, *typed):
    skipped, problems = Counter(), []
    found = logs.read(path, list(typed), skipped, problems)
    assert found is not None and len(found) == 1, found
    (point,) = found[0].points.values()
    return point, found[0], skipped


def written(tmp_path, text, name="run.log"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_every_public_log_gives_its_value(capsys):
    assert {row[0] for row in ROWS} == {p.stem for p in DATA.glob("*.log")}
    with capsys.disabled():
        print(f"\n{'file':32} {'format':22} {'kept':>4} {'left':>4} {'value':>12} {'wanted':>12}")
        for name, form, kept, left, what, wanted, said in ROWS:
            point, sweep, _ = only(DATA / f"{name}.log")
            seen, value = max(point.n, 1), what(point, sweep.run)
            out = sum(int(n.split(":")[1].split()[0]) for n in sweep.notes if n.startswith("start-up left out"))
            print(f"{name:32} {sweep.run.job.trainer:22} {seen:4} {out:4} {value:12.2f} {wanted:12.2f}")
            assert (sweep.run.job.trainer, seen, out) == (form, kept, left), name
            assert value == pytest.approx(wanted, rel=2e-3 if form.startswith("Hugging") else 2e-4), name
            assert {k: v for k, v in facts(sweep).items() if k in said} == said, name


def test_what_an_observation_is_stays_apart():
    assert only(DATA / "nanogpt_a100.log")[0].kind == "step"
    bridge, sweep, _ = only(DATA / "megatron_bridge.log")
    assert bridge.kind == "mean" and bridge.times_ms == (13212.7, 14260.3) and bridge.ci_ms is None
    assert "2 means: too few for an interval" in sweep.notes
    whole, sweep, _ = only(DATA / "hf_train_metrics.log")
    assert whole.kind == "average" and whole.ci_ms is None and whole.times_ms == ()
    assert any("average over the whole run" in n for n in sweep.notes)
    first, sweep, _ = only(DATA / "composer_console.log")
    assert first.outcome == "partial" and any("no step to compare" in n for n in sweep.notes)
    slowest, _, _ = only(DATA / "torchtitan_8x_b200.log")
    assert [round(1e3 / t) for t in slowest.times_ms] == [10049, 10007]  # the slowest rank's, two steps of eight lines


def test_a_count_of_gpus_and_a_length_give_tokens_a_second_of_a_gpu(tmp_path):
    point, sweep, _ = only(DATA / "megatron_16x_h100_mixtral_8x7b.log", "gpus=16", "seq_len=4096")
    assert rates.tokens_per_s(sweep.run, point) == pytest.approx(5921, abs=1)
    point, sweep, _ = only(GB200, "gpus=8")
    assert rates.tokens_per_s(sweep.run, point) == pytest.approx(40535, abs=2)
    point, sweep, _ = only(DATA / "composer_console.log")
    assert rates.tokens_per_s(sweep.run, point) == pytest.approx(412.4, rel=1e-3)


LINES = {  # the same kinds as other versions print them -> (kind, per, value, facts)
    "megatron, other order and older words": (
        " iteration       {i}/     500 | elapsed time per iteration (ms): 1{i}00.5 | consumed samples:  {i}0 | "
        "global batch size:    64 | learning rate: 1.0E-05 | samples per second: 19.4 | TFLOPs: 150.1 |\n",
        "mean", "step", 1600.5, {"global_batch": 64}),
    "megatron in seconds, with tokens": (
        "[default7]: iteration {i}/ 311541 | consumed samples: {i} | consumed tokens: {i}000 | "
        "elapsed time per iteration (s): 1.{i} | global batch size: 16 | lm loss: 1.1E+01 |\n",
        "mean", "step", 1600, {"global_batch": 16, "seq_len": 1000}),
    "torchtitan in colours": (
        "[rank0]:\x1b[31mstep: {i}  \x1b[32mloss: 10.1  \x1b[38;2;180;60;0mgrad_norm: 1.2  "
        "\x1b[34mmemory: 20.5GiB(21%)  \x1b[36mtps: {i},000  \x1b[35mtflops: 40.2  \x1b[31mmfu: 12.3%\x1b[39m\n",
        "mean", "token of a GPU", 1 / 6, {}),
    "torchtitan of 2024": (
        "2024-08-01 10:00:00,1 - root - INFO - step: {i}  loss: 9.8  memory: 20.5GiB(21%)  wps: {i},000  mfu: 30.1%\n",
        "mean", "token of a GPU", 1 / 6, {}),
    "nemo's progress bar": (
        "Epoch 0: :   1%|x| {i}/100 [00:1{i}<01:00, v_num=1, reduced_train_loss=7.0, global_step={i}.000, "
        "consumed_samples=12.0, train_step_timing in s=12.{i}0]\r",
        "step", "step", 12600, {}),
    "deepspeed, newer": (
        "[2024-01-01 10:00:00,000] [INFO] [timer.py:260:stop] epoch=0/micro_step={i}0/global_step={i}, "
        "RunningAvgSamplesPerSec=99.9, CurrSamplesPerSec=1{i}.0, MemAllocated=1.75GB, MaxMemAllocated=2.62GB\n",
        "step", "sample", 1e3 / 16, {}),
    "deepspeed's pipeline": (
        "steps: {i} loss: 6.5 iter time (s): 0.1{i}0 samples/sec: 400.000\n", "mean", "step", 160, {}),
    "build-nanogpt": (
        "step    {i} | loss: 6.5 | lr 6.0e-04 | norm: 1.0 | dt: 33{i}.12ms | tok/sec: 1558885.64\n",
        "step", "step", 336.12, {}),
    "a table of a tracker": (
        '{i},0.{i}5,"1,000",3.1\n', "step", "step", 650, {"tokens_per_step": None}),
    "samples_per_second in mlperf": (
        ':::MLLOG {{"key": "tracked_stats", "value": {{"samples_per_second": 1{i}.0}}, "metadata": {{"step": {i}}}}}\n',
        "mean", "sample", 1e3 / 16, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_other_versions_of_the_same_kinds(name, tmp_path):
    line, kind, per, value, said = LINES[name]
    head = '"Step","big-run - perf/step_time_s","eval/step_time_s","loss"\n' if "tracker" in name else ""
    point, sweep, skipped = only(written(tmp_path, head + "".join(line.format(i=i) for i in range(4, 9))))
    assert (point.kind, point.per, point.n) == (kind, per, 5) and not skipped
    assert point.median_ms == pytest.approx(value) and point.ci_ms
    assert {k: v for k, v in facts(sweep).items() if k in said} == said


def test_facts_a_log_says_before_its_steps(tmp_path):
    titan = "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory\n"
    titan += (
        "Training starts at step 1, with local batch size 1, global batch size 8, sequence length 8192, total steps 9\n"
    )
    titan += "".join(
        f"step: {i}  loss: 1.0  memory: 9.1GiB(9%)  tps: 8,19{i}  tflops: 3.1  mfu: 1%\n" for i in range(1, 6)
    )
    point, sweep, _ = only(written(tmp_path, titan), "gpus=8")
    assert facts(sweep).items() >= {"gpu": "NVIDIA H100 80GB HBM3", "global_batch": 8, "seq_len": 8192}.items()
    assert point.per == "step" and point.median_ms == pytest.approx(1e3 * 8192 / 8193)
    megatron = "  seq_length ........ 4096\n  world_size ........ 16\n  bf16 ............. True\n"
    megatron += (DATA / "megatron_16x_h100_mixtral_8x7b.log").read_text()
    _, sweep, _ = only(written(tmp_path, megatron))
    assert facts(sweep).items() >= {"gpus": 16, "seq_len": 4096, "precision": "bf16"}.items()


def nano(steps, ms, start=0):
    return "".join(f"iter {start + i}: loss 3.2, time {ms + i:.2f}ms, mfu 16.68%\n" for i in range(steps))


def test_a_restart_and_another_batch_are_sweeps_of_their_own(tmp_path):
    found = logs.read(written(tmp_path, nano(10, 100) + nano(8, 200)), [], Counter(), [])
    assert [[p.n for p in s.points.values()] for s in found] == [[10], [8]]
    assert found[1].notes[0] == "run 2 of 2 in run.log"
    line = "iteration {}/9 | elapsed time per iteration (ms): {}.0 | global batch size: {} | x |\n"
    text = "".join(line.format(i, 100 + i, 8 if i < 5 else 16) for i in range(1, 10))
    found = logs.read(written(tmp_path, text), [], Counter(), [])
    assert [s.run.job.global_batch for s in found] == [8, 16]


def test_a_mean_over_k_steps_is_one_observation_of_weight_k(tmp_path):
    line = "step: {}  loss: 1.0  memory: 9.1GiB(9%)  tps: {}  tflops: 3.1  mfu: 1%\n"
    text = "".join(line.format(*x) for x in [(1, 1000), (10, 1010), (20, 1020), (30, 1000), (31, 1010)])
    point, _, _ = only(written(tmp_path, text))
    assert point.weights == (1, 9, 10, 10, 1) and point.n == 5
    # of 31 steps, sorted by time: 10 at 1/1020, 10 (9 and 1) at 1/1010, so the sixteenth is 1/1010
    assert 1e3 / point.median_ms == pytest.approx(1010)


def test_prefixes_echoes_and_colours_do_not_matter(tmp_path):
    plain = only(written(tmp_path, nano(6, 100)))[0]
    for prefix in ("0: ", "[rank3]: ", "[default0]:", "[1,0]<stdout>:", "stdout: ", "gpu-node-7: ", "\x1b[32m"):
        text = "+ echo iter 99: loss 3.2, time 1.00ms, mfu 1%\n"
        text += "".join(prefix + line + "\n" for line in nano(6, 100).splitlines())
        assert only(written(tmp_path, text))[0].times_ms == plain.times_ms, prefix


def test_what_cannot_be_read_is_counted(tmp_path):
    text = nano(6, 100) + "iter 7: loss nan, time nanms, mfu 1%\niter 8: loss 1, time 893\n" + nano(1, 0, start=9)
    point, _, skipped = only(written(tmp_path, text))
    assert point.n == 6 and sum(skipped.values()) == 3  # nan, cut off, a time of zero


def test_huggings_files(tmp_path):
    state = {"log_history": [{"loss": 1.0, "step": 10}, {"train_runtime": 314.9, "train_samples_per_second": 20.32,
             "train_steps_per_second": 0.3176, "step": 100}, {"eval_samples_per_second": 99.0}]}  # fmt: skip
    for text in (json.dumps(state), json.dumps(state, indent=2)):
        point, sweep, _ = only(written(tmp_path, text + "\n", "trainer_state.json"))
        assert samples(point, sweep.run) == pytest.approx(20.32, rel=1e-3) and point.kind == "average"
    line = (
        '{{"current_steps": {}, "total_steps": 500, "loss": 1.2, "elapsed_time": "{}", "remaining_time": "0:09:00"}}\n'
    )
    text = line.format(10, "0:01:40") + line.format(20, "0:02:20") + line.format(110, "0:08:20")
    point, sweep, _ = only(written(tmp_path, text, "trainer_log.jsonl"))
    assert point.median_ms == pytest.approx(4000) and point.kind == "average"  # 400 s for the 100 after the first line
    bar = "".join(f"\r {i}%|x | {i}0/1000 [00:{i}<10:00,  2.0{i}it/s]" for i in range(10, 15)) + "\n"
    point, sweep, _ = only(written(tmp_path, bar))
    assert point.median_ms == pytest.approx(1e3 / 2.014) and any("progress bar" in n for n in sweep.notes)


# -- two logs


@pytest.fixture
def boxes(tmp_path):
    """The GB200 and the GB300 log, each with a box.toml beside it."""
    paths = []
    for name, source, toml in (("a", GB200, "gpus = 8\n"), ("b", GB300, 'gpu = "GB300"\ngpus = 8\n')):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / source.name)
        paths[-1].write_bytes(source.read_bytes())
        (tmp_path / name / "box.toml").write_text(toml)
    return [str(p) for p in paths]


def test_gb200_and_gb300(boxes):
    code, page, err = upgrade(*boxes, "--price-ratio", "1.3")
    assert code == 0, err
    assert "gpu: the log says GB200, box.toml says GB300: box.toml counts" in page
    assert "1.17 [1.17, 1.17]" in page and "50 means, 50 means" in page
    assert "unknown on both sides: precision, software" in page
    code, out, _ = upgrade(*boxes, "--json")
    result = json.loads(out)
    speedup = result["speed"]["points"][0]["speedup"]
    assert speedup["value"] == pytest.approx(404.191017 / 345.555544) and speedup["low"] < 1.1697 < speedup["high"]
    assert any("box.toml says GB300" in text for text in result["question"]["problems"])
    assert result["comparable"]["facts"]["new"]["gpu"] == "NVIDIA GB300"


def test_mi350x_and_mi355x():
    code, page, _ = upgrade(*(str(DATA / f"mlperf_8x_mi{n}x_llama31_8b.log") for n in (350, 355)))
    assert code == 0 and "1.23 [1.23, 1.23]" in page
    assert "it rests on the number of GPUs being equal, which no log says" in page


GUIDE = """===== seq_len=8192 =====
# env: python=3.12.9 torch=2.13.0 cuda=13.0 transformers=5.14.1 deepspeed=0.19.2 liger-kernel=0.8.0 flash-attn-3=3.0.0
# gpu=NVIDIA H200 attn_backend=flash_attention_3 liger=1 gc=1 offload_optim=1 zero=3 model_size=8b world_size=8 batch_size=1 seq_len=8192
"""  # noqa: E501


def guide_steps(numbers, warmups=2):
    line = '{{"step": {}, "warmup": {}, "exec_time_ms": "{:.2f}", "tflops": "{:.2f}", "peak_mem_gib": "16.3"}}\n'
    return "".join(line.format(i, json.dumps(i < warmups), 3000 + i, 421.6e3 / (3000 + i)) for i in numbers)


def test_an_mlperf_log_and_a_guide_log_are_refused(tmp_path):
    guide = written(tmp_path, GUIDE + guide_steps(range(12)), "guide.log")
    code, page, err = upgrade(str(DATA / "mlperf_8x_h200_llama2_70b_lora.log"), str(guide))
    assert code == 3 and "not comparable" in err
    assert "DIFFERENT model: llama2_70b_lora and llama-3.1-8b" in page and "DIFFERENT trainer: MLPerf and" in page


def test_unknown_lengths_still_have_a_ratio_and_it_says_on_what_it_rests(tmp_path):
    old, new = written(tmp_path, nano(9, 200), "old.log"), written(tmp_path, nano(9, 100), "new.log")
    code, page, _ = upgrade(str(old), str(new), "--price-ratio", "1.5")
    assert code == 0 and "1.96" in page  # 204 / 104
    assert "rests on the sequence length and the batch and the number of GPUs being equal, which no log says" in page
    assert "unknown on both sides: model, number of GPUs, global batch, precision, software" in page
    for name in ("plot.png", "plot.svg"):
        assert plot_results.main([str(old), str(new), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 10_000


def test_other_batches_are_compared_by_tokens_only_and_when_allowed(tmp_path):
    line = "iteration {}/9 | elapsed time per iteration (ms): {}.0 | global batch size: {} | x |\n"
    old, new = (
        written(tmp_path, "".join(line.format(i, ms, batch) for i in range(1, 6)), name)
        for name, ms, batch in (("old.log", 1000, 8), ("new.log", 1500, 24))
    )
    assert upgrade(str(old), str(new))[0] == 3
    code, _, err = upgrade(str(old), str(new), "--allow-mismatch")
    assert code == 2 and "seq_len = N; gpus = N" in err and "--old seq_len=N --old gpus=N" in err
    typed = [x for side in ("--old", "--new") for fact in ("gpus=8", "seq_len=4096") for x in (side, fact)]
    code, page, _ = upgrade(str(old), str(new), "--allow-mismatch", *typed)
    assert code == 0 and "2.00" in page and "DIFFERENT global batch: 8 and 24" in page


def test_one_box_toml_for_two_logs_of_a_folder(tmp_path):
    for path in (GB200, GB300):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "box.toml").write_text(f'gpus = 8\n["{GB300.name}"]\ngpu = "GB300"\n')
    names = [read_box(tmp_path / path.name).name for path in (GB200, GB300)]
    assert names == ["GB200", "GB300"]
    assert upgrade(str(tmp_path / GB200.name), str(tmp_path / GB300.name))[0] == 0


# -- wrong input: one line that says what to do


def test_a_missing_length(tmp_path):
    old, new = written(tmp_path, nano(9, 200), "old.log"), written(tmp_path, nano(9, 100), "new.log")
    code, _, err = upgrade(str(old), str(new), "--new", "seq_len=1024")
    assert code == 2 and err.count("\n") == 1
    assert (
        "OLD (old.log) does not say seq_len, and NEW has 1024: write seq_len = N into box.toml beside it, or give"
        in err
    )


def test_an_unknown_gpu_is_named_and_works(tmp_path):
    log = str(written(tmp_path, nano(9, 200)))
    code, page, _ = upgrade(log, log, "--new", "gpu=Phantom 9000")
    assert code == 0 and "gpu 'Phantom 9000' is not in harness/gpus.toml: no specifications, no MFU" in page


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("lenght = 8192", "unknown key lenght; known are gpu, gpus, seq_len"),
        ('seq_len = "8k"', "seq_len = '8k': Input should be a valid integer"),
        ("gpus = 0", "gpus = 0: Input should be greater than 0"),
        ("gpu = 7", "gpu = 7: Input should be a valid string"),
        ('model = "nope"', "model = 'nope' is no file, and no shipped shape: tiny, llama-3.1-8b"),
        ('["other.log"]\ngpus = 8', "[other.log] is no file in this folder"),
        ("gpus 8", "box.toml: "),
    ],
)
def test_a_wrong_box_toml(tmp_path, toml, text):
    log = str(written(tmp_path, nano(9, 200)))
    (tmp_path / "box.toml").write_text(toml)
    code, _, err = upgrade(log, log)
    assert code == 2 and err.count("\n") == 1 and "box.toml" in err and text in err


def test_facts_for_a_box_that_has_records():
    code, _, err = upgrade(
        str(ROOT / "results/published/h200"), str(ROOT / "results/published/b200"), "--old", "gpus=8"
    )
    assert code == 2 and "holds this project's records" in err


def test_contradicting_columns_and_a_time_without_a_unit(tmp_path):
    text = "step,step_time_ms,step_time_s\n1,100,0.1\n2,100,0.3\n3,100,0.1\n"
    log = str(written(tmp_path, text, "run.csv"))
    code, _, err = upgrade(log, log)
    assert code == 2 and 'columns "step_time_ms" and "step_time_s" contradict: 100 and 300' in err
    log = str(written(tmp_path, "step,step_time\n1,100\n2,100\n3,101\n", "run.csv"))
    code, _, err = upgrade(log, log)
    assert code == 2 and 'column "step_time" has no unit: call it step_time_ms or step_time_s' in err
    text = "step\ttokens/s\tloss\n" + "".join(f"{i}\t{1000 + i}\t2.0\n" for i in range(5))
    point, sweep, _ = only(written(tmp_path, text, "run.tsv"))
    assert 1e3 / point.median_ms == pytest.approx(1002) and "columns not used: loss" in sweep.notes


def test_no_format_recognised_lists_them(tmp_path):
    log = written(tmp_path, "hello\nworld\n")
    code, _, err = upgrade(str(log), str(log))
    assert code == 4 and all(name in err for name in logs.NAMES)
    with pytest.raises(NothingUsable):
        read_box(written(tmp_path, ""))


# -- the guide's headers, repeated by other ranks


def guide(tmp_path, other_torch):
    again = GUIDE.split("\n", 1)[1].replace("torch=2.13.0", f"torch={other_torch}")
    return read_box(written(tmp_path, GUIDE + guide_steps(range(5)) + again + guide_steps(range(5, 12)), "guide.log"))


def test_identical_headers_of_other_ranks_start_no_new_run(tmp_path):
    box = guide(tmp_path, "2.13.0")
    assert len(box.sweeps) == 1 and box.sweeps[0].points[8192].n == 10
    assert box.sweeps[0].points[8192].outcome == "measured" and not box.sweeps[0].notes


def test_other_headers_inside_one_run_are_a_mismatch(tmp_path):
    box = guide(tmp_path, "2.9.0")
    assert box.sweeps[0].points[8192].n == 10
    code, page, _ = upgrade(str(tmp_path / "guide.log"), str(tmp_path / "guide.log"))
    assert code == 3 and "DIFFERENT ranks of OLD: torch 2.13.0 and 2.9.0" in page


def test_a_guide_log_with_deepspeeds_own_lines_stays_a_guide_log(tmp_path):
    text = (DATA / "deepspeed_timer.log").read_text() + GUIDE + guide_steps(range(12))
    box = read_box(written(tmp_path, text, "guide.log"))
    assert [s.run.source for s in box.sweeps] == ["measured"] and box.sweeps[0].points[8192].n == 10


def test_a_trainers_own_tflops_are_shown_beside_the_recomputed_and_not_compared(tmp_path):
    line = " iteration {i}/ 9 | elapsed time per iteration (ms): 1000.0 | throughput per GPU (TFLOP/s/GPU): 600.0 | "
    line += "global batch size: 8 | x |\n"
    log = written(tmp_path, "".join(line.format(i=i) for i in range(1, 6)))
    point, sweep, _ = only(log, "gpus=8", "seq_len=8192", "model=llama-3.1-8b", "precision=bf16", "gpu=H100")
    assert point.tflops == pytest.approx(421.6, abs=0.1)  # the published work of such a step, in one second
    assert point.mfu == pytest.approx(421.6 / 989, rel=1e-3)
    assert "the log prints 600 TFLOPS by its own count, 1.42 of what is recomputed" in sweep.notes


def test_two_runs_at_once_have_no_batch(tmp_path):
    """Interleaved headers of two MLPerf logs: neither batch is taken, so no time is of a step."""
    fact = ':::MLLOG {{"key": "global_batch_size", "value": {}}}\n'
    stat = ':::MLLOG {{"key": "tracked_stats", "value": {{"throughput": {}.0}}, "metadata": {{"step": {}}}}}\n'
    text = fact.format(8) + fact.format(32) + "".join(stat.format(20 + i, i) for i in range(1, 6))
    point, sweep, _ = only(written(tmp_path, text))
    assert sweep.run.job.global_batch is None and point.per == "sample"


def test_several_ranks_lines_are_one_step_and_last_as_long_as_the_slowest(tmp_path):
    line = "[rank{r}]: iteration {i}/ 50 | elapsed time per iteration (ms): {ms}.0 | global batch size: 8 |\n"
    late = [(0, 1), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3)]  # rank 2 is a step behind
    text = "".join(line.format(r=r, i=i, ms=100 * i + r) for r, i in late)
    assert only(written(tmp_path, text))[0].times_ms == (102, 202, 302)
