"""The figure is drawn from the data, with any of it missing, and whatever display or backend the machine has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.report import decision, figure, tables
from harness.report.reading import read_box
from tests import boxes

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "results" / "published"


def view(old, new, **options):
    return tables.view(read_box(old), read_box(new), decision.Options(**options))


def panels(drawn):
    return {axes.get_title(loc="left"): axes for axes in drawn.axes if axes.axison}


def line(axes, label):
    handles, labels = axes.get_legend_handles_labels()
    data = handles[labels.index(label)][0]
    return dict(zip(data.get_xdata().tolist(), data.get_ydata().tolist(), strict=True))


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_the_published_figure():
    shown = panels(figure.draw(view(PUBLISHED / "h200", PUBLISHED / "b200", price_ratio=2)))
    assert list(shown) == [
        "Throughput",
        "Speedup",
        "Attention share of the work",
        "Peak memory",
        "Cost of a million tokens at price ratio 2",
        "Where the time of a step goes",
    ]
    assert line(shown["Throughput"], "B200 SXM")[262144] == pytest.approx(852, abs=0.01)
    assert line(shown["Speedup"], "tokens per second")[65536] == pytest.approx(719 / 391, abs=1e-3)
    assert words(shown["Speedup"]) == ["1.18", "1.62", "1.84", "1.99", "2.02", "2.03"]
    _, labels = shown["Speedup"].get_legend_handles_labels()
    assert labels[:2] == ["peak bf16, 2.28", "memory bandwidth, 1.67"]
    assert words(shown["Attention share of the work"]) == ["13", "36", "53", "70", "77", "82"]
    assert {"H200 SXM: 141", "B200 SXM: 180"} <= set(words(shown["Peak memory"]))
    bars = shown["Where the time of a step goes"].patches
    assert sum(bar.get_height() for bar in bars[:2]) == pytest.approx(914.8, abs=0.1)


def test_gaps_and_error_bars(tmp_path):  # case 78
    boxes.sweep(tmp_path / "old", boxes.H200, {8192: 300, 32768: 350, 131072: 400}, {262144: "gpu_oom", 393216: ""})
    boxes.sweep(tmp_path / "new", boxes.B200, {8192: 301, 131072: 800, 262144: 850}, {32768: "nccl_error"}, seed=1)
    shown = panels(figure.draw(view(tmp_path / "old", tmp_path / "new")))
    assert words(shown["Throughput"]) == ["OOM", "not run", "failed", "not run"]
    old, new = (line(shown["Throughput"], name) for name in ("H200 SXM", "B200 SXM"))
    assert old[262144] != old[262144] and new[32768] != new[32768]  # nan: the line breaks there
    assert new[262144] == pytest.approx(850, rel=0.02)
    assert words(shown["Speedup"])[0] == "~" and len(words(shown["Speedup"])) == 2
    container = shown["Throughput"].containers[0]
    assert container.has_yerr
    segments = container[2][0].get_segments()
    low, high = segments[0][0][1], segments[0][1][1]
    assert low < old[8192] < high < 1.05 * low


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rates, failed", [({}, {8192: "gpu_oom"}), ({8192: 300}, {})])
def test_one_box_without_a_single_figure(tmp_path, rates, failed):  # case 84
    boxes.sweep(tmp_path / "old", boxes.H200, rates, failed)
    boxes.sweep(tmp_path / "new", boxes.B200, {}, {8192: "gpu_oom"})
    v = view(tmp_path / "old", tmp_path / "new", price_ratio=2)
    figure.save(figure.draw(v), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_panels_of_measured_companions(tmp_path):
    for name, gpu, speed in (("old", boxes.H200, 1.0), ("new", boxes.B200, 1.9)):
        boxes.attention(tmp_path / name, gpu, speed)
        boxes.decomposed(tmp_path / name, gpu, speed)
    shown = panels(figure.draw(view(tmp_path / "old", tmp_path / "new")))
    assert list(shown) == ["Where the time of a step goes", "Attention alone, forward + backward"]
    assert line(shown["Attention alone, forward + backward"], "B200 SXM fa4, burst") == {1024: 760, 8192: 760}
    assert len(shown["Where the time of a step goes"].patches) == 4 * 5


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_any_display_and_backend(tmp_path, ending, start):  # case 84
    strange = {"DISPLAY": "localhost:64.0", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    if ending == "svg":
        strange["MPLBACKEND"] = "no such backend"
    path = tmp_path / f"plot.{ending}"
    done = subprocess.run(
        [sys.executable, "plot_results.py", "-o", str(path)],
        cwd=ROOT,
        env=os.environ | strange,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    assert path.read_bytes().startswith(start)
