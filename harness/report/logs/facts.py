"""What a log does not say, from box.toml beside it or from the command line, and the run made of all of it.

    gpu = "GB300"                           # of every log in the folder
    gpus = 8
    ["b.log"]                               # of this one alone
    seq_len = 8192

The command line goes before the file, a file's own table before the rest, and all of them before what the log says;
where two differ, that is said. Nothing here is a default: what nobody says is null.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness import flops, gpus, records
from harness.report.logs.reader import number

FILE = "box.toml"
Count = Annotated[int, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


class Facts(BaseModel):
    """global_batch: sequences of all GPUs a step; model: a shipped shape, or the path of a config.json."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    gpu: Text | None = None
    gpus: Count | None = None
    seq_len: Count | None = None
    global_batch: Count | None = None
    grad_accum: Count | None = None
    model: Text | None = None
    precision: Text | None = None
    software: Text | None = None


def given(path: Path, typed: list[str]) -> dict[str, tuple[object, str]]:
    """Fact -> (value, where it is from) for one log. Raises ValueError naming the file or option that is wrong."""
    found: dict[str, tuple[object, str]] = {}
    beside = path.with_name(FILE)
    if beside.is_file():
        try:
            table = tomllib.loads(beside.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{beside}: {error}") from None
        files = {key: table.pop(key) for key in list(table) if isinstance(table[key], dict)}
        if strange := [key for key in files if not path.with_name(key).is_file()]:
            raise ValueError(f"{beside}: [{strange[0]}] is no file in this folder")
        for part in (table, files.get(path.name, {})):
            found |= {key: (value, FILE) for key, value in _checked(part, str(beside), path.parent).items()}
    pairs = {}
    for text in typed:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f'"{text}": write KEY=VALUE, such as seq_len=8192')
        pairs[key.strip()] = value
    return found | {key: (v, "the command line") for key, v in _checked(pairs, "command line", Path()).items()}


def _checked(part: dict, where: str, folder: Path) -> dict:
    try:
        facts = Facts.model_validate(part).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{where}: unknown key {key}; known are {', '.join(Facts.model_fields)}") from None
        text = key in ("gpu", "model", "precision", "software")
        wanted = "text in quotes is" if text else "a whole number above zero, without a unit, is"
        raise ValueError(f"{where}: {key} = {first['input']!r}: {wanted} needed") from None
    if model := facts.get("model"):
        facts["model"] = _model(model, where, folder)
    return facts


def _model(text: str, where: str, folder: Path) -> str:
    """A shipped shape as it is, a config.json by its path from where it is written. Raises ValueError."""
    if text in flops.shapes():
        return text
    path = folder / text
    if not path.is_file():
        raise ValueError(f"{where}: model = {text!r} is no file, and no shipped shape: {', '.join(flops.shapes())}")
    return str(path)


def run_of(facts: dict, trainer: str, run_id: str, problems: list[str]) -> records.Run:
    """What is known of a launch as a run. A GPU no table has is named in `problems` and works."""
    name = facts.get("gpu")
    if name:
        with contextlib.suppress(KeyError):
            name = gpus.by_key(name).names[0]
        if gpus.identify(name) is None:
            problems.append(f"gpu {name!r} is not in harness/gpus.toml: no specifications, no MFU")
    count = facts.get("gpus")
    job = {key: facts.get(key) for key in ("software", "precision", "global_batch", "tokens_per_step", "grad_accum")}
    return records.Run(
        kind="sweep", run_id=run_id, started="unknown", source="log", world_size=count, stack=records.Stack(),
        gpu=records.Gpu(device="cuda" if name else None, name=name, count=count),
        job=records.Job(trainer=trainer, **job), model=_shape(facts.get("model"), problems),
    )  # fmt: skip


def _shape(name: str | None, problems: list[str]) -> records.Model | None:
    if name is None:
        return None
    made = {"name": name, "weights": None, "num_layers": None, "parameters": None, "config": {}}
    if name in flops.shapes():
        return records.Model(**made | {"config": flops.shape(name)})
    if name.endswith(".json"):
        try:
            config = json.loads(Path(name).read_text(encoding="utf-8"))
            flops.count(config, 1)
            return records.Model(**made | {"config": config})
        except (OSError, ValueError, AttributeError, TypeError) as error:
            problems.append(f"{name}: the work of a step is not known: {error}")
    return records.Model(**made, uncounted=f"no shipped shape is called {name}")


def merged(said: dict, given: dict[str, tuple[object, str]], problems: list[str]) -> dict:
    """The facts of a launch: what is given goes before what the log says, and a disagreement is named."""
    for key, (value, where) in given.items():
        log = said.get(key)
        if log is not None and not _same(key, log, value):
            problems.append(f"{key}: the log says {log}, {where} says {value}: {where} counts")
    facts = said | {key: value for key, (value, _) in given.items()}
    length, tokens = facts.get("seq_len"), facts.get("tokens_per_step")
    if length and facts.get("global_batch"):
        facts["tokens_per_step"] = length * facts["global_batch"]
    elif length and tokens and tokens % length == 0:
        facts["global_batch"] = tokens // length
    return facts


def _same(key: str, a: object, b: object) -> bool:
    if key == "gpu":
        known = []
        for text in (a, b):
            with contextlib.suppress(KeyError):
                known.append(gpus.by_key(str(text)).key)
        return len(known) == 2 and known[0] == known[1] or str(a).lower() == str(b).lower()
    return number(a) == number(b) if number(a) is not None else a == b
