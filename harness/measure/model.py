"""The model a step trains: from a shipped shape, a folder or a hub id, with real or random weights.

Under ZeRO-3 it is built inside deepspeed.zero.Init, so that no rank ever holds the whole model on its device;
checkpoint files are mapped, and only rank 0 reads them, so host memory does not grow with the ranks.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import flops, records
from harness.measure import attention
from harness.measure.failures import first_line
from harness.measure.settings import Settings


class ModelUnavailable(RuntimeError):
    """The model's config or weights cannot be had; the message says what to do."""

    kind = "model_unavailable"


@dataclass
class Built:
    model: torch.nn.Module
    record: records.Model
    liger_applied: bool
    notes: list[str]


def hf_config(settings: Settings):
    """(transformers config, where its weights are or None). Raises ModelUnavailable.

    A shipped shape needs no network; its weights are taken from the Hugging Face cache if they are there.
    """
    from transformers import AutoConfig

    try:
        if settings.model in flops.shapes():
            shape = flops.shape(settings.model)
            config = AutoConfig.for_model(shape.pop("model_type"), **shape)
            source = cached_weights(flops.hub_id(settings.model)) if settings.weights != "random" else None
            if settings.weights == "real" and source is None:
                hub = flops.hub_id(settings.model) or settings.model
                raise ModelUnavailable(
                    f"WEIGHTS=real: {hub} is not in the Hugging Face cache; run `hf download {hub}`, or WEIGHTS=random"
                )
        else:
            folder = Path(settings.model)
            if settings.model.startswith((".", "/", "~")) and not folder.expanduser().is_dir():
                raise ModelUnavailable(f"MODEL={settings.model}: no such folder")
            source = str(folder.expanduser()) if folder.expanduser().is_dir() else settings.model
            config = AutoConfig.from_pretrained(source)
            if settings.weights == "random" or (settings.weights == "auto" and not has_weights(source)):
                source = None
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(f"MODEL={settings.model}: {first_line(error)}") from error
    text = config.get_text_config()
    if settings.num_layers:
        if settings.num_layers > text.num_hidden_layers:
            raise ModelUnavailable(f"NUM_LAYERS={settings.num_layers}: {settings.model} has {text.num_hidden_layers}")
        text.num_hidden_layers = settings.num_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: settings.num_layers]
    text.use_cache = False  # a cache in training costs copies, and makes sdpa lose the document mask
    return config, source


def attention_shape(config) -> tuple[int, int, int]:
    """(query heads, key and value heads, width of a head) of a transformers config."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(text, "head_dim", None) or text.hidden_size // heads


def cached_weights(hub_id: str | None) -> str | None:
    """The snapshot folder of a hub model whose weights are on this machine: in $DATA_FAST, else in HF_HOME."""
    if not hub_id:
        return None
    fast = os.environ.get("DATA_FAST")
    staged = Path(fast) / hub_id if fast else None
    if staged and has_weights(str(staged)):
        return str(staged)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(hub_id, local_files_only=True, allow_patterns=["*.json", "*.safetensors"])
    except (LocalEntryNotFoundError, OSError):
        return None
    return folder if has_weights(folder) else None


def has_weights(source: str) -> bool:
    """Whether a folder holds weights; a hub id that is no folder is taken to."""
    folder = Path(source)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def apply_liger(model_type: str, device: str) -> tuple[bool, list[str]]:
    """Patch transformers' classes of this model type for the whole process. (applied, notes why not)."""
    if device != "cuda":
        return False, ["Liger was asked for and not applied: its Triton kernels need a GPU"]
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False, [f"Liger was asked for and not applied: it does not know model type {model_type}"]
    MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]()
    return True, []


def build(settings: Settings, backend: str, device: str, zero3_config: dict | None) -> Built:
    """Build the model in bfloat16 and check what it really uses.

    zero3_config: DeepSpeed's config under ZeRO-3, else None. Raises ModelUnavailable, attention.AttentionUnavailable.
    """
    import transformers
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.integrations import HfDeepSpeedConfig

    # Alive until the model is built: transformers looks it up to decide on deepspeed.zero.Init.
    keep_alive = HfDeepSpeedConfig(zero3_config) if zero3_config else None
    config, source = hf_config(settings)
    liger, notes = apply_liger(config.model_type, device) if settings.use_liger else (False, [])
    set_seed(settings.seed)
    auto, wrappers = AutoModelForCausalLM, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in wrappers:
        auto = transformers.AutoModelForImageTextToText  # Qwen2.5-VL and others have no class for text alone
    options = {"attn_implementation": attention.BACKENDS[backend], "dtype": torch.bfloat16}
    try:
        if source:
            model = auto.from_pretrained(source, config=config, **options)
        elif zero3_config:
            model = auto.from_config(config, **options)
        else:
            # Straight onto the device: random init of billions of weights takes minutes on a CPU.
            with torch.device(device):
                model = auto.from_config(config, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ModelUnavailable(f"MODEL={settings.model}: {first_line(error)}") from error
    del keep_alive
    model.train()
    mismatch = attention.check_model(model, backend)
    if mismatch:
        raise attention.AttentionUnavailable(mismatch, "attn_mismatch")
    if settings.grad_checkpoint:
        model.gradient_checkpointing_enable()
    modules = {type(m).__module__ for m in model.modules()} | {model.forward.__module__}
    if liger and not any("liger" in name for name in modules):
        liger, notes = False, [*notes, "Liger was asked for and no module of the model uses it"]
    if source is None:
        notes.append("random weights of the model's shape: speed and memory hold, the loss means nothing")
    longest, limit = max(settings.lengths), getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and longest > limit:
        notes.append(f"{longest} tokens exceed the {limit} the model was made for: speed holds, the loss means nothing")
    parameters = sum(getattr(p, "ds_numel", None) or p.numel() for p in model.parameters())
    if not parameters:
        raise ModelUnavailable(f"MODEL={settings.model}: the built model has no parameters")
    # to_diff_dict leaves defaults out; the report needs them all, without this machine's paths.
    as_dict = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    name = settings.model
    if "/" in name and Path(name).expanduser().is_dir():
        name = Path(name).expanduser().name  # a folder's path is this machine's business
    record = records.Model(
        name=name, weights="real" if source else "random", num_layers=config.get_text_config().num_hidden_layers,
        parameters=parameters, config=as_dict, **counted(as_dict),
    )  # fmt: skip
    return Built(model, record, liger, notes)


def counted(config: dict) -> dict:
    """What the FLOPs of a model with this config leave out, or the reason why they cannot be counted."""
    try:
        flops.count(config, 1024)
        return {"left_out": flops.left_out(config)}
    except flops.Uncountable as reason:
        return {"uncounted": str(reason)}
