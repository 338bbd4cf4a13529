"""The library of published measurements: every CSV and box under results/published/ as rows, and what pairs them.

    library = load()                        # library.rows, library.problems (file, line and what is wrong with it)
    pairs = matched(library.rows)           # every two rows that differ by the GPU, or the precision, and little else
    [p for p in pairs if (p.old.gpu.key, p.new.gpu.key) == ("h100-sxm", "b200-sxm")]

A CSV is a source and keeps the columns it was published with: COLUMNS says by which names a column is known. A folder
of records (the guide's boxes) is read as it lies there. A row that cannot be is left out and named, the rest is used.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass as checked

from harness import flops, gpus, records
from harness.gpus import Gpu

FOLDER = Path(__file__).resolve().parents[2] / "results" / "published"
COLUMNS = {  # what a row is made of: the headings it goes by, in lower case with _ for all that is no letter or digit
    "gpu": ("system", "gpu", "gpu_type", "gpu_name", "accelerator", "device", "hardware"),
    "count": ("gpus", "count", "gpu_count", "num_gpus", "n_gpus", "world_size"),
    "model": ("model", "model_name"),
    "kind": ("kind", "task", "training", "workload"),
    "work": ("class", "work"),  # dense or experts, where the model's name does not tell
    "parameters": ("parameters", "params", "num_parameters"),
    "seq_len": ("seq_len", "seqlen", "seq_length", "sequence_length", "max_seq_len", "max_sequence_length"),
    "global_batch": ("global_batch", "global_batch_size", "gbs"),
    "micro_batch": ("micro_batch", "micro_batch_size", "mbs"),
    "precision": ("precision", "dtype", "compute_dtype"),
    "release": ("release", "version", "software", "container"),
    "tokens_per_s_per_gpu": ("tokens_per_s_per_gpu", "tokens_s_gpu", "tokens_sec_gpu", "tokens_per_sec_per_gpu"),
    "step_ms": ("step_ms", "ms", "ms_per_step", "step_time_ms", "exec_time_ms"),
    "tflops": ("model_tflops_per_gpu", "model_tflop_s_gpu", "model_tflop_sec_gpu", "tflops_per_gpu", "tflops"),
    "origin": ("source", "url", "origin"),
}
PARALLEL = ("tp", "pp", "cp", "vp", "ep", "etp", "dp", "fsdp", "grad_accum", "sharding", "activation_checkpointing")
SYSTEMS = {"h100_80gb": "h100-sxm", "a100_80gb": "a100-sxm-80gb", "a100_40gb": "a100-sxm-40gb"}  # how sources say it
PRECISIONS = {"nvfp4": "nvfp4", "fp4": "fp4", "fp8": "fp8", "bf16": "bf16", "bfloat16": "bf16"}  # first part found
EXPERTS = re.compile(
    r"a\d+(\.\d+)?b\b|deepseek|gpt.?oss|kimi|mixtral|moe|nemotron.?3|\d+x\d+b|dbrx|grok|scout|maverick"
)
DENSE = re.compile(r"llama|mpt|gpt|qwen|mistral|gemma|nemotron|bert|opt|falcon|phi|olmo")
PRETRAINING = "pre-training"  # what a source without a word for it measured
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@checked(frozen=True)
class Row:
    """One published training step of one system."""

    gpu: Gpu
    model: str
    seq_len: PositiveInt
    precision: str  # of gpus.DTYPES
    precision_said: str
    tokens_per_s_per_gpu: Above0
    source: str  # the file's name, which is a source
    where: str  # file:line
    count: PositiveInt | None = None
    kind: str = PRETRAINING
    work: str | None = None  # dense, experts; null: nothing says
    parameters: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    micro_batch: PositiveInt | None = None
    release: str | None = None
    tflops: Above0 | None = None  # model TFLOPS per GPU as published
    origin: str | None = None  # where the source has it
    parallel: str = ""


@dataclass
class Library:
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """Two rows of one source, release, kind of training, model and length."""

    old: Row
    new: Row

    @property
    def speedup(self) -> float:
        return self.new.tokens_per_s_per_gpu / self.old.tokens_per_s_per_gpu

    @property
    def precisions(self) -> tuple[str, str]:
        return self.old.precision, self.new.precision

    @property
    def work(self) -> str:
        """dense, experts or unknown, and the kind of training unless it is pre-training."""
        kind = self.old.kind if self.old.kind != PRETRAINING else ""
        return f"{self.old.work or 'unknown'} {kind}".strip()

    @property
    def differs(self) -> list[str]:
        """What is not equal, as `GPUs 16/8`: the count, the global batch, the micro batch."""
        names = {"GPUs": "count", "batch": "global_batch", "micro": "micro_batch"}
        beside = {name: (getattr(self.old, key), getattr(self.new, key)) for name, key in names.items()}
        return [f"{name} {a or '?'}/{b or '?'}" for name, (a, b) in beside.items() if a != b]


def peak(gpu: Gpu, precision: str) -> float | None:
    """Dense TFLOPS. Sheets that give one figure for 4 bits give it as fp4: it is taken for nvfp4 too."""
    return getattr(gpu, precision) or (gpu.fp4 if precision == "nvfp4" else None)


def place(gpu: Gpu) -> tuple:
    """Sorts GPUs by speed, then by generation. Of a published pair the first is the old one."""
    return gpu.bf16 or 0, gpu.bandwidth_tb_s or 0, gpu.capability or (0, 0), gpu.label


@functools.cache
def load(folder: Path = FOLDER) -> Library:
    """Every row of every source in the folder."""
    library, seen = Library(), {}
    for path in sorted(folder.glob("*.csv")):
        _keep(library, seen, path, _csv(path))
    for path in sorted(folder.glob("*/*.jsonl")):
        _keep(library, seen, path, _records(path))
    return library


def _keep(library: Library, seen: dict, path: Path, found: Iterator[tuple[int, Row | str]]) -> None:
    """The rows that are sound and new; what is wrong with the others, with the line it is in."""
    try:
        for line, row in found:
            key = None if isinstance(row, str) else _key(row)
            problem = row if isinstance(row, str) else _impossible(row)
            if not problem and key in seen:
                first = seen[key]
                same = first.tokens_per_s_per_gpu == row.tokens_per_s_per_gpu
                problem = f"the same as {first.where}" + ("" if same else ", with another figure") + ": left out"
            if problem:
                library.problems.append(f"{path.name}:{line}: {problem}")
            else:
                library.rows.append(seen.setdefault(key, row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        library.problems.append(f"{path.name}: {error}")


def _key(row: Row) -> tuple:
    setup = (row.count, row.global_batch, row.micro_batch, row.parallel, row.precision_said.lower())
    return row.release or row.source, row.kind, row.gpu.key, row.model, row.seq_len, *setup


def _impossible(row: Row) -> str | None:
    """Over the peak of the GPU: by the TFLOPS published, or by 6 FLOPs a parameter and token of a dense model."""
    highest = peak(row.gpu, row.precision) or max(getattr(row.gpu, name) or 0 for name in gpus.DTYPES)
    rates = {"TFLOPS": row.tflops, "tokens/s, as TFLOPS": 6e-12 * _active(row) * row.tokens_per_s_per_gpu}
    for name, rate in rates.items():
        if rate and rate > highest:
            return f"{name} of {rate:.4g} are over the {row.gpu.label}'s peak of {highest:g}: left out"
    return None


def _active(row: Row) -> float:
    """Parameters every token meets, by the row or the model's name (70B; 30B-A3B: 3e9); 0: neither says."""
    if row.work == "dense" and row.parameters:
        return row.parameters
    name = row.model.lower().replace("_", " ")
    size = re.search(r"\b(\d+(?:\.\d+)?)([bm])\b" if row.work == "dense" else r"\ba(\d+(?:\.\d+)?)(b)\b", name)
    return float(size[1]) * {"b": 1e9, "m": 1e6}[size[2]] if size else 0.0


def _csv(path: Path) -> Iterator[tuple[int, Row | str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        heads = [re.sub(r"\W+", "_", head.strip().lower()).strip("_") for head in next(reader, [])]
        places = {name: next((heads.index(n) for n in known if n in heads), None) for name, known in COLUMNS.items()}
        if missing := _missing({name for name, place in places.items() if place is not None}):
            yield 1, f"no column {missing}: the file is left out"
            return
        for cells in reader:
            line = reader.line_num
            if len(cells) != len(heads):
                if cells:
                    yield line, f"{len(cells)} cells under {len(heads)} headings: left out"
                continue
            cells = [_cell(text) for text in cells]
            said = {name: cells[place] for name, place in places.items() if place is not None}
            said["parallel"] = " ".join(f"{h} {c}" for h, c in zip(heads, cells, strict=True) if h in PARALLEL and c)
            yield line, _row(said, path.stem, f"{path.name}:{line}")


def _cell(text: str) -> str | None:
    text = text.strip()
    if text.lower() in ("", "n/a", "na", "-", "none"):
        return None
    return text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def _missing(names: Collection[str]) -> str:
    """What no row can be without, of what these names lack."""
    found = [name for name in ("gpu", "model", "seq_len", "precision") if name not in names]
    return ", ".join(found + ["tokens_per_s_per_gpu"] * (not {"tokens_per_s_per_gpu", "step_ms"} & {*names}))


def _row(said: dict, source: str, where: str) -> Row | str:
    """A row, or what is wrong with it."""
    said = {name: value for name, value in said.items() if value is not None}
    if missing := _missing(said.keys()):
        return f"no {missing}: left out"
    try:
        gpu = system(said["gpu"])
    except KeyError:
        return f"no GPU {said['gpu']!r} in harness/gpus.toml: left out"
    word = said.pop("precision")
    precision = precision_of(word)
    if precision is None:
        return f"precision {word!r} is none of {', '.join(dict.fromkeys(PRECISIONS.values()))}: left out"
    said |= {"gpu": gpu, "precision": precision, "precision_said": word, "source": source, "where": where}
    said["kind"] = said.get("kind", PRETRAINING).lower()
    said["work"] = said.get("work") or kind_of_work(said["model"], said["parallel"])
    try:
        if ms := said.pop("step_ms", None):
            tokens = int(said["seq_len"]) * int(said["global_batch"]) / int(said["count"])
            said.setdefault("tokens_per_s_per_gpu", tokens / float(ms) * 1e3)
        return Row(**said)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{first['loc'][-1]} {first['input']!r}: {first['msg'].lower()}: left out"
    except (ValueError, KeyError, ZeroDivisionError) as error:
        return f"no rate from step_ms, seq_len, global_batch and gpus ({error}): left out"


def precision_of(word: str) -> str | None:
    """bf16, fp8, fp4 or nvfp4, by a source's word for it: BF16, amp_bf16, FP8-CS, MXFP8; None: none of these."""
    return next((name for part, name in PRECISIONS.items() if part in word.lower()), None)


def system(text: str) -> Gpu:
    """The GPU of a system as sources call it: DGX-GB300, h100_80gb, NVIDIA B200. Raises KeyError."""
    name = re.sub(r"^(nvidia[ _-])?(dgx|hgx)[ _-]|[ _-]nvl72$", "", text.strip().lower())
    return gpus.by_key(SYSTEMS.get(name, name))


def kind_of_work(model: str, parallel: str = "") -> str | None:
    """dense or experts, by the model's name or an expert-parallel size over 1; None: neither tells."""
    name, split = model.lower().replace("_", " "), re.search(r"\bep (\d+)", parallel)
    if EXPERTS.search(name) or (split and int(split[1]) > 1):
        return "experts"
    return "dense" if DENSE.search(name) else None


def _records(path: Path) -> Iterator[tuple[int, Row | str]]:
    """The sweeps and decomposed steps of one file of a box, without its failures."""
    runs: dict[str, records.Run] = {}
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = records.validate(json.loads(text))
        except ValueError as error:
            yield line, f"no record: {str(error).splitlines()[0]}: left out"
            continue
        if isinstance(record, records.Run):
            runs[record.run_id] = record
        elif isinstance(record, records.Summary | records.Decomposition) and (run := runs.get(record.run_id)):
            ms = record.median_ms if isinstance(record, records.Summary) else record.step_ms
            if ms and run.model and run.recipe:
                batch = run.recipe.batch_size * run.recipe.grad_accum * run.world_size
                said = {"gpu": run.gpu.name, "model": run.model.name, "parameters": run.model.parameters}
                said |= {
                    "precision": run.dtype,
                    "seq_len": record.seq_len,
                    "count": run.world_size,
                    "global_batch": batch,
                }
                said |= {"micro_batch": run.recipe.batch_size, "parallel": run.recipe.name}
                said |= {"release": f"torch {run.stack.torch} ({path.stem})"}
                said["tokens_per_s_per_gpu"] = flops.step_tokens(run, record.seq_len) / ms * 1e3
                yield line, _row(said, path.stem.rpartition("_")[2], f"{path.parent.name}/{path.name}:{line}")


def matched(rows: Iterable[Row]) -> list[Pair]:
    """Every pair of rows of two GPUs, or of two precisions of one, both ways: old and new are the reader's to choose.

    Where a precision is published in several forms (FP8, MXFP8), like goes with like if both sides have it. Of several
    counts or batches each row is paired once, the nearest first.
    """
    groups: dict[tuple, dict[tuple, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = row.source, row.release, row.kind, row.model.lower(), row.seq_len
        groups[key][row.gpu.key, row.precision, _form(row)].append(row)
    found = []
    for group in groups.values():
        for (a, p, form), olds in group.items():
            for (b, q, other), news in group.items():
                if (a, p) != (b, q) and (form == other or p != q or not {(a, q, other), (b, p, form)} & group.keys()):
                    found += _nearest(olds, news)
    return found


@functools.cache
def pairs() -> list[Pair]:
    """Of everything in results/published; matched once, for a page asks at every price."""
    return matched(load().rows)


def _form(row: Row) -> str:
    """FP8-MX and MXFP8 are one form; fp8 with per-tensor scales (FP8, FP8-CS, amp_fp8) is another."""
    return row.precision + ("-mx" if "mx" in row.precision_said.lower() else "")


def _nearest(olds: list[Row], news: list[Row]) -> list[Pair]:
    def apart(pair: tuple[Row, Row]) -> tuple:
        a, b = pair
        return tuple(abs((getattr(a, k) or 0) - (getattr(b, k) or 0)) for k in ("count", "global_batch", "micro_batch"))

    found, used = [], set()
    for a, b in sorted(((a, b) for a in olds for b in news), key=apart):
        if not used & {a.where, b.where}:
            used |= {a.where, b.where}
            found.append(Pair(a, b))
    return found
