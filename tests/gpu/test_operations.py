"""Single operations on the GPU: attention, packed documents, ceilings, the installer's own check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from harness.measure import attention, model, training, verify
from harness.measure.settings import Settings
from tests.gpu import judging, launches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("word", attention.BACKENDS)
def test_attention(check, word):
    """attention forward and backward against fp32"""
    capability = launches.facts()["capability"]
    try:
        attention.require(word, capability)
    except attention.AttentionUnavailable as reason:
        if launches.MODE == "venv" and word == attention.choose("auto", capability):
            raise  # what install.sh is there to install
        pytest.skip(str(reason))
    seen = attention.probe(word, launches.DEVICE)
    figure = f"{seen.max_error:.2%} off, {seen.function}, {(seen.kernels or ['no kernel seen'])[0][:70]}"
    holds = seen.kernels and seen.max_error <= attention.MAX_RELATIVE_ERROR
    check(f"{word} forward and backward against fp32", figure, holds)


def test_the_installers_verification(check):
    """install.sh's last step"""
    if launches.MODE == "system":
        pytest.skip("the packages are this box's own, not install.sh's")
    verify.verify(launches.backend(), launches.DEVICE == "cuda")
    check("install.sh's last step", f"passes with {launches.backend()}", True)


class Alone(training.Trainer):
    rank = 0  # without a process group


def test_packing(check):
    """packed documents against each document by itself"""
    n, doc, facts = 1000, 384, launches.facts()
    word = attention.for_documents(launches.backend(), facts["capability"], n, facts["memory_gib"])
    attention.require(word, facts["capability"])
    settings = Settings(
        _cli_parse_args=[], recipe="short-context", model=launches.model_name(), num_layers=1, weights="random",
        seq_len=n, doc_len=doc,
    ).resolve(True)  # fmt: skip
    net = model.build(settings, word, launches.DEVICE, None).model
    trainer = Alone(
        settings=settings, device=launches.DEVICE, engine=net, sampler=None, vocab=net.config.vocab_size,
        node_of_rank=[], out=None, run=SimpleNamespace(attention=SimpleNamespace(backend=word)),
    )  # fmt: skip
    batch = trainer.make_batch(n)
    ids = batch["input_ids"]
    pieces = [ids[:, start : start + doc] for start in range(0, n, doc)]
    labels = sum(p.shape[1] - 1 for p in pieces)

    def run(parts: list[tuple[dict, float]]):
        """(logits, loss, a gradient) of the parts, whose losses are weighted."""
        net.zero_grad()
        logits, loss = [], 0.0
        for part, weight in parts:
            out = net(**part)
            (out.loss * weight).backward()
            logits.append(out.logits.detach().float())
            loss += out.loss.item() * weight
        return torch.cat(logits, 1), loss, net.model.layers[0].self_attn.q_proj.weight.grad.float().clone()

    packed = run([(batch, 1.0)])
    each = run([({"input_ids": p, "labels": p, "use_cache": False}, (p.shape[1] - 1) / labels) for p in pieces])
    whole = run([({"input_ids": ids, "labels": batch["labels"], "use_cache": False}, 1.0)])  # as if the mask were lost

    def off(got, index):
        return ((got[index] - each[index]).norm() / each[index].norm()).item()

    check(
        "packed documents against each by itself",
        f"loss {packed[1]:.4f} and {each[1]:.4f}, logits {off(packed, 0):.2%} apart, gradient {off(packed, 2):.2%}; "
        f"without the mask {off(whole, 0):.0%} and {off(whole, 2):.0%}",
        abs(packed[1] - each[1]) < 0.01 and all(off(packed, i) < min(0.05, off(whole, i) / 4) for i in (0, 2)),
    )


def test_ceilings(check, tmp_path):
    """ceilings of this GPU"""
    budget = 0.2 if launches.REHEARSAL else 3
    for name, figure, holds in judging.ceilings(None, launches.launch(
        tmp_path, "bench_ceilings.py", budget_s=budget, seq_len=1024
    )):  # fmt: skip
        if holds is None:
            pytest.skip(figure)
        check(name, figure, holds)


def test_attention_burst(check, tmp_path):
    """the attention kernel alone"""
    more = {"sustained_s": 0, "burst_ms": 300, "attn": "sdpa" if launches.REHEARSAL else "all"}
    rows = launches.of(launches.launch(tmp_path, "bench_flash_attn.py", seqlens=launches.SHORT, **more), "attention")
    peak = launches.gpu().bf16 if launches.gpu() else None
    timed = {r.backend: r.fwd_bwd_tflops for r in rows if not r.error}
    figure = ", ".join(f"{name} {rate:.4g}" for name, rate in timed.items())
    holds = launches.backend() in timed and all(0 < rate < (peak or float("inf")) for rate in timed.values())
    check(f"attention alone at {launches.SHORT}, TFLOPS under the peak", figure or "none ran", holds)
