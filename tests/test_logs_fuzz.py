"""Logs as they end up on disk: cut, shuffled, doubled, interleaved, mixed. No traceback, no time that no line says."""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.report import logs
from harness.report.box import NothingUsable
from harness.report.reading import read_box
from tests.conftest import ROOT

FILES = sorted((ROOT / "tests" / "data" / "logs").glob("*.log"))
TEXTS = {p.stem: p.read_bytes() for p in FILES}


def times(path) -> set[tuple[str, str, float]]:
    """(format, what a time is of, the time in seven digits) of every observation, also of averages and single ones."""
    found = logs.read(path, [], Counter(), []) or []
    points = [(s, p) for s in found for p in s.points.values()]
    seen = [(s.run.job.trainer, p.per, x) for s, p in points for x in p.times_ms or [p.median_ms]]
    return {(trainer, per, float(f"{x:.7g}")) for trainer, per, x in seen}


def rates(path) -> set[float]:
    """The same without what it is of: a batch that damage took away makes a step's time a sample's again."""
    return {x for *_, x in times(path)}


def strange(path, allowed: set[float]) -> list[float]:
    """Times that are none of the allowed ones: rates of one step are rounded each for itself, to five digits or so."""
    return [x for x in rates(path) if not any(abs(x / y - 1) < 2e-5 for y in allowed)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Every time that a whole log has, as a step's and (the batch unknown) as a sample's or a token's."""
    folder, found = tmp_path_factory.mktemp("whole"), {}
    for name, text in TEXTS.items():
        path = folder / "run.log"
        path.write_bytes(text)
        found[name] = rates(path)
        lines = [x for x in text.splitlines(keepends=True) if b"batch_size" not in x and b"max_seq" not in x]
        path.write_bytes(b"".join(lines))
        found[name] |= rates(path)
        parts = [lines[i : i + 1] for i in range(len(lines))] + [
            lines[:i] for i in range(len(lines) * (len(lines) < 20))
        ]
        for part in parts:  # what one line says alone, and the first lines of a block of rates, each rounded
            path.write_bytes(b"".join(part))
            found[name] |= rates(path)
    found["hf_trainer_stdout"] |= {float(f"{1e3 / x:.7g}") for x in (20.32, 0.3176)}  # one of two on a line
    return found


NAMES = st.sampled_from(sorted(TEXTS))
DAMAGE = st.sampled_from(["cut", "shuffled", "doubled", "interleaved", "lost"])


def damaged(data, how: str, names: list[str]) -> bytes:
    text = TEXTS[names[0]]
    lines = text.splitlines(keepends=True)
    if how == "cut":
        a = data.draw(st.integers(0, len(text)))
        return text[:a] if data.draw(st.booleans()) else text[a:]
    if how == "shuffled":
        return b"".join(data.draw(st.permutations(lines)))
    if how == "doubled":
        again = data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=9))
        return b"".join(x * (1 + again.count(i)) for i, x in enumerate(lines))
    if how == "lost":
        kept = data.draw(st.lists(st.booleans(), min_size=len(lines), max_size=len(lines)))
        return b"".join(x for x, keep in zip(lines, kept, strict=True) if keep)
    queues = [TEXTS[n].splitlines(keepends=True) for n in names]
    merged = []
    while any(queues):
        queue = data.draw(st.sampled_from([q for q in queues if q]))
        merged.append(queue.pop(0))
    return b"".join(merged)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), how=DAMAGE, names=st.lists(NAMES, min_size=1, max_size=3, unique=True))
def test_damage_makes_no_time(tmp_path, sound, data, how, names):
    path = tmp_path / "run.log"
    path.write_bytes(damaged(data, how, names))
    allowed = set().union(*(sound[n] for n in (names if how == "interleaved" else names[:1])))
    assert strange(path, allowed) == [] or how == "interleaved" and same_format(names)
    try:
        read_box(path)
    except NothingUsable as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_number_cut_in_half_is_none(tmp_path, sound, name):
    """The file ends inside a number of its last line with a figure, at every place there is; a line end may follow."""
    text, path = TEXTS[name].rstrip(b"\n"), tmp_path / "run.log"
    inside = [
        i for i in range(max(1, len(text) - 400), len(text)) if text[i - 1 : i].isdigit() and text[i : i + 1] != b" "
    ]
    ends = (b"",) if name == "hf_train_metrics" else (b"", b"\n")  # its block has nothing after a number
    for at, end in itertools.product(inside, ends):
        path.write_bytes(text[:at] + end)
        assert strange(path, sound[name]) == [], text[at - 30 : at]


def same_format(names: list[str]) -> bool:
    """Two logs of one format in one file: of two lines of a step the slower stays; not judged here."""
    kinds = [n.split("_")[0] for n in names]
    return len(set(kinds)) < len(kinds) or "hf" in kinds


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES, data=st.data())
def test_any_bytes_are_read_or_refused(tmp_path, name, data):
    text = bytearray(TEXTS[name])
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    path = tmp_path / "run.log"
    path.write_bytes(text)
    try:
        box = read_box(path)
    except (NothingUsable, ValueError):
        return
    assert all(p.median_ms is None or p.median_ms > 0 for s in box.sweeps for p in s.points.values())
