"""The table the suite ends with: check, figure, holds or not.

A test adds rows with the `check` fixture and fails at its end when one does not hold. A test that cannot run adds
"not run" and the reason; one that breaks adds its error.
"""

from __future__ import annotations

import pytest

from harness.measure import box
from tests.gpu import launches

ROWS: list[tuple[str, str, bool | None]] = []  # check, figure, holds; None: not run


@pytest.fixture
def check():
    """check(name, figure, holds) adds a row."""
    broken = []

    def add(name: str, figure: str, holds) -> None:
        ROWS.append((name, figure, bool(holds)))
        if not holds:
            broken.append(f"{name}: {figure}")

    yield add
    if broken:
        pytest.fail("; ".join(broken), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if launches.REHEARSAL or box.has_gpu():
        return
    if launches.MODE:
        pytest.exit("there is a GPU and this torch cannot use it: run ./install.sh, or check the driver", returncode=1)
    pytest.skip("needs an NVIDIA GPU: bash tests/gpu/run.sh on a box that has one")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    name = (item.obj.__doc__ or item.name) + (f" [{item.callspec.id}]" if hasattr(item, "callspec") else "")
    if report.skipped:
        ROWS.append((name, report.longrepr[2].removeprefix("Skipped: "), None))
    elif report.failed and report.when != "teardown":
        ROWS.append((name, call.excinfo.exconly().splitlines()[0], False))
    return report


def pytest_terminal_summary(terminalreporter):
    if not (launches.MODE and ROWS):
        return
    launches.show(ROWS)
