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

FILE, TYPED = "box.toml", "the command line"
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
    beside, table = path.with_name(FILE), {}
    if beside.is_file():
        try:
            table = tomllib.loads(beside.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{beside}: {error}") from None
    files = {key: table.pop(key) for key in list(table) if isinstance(table[key], dict)}
    if strange := [key for key in files if not path.with_name(key).is_file()]:
        raise ValueError(f"{beside}: [{strange[0]}] is no file in this folder")
    if wrong := [text for text in typed if "=" not in text]:
        raise ValueError(f'"{wrong[0]}": write KEY=VALUE, such as seq_len=8192')
    pairs = {key.strip(): value for key, value in (text.split("=", 1) for text in typed)}
    found = {}
    for part, where, folder in ((table | files.get(path.name, {}), FILE, path.parent), (pairs, TYPED, Path())):
        shown = str(beside) if where == FILE else where
        found |= {key: (value, where) for key, value in _checked(part, shown, folder).items()}
    return found


def _checked(part: dict, where: str, folder: Path) -> dict:
    try:
        facts = Facts.model_validate(part).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        key, known = ".".join(map(str, first["loc"])), ", ".join(Facts.model_fields)
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{where}: unknown key {key}; known are {known}") from None
        raise ValueError(f"{where}: {key} = {first['input']!r}: {first['msg']}") from None
    if (model := facts.get("model")) and model not in flops.shapes():
        if not (folder / model).is_file():
            shapes = ", ".join(flops.shapes())
            raise ValueError(f"{where}: model = {model!r} is no file, and no shipped shape: {shapes}")
        facts["model"] = str(folder / model)
    return facts


def run_of(facts: dict, trainer: str, run_id: str, problems: list[str]) -> records.Run:
    """What is known of a launch as a run. A GPU no table has is named in `problems` and works."""
    name, count = facts.get("gpu"), facts.get("gpus")
    if name and gpus.identify(name := _driver_name(name)) is None:
        problems.append(f"gpu {name!r} is not in harness/gpus.toml: no specifications, no MFU")
    job = {key: facts.get(key) for key in records.Job.model_fields if key != "trainer"}
    return records.Run(
        kind="sweep", run_id=run_id, started="unknown", source="log", world_size=count, stack=records.Stack(),
        gpu=records.Gpu(device="cuda" if name else None, name=name, count=count),
        job=records.Job(trainer=trainer, **job), model=_model(facts.get("model"), problems),
    )  # fmt: skip


def _model(name: str | None, problems: list[str]) -> records.Model | None:
    if name is None:
        return None
    config, why = {}, f"no shipped shape is called {name}"
    try:
        if name in flops.shapes():
            config, why = flops.shape(name), None
        elif name.endswith(".json"):
            config = json.loads(Path(name).read_text(encoding="utf-8"))
            flops.count(config, 1)
            why = None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        config, why = {}, f"{name}: the work of a step is not known: {error}"
        problems.append(why)
    return records.Model(name=name, weights=None, num_layers=None, parameters=None, config=config, uncounted=why)


def merged(said: dict, given: dict[str, tuple[object, str]], problems: list[str]) -> dict:
    """The facts of a launch: what is given goes before what the log says, and a disagreement is named."""
    for key, (value, where) in given.items():
        log = said.get(key)
        same = log == value or key == "gpu" and log and _driver_name(log) == _driver_name(value)
        if log is not None and not same:
            problems.append(f"{key}: the log says {log}, {where} says {value}: {where} counts")
    facts = said | {key: value for key, (value, _) in given.items()}
    length, tokens = facts.get("seq_len"), facts.get("tokens_per_step")
    if length and facts.get("global_batch"):
        facts["tokens_per_step"] = length * facts["global_batch"]
    elif length and tokens and tokens % length == 0:
        facts["global_batch"] = tokens // length
    return facts


def _driver_name(gpu: str) -> str:
    """As its driver calls it; what no table has, as it is."""
    with contextlib.suppress(KeyError):
        return gpus.by_key(gpu).names[0]
    return gpu
