"""Fits of peak memory and step time against figures they were made from."""

import numpy as np
import pytest
from scipy.optimize import nnls

from harness import flops
from harness.report import fits
from tests.handmade import box, point, run

TFLOP = {n: (52.776558 * (n / 8192) ** 2, 368.868971 * n / 8192) for n in (8192, 32768, 65536, 131072)}  # 8B model


def sweep(times, base=None, **points):
    return box(base or run(), *(point(n, ms) for n, ms in times.items())).sweeps[0]


def with_peaks(peaks):
    return box(run(), *(point(n, 1.0, peak_mem_gib=gib) for n, gib in peaks.items())).sweeps[0]


def test_tokens_of_a_step():
    assert flops.step_tokens(run(), 8192) == 8192
    assert flops.step_tokens(run(**{"recipe.batch_size": 3, "recipe.grad_accum": 4}), 8192) == 12 * 8192
    assert flops.step_tokens(run(**{"recipe.sp_size": 2}), 8192) == 4096  # two GPUs share a sequence
    assert flops.step_tokens(run(recipe=None), 8192) == 8192


def test_a_memory_line():
    line = fits.memory_line(with_peaks({1000: 10.0, 2000: 12.0, 3000: 13.0, 4000: 15.0}))
    # least squares by hand: slope sum((x-2500)(y-12.5)) / sum((x-2500)^2) = 8000 / 5e6
    assert line.gib_per_token == pytest.approx(0.0016) and line.floor_gib == pytest.approx(8.5)
    assert line.rms_error_gib == pytest.approx(((0.1**2 + 0.3**2 + 0.3**2 + 0.1**2) / 4) ** 0.5)
    assert line.worst_error_gib == pytest.approx(0.3)
    assert line.largest(16.5) == pytest.approx(5000, abs=1) and line.largest(8.0) is None


def test_no_line_from_two_lengths_and_no_length_from_a_falling_line():
    assert fits.memory_line(with_peaks({1000: 10.0, 2000: 12.0})) is None
    assert fits.memory_line(with_peaks({1000: 10.0, 2000: 9.0, 3000: 8.0})).largest(100) is None


def test_step_time_finds_what_it_was_made_from():
    times = {n: 2000 + 1e3 * (dense / 500 + attention / 400) for n, (attention, dense) in TFLOP.items()}
    found = fits.step_time(sweep(times))
    assert found.fixed_ms == pytest.approx(2000, rel=1e-3)
    assert found.dense_tflops == pytest.approx(500, rel=1e-3)
    assert found.attention_tflops == pytest.approx(400, rel=1e-3) and found.worst_error < 1e-6


def test_step_time_needs_four_lengths_and_a_model_that_can_be_counted():
    times = {n: 100.0 * i for i, n in enumerate(TFLOP, 1)}
    assert fits.step_time(sweep(times)) is not None
    assert fits.step_time(sweep({n: times[n] for n in list(times)[:3]})) is None
    assert fits.step_time(sweep(times, run(**{"model.uncounted": "mamba"}))) is None
    unsure = sweep(times)
    unsure.points[8192].outcome = "partial"
    assert fits.step_time(unsure) is None


def test_no_part_of_a_step_is_negative():
    times = {n: 1e3 * dense / 500 - 100 for n, (_, dense) in TFLOP.items()}  # a line that starts below zero
    found = fits.step_time(sweep(times))
    rows = np.array([[1, 1e3 * dense, 1e3 * attention] for attention, dense in TFLOP.values()])
    medians = np.array([p.median_ms for p in sweep(times).points.values()])
    fixed, dense, attention = nnls(rows / medians[:, None], np.ones(len(medians)))[0]
    assert found.fixed_ms == fixed == 0
    assert 1 / found.dense_tflops == pytest.approx(dense)
    assert (1 / found.attention_tflops if found.attention_tflops else 0) == pytest.approx(attention)
