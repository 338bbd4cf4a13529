"""Text of a result file or a log -> whole JSON objects and the text between them, through any damage.

A launcher's output has several ranks on one line, progress bars ended by carriage returns, warnings glued to records,
records cut in half. Everything that is complete is kept; what is not is counted by name in `skipped`.
The headers of the guide's logs are read here too: `===== seq_len=8192 =====`, `# env: torch=...`, `# gpu=...`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pydantic_core import from_json  # three times as fast as json.loads, and the same objects

from harness import flops, records

LINE_LIMIT = 1 << 22  # bytes; a longer line is cut there, so that a file without line ends needs no memory
LARGEST = sys.float_info.max
TRIES = 10_000  # places of one line to look for an object at: nested braces could take for ever

SECTION = re.compile(r"=====\s*seq_len=(\d+)\s*=====")
HEADER = re.compile(r"# (?:(env:)|(?=gpu=))(.*)")
FLUSHED = re.compile(r"allocator cache flush")
OOM = re.compile(records.GPU_OOM)
ERROR = re.compile(r"\b\w*Error\b: .*|exits with return code = -?[1-9].*|\bKilled\b.*|\bBus error\b.*|\bERROR\b.*")

_DECODER = json.JSONDecoder()
_PAIR = re.compile(r"(?<!\S)([A-Za-z][\w.-]*)=(.*?)(?=\s+[A-Za-z][\w.-]*=|\s*$)")


def pieces(path: Path, skipped: Counter[str]) -> Iterator[tuple[int, dict | str]]:
    """(line number, object or text) in the file's order. Raises OSError."""
    with path.open("rb") as file:
        for line, raw in enumerate(iter(partial(file.readline, LINE_LIMIT), b""), 1):
            try:
                whole = from_json(raw) if raw[:1] == b"{" else None
            except ValueError:
                whole = None
            if isinstance(whole, dict):
                yield line, whole
            else:
                for piece in scan(raw.decode("utf-8", "replace"), skipped):
                    yield line, piece


def scan(line: str, skipped: Counter[str]) -> Iterator[dict | str]:
    """The pieces of one physical line; a carriage return ends a line too."""
    for part in re.split(r"[\r\n]+", line):
        done = look = tries = 0
        while (start := part.find("{", look)) >= 0 and tries < TRIES:
            tries += 1
            try:
                found, end = _DECODER.raw_decode(part, start)
            except (ValueError, RecursionError):
                look = start + 1
                continue
            yield from _text(part[done:start], skipped)
            yield found
            done = look = end
        yield from _text(part[done:], skipped)


def _text(text: str, skipped: Counter[str]) -> Iterator[str]:
    if text := text.strip():
        if '{"' in text:
            skipped["records cut in half"] += 1
        yield text


def number(value: object) -> float | None:
    """A finite number, also from a string; None for words, NaN, Infinity, true."""
    kind = type(value)
    if kind is str:
        try:
            value = float(value)
        except ValueError:
            return None
    elif kind is not float and kind is not int:
        return None
    return value if -LARGEST <= value <= LARGEST else None  # no comparison holds for nan


def flag(value: object) -> bool | None:
    """true, "false", 1, "0"; None for anything else."""
    if value is True or value is False:
        return value
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def pairs(text: str) -> dict[str, str]:
    """`gpu=NVIDIA H200 zero=3` -> {"gpu": "NVIDIA H200", "zero": "3"}: values may have blanks."""
    return {key: value.strip() for key, value in _PAIR.findall(text)}


def guide_run(env: dict[str, str], gpu: dict[str, str], run_id: str) -> records.Run:
    """What the two header lines of a guide log say, as a run; the rest stays unknown. Raises ValueError if a key that
    decides what was measured is missing or no number."""
    try:
        zero, world, batch = (int(gpu[k]) for k in ("zero", "world_size", "batch_size"))
        offload, checkpoint, liger = (gpu[k] == "1" for k in ("offload_optim", "gc", "liger"))
        device, backend, size = gpu["gpu"], gpu["attn_backend"], gpu["model_size"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"# gpu header without {error}") from None
    versions = {k.replace("-", "_"): v for k, v in env.items() if v.lower() not in ("n/a", "none", "")}
    named = {k: versions.get(k) for k in ("cuda", "transformers", "deepspeed", "liger_kernel")}
    named |= {k: versions.get(k, "unknown") for k in ("python", "torch")}
    attention = records.Attention(requested="auto", backend=backend)
    if digit := re.fullmatch(r"flash_attention_(\d)", backend):
        package = {"2": "flash-attn"}.get(digit[1], f"flash-attn-{digit[1]}")
        attention.backend = f"fa{digit[1]}"
        if version := versions.get(package.replace("-", "_")):
            named["attention_package"] = f"{package} {version}"
        else:
            attention.mismatch = f"the header says {backend}, {package} is not installed"
    shapes = [s for s in flops.shapes() if s.startswith("llama-") and s.endswith(f"-{size}")]
    model = {"name": size, "num_layers": 0, "parameters": 0, "config": {}}
    if len(shapes) == 1:
        config = flops.shape(shapes[0])
        model = {"name": shapes[0], "num_layers": config["num_hidden_layers"], "config": config}
        model["parameters"] = flops.parameters(config)
    else:
        model["uncounted"] = f"no shipped shape is a llama of {size}"
    recipes = {(3, True, True, True): "long-context", (2, False, False, False): "short-context"}
    recipe = {"name": recipes.get((zero, offload, checkpoint, liger), "custom"), "zero_stage": zero}
    recipe |= {"offload_optimizer": offload, "grad_checkpoint": checkpoint, "use_liger": liger, "liger_applied": liger}
    taken = "read from a log in the guide's form: weights, accumulation and convention are taken as the guide's"
    return records.Run(
        kind="sweep", run_id=run_id, started="unknown", world_size=world, attention=attention,
        gpu=records.Gpu(device="cuda", name=device, count=world), stack=records.Stack(**named),
        model=records.Model(weights="real", **model),
        recipe=records.Recipe(batch_size=batch, grad_accum=1, compile=False, **recipe),
        flop_convention=flops.CONVENTION, notes=[taken],
    )  # fmt: skip
