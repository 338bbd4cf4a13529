"""The headers of the guide's logs: `===== seq_len=8192 =====`, `# env: torch=...`, `# gpu=...` -> a run.

Its steps are JSON objects and read as this project's own are, in reading.py.
"""

from __future__ import annotations

import re

from harness import flops, records

SECTION = re.compile(r"=====\s*seq_len=(\d+)\s*=====")
HEADER = re.compile(r"# (?:(env:)|(?=gpu=))(.*)")
_PAIR = re.compile(r"(?<!\S)([A-Za-z][\w.-]*)=(.*?)(?=\s+[A-Za-z][\w.-]*=|\s*$)")


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
    config = flops.shape(shapes[0]) if len(shapes) == 1 else {}
    model = records.Model(
        name=shapes[0] if config else size, weights="real", config=config,
        num_layers=config.get("num_hidden_layers", 0), parameters=flops.parameters(config) if config else 0,
        uncounted=None if config else f"no shipped shape is a llama of {size}",
    )  # fmt: skip
    recipes = {(3, True, True, True): "long-context", (2, False, False, False): "short-context"}
    taken = "read from a log in the guide's form: weights, accumulation and convention are taken as the guide's"
    return records.Run(
        kind="sweep", run_id=run_id, started="unknown", world_size=world, attention=attention,
        gpu=records.Gpu(device="cuda", name=device, count=world), stack=records.Stack(**named), model=model,
        recipe=records.Recipe(
            name=recipes.get((zero, offload, checkpoint, liger), "custom"), zero_stage=zero, offload_optimizer=offload,
            grad_checkpoint=checkpoint, use_liger=liger, liger_applied=liger, batch_size=batch, grad_accum=1,
            compile=False,
        ),
        flop_convention=flops.CONVENTION, notes=[taken],
    )  # fmt: skip
