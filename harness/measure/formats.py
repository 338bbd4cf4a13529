"""The format of a step's matmuls (DTYPE), by torchao's training layers: what each needs, and which layers take it.

    why = formats.refusal(settings, capability)                 # before anything is loaded; None: nothing against it
    converter = formats.converter(settings.dtype, capability)   # imports torchao; raises FormatUnavailable
    record = formats.convert(model, settings.dtype, capability, converter)

Only the three matmuls of a linear layer change (output, gradient of the input, gradient of the weight). The parameters
are the same objects before and after, so ZeRO, the optimizer and its master copy see no difference. A model is
converted when it is built, sharded or not, and before deepspeed.initialize hooks its modules.
"""

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from harness import records
from harness.measure import attention
from harness.measure.failures import first_line
from harness.measure.settings import Settings

FP8_MATMUL = (8, 9)  # compute capability from which torch's scaled matmul takes fp8; under it torchao emulates
# Of a layer's sizes and of the tokens of a sequence, as each is the inner size of one of the three matmuls: what
# torch's scaled matmul takes, a block of MXFP8, and what torchao's NVFP4 kernels take.
MULTIPLE = {"fp8": 16, "fp8_rowwise": 16, "mxfp8": 32, "nvfp4": 128}
RECIPE = {"fp8": "tensorwise", "fp8_rowwise": "rowwise", "mxfp8": "rceil", "nvfp4": "triton"}
# Modules under torchao.prototype.moe_training, and their layers: made for 10.x alone, and free to move.
PROTOTYPE = {"mxfp8": ("mxfp8_linear", "MXFP8Linear"), "nvfp4": ("nvfp4_training.nvfp4_training", "NVFP4Linear")}
ROUTERS = ("gate", "router", "shared_expert_gate")  # of mixtures: small, and rounding changes who is chosen


class FormatUnavailable(RuntimeError):
    """The format cannot be trained in here; the message names DTYPE and says what is missing."""

    kind = "wrong_setting"


def emulated(dtype: str, capability: tuple[int, int] | None) -> bool:
    """Whether operands are rounded to the format and multiplied in bf16: its loss, and nothing of its speed."""
    return dtype in ("fp8", "fp8_rowwise") and (capability is None or capability < FP8_MATMUL)


def refusal(settings: Settings, capability: tuple[int, int] | None) -> str | None:
    """Everything that speaks against DTYPE with these (resolved) settings on this GPU (None: no GPU), as one line."""
    dtype, found = settings.dtype, []
    if dtype == "bf16":
        return None
    if attention.version("torchao") is None:
        found.append("torchao is not installed, run ./install.sh")
    if dtype in PROTOTYPE and (capability is None or capability[0] != 10):
        here = f"this GPU is {capability[0]}.{capability[1]}" if capability else "there is no GPU here"
        found.append(f"its kernels need compute capability 10.x and {here}")
    if dtype in PROTOTYPE and not settings.compile:
        found.append("it needs COMPILE=1, uncompiled its casts cost more than its matmuls save")
    if odd := [n for n in settings.lengths if n // settings.sp_size % MULTIPLE[dtype]]:
        found.append(f"a GPU's part of a sequence must be divisible by {MULTIPLE[dtype]}, not so at {odd}")
    return f"DTYPE={dtype}: {'; '.join(found)}" if found else None


def converter(dtype: str, capability: tuple[int, int] | None) -> Callable | None:
    """torchao's converter, called with (model, module_filter_fn=...); None for bf16. Raises FormatUnavailable."""
    if dtype == "bf16":
        return None
    try:
        from torchao import float8
        from torchao.float8.float8_linear_utils import swap_linear_layers

        if dtype not in PROTOTYPE:
            config = float8.Float8LinearConfig.from_recipe_name(RECIPE[dtype])
            config = dataclasses.replace(config, emulate=emulated(dtype, capability))
            return partial(float8.convert_to_float8_training, config=config)
        module, name = PROTOTYPE[dtype]
        layer = getattr(importlib.import_module(f"torchao.prototype.moe_training.{module}"), name)
        if dtype == "nvfp4":
            return partial(swap_linear_layers, from_float_func=layer.from_linear)
        if not torch._C._dispatch_has_kernel_for_dispatch_key("torchao::mxfp8_quantize", "CUDA"):
            raise ImportError("its mxfp8 kernel did not load, which is built for CUDA 13")
        return partial(swap_linear_layers, from_float_func=partial(around, layer=layer))
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise FormatUnavailable(
            f"DTYPE={dtype}: torchao {attention.version('torchao')} here: {first_line(error)}"
        ) from error


def around(linear: nn.Linear, layer: Callable) -> nn.Linear:
    """A layer of this kind with the linear layer's own parameters, which may be sharded."""
    with torch.device("meta"):
        made = layer(linear.in_features, linear.out_features, bias=False)
    made.weight, made.bias = linear.weight, linear.bias
    return made


def convert(model: nn.Module, dtype: str, capability: tuple[int, int] | None, converter: Callable) -> records.Format:
    """Replace every linear layer that can take the format, and say which could not. Raises FormatUnavailable."""
    output = model.get_output_embeddings()
    said = {name: why_kept(name, module, output, MULTIPLE[dtype]) for name, module in model.named_modules()}
    kept, taken = {n: why for n, why in said.items() if why}, [n for n, why in said.items() if why == ""]
    if not taken:
        raise FormatUnavailable(f"DTYPE={dtype}: no layer can take it: {'; '.join(sorted({*kept.values()}))}")
    converter(model, module_filter_fn=lambda _, name: said.get(name) == "")
    kinds = [type(model.get_submodule(name)) for name in taken]
    recipe = f"torchao {attention.version('torchao')} {kinds[0].__name__} {RECIPE[dtype]}"
    return records.Format(
        name=dtype, recipe=recipe, emulated=emulated(dtype, capability), kept=kept,
        converted=sum(kind is not nn.Linear for kind in kinds), total=len(taken) + len(kept),
    )  # fmt: skip


def why_kept(name: str, module: nn.Module, output: nn.Module | None, multiple: int) -> str | None:
    """Why a layer stays bf16; "" when it can be converted, None when it has no matrix to multiply with."""
    if not isinstance(module, nn.Linear):
        # Under ZeRO-3 a parameter is empty, and its shape is beside it.
        matrix = any(len(getattr(p, "ds_shape", p.shape)) > 1 for p in module.parameters(recurse=False))
        return f"{type(module).__name__}, no nn.Linear" if matrix and not isinstance(module, nn.Embedding) else None
    if module is output:
        return "the output layer"
    if type(module) is not nn.Linear or name.rpartition(".")[2] in ROUTERS:
        return f"{type(module).__name__}, a router or of its own kind"
    odd = module.in_features % multiple or module.out_features % multiple
    return f"{module.in_features} x {module.out_features} is not divisible by {multiple}" if odd else ""
