"""install.sh on boxes made of stand-in programs, the pins, and the build of the compiled ops."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.measure import attention, stack, verify
from tests import standins

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
SMI_BROKEN = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.fixture(scope="session")
def system_tools(tmp_path_factory):
    """The machine's programs without its GPU's: a box starts with none."""
    folder = tmp_path_factory.mktemp("tools")
    for program in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
        if program.name not in ("nvidia-smi", "nvcc") and not (folder / program.name).exists():
            (folder / program.name).symlink_to(program)
    return folder


class Box:
    """A healthy box without a GPU; `program` and `env` change it."""

    def __init__(self, folder: Path, tools: Path):
        self.programs, self.venv, self.log = folder / "programs", folder / "venv", folder / "log"
        self.programs.mkdir()
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "DS_", "HF_", "DATA_FAST", "PYTHON"))}
        self.env = keep | {"PATH": f"{self.programs}:{tools}", "HOME": str(folder), "PYTHON": sys.executable}
        self.space(disk_gb=500, shm_mib=16384)
        self.program("getconf", "case $1 in _PHYS_PAGES) echo 500000000 ;; *) echo 4096 ;; esac")

    def program(self, name: str, body: str) -> None:
        path = self.programs / name
        path.write_text("#!/bin/bash\n" + body + "\n")
        path.chmod(0o755)

    def space(self, disk_gb: int, shm_mib: int) -> None:
        rows = 'case "${@: -1}" in /dev/shm) echo "shm {shm} 0 {shm} 0% /x" ;; *) echo "d 9 0 {disk} 0% /" ;; esac'
        rows = rows.replace("{shm}", str(shm_mib * 1024)).replace("{disk}", str(disk_gb * 1000000))
        self.program("df", "echo head\n" + rows)

    def gpus(self, *lines: str, driver: str = "580.95.05", nvcc: str = "13.0") -> None:
        listing = "\n".join(lines)
        self.program("nvidia-smi", f'case "$*" in *driver*) echo {driver} ;; *) echo "{listing}" ;; esac')
        self.program("nvcc", f'echo "Cuda compilation tools, release {nvcc}, V{nvcc}.88"')

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        command = [str(ROOT / "install.sh"), "--venv", str(self.venv), *arguments]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True)

    def plan(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        done = self.run("--plan", *arguments, **env)
        assert not self.venv.exists()
        return done

    def pretend_python(self, folder: Path, torch: str = "2.13.0+cu130", cuda: str | None = "13.0") -> None:
        """From here on the interpreter, its pip and its torch are stand-ins, so that a whole run takes a second."""
        python, site = folder / "python", folder / "site"
        shutil.copy(Path(standins.__file__).with_name("python.sh"), python)
        python.chmod(0o755)
        site.mkdir()
        fake = f"import types\n__version__ = {torch!r}\nversion = types.SimpleNamespace(cuda={cuda!r})\n"
        (site / "torch.py").write_text(fake)
        self.env |= {"PYTHON": str(python), "REAL_PYTHON": sys.executable, "FAKE_SITE": str(site), "LOG": str(self.log)}

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def box(tmp_path, system_tools):
    return Box(tmp_path, system_tools)


def last_line(done: subprocess.CompletedProcess) -> str:
    return done.stderr.strip().splitlines()[-1]


# ---- choices -------------------------------------------------------------------------------------------------------

CAPABILITIES = {
    "NVIDIA A100-SXM4-80GB": (8, 0), "NVIDIA L40S": (8, 9), "NVIDIA H200": (9, 0), "NVIDIA B200": (10, 0),
    "NVIDIA B300 SXM6 AC": (10, 3), "NVIDIA Thor": (11, 0), "NVIDIA GB10": (12, 1),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_gpus_own_choice_is_the_one_training_makes(box, name):  # case 15, 16
    major, minor = CAPABILITIES[name]
    box.gpus(*[f"{major}.{minor}, {name}"] * 8)
    done = box.plan()
    assert done.returncode == 0, done.stderr
    assert f"8 x {name} (compute capability {major}.{minor})" in done.stdout
    assert re.search(r"^attention +(\w+)", done.stdout, re.M)[1] == attention.choose("auto", (major, minor))
    assert "2.13.0 (cu130)" in done.stdout


@pytest.mark.parametrize("backend", ["fa3", "fa4", "sdpa"])
def test_force_allows_what_training_allows(box, backend):
    for name, capability in CAPABILITIES.items():
        box.gpus("{}.{}, {}".format(*capability, name))
        done = box.plan("--force", backend)
        try:
            attention.choose(backend, capability)
        except attention.AttentionUnavailable:
            assert done.returncode == 1 and f"--force {backend}: it cannot train on" in last_line(done)
        else:
            assert done.returncode == 0 and re.search(rf"^attention +{backend} ", done.stdout, re.M)


def test_without_a_gpu_the_cpu_stack_is_named(box):
    done = box.plan()
    assert done.returncode == 0 and not done.stderr
    assert "sdpa (PyTorch's own attention, no GPU used)" in done.stdout and "2.13.0 (cpu)" in done.stdout
    done = box.plan("--force", "fa4")
    assert done.returncode == 1 and last_line(done) == "error: --force fa4: there is no NVIDIA GPU here"


def test_force_cpu_does_not_ask_the_gpu(box):
    box.program("nvidia-smi", "exit 9")
    done = box.plan("--force", "cpu")
    assert done.returncode == 0 and "(cpu)" in done.stdout and not done.stderr


@pytest.mark.parametrize("answer", [f'echo "{SMI_BROKEN}"; exit 9', "echo No devices were found", "exit 6"])
@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU: a broken nvidia-smi is an error")
def test_a_driver_tool_without_a_gpu_is_not_trusted_silently(box, answer):
    box.program("nvidia-smi", answer)
    done = box.plan()
    assert done.returncode == 0 and "(cpu)" in done.stdout
    assert done.stderr.startswith("warning: nvidia-smi is here but finds no GPU")


def test_unlike_gpus_need_a_decision(box):
    box.gpus("9.0, NVIDIA H200", "12.0, NVIDIA RTX PRO 4000 Blackwell")
    done = box.plan()
    assert done.returncode == 1 and "GPUs of different kinds" in last_line(done) and "--force" in last_line(done)
    assert "fa3 (FlashAttention-3 3.0.0)" in box.plan("--force", "fa3").stdout


def test_another_torch_goes_into_an_environment_of_its_own(box):
    box.gpus("9.0, NVIDIA H200", nvcc="12.6", driver="565.10")
    command = [str(ROOT / "install.sh"), "--plan", "--torch", "2.9.1", "--cuda", "cu126"]
    done = subprocess.run(command, env=box.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2.9.1 (cu126)" in done.stdout and "/.venv-torch2.9.1-cu126" in done.stdout


def test_the_latest_stack_brings_its_own_torch_and_cuda(box):
    box.gpus("10.0, NVIDIA B200", nvcc="13.2")
    done = box.plan("--stack", str(REQUIREMENTS / "latest.txt"))
    assert done.returncode == 0, done.stderr
    assert "2.15.0 (cu132)" in done.stdout and "fa4 (FlashAttention-4 4.0.0b36)" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--nope"], ["--force", "fa9"], ["--venv"], ["--torch", "2.9.1"], ["--cuda", "cu126"], ["--stack", "/nope"]]
    + [["--torch", "2.9.1", "--cuda", "12.6"]],
)
def test_wrong_use_exits_2_in_one_line(box, arguments):
    done = subprocess.run([str(ROOT / "install.sh"), *arguments], env=box.env, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("wrong use: ")


def test_help_of_the_sweep_installs_nothing(box, tmp_path):
    command, env = [str(ROOT / "run_sweep.sh"), "--help"], box.env | {"VENV": str(tmp_path / "none")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "SEQLENS=guide ./run_sweep.sh" in done.stdout and "docs/settings.md" in done.stdout
    assert not (tmp_path / "none").exists()


def test_help_shows_commands_and_exit_codes(box):
    done = subprocess.run([str(ROOT / "install.sh"), "--help"], env=box.env, capture_output=True, text=True)
    assert done.returncode == 0 and "./install.sh --plan" in done.stdout and "130 interrupted" in done.stdout
    assert "set -euo" not in done.stdout


# ---- preflight -----------------------------------------------------------------------------------------------------


def spoil(box: Box, what: str) -> dict[str, str]:
    """Makes one thing wrong on a box with an H200; returns environment variables that go with it."""
    smi = {"driver": {"driver": "570.86.15"}, "nvcc": {"nvcc": "12.8"}, "nvcc 13.1": {"nvcc": "13.1"}}.get(what, {})
    box.gpus("7.0, Tesla V100-SXM2-32GB" if what == "old GPU" else "9.0, NVIDIA H200", **smi)
    if what == "disk":
        box.space(disk_gb=5, shm_mib=16384)
    if what == "shm":
        box.space(disk_gb=500, shm_mib=64)
    if what == "ram":
        box.program("getconf", "case $1 in _PHYS_PAGES) echo 16000000 ;; *) echo 4096 ;; esac")
    if what == "venv module":
        body = f'[[ "$*" != *ensurepip* ]] || exit 1\nexec {sys.executable} "$@"'
        box.program("python-without-venv", body)
        return {"PYTHON": "python-without-venv"}
    if what == "headers":
        box.program("python-without-headers", f'[[ "$*" != *sysconfig* ]] || exec echo /x\nexec {sys.executable} "$@"')
        return {"PYTHON": "python-without-headers"}
    return {"compiler": {"CXX": "no-such-compiler"}, "toolkit": {"CUDA_HOME": "/no/such/toolkit"}}.get(what, {})


PROBLEMS = {
    "disk": "5 GB free for .*, about 14 GB needed: make room, or --venv",
    "venv module": "cannot make virtual environments: .*python3-venv",
    "headers": "no Python.h .*python3-dev",
    "compiler": "no C.. compiler: .*install g",
    "toolkit": r"CUDA toolkit missing \(/no/such/toolkit/bin/nvcc does not run\): .*install CUDA 13.0",  # case 4
    "nvcc": "nvcc is CUDA 12.8, torch is built for 13.0 .*CUDA_HOME=/usr/local/cuda-13.0 .*DS_SKIP_CUDA_CHECK=1",
    "nvcc 13.1": "nvcc is CUDA 13.1, torch is built for 13.0",
    "driver": "driver 570.86.15, CUDA 13.0 needs 580 or later: update it, or .*--cuda cu126",
    "old GPU": "no code for compute capability 7.0",
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_preflight_stops_before_the_download_and_says_what_to_do(box, what):
    done = box.plan(**spoil(box, what))
    assert done.returncode == 1
    problem, last = done.stderr.strip().splitlines()
    assert re.search(f"^problem: .*{PROBLEMS[what]}", problem)
    assert last == "error: 1 of the checks failed, nothing was installed (--no-preflight goes on all the same)"


WARNINGS = {
    "shm": "/dev/shm has 64 MiB: .*--shm-size=16g",  # case 14
    "ram": "6. GB of host memory: .*160 GB; use OFFLOAD_OPTIMIZER=0",
}


@pytest.mark.parametrize("what", WARNINGS)
def test_preflight_only_warns_of_what_some_runs_can_live_with(box, what):
    done = box.plan(**spoil(box, what))
    assert done.returncode == 0
    assert re.fullmatch(f"warning: {WARNINGS[what]}.*", done.stderr.strip())


def test_preflight_lists_everything_at_once(box):
    box.gpus("9.0, NVIDIA H200", driver="535.1", nvcc="12.4")
    box.space(disk_gb=1, shm_mib=64)
    done = box.plan(CXX="no-such-compiler")
    assert done.stderr.count("problem: ") == 4 and done.returncode == 1
    done = box.plan("--no-preflight", CXX="no-such-compiler")
    assert done.returncode == 0 and last_line(done) == "warning: 4 of the checks failed; going on as asked"


def test_a_healthy_gpu_box_has_nothing_to_say(box):
    box.gpus("9.0, NVIDIA H200")
    assert box.plan().stderr == ""


def test_a_skipped_cuda_check_and_cuda_12s_minor_versions_pass(box):
    box.gpus("9.0, NVIDIA H200", nvcc="13.1")
    assert box.plan(DS_SKIP_CUDA_CHECK="1").returncode == 0
    box.gpus("9.0, NVIDIA H200", nvcc="12.4")
    assert box.plan("--torch", "2.9.1", "--cuda", "cu126").returncode == 0


def test_too_old_a_python_is_refused(box):
    box.program("old-python", "exit 1")
    done = box.plan(PYTHON="old-python")
    assert done.returncode == 1 and last_line(done).startswith("error: no Python 3.11 or later (tried old-python)")


# ---- the installation itself, with a stand-in interpreter ------------------------------------------------------------


def test_hopper_gets_flash_attention_3_from_pytorchs_index_alone(box, tmp_path):
    box.gpus("9.0, NVIDIA H200")
    box.pretend_python(tmp_path)
    done = box.run(TORCH_INDEX="https://wheels.example", INDEX_IS_UP="1")
    assert done.returncode == 0, done.stderr
    packages, flash, ops, check = box.calls()
    assert "--extra-index-url https://wheels.example/cu130" in packages
    assert packages.endswith(f"-c {box.venv}/constraints.txt -r {REQUIREMENTS}/train.txt einops")
    assert flash.endswith("--no-deps --index-url https://wheels.example/cu130 flash-attn-3==3.0.0")
    assert ops == "harness.measure.verify --build-ops"
    assert check == "harness.measure.verify --attn fa3 --gpu"
    assert (box.venv / "constraints.txt").read_text() == (REQUIREMENTS / "pinned.txt").read_text()


def test_blackwell_gets_the_pinned_flash_attention_4_in_the_same_resolver_call(box, tmp_path):
    box.gpus("10.3, NVIDIA B300 SXM6 AC")
    box.pretend_python(tmp_path)
    done = box.run()
    assert done.returncode == 0, done.stderr
    packages, _, check = box.calls()
    assert packages.endswith("-r " + str(REQUIREMENTS / "train.txt") + " flash-attn-4[cu13]")
    assert "--pre" not in packages and "--upgrade" not in packages and "index-url" not in packages
    assert "flash-attn-4==4.0.0b22" in (box.venv / "constraints.txt").read_text().splitlines()
    assert "cannot be reached: taking torch from where pip looks by default" in done.stderr
    assert check == "harness.measure.verify --attn fa4 --gpu"


def test_another_torch_keeps_all_pins_but_its_own_libraries(box, tmp_path):
    box.gpus("10.0, NVIDIA B200", nvcc="12.8")
    box.pretend_python(tmp_path, torch="2.9.1+cu128", cuda="12.8")
    done = box.run("--torch", "2.9.1", "--cuda", "cu128")
    assert done.returncode == 0, done.stderr
    assert box.calls()[0].endswith(" flash-attn-4")  # its [cu13] part is for CUDA 13
    left = {line.partition("==")[0] for line in (box.venv / "constraints.txt").read_text().splitlines()}
    assert {"torch", "transformers", "deepspeed", "nvidia-ml-py", "nvidia-cutlass-dsl"} <= left
    assert not left & {"triton", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc", "cuda-toolkit"}
    assert "torch==2.9.1" in (box.venv / "constraints.txt").read_text()


@pytest.mark.parametrize(("torch", "cuda"), [("2.13.0+cpu", None), ("2.13.0", "12.8"), ("2.15.0+cu130", "13.0")])
def test_a_torch_that_was_replaced_stops_the_installation(box, tmp_path, torch, cuda):  # case 12
    box.gpus("9.0, NVIDIA H200")
    box.pretend_python(tmp_path, torch, cuda)
    done = box.run()
    assert done.returncode == 1
    assert f"torch {torch} with CUDA {cuda} is installed; 2.13.0 with cu130 was asked for" in done.stderr
    assert last_line(done) == "error: after installing the packages, torch is not the one asked for"
    assert len(box.calls()) == 1 and not (box.venv / "installed").exists()


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("train.txt", "pip could not install the packages"),
        ("flash-attn-3", "FlashAttention-3 could not be installed from .*; --force sdpa does without it"),
        ("--build-ops", "DeepSpeed's ops could not be built"),
        ("--attn", "this stack cannot train here"),
    ],
)
def test_a_failing_part_is_named_last_and_the_next_run_goes_on(box, tmp_path, fails, says):
    box.gpus("9.0, NVIDIA H200")
    box.pretend_python(tmp_path)
    done = box.run(FAIL_AT=fails)
    assert done.returncode == 1 and re.match("error: " + says, last_line(done))
    assert not (box.venv / "installed").exists()
    assert box.run().returncode == 0


def test_the_second_run_does_nothing_and_another_choice_does(box, tmp_path):
    box.gpus("9.0, NVIDIA H200")
    box.pretend_python(tmp_path)
    assert box.run().returncode == 0
    before = box.calls(), {p: p.stat().st_mtime_ns for p in box.venv.rglob("*")}
    done = box.run()
    assert done.returncode == 0 and "complete already: nothing to do" in done.stdout
    assert (box.calls(), {p: p.stat().st_mtime_ns for p in box.venv.rglob("*")}) == before
    assert box.run("--force", "fa4").returncode == 0
    assert box.calls()[len(before[0])].endswith("flash-attn-4[cu13]")


def start(box: Box, **env: str) -> subprocess.Popen:
    """An installation that is stuck in pip, in a process group of its own."""
    command = [str(ROOT / "install.sh"), "--venv", str(box.venv)]
    pipe = subprocess.PIPE
    env = box.env | {"SLEEP_AT": "pip install"} | env
    run = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    while not box.calls():
        time.sleep(0.02)
        assert run.poll() is None, run.communicate()
    return run


def test_ctrl_c_leaves_no_finished_mark_and_no_process(box, tmp_path):
    box.pretend_python(tmp_path, "2.13.0+cpu", None)
    run = start(box)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate()
    assert run.returncode == 130 and errors.strip().endswith("run ./install.sh again, it goes on from here")
    assert not (box.venv / "installed").exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(box.venv) in " ".join(p.info["cmdline"] or [])]
    assert box.run().returncode == 0


def test_two_installations_of_one_environment_are_refused(box, tmp_path):
    box.pretend_python(tmp_path, "2.13.0+cpu", None)
    first = start(box)
    done = box.run()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert done.returncode == 1 and "another ./install.sh is at work" in last_line(done)
    assert box.run().returncode == 0  # the lock went with its holder


def test_a_folder_with_other_things_is_left_alone(box, tmp_path):
    box.pretend_python(tmp_path, "2.13.0+cpu", None)
    box.venv.mkdir()
    (box.venv / "thesis.tex").write_text("precious")
    done = box.run()
    assert done.returncode == 2 and "a folder with other things in it" in last_line(done)
    assert [p.name for p in box.venv.iterdir()] == ["thesis.tex"]


def test_a_half_made_environment_is_made_anew(box, tmp_path):
    box.pretend_python(tmp_path, "2.13.0+cpu", None)
    (box.venv / "bin").mkdir(parents=True)
    (box.venv / "pyvenv.cfg").touch()
    assert box.run().returncode == 0 and (box.venv / "bin" / "python").exists()


def test_a_cached_model_is_copied_whole_to_fast_disk(box, tmp_path):
    box.gpus("9.0, NVIDIA H200")
    box.pretend_python(tmp_path)
    hub = tmp_path / "hf" / "hub" / "models--meta-llama--Llama-3.1-8B"
    snapshot, blobs, fast = hub / "snapshots" / "abc", hub / "blobs", tmp_path / "fast"
    env = {"HF_HOME": str(tmp_path / "hf"), "DATA_FAST": str(fast)}
    done = box.run(**env)
    assert done.returncode == 0 and f"{box.venv}/bin/hf download meta-llama/Llama-3.1-8B && ./install.sh" in done.stdout
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (snapshot / name).symlink_to(blobs / name)  # as the hub's cache has it
    for present in (names[:1], names[:2]):  # nothing but the config; one of two shards
        (blobs / present[-1]).write_text(present[-1])
        assert "is not (all) in the Hugging Face cache" in box.run(**env).stdout and not fast.exists()
    (blobs / names[2]).write_text(names[2])
    assert "set DATA_FAST" in box.run(HF_HOME=env["HF_HOME"]).stdout
    done = box.run(**env)
    copied = fast / "meta-llama" / "Llama-3.1-8B"
    assert done.returncode == 0 and sorted(p.name for p in copied.iterdir()) == names
    assert all(p.read_text() == p.name and not p.is_symlink() for p in copied.iterdir())
    assert f"meta-llama/Llama-3.1-8B is in {copied}" in box.run(**env).stdout


def test_a_copy_that_fails_leaves_nothing_that_looks_like_a_model(box, tmp_path):
    box.gpus("9.0, NVIDIA H200")
    box.pretend_python(tmp_path)
    box.program("cp", 'if [[ $1 == -rL ]]; then mkdir -p "$3"; exit 1; fi; exec /bin/cp "$@"')  # a full disk
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (snapshot / "model.safetensors").touch()
    done = box.run(HF_HUB_CACHE=str(tmp_path / "hub"), DATA_FAST=str(tmp_path / "fast"), MODEL_ID="a/b")
    assert done.returncode == 1 and "a/b could not be copied to" in last_line(done)
    assert not list((tmp_path / "fast").rglob("b*"))


# ---- the pins ------------------------------------------------------------------------------------------------------


def pins(name: str) -> dict[str, str]:
    lines = [x for x in (REQUIREMENTS / name).read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", line) for line in lines)
    return dict(line.split("==") for line in lines)


def test_every_package_is_pinned_once_and_as_published():
    parts = [pins(name) for name in ("report.txt", "test.txt", "pinned.txt")]
    together = {k: v for part in parts for k, v in part.items()}
    assert sum(map(len, parts)) == len(together)
    wanted = [x for x in (REQUIREMENTS / "train.txt").read_text().splitlines() if x and x[0] not in "#-"]
    assert set(wanted) <= set(together)
    guide = {"torch": "2.13.0", "transformers": "5.14.1", "deepspeed": "0.19.2", "liger-kernel": "0.8.0"}
    assert guide.items() | {("flash-attn-4", "4.0.0b22"), ("triton", "3.7.1")} <= together.items()


def test_the_report_needs_no_torch():
    assert {"pydantic", "rich", "numpy", "scipy", "matplotlib"} <= set(pins("report.txt"))
    assert not {"torch", "transformers", "deepspeed", "triton"} & set(pins("report.txt"))


@pytest.mark.skipif(not (Path(sys.prefix) / "installed").exists(), reason="not an environment that install.sh made")
def test_what_is_installed_is_what_is_pinned():
    pinned = {k: v for name in ("report.txt", "test.txt", "pinned.txt") for k, v in pins(name).items()}
    # Not sys.path: setuptools adds a folder of its own to it.
    found = metadata.distributions(path=list({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    here = {re.sub(r"[-_.]+", "-", d.name).lower(): d.version.partition("+")[0] for d in found}
    here.pop("pip")
    assert {k: v for k, v in here.items() if pinned.get(k, "").removesuffix(".0") != v.removesuffix(".0")} == {}


# ---- the compiled ops and the stack record ---------------------------------------------------------------------------


@pytest.fixture
def ops(tmp_path, monkeypatch):
    """build_ops with stand-in builders; returns (folder of the ops, names built, the builders' `load` to replace)."""
    import deepspeed.accelerator as accelerators

    built, load = [], {}

    def builder(name):
        return SimpleNamespace(name=name, load=lambda verbose: (built.append(name), load.get(name, lambda: None)()))

    fake = SimpleNamespace(device_name=lambda: "cpu", create_op_builder=builder)
    monkeypatch.setattr(accelerators, "get_accelerator", lambda: fake)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    return tmp_path / "ops", built, load


def test_the_ops_training_loads_are_built_in_one_process(ops):
    verify.build_ops()
    assert ops[1] == ["CPUAdamBuilder", "FusedAdamBuilder", "ShareMemCommBuilder"]


def test_a_dead_builders_lock_goes_and_a_live_ones_stays(ops):  # case 2
    verify.build_ops()
    dead, live = ops[0] / "cpu_adam" / "lock", ops[0] / "fused_adam" / "lock"
    for lock in (dead, live):
        lock.parent.mkdir()
    dead.touch()
    with live.open("w"):
        verify.build_ops()
        assert not dead.exists() and live.exists()


def test_ops_of_another_torch_are_thrown_away(ops):  # case 2
    verify.build_ops()
    op = ops[0] / "cpu_adam" / "cpu_adam.so"
    op.parent.mkdir()
    op.touch()
    verify.build_ops()
    assert op.exists()
    (ops[0] / "built_for").write_text((ops[0] / "built_for").read_text().replace("2.13.0", "2.9.1"))
    verify.build_ops()
    assert not op.exists()


def test_the_first_compiler_error_is_the_one_reported(ops, tmp_path, capsys):  # case 1
    from torch.utils import cpp_extension

    source = tmp_path / "bad.cpp"
    source.write_text('#include "no_such_header.h"\nint main() { return nothing; }\n')
    ops[2]["FusedAdamBuilder"] = lambda: cpp_extension.load(name="bad", sources=[str(source)], verbose=False)
    assert verify.main(["--build-ops"]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "building DeepSpeed's FusedAdamBuilder failed: " in line and "no_such_header.h" in line
    assert ops[1] == ["CPUAdamBuilder", "FusedAdamBuilder"]


def test_a_gpu_that_torch_does_not_see_fails_the_verification(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert verify.main(["--attn", "sdpa", "--gpu"]) == 1
    assert "sees no GPU: check the driver" in capsys.readouterr().err.splitlines()[-1]


def test_the_verification_calls_the_attention(capsys):
    assert verify.main(["--attn", "sdpa"]) == 0
    assert "torch.nn.functional.scaled_dot_product_attention" in capsys.readouterr().out


def test_nothing_private_is_recorded(monkeypatch):
    monkeypatch.setenv("HOME", "/data/people/ann")
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/data/people/ann/topo.xml")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/ann/triton:/home/bob/x")
    monkeypatch.setenv("CUDA_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NCCL_ALGO", "annular")
    seen = stack.environment()
    assert seen["NCCL_TOPO_FILE"] == "~/topo.xml" and seen["TRITON_CACHE_DIR"] == "/scratch/~/triton:~/x"
    assert seen["NCCL_ALGO"] == "annular"
    assert "secret" not in str(seen) and "HF_TOKEN" not in seen and "HOME" not in seen


def test_the_host_is_described_in_known_units():
    host = stack.host(["node0"])
    kib = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    assert host.ram_gib == pytest.approx(kib / 2**20, abs=0.1)
    assert host.affinity == len(os.sched_getaffinity(0)) and host.nodes == ["node0"]


def test_the_compiled_ops_belong_to_the_environment(monkeypatch):
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    stack.use_venv_extensions()
    if sys.prefix == sys.base_prefix:
        pytest.skip("not a virtual environment")
    assert os.environ["TORCH_EXTENSIONS_DIR"] == f"{sys.prefix}/torch_extensions"
    assert os.environ["PATH"] == f"{sys.prefix}/bin:/bin"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    stack.use_venv_extensions()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/chosen" and os.environ["PATH"] == f"{sys.prefix}/bin:/bin"
