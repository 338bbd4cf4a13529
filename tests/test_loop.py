"""The measuring loop around an engine that is only a number: when it stops, what it refuses, what MEM_DEBUG says."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness import flops, records
from harness.measure import box, result_file, session, telemetry, training
from harness.measure.settings import Settings


class Engine:
    """Its loss is `losses` in turn, the last one again and again."""

    def __init__(self, losses):
        self.losses, self.calls = list(losses), []

    def __call__(self, **batch):
        self.calls.append("forward")
        loss = self.losses.pop(0) if len(self.losses) > 1 else self.losses[0]
        return SimpleNamespace(loss=torch.tensor(loss))

    def backward(self, loss):
        self.calls.append("backward")

    def step(self):
        self.calls.append("optimizer")


@pytest.fixture
def make(tmp_path):
    """make(losses, **settings) -> a Trainer of one rank that writes to a file."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(losses=(2.0,), **more):
        asked = {"seq_len": 64, "steps": 4, "warmup_steps": 0, "precision": 0} | more
        settings = Settings(_cli_parse_args=[], result_file=tmp_path / "sweep_1.jsonl", **asked).resolve(False)
        config = flops.shape("tiny")
        run = records.Run(
            kind="sweep", run_id="r", started="", gpu=records.Gpu(device="cpu", name="x", count=1),
            stack=records.Stack(python="3", torch="2"), attention=records.Attention(requested="auto", backend="sdpa"),
            model=records.Model(name="tiny", weights="random", num_layers=4, parameters=1, config=config),
        )  # fmt: skip
        return training.Trainer(
            settings=settings, device="cpu", engine=Engine(losses), run=run, sampler=telemetry.Sampler(None),
            vocab=1024, node_of_rank=["here"], out=result_file.Writer(settings.result_file),
        )  # fmt: skip

    yield make
    dist.destroy_process_group()


def lasting(trainer, monkeypatch, *milliseconds: float):
    """Steps that took this long, one after the other."""
    times = iter(milliseconds)

    def timed_step(batch, seq_len, number, warmup):
        return records.Step(run_id="r", seq_len=seq_len, step=number, warmup=warmup, exec_time_ms=next(times))

    monkeypatch.setattr(trainer, "timed_step", timed_step)


def test_steps_stop_when_they_are_precise_enough_and_have_lasted(make, monkeypatch):
    trainer = make(precision=1, steps=10)
    lasting(trainer, monkeypatch, 19_000, 11_001, 10_999, 11_000, 11_001, 11_000)
    got = trainer.measure(64)
    assert (got.n, got.stopped_by) == (6, "precision")  # the first step pays for new memory
    lasting(trainer, monkeypatch, *[4_000, 4_001] * 5)
    assert trainer.measure(64).n == 8  # not before 30 s
    lasting(trainer, monkeypatch, *[1_000, 1_001] * 5)
    assert trainer.measure(64).stopped_by == "steps"  # as precise, and over after 10 s
    # The logarithms of the second to the sixth deviate by 0.0099: (2.776 * 1.08 * 0.99)^2 = 8.8; no other counts.
    lasting(trainer, monkeypatch, 19_000, 10_000, 10_200, 10_100, 10_000, 10_200, *[20_000] * 4)
    assert trainer.measure(64).n == 9
    lasting(trainer, monkeypatch, *[11_000, 13_000] * 5)
    assert trainer.measure(64).n == 10  # far from precise


def test_warm_up_goes_on_while_steps_drift(make, monkeypatch):
    trainer = make(warmup_steps=2, steps=1)
    lasting(trainer, monkeypatch, 9_000, 3_000, 1_000, 990, 1_000)
    got = trainer.measure(64)
    assert (got.warmup_steps, got.n, got.steady) == (4, 1, True)
    lasting(trainer, monkeypatch, *[2_000, 1_000] * 3, 1_500, 1_000)
    got = trainer.measure(64)
    assert (got.warmup_steps, got.steady) == (7, False)  # two and five more, and still not steady


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_length(make, loss):
    trainer = make([2.0, 2.0, loss])
    with pytest.raises(training.NonFiniteLoss, match="not finite at step 2"):
        trainer.measure(64)
    written = [records.parse(line) for line in trainer.out.path.read_text().splitlines()]
    assert [r.loss for r in written] == [2.0, 2.0]


def test_memory_debug_names_each_stage(make, capsys):
    trainer = make(mem_debug=True, steps=1)
    trainer.measure(64)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    stages = ["start", "after forward", "after backward", "after optimizer"]
    assert [line.split(": ")[0] for line in said[:4]] == [f"# memory seq_len=64 {stage}" for stage in stages]
    assert all("reserved 0." in line or "reserved 1." in line for line in said[:4])  # the resident set, GiB
    assert said[4] == "# no memory snapshot: the CPU has no caching allocator"
    assert trainer.engine.calls[:3] == ["forward", "backward", "optimizer"] and len(trainer.engine.calls) == 6


def test_what_was_compiled_for_one_length_is_not_used_for_the_next(make, monkeypatch):
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    trainer = make(compile=True, steps=1)
    trainer.measure(64)
    trainer.measure(128)
    assert len(resets) == 2


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [(MemoryError("much"), None, 1), (training.NonFiniteLoss("nan"), "non_finite_loss", 1),
     (session.WrongSetting("SP_SIZE=3"), "wrong_setting", 2)],
)  # fmt: skip
def test_a_failing_rank_says_why_before_it_ends(make, monkeypatch, capsys, error, kind, code):
    trainer = make(mem_debug=True)
    trainer.seq_len = 64
    monkeypatch.setattr(session, "start", lambda settings, what, device: trainer)
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    monkeypatch.setattr(box, "use_accelerator", lambda: "cpu")
    with pytest.raises(SystemExit) as ended, session.run(trainer.settings, "sweep"):
        raise error
    assert ended.value.code == code
    (written,) = [records.parse(line) for line in trainer.out.path.read_text().splitlines()]
    assert (written.record, written.seq_len, written.kind, written.rank) == ("rank_error", 64, kind, 0)
    assert written.error == f"{type(error).__name__}: {error}" and "Traceback" not in written.error
    assert "no memory snapshot" in capsys.readouterr().out


def test_sequences_that_cannot_be_shared_are_a_wrong_setting(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    def refuse(*arguments, **more):
        raise ValueError("num_attention_heads (4) must be divisible by sequence_parallel_size")

    monkeypatch.setattr(UlyssesSPAttentionHF, "register_with_transformers", refuse)
    settings = Settings(_cli_parse_args=[], seq_len=63, sp_size=3).resolve(False)
    with pytest.raises(session.WrongSetting, match=r"SP_SIZE=3: num_attention_heads \(4\) must be divisible"):
        session.share_sequences(torch.nn.Identity(), settings, "sdpa")
