"""The format of a step's matmuls (DTYPE), by torchao's training layers: what each needs, and which layers take it.

    why = formats.refusal(settings, capability)         # cheap, before anything is loaded; None: nothing against it
    converter = formats.converter(settings.dtype, capability)   # imports torchao; raises FormatUnavailable
    record = formats.convert(model, settings.dtype, capability, converter)

Only the three matmuls of a linear layer change (output, gradient of the input, gradient of the weight). The parameters
are the same objects before and after, so ZeRO, the optimizer and its master copy see no difference: converting is right
after the model is built, sharded or not, and before deepspeed.initialize hooks its modules.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from harness import records
from harness.measure import attention
from harness.measure.settings import Settings

FP8_MATMUL = (8, 9)  # compute capability from which torch's scaled matmul takes fp8; under it torchao emulates
ROUTERS = ("gate", "router", "shared_expert_gate")  # of mixtures: small, and a wrong choice costs more than a rounding
PROTOTYPES = "torchao.prototype.moe_training."


class Kind(NamedTuple):
    """`multiple`: of a layer's two sizes and of the tokens of a micro-step, each the inner size of one of its matmuls.
    16: torch's scaled matmul; 32: a block of MXFP8; 128: torchao's NVFP4 kernels. `name`: torchao's recipe."""

    multiple: int
    module: str
    layer: str
    name: str
    prototype: bool


KINDS = {
    "fp8": Kind(16, "torchao.float8.float8_linear", "Float8Linear", "tensorwise", False),
    "fp8_rowwise": Kind(16, "torchao.float8.float8_linear", "Float8Linear", "rowwise", False),
    "mxfp8": Kind(32, PROTOTYPES + "mxfp8_linear", "MXFP8Linear", "rceil", True),
    "nvfp4": Kind(128, PROTOTYPES + "nvfp4_training.nvfp4_training", "NVFP4Linear", "rht", True),
}


class FormatUnavailable(RuntimeError):
    """The format cannot be trained in here; the message names DTYPE and says what is missing."""

    kind = "wrong_setting"


def quiet() -> None:
    """Before torchao's first import, which warns of kernels for other GPUs and of its own use of torch."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def emulated(dtype: str, capability: tuple[int, int] | None) -> bool:
    """Whether the matmuls run in bf16 on operands rounded to the format: its loss, and nothing of its speed."""
    return dtype != "bf16" and not KINDS[dtype].prototype and (capability is None or capability < FP8_MATMUL)


def refusal(settings: Settings, capability: tuple[int, int] | None) -> str | None:
    """Everything that speaks against DTYPE with these (resolved) settings on this GPU (None: no GPU), as one line."""
    if settings.dtype == "bf16":
        return None
    kind, found = KINDS[settings.dtype], []
    if attention.version("torchao") is None:
        found.append("torchao is not installed, run ./install.sh")
    if kind.prototype and (capability is None or capability[0] != 10):
        here = f"this GPU is {capability[0]}.{capability[1]}" if capability else "there is no GPU here"
        found.append(f"its kernels need compute capability 10.x and {here}")
    if kind.prototype and not settings.compile:
        found.append("needs COMPILE=1, uncompiled its casts cost more than its matmuls save")
    odd = [n for n in settings.lengths if settings.batch_size * n // settings.sp_size % kind.multiple]
    if odd:
        found.append(f"the tokens of a GPU and micro-step must be divisible by {kind.multiple}, not so at {odd}")
    return f"DTYPE={settings.dtype}: {'; '.join(found)}" if found else None


def converter(dtype: str, capability: tuple[int, int] | None) -> Callable | None:
    """torchao's converter, called with (model, module_filter_fn=...); None for bf16. Raises FormatUnavailable."""
    if dtype == "bf16":
        return None
    kind = KINDS[dtype]
    try:
        float8, linears = map(importlib.import_module, ("torchao.float8", "torchao.float8.float8_linear_utils"))
        layer = getattr(importlib.import_module(kind.module), kind.layer)
        if dtype == "mxfp8" and not torch._C._dispatch_has_kernel_for_dispatch_key("torchao::mxfp8_quantize", "CUDA"):
            raise ImportError("its mxfp8 kernel did not load, which is built for CUDA 13")
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise FormatUnavailable(f"DTYPE={dtype}: torchao {attention.version('torchao')} here: {first}") from error
    if not kind.prototype:
        config = float8.Float8LinearConfig.from_recipe_name(kind.name)
        config = dataclasses.replace(config, emulate=emulated(dtype, capability))
        return partial(float8.convert_to_float8_training, config=config)
    make = layer.from_linear if dtype == "nvfp4" else partial(around, layer=layer)
    return partial(linears.swap_linear_layers, from_float_func=make)


def around(linear: nn.Linear, layer: type[nn.Linear], **options) -> nn.Linear:
    """A layer of this class with the linear layer's own parameters, which may be sharded."""
    with torch.device("meta"):
        made = layer(linear.in_features, linear.out_features, bias=False, **options)
    made.weight, made.bias = linear.weight, linear.bias
    return made


def convert(model: nn.Module, dtype: str, capability: tuple[int, int] | None, converter: Callable) -> records.Format:
    """Replace every linear layer that can take the format, and say which could not. Raises FormatUnavailable."""
    kind, output = KINDS[dtype], model.get_output_embeddings()
    said = {name: why_kept(name, module, output, kind.multiple) for name, module in model.named_modules()}
    said = {name: why for name, why in said.items() if why is not None}
    kept = {name: why for name, why in said.items() if why}
    if len(kept) == len(said):
        raise FormatUnavailable(
            f"DTYPE={dtype}: no layer of this model can take it: {'; '.join(sorted({*kept.values()}))}"
        )
    converter(model, module_filter_fn=lambda _, name: said.get(name) == "")
    converted = sum(type(m).__name__ == kind.layer for m in model.modules())  # counted, not concluded
    recipe = f"torchao {attention.version('torchao')} {kind.layer} {kind.name}"
    fake = emulated(dtype, capability)
    return records.Format(name=dtype, recipe=recipe, emulated=fake, converted=converted, total=len(said), kept=kept)


def why_kept(name: str, module: nn.Module, output: nn.Module | None, multiple: int) -> str | None:
    """Why a layer stays bf16; "" when it can be converted, None when it has no matrix to multiply with."""
    if not isinstance(module, nn.Linear):
        # Under ZeRO-3 a parameter is empty, and its shape is beside it.
        matrix = any(len(getattr(p, "ds_shape", p.shape)) > 1 for p in module.parameters(recurse=False))
        return f"{type(module).__name__}, no nn.Linear" if matrix and not isinstance(module, nn.Embedding) else None
    if module is output:
        return "the output layer"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__}, a linear layer of its own kind"
    if name.rpartition(".")[2] in ROUTERS:
        return "a router"
    if module.in_features % multiple or module.out_features % multiple:
        return f"{module.in_features} x {module.out_features} is not divisible by {multiple}"
    return ""


def notes(settings: Settings, fmt: records.Format | None) -> list[str]:
    """What to know of a measurement in this format."""
    if not fmt:
        return []
    found = []
    if not fmt.emulated and not settings.compile:
        found.append(f"DTYPE={fmt.name} without COMPILE=1: each cast is a kernel of its own and may cost what it saves")
    if settings.zero_stage == 3 and not settings.grad_checkpoint and not KINDS[fmt.name].prototype:
        found.append("ZeRO-3 without checkpointing: torchao's fp8 layers hold each gathered weight until its backward")
    return found
