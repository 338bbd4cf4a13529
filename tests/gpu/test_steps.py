"""Real training steps on one GPU: two layers of the guide's model, random weights, through the sweep's own launches."""

from __future__ import annotations

import pickle

import pytest

from harness.measure import attention
from tests.gpu import judging, launches
from tests.gpu.launches import LONG, SHORT, SWEEP, launch, of, one

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lambda name: tmp_path_factory.mktemp(name)


@pytest.fixture(scope="module")
def long_context(folder):
    return launch(folder("long"), *SWEEP, seqlens=f"{SHORT} {LONG}")


@pytest.fixture(scope="module")
def short_context(folder):
    return launch(folder("short"), *SWEEP, seqlens=LONG, recipe="short-context")


def judge(check, name: str, found: list, seq_len: int) -> None:
    """The row of a measured length."""
    check(name, *launches.step_row(found, seq_len))


@pytest.mark.parametrize("recipe", ["long_context", "short_context"])
def test_step(check, request, recipe):
    """a training step"""
    found = request.getfixturevalue(recipe)
    run, name = one(found, "run"), recipe.replace("_", "-")
    judge(check, f"{name} step", found, LONG)
    expected = name if there_is_liger() else "custom"
    said = f"{run.recipe.name}: ZeRO-{run.recipe.zero_stage}, {run.recipe.optimizer}, Liger {run.recipe.liger_applied}"
    holds = run.recipe.name == expected if recipe == "long_context" else run.recipe.name == name
    check(f"{name} is what ran", said, holds and ("CPU" in run.recipe.optimizer) == (recipe == "long_context"))


def there_is_liger() -> bool:
    return launches.there("liger_kernel")


def test_backend_of_the_step(check, long_context):
    """attention of the training step"""
    seen, package = one(long_context, "run").attention, attention.PACKAGES.get(launches.backend())
    figure = f"{seen.backend}, {seen.function}, {', '.join(k[:60] for k in seen.kernels[:2])}"
    ours = seen.function.startswith(package.module if package else "torch")
    check("attention of the training step", figure, seen.backend == launches.backend() and ours and seen.kernels)


def test_gpu_state(check, long_context):
    """GPU state in the step records"""
    launches.only_on_a_gpu()
    steps, summary = of(long_context, "step", LONG), one(long_context, "summary", LONG)
    silent = launches.silent_gauges(steps)
    last = steps[-1].gpu_state
    figure = f"no {', '.join(silent)}" if silent else (
        f"{last.sm_clock_mhz:.0f} MHz, {last.power_w:.0f} W, {last.temperature_c:.0f} C, {last.energy_j:.0f} J a step"
    )  # fmt: skip
    check("clock, power, temperature, throttling, energy", figure, not silent and (summary.joules_per_token or 0) > 0)


def test_phases(check, long_context, short_context):
    """phases of a step against its time"""
    gap = max(launches.phase_gap(of(found, "step", LONG)) for found in (long_context, short_context))
    check("forward, backward and optimizer sum to the step", f"{gap:.2%} apart at most", gap < 0.05)


def test_liger(check, folder, short_context):
    """Liger applied, and its memory"""
    launches.only_on_a_gpu()
    if not there_is_liger():
        pytest.skip("liger-kernel is not installed")
    fused = launch(folder("liger"), *SWEEP, seqlens=LONG, recipe="short-context", use_liger=1)
    applied = [one(found, "run").recipe.liger_applied for found in (short_context, fused)]
    check("Liger is applied only where asked for", f"without {applied[0]}, with {applied[1]}", applied == [False, True])
    before, after = (one(found, "summary").peak_allocated_gib for found in (short_context, fused))
    check(f"Liger's peak memory at {LONG}", f"{before:.1f} GiB without, {after:.1f} GiB with", after < before)


def test_shared_launch(check, folder, long_context):
    """peak memory in a shared launch against an isolated one"""
    alone, shared = one(launch(folder("alone"), *SWEEP, seqlens=LONG), "summary"), one(long_context, "summary", LONG)
    pairs = [(a, b) for a, b in ((shared.peak_mem_gib, alone.peak_mem_gib),
                                 (shared.peak_allocated_gib, alone.peak_allocated_gib)) if b is not None]  # fmt: skip
    figure = " / ".join(f"{a:.2f} and {b:.2f} GiB" for a, b in pairs)
    holds = all(launches.apart(a, b) < 0.05 for a, b in pairs)
    check("reserved / allocated, shared and isolated launch", figure, holds)


def test_out_of_memory(check, folder):
    """a real out-of-memory and the lengths after it"""
    launches.only_on_a_gpu()
    # The logits alone, in fp32, are as large as the GPU's memory.
    huge = int(launches.facts()["memory_gib"] * 2**30 / 4 / 128256) // SHORT * SHORT
    place = folder("oom")
    found = launch(
        place, *SWEEP, seqlens=f"{SHORT} {huge} {2 * huge}", recipe="short-context", use_liger=0, num_layers=1,
        keep_going=1, mem_debug=1,
    )  # fmt: skip
    got = launches.outcomes(found)
    wanted = {SHORT: "summary", huge: "gpu_oom", 2 * huge: "gpu_oom"}
    check("out-of-memory is recorded, and the sweep goes on", ", ".join(f"{n}: {k}" for n, k in got.items()),
          got == wanted)  # fmt: skip
    kept = {n: list(place.glob(f"*/*_memory_{n}_rank0.pickle")) for n in (SHORT, huge)}
    whole = [n for n, files in kept.items() if files and "segments" in pickle.loads(files[0].read_bytes())]
    check("memory snapshots, after a length and at the OOM", f"of {whole}", whole == [SHORT, huge])


def test_compile(check, folder):
    """a compiled step"""
    found = launch(folder("compile"), *SWEEP, seqlens=SHORT, recipe="short-context", num_layers=1, compile=1)
    judge(check, "compiled step", found, SHORT)
    assert one(found, "run").recipe.compile


def test_decomposition(check, folder):
    """decomposition on real kernels"""
    command = (*launches.TORCHRUN, "bench_decompose.py")
    found = launch(folder("split"), *command, seq_len=LONG, use_liger=int(there_is_liger()))
    for row in judging.decomposition(None, found):
        check(*row)
