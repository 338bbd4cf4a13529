"""Every command of the README and of docs/: those that need no GPU are run, the others are named with the reason.

What the README shows of an output stands in the output: its lines in their order, `...` for what is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment

# Run elsewhere, or not without a GPU, a second box or a network.
NOT_RUN = {
    "pip install -r requirements/report.txt": "what is pinned is what is installed: test_install.py",
    "bash tests/run.sh": "this test is part of it",
    "./install.sh": "test_install.py",
    "source .venv/bin/activate": "the tests run in such an environment",
    "SEQLENS=guide ./run_sweep.sh": "needs a GPU",
    'FIND_MAX=1 SEQLENS="131072 262144" ./run_sweep.sh': "needs a GPU; FIND_MAX is in test_faults.py",
    "python bench_ceilings.py": "test_companions.py, on small sizes",
    "python bench_flash_attn.py": "test_companions.py, on small sizes",
    "python bench_flash_attn.py --attn all": "needs a GPU",
    "for L in 0 1; do USE_LIGER=$L deepspeed --num_gpus=8 bench_decompose.py; done": "eight GPUs; test_companions.py",
    "deepspeed --num_gpus=8 bench_ceilings.py": "eight GPUs; test_companions.py",
    "SEQ_LEN=131072 RECIPE=long-context deepspeed --num_gpus=8 bench_decompose.py": "eight GPUs",
    "python bench_decompose.py --trace trace.json.gz --step-ms 512": "needs a trace; test_companions.py",
    "python should_upgrade.py old.log new.log --price-ratio 1.8": "two logs",
    "python should_upgrade.py old.log new.log --old gpus=8 --new gpus=8 --new gpu=GB300": "two logs",
    "python plot_results.py results/nvidia-h200 results/nvidia-b200": "two measured boxes",
    "python should_upgrade.py results/nvidia-h200 results/nvidia-b200 --price-old 2.5 --price-new 4.9": "two boxes",
    "HOSTFILE=hosts ./run_sweep.sh": "needs ssh; two loopback nodes are in test_nodes.py",
    'HOSTFILE=hosts LAUNCHER_ARGS="--launcher slurm" ./run_sweep.sh': "needs SLURM",
}
TWO_NODES = re.compile(r"^(torchrun|deepspeed) .*node.rank")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"^    (python [^\n#]*?)\n\n```text\n(.*?)^```", re.M | re.S)


def commands() -> list[str]:
    """Lines of code blocks, without comments. Tables and output are no commands."""
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) + re.findall(r"^(?: {4}\S.*\n)+", text, re.M)
    lines = [re.sub(r"\s+# .*$", "", line.strip()) for block in blocks for line in block.splitlines()]
    start = r"^(\w+=\S* |\w+=\"[^\"]*\" )*(python|pip|bash|source|for|deepspeed|torchrun|\./)"
    return list(dict.fromkeys(line for line in lines if re.match(start, line)))


def test_every_command_is_run_or_excused():
    found = commands()
    assert len(found) > 20
    assert not [c for c in NOT_RUN if c not in found], "no longer in the README"
    assert sum(bool(TWO_NODES.match(c)) for c in found) == 2
    for script in ("./run_sweep.sh", "python plot_results.py", "python should_upgrade.py"):
        assert script in found


def clone(folder: Path) -> Path:
    """The files git has here, as they are now."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    return folder


def test_the_report_installs_as_a_package(tmp_path):
    """What pipx and uvx do: the scripts run without the folder, with the published figures."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    target = tmp_path / "site"
    done = subprocess.run([*pip, target, clone(tmp_path / "clone")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = "import sys, should_upgrade; sys.exit(should_upgrade.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "--price-ratio", "2"]
    env = environment(PYTHONPATH=str(target))
    page = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert page.returncode == 0 and "break-even: 1.99-2.03x" in page.stdout, page.stderr
    assert not list(target.glob("harness/measure")), "the package is the report alone"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("command, shown", [pytest.param(*m, id=m[0]) for m in SHOWN.findall(PAGES[0].read_text())])
def test_the_output_shown_is_the_true_one(command, shown):
    words = shlex.split(command)[1:]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
    said = iter([line.rstrip() for line in done.stdout.splitlines()])
    for line in filter(lambda line: line.strip() not in ("", "..."), map(str.rstrip, shown.splitlines())):
        assert line in said, f"{line!r} is not what {command} prints (in this place)"


RUN = [c for c in commands() if c not in NOT_RUN and not TWO_NODES.match(c)]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_runs(command, tmp_path):
    installed = Path(sys.prefix) / "installed"
    if "run_sweep.sh" in command and not installed.exists():
        pytest.skip("run_sweep.sh would install into this environment, which install.sh did not make")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    few = {"STEPS": "2", "WARMUP_STEPS": "1"}  # that it runs is the question, not how fast
    env = environment(RESULTS=str(tmp_path), VENV=sys.prefix, PATH=path, TMPDIR=str(tmp_path), **few)
    folder = clone(tmp_path / "clone")  # what a command writes stays out of the checkout
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert (done.stdout + done.stderr).strip(), shlex.split(command)
