"""Two "nodes" on the loopback address, started the two ways that need no ssh."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness import records
from harness.measure.launch import free_port
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.slow


def torchrun(node: int, port: int, hostfile) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
            "--master-addr=127.0.0.1", f"--master-port={port}"]  # fmt: skip


def deepspeed(node: int, port: int, hostfile) -> list[str]:
    return [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={hostfile}", "--no_ssh",
            f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]  # fmt: skip


@pytest.mark.parametrize("launcher", [torchrun, deepspeed])
def test_two_loopback_nodes(launcher, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    port = free_port()
    flags = ["benchmark.py", "--seq-len=64", "--steps=3", "--warmup-steps=1", f"--results={tmp_path}"]
    nodes = [
        subprocess.Popen([*launcher(n, port, hostfile), *flags], cwd=ROOT, env=environment(OMP_NUM_THREADS="1"),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for n in (0, 1)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    [file] = tmp_path.glob("cpu/sweep_*.jsonl")  # rank 0 alone writes
    found = [records.parse(line) for line in file.read_text().splitlines()]
    assert found[0].world_size == 2
    assert len(found[0].host.nodes) == 2
    assert found[-1].record == "summary"
    assert found[-1].n == 3
    step_lines = [line for line in outputs[0].splitlines() if line.startswith('{"record": "step"')]
    assert len(step_lines) >= 4
    assert not any(line.startswith("{") for line in outputs[1].splitlines())
    assert {"step", "warmup", "exec_time_ms", "tflops", "peak_mem_gib"} <= json.loads(step_lines[0]).keys()
