"""A profiled window of real operators on this CPU becomes the same events live and from the kept file."""

import gzip
import json
import socket

import pytest
import torch
import torch.nn.functional as F

from harness import kernels
from harness.measure import profile


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    calls = []
    layer = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    x = torch.randn(1, 4, 512, 64)

    def step():
        calls.append(1)
        q = layer(x.transpose(1, 2).reshape(1, 512, 256)).view(1, 512, 4, 64).transpose(1, 2)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    kept = tmp_path_factory.mktemp("traces") / "new" / "trace.json.gz"
    return profile.record(step, 3, "cpu", kept), kept, len(calls)


def test_one_window_is_thrown_away(window):
    trace, _, calls = window
    assert calls == 1 + 3 and len(trace.marks) == 3


def test_what_a_step_is_made_of_is_seen(window):
    split = kernels.decompose(window[0])
    split.check(world_size=1, min_attention=2 * 3)
    assert not split.on_gpu and split.steps == 3
    full = split.full(30.0)
    assert all(full[name] > 0 for name in ("attention", "matmul", "other_compute", "optimizer", "idle"))
    assert full["copies"] == full["exposed_communication"] == 0
    assert sum(full.values()) == pytest.approx(30, abs=1e-3)
    with pytest.raises(kernels.ProfileError, match="no communication"):
        split.check(world_size=2)


def test_operator_times_agree_with_torch(window):
    """torch's own self time of the leaf operators is an independent reference; wrappers around them have their own."""
    layer, x = torch.nn.Linear(512, 512, bias=False), torch.randn(256, 512)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(20):
            layer(x).relu()
    rows = {r.key: r.self_cpu_time_total for r in profiler.key_averages()}
    events = [
        kernels.Event(e.name, "cpu_op", round(e.time_range.start * 1000), round(e.time_range.end * 1000), e.thread)
        for e in profiler.events()
    ]
    split = kernels.decompose(kernels.Trace(events))
    mm = rows["aten::mm"] + sum(t for k, t in rows.items() if k in ("aten::resolve_conj",))
    assert split.time["matmul"] / 1e3 == pytest.approx(mm, rel=0.05)
    assert (split.time["matmul"] + split.time["other"]) / 1e3 == pytest.approx(sum(rows.values()), rel=0.05)


def test_the_kept_file_is_the_same_trace_and_names_no_machine(window):
    trace, kept, _ = window
    assert kernels.read_trace(kept) == trace
    data = json.loads(gzip.decompress(kept.read_bytes()))
    assert data["host_name"] == "" and data["traceName"] == ""
    assert f'"{socket.gethostname()}"' not in gzip.decompress(kept.read_bytes()).decode()
