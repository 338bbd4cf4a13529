"""CASES.md names tests that exist."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_every_test_that_the_table_names_exists():
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", (ROOT / "tests/CASES.md").read_text(), re.M)
    numbers = [int(number) for number, _ in rows]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 58
    for number, held in rows:
        named = re.findall(r"(test_\w+)::(test_\w+)", held)
        assert named, f"case {number} names no test"
        for file, test in named:
            text = (ROOT / f"tests/{file}.py").read_text()
            assert re.search(rf"^def {test}\(", text, re.M), f"case {number}: {file}::{test}"
