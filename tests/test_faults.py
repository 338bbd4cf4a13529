"""What really goes wrong with a sweep, done to real processes: nothing measured is lost, nothing is left running."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, alive, environment

pytestmark = pytest.mark.slow
QUICK = {"steps": 25, "warmup_steps": 1}
BY_TORCHRUN = "tests.sweep_by_torchrun"


def outcomes(records: list[dict]) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for r in records:
        if r["record"] in ("summary", "failure", "not_run"):
            found.setdefault(r["seq_len"], []).append(r)
    return found


def steps(records: list[dict], seq_len: int) -> list[dict]:
    return [r for r in records if r["record"] == "step" and r["seq_len"] == seq_len]


def left_in_shared_memory(sweep) -> list[str]:
    """case 14: segments of this sweep's launches, by their ports."""
    log = sweep.file().with_suffix(".log").read_text()
    ports = set(re.findall(r"--master_port=(\d+)", log))
    assert ports
    return [p.name for p in Path("/dev/shm").glob("deepspeed_*") for port in ports if f"_{port}_" in p.name]


def test_killed_and_interrupted_until_completed(start_sweep):
    """cases 49, 54, 57: one sweep suffers kill -9 of a rank, of the launcher, Ctrl-C and kill -9 of itself, and
    completes at the fifth launch; the launcher's exit code 0 is not believed."""
    lengths = {"seqlens": "64 128 192", **QUICK}
    sweep = start_sweep(**lengths)
    sweep.wait_for(record="summary", seq_len=64)
    sweep.wait_for(record="step", seq_len=128)
    sweep.rank(1).kill()
    assert sweep.wait_for(record="failure", seq_len=128)["kind"] == "killed_sig9"
    sweep.wait_for(record="step", seq_len=192)
    processes = sweep.tree()
    sweep.rank(1).send_signal(signal.SIGSTOP)  # or the ranks, which a killed launcher leaves, might finish first
    sweep.find("deepspeed.launcher.launch").kill()
    assert sweep.finish() == 1
    assert not alive(processes)
    found = outcomes(sweep.records())
    assert {n: [o["record"] for o in os] for n, os in found.items()} == {
        64: ["summary"],
        128: ["failure"],
        192: ["failure"],
    }
    assert found[192][0]["kind"] == "launcher_died"
    assert found[128][0]["steps_done"] >= 1
    assert sweep.output().rstrip().splitlines()[-1].startswith("128 tokens: killed_sig9")
    assert not left_in_shared_memory(sweep)
    before = sweep.file().read_bytes()

    interrupted = start_sweep(**lengths)
    interrupted.wait_for(record="step", seq_len=128)
    processes = interrupted.tree()
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.finish() == 1
    assert not alive(processes)
    assert not left_in_shared_memory(interrupted)
    found = outcomes(interrupted.records())
    assert [len(found[n]) for n in (64, 128, 192)] == [1, 2, 2]
    assert (found[64][-1]["record"], found[128][-1]["kind"]) == ("summary", "interrupted")
    assert found[192][-1]["record"] == "not_run"

    killed = start_sweep(**lengths)
    killed.wait_for(record="step", seq_len=128)
    processes = killed.tree()
    assert len(processes) >= 4  # two launchers, two ranks
    killed.process.kill()
    assert not alive(processes)
    # The last line may be half a record; the next run must not glue one to it.
    with killed.file().open("a") as f:
        f.write('{"record": "step", "run_id": "x", "seq')
    left = left_in_shared_memory(killed)  # what nobody was there to remove

    last = start_sweep(**lengths)
    assert last.finish() == 0, last.output()
    assert left_in_shared_memory(last) == left
    assert last.file().read_bytes().startswith(before)  # the same file, continued
    found = outcomes(last.records())
    assert [len(found[n]) for n in (64, 128, 192)] == [1, 3, 3]
    assert all(o[-1]["record"] == "summary" and o[-1]["n"] == 25 for o in found.values())


def test_hang_is_ended_and_named(start_sweep):
    sweep = start_sweep(seqlens="64 128", timeout=8, steps=200, warmup_steps=1)
    sweep.wait_for(record="step", seq_len=64)
    processes = sweep.tree()
    sweep.rank(1).send_signal(signal.SIGSTOP)
    failure = sweep.wait_for(record="failure", seq_len=64)
    assert failure["kind"] == "timeout"
    assert failure["steps_done"] == len(steps(sweep.records(), 64))
    assert not alive(processes)
    sweep.process.send_signal(signal.SIGTERM)
    assert sweep.finish() == 1


def test_full_disk(start_sweep, tmp_path):
    """The length is recorded as what it is, from a reserve, and the sweep continues when there is room."""
    results = tmp_path / "results"
    results.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", results]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        sweep = start_sweep(seqlens="64 128", **QUICK, module=BY_TORCHRUN)
        sweep.wait_for(record="step", seq_len=64)
        filler = os.open(results / "filler", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space left"):
            while True:
                os.write(filler, b"\0" * 512)
        os.close(filler)
        assert sweep.finish() == 1, sweep.output()
        found = outcomes(sweep.records())
        assert found[64][0]["kind"] == "disk_full"
        assert found[128][0]["record"] == "not_run"
        assert steps(sweep.records(), 64)
        assert "disk_full" in sweep.output().splitlines()[-1]
        (results / "filler").unlink()
        again = start_sweep(seqlens="64 128", **QUICK, module=BY_TORCHRUN)
        assert again.finish() == 0, again.output()
    finally:
        subprocess.run(["umount", "-l", results])


def wide_model(folder, vocab: int) -> str:
    """A model whose logits are its memory: out of it quickly and with little arithmetic."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": vocab, "tie_word_embeddings": False,
              "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def limited() -> None:
    """This process and all it starts: 3.8 GiB of memory of its own each. RLIMIT_DATA counts that; what RLIMIT_AS counts
    too, mapped libraries and space set aside, is larger than what a short sequence needs."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(3.8 * 2**30),) * 2)


def test_out_of_memory_and_longest_length(tmp_path):
    """A memory limit on the processes: the length that does not fit is tried by itself, then called out of memory.

    A rank holds 1.6 GiB, and 12 bytes for each of 32768 words of each token: 3.1 GiB at 4096 tokens, 4.6 at 8192.
    """
    model = wide_model(tmp_path / "wide", 32768)
    variables = {"RESULTS": str(tmp_path / "results"), "MODEL": model, "SEQLENS": "256 8192 16384", "STEPS": "2",
                 "WARMUP_STEPS": "1", "TMPDIR": str(tmp_path), "FIND_MAX": "1", "GRANULARITY": "4096",
                 "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", BY_TORCHRUN], cwd=ROOT, env=environment(**variables),
                          capture_output=True, text=True, preexec_fn=limited)  # fmt: skip
    file = next((tmp_path / "results").glob("cpu/sweep_*.jsonl"))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = outcomes(records)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found[256][0]["record"] == "summary"
    assert found[8192][-1]["kind"] == "host_oom"
    assert found[8192][-1]["rank"] in (0, 1)
    assert "can't allocate memory" in found[8192][-1]["error"]
    assert found[16384][-1]["record"] == "not_run"
    assert "once more by itself" in done.stdout
    fits = max(n for n, o in found.items() if o[-1]["record"] == "summary")
    fits_not = min(n for n, o in found.items() if o[-1]["record"] == "failure")
    assert 256 < fits < fits_not <= 8192
    assert fits_not - fits <= 4096
    assert f"longest length that fits: {fits} tokens" in done.stdout


def test_two_sweeps_on_the_same_devices_are_refused(start_sweep):
    first = start_sweep(seqlens="64", **QUICK)
    deadline = time.monotonic() + 60
    while not first.file():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = start_sweep(seqlens="64", **QUICK)
    assert second.finish() == 2
    assert "another sweep is running on cpu" in second.output()
    first.process.send_signal(signal.SIGINT)
    first.finish()
