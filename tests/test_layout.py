"""The folder's own rules: who imports whom, which setting is documented, what must not be in the repository."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from harness.measure.settings import SweepSettings
from tests.conftest import ROOT

MODULES = sorted(ROOT.glob("harness/**/*.py"))
SCRIPTS = ["benchmark.py", "bench_flash_attn.py", "bench_ceilings.py", "bench_decompose.py", "plot_results.py",
           "should_upgrade.py"]  # fmt: skip


def imports(path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_measure_and_report_never_meet_and_only_measure_has_torch(path):
    found = imports(path)
    part = path.relative_to(ROOT / "harness").parts[0]
    assert part == "measure" or not any(name.split(".")[0] in ("torch", "transformers", "deepspeed") for name in found)
    assert part != "measure" or not any(name.startswith("harness.report") for name in found)
    assert part == "measure" or not any(name.startswith("harness.measure") for name in found)
    assert part == "report" or not any(name.startswith("harness.report") for name in found)


def test_the_report_names_all_of_its_files():
    told = (ROOT / "harness/report/__init__.py").read_text()
    files = {path.name for path in (ROOT / "harness/report").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"\w+\.py", told))


def test_every_setting_stands_in_the_docs():
    table = (ROOT / "docs/settings.md").read_text()
    missing = [name.upper() for name in SweepSettings.model_fields if not re.search(rf"\b{name.upper()}\b", table)]
    assert not missing


def test_every_record_stands_in_the_docs():
    from harness import records

    table = (ROOT / "docs/records.md").read_text()
    kinds = re.findall(r'record: Literal\["(\w+)"\]', (ROOT / "harness/records.py").read_text())
    assert len(kinds) >= 10
    assert not [kind for kind in kinds if not re.search(rf"\b{kind}\b", table)]
    assert records.SCHEMA == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_commands_and_exit_codes(script, python):
    done = subprocess.run([python, script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search("exit codes:", done.stdout, re.I)
    assert f"{script}" in done.stdout


def test_no_trace_of_a_machine():
    """No absolute path of a home or a build machine, no package registry but PyTorch's own index in install.sh."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    bad = re.compile(
        r"/(?:root|home|Users|work)/[a-z.]|\bpypi\.|files\.pythonhosted|index-url https?://(?!download\.pytorch)"
    )
    for name in files:
        path = ROOT / name
        if path.suffix in (".png", ".gz") or name.startswith("tests/") or not path.is_file():
            continue
        assert not bad.search(path.read_text()), name
        if name != "install.sh":
            assert "download.pytorch.org" not in path.read_text(), name
