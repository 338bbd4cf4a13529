"""Model FLOPs of a training step from a Hugging Face config, under one convention. No torch.

    from harness import flops
    c = flops.count(flops.shape("llama-3.1-8b"), seq_len=131072)
    c.attention_tflop, c.dense_tflop, c.total_tflop, c.attention_share     # 13510.8 5901.9 19412.7 0.696

Forward and backward of one micro-batch, in TFLOP (a count, not a rate). A multiply-add is two FLOPs, the backward
is twice the forward:

    dense      6 * N * tokens             N = weights of every matmul a token really goes through: all layers, the
                                          chosen and the shared experts, the router, and lm_head once, tied or not.
                                          Looking up an embedding is free.
    attention  12 * pairs * head_dim * heads, per layer, where pairs is the area the query-key mask leaves:
               causal over n tokens       n^2 / 2                    (so 6 * s^2 * head_dim * heads * layers in all)
               window of w < n tokens     n^2 / 2 - (n - w)^2 / 2    (= n*w - w^2 / 2)
               packed documents           the sum over the documents

Recomputation (activation checkpointing) is not counted: this is what MFU needs, not HFU. The area of the triangle
leaves out half of the diagonal, one part in s, as the published figures do. A model type is counted only if it is
known here, and tests/test_flops.py holds each one against torch's FlopCounterMode; a config without a model_type is
taken as llama-like. Of a multimodal config the text part is counted.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CONVENTION = (
    "causal model FLOPs: 6*N*tokens + 6*s^2*head_dim*heads*layers, N with lm_head once and active experts only, "
    "embedding look-up free, windows and packed documents by area, recompute not counted"
)

# Where a model type applies `sliding_window` when its config has no `layer_types`:
#   ignores  nowhere, whatever the config says        every   in every layer
#   upper    from layer `max_window_layers` upwards   listed  its config class always fills in layer_types
_GATED = {
    "ignores": "bitnet cohere ernie4_5 flex_olmo gemma glm glm4 glm4_moe granite granitemoe llama olmo olmo2 olmoe "
    "seed_oss stablelm",
    "every": "ministral3 mistral mixtral phi3 qwen3_moe",
    "upper": "qwen2 qwen3",
    "listed": "cohere2 dots1 exaone4 gemma2 gemma3_text gpt_oss olmo3 qwen2_moe smollm3",
}
_PLAIN = {"ignores": "apertus arcee gpt2 gpt_neox nemotron phi", "every": "starcoder2"}
# model_type -> (matrices in an MLP, the rule above)
_TYPES = {name: (3, rule) for rule, names in _GATED.items() for name in names.split()}
_TYPES |= {name: (2, rule) for rule, names in _PLAIN.items() for name in names.split()}
# Their config classes have a head_dim of their own, so hidden_size / heads would be a guess where it is missing.
_OWN_HEAD_DIM = (
    "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "ministral3", "qwen3", "seed_oss",
)  # fmt: skip
_SHIPPED: dict[str, dict] = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
_EXPERTS, _SHARED = ("num_local_experts", "num_experts", "n_routed_experts"), ("n_shared_experts", "num_shared_experts")
_EXPERT_KEYS = {*_EXPERTS, *_SHARED, "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
# Set keys of what is not counted: recurrent and linear attention, low-rank and sparse attention, encoders, ...
_FOREIGN = re.compile(
    "mamba|^ssm|rwkv|hybrid|^linear_|^conv_|_lora_rank$|^attn_layer_|^attention_types$|^attention_chunk_size$|^layers_block|"
    "^block_|^full_attention_interval$|^num_kv_shared|^cross_attention|^add_cross_attention$|^is_encoder_decoder$|"
    "^use_bidirectional_attention$|^per_layer_config$|^interleave_moe|^index_topk$|^mlp_layer_types$"
)


class Uncountable(ValueError):
    """The FLOPs of this config are not known, and the message says why. They are null then, never a guess."""


@dataclass(frozen=True)
class Count:
    """TFLOP (10^12 operations) of forward and backward of one micro-batch."""

    attention_tflop: float
    dense_tflop: float

    @property
    def total_tflop(self) -> float:
        return self.attention_tflop + self.dense_tflop

    @property
    def attention_share(self) -> float:
        """Of the total, 0..1."""
        return self.attention_tflop / self.total_tflop


class _Model(NamedTuple):
    width: int  # head_dim * heads of the queries
    table: int  # vocabulary * hidden: the embedding's weights, and lm_head's
    windows: list[int | None]  # one a layer, in tokens; None = everything before
    active: int  # weights of the layers a token goes through
    held: int  # weights of the layers, with all experts


def count(config: dict, seq_len: int, batch_size: int = 1, doc_len: int | None = None) -> Count:
    """Forward + backward of `batch_size` sequences of `seq_len` tokens of the model `config` describes.

    With `doc_len` each sequence is packed documents of that many tokens, the last one shorter when it does not
    divide. Raises Uncountable for a model that cannot be counted and for a length that is not a positive number.
    """
    model, batch_size, seq_len = _read(config), _positive(batch_size, "batch_size"), _positive(seq_len, "seq_len")
    doc_len = seq_len if doc_len is None else min(_positive(doc_len, "doc_len"), seq_len)
    twice_pairs = 0
    for window, layers in Counter(model.windows).items():
        for n, times in ((doc_len, seq_len // doc_len), (seq_len % doc_len, 1)):
            twice_pairs += layers * times * (n**2 - (0 if window is None else max(0, n - window) ** 2))
    return Count(
        attention_tflop=6 * twice_pairs * model.width * batch_size / 1e12,
        dense_tflop=6 * (model.active + model.table) * seq_len * batch_size / 1e12,
    )


def step_work(run, seq_len: int, doc_len: int | None = None) -> Count | None:
    """One GPU's share of a step of `run` (a records.Run), all accumulated micro-batches; None: it cannot be counted.

    doc_len overrides the recipe's: documents of that many tokens packed into the sequence.
    """
    if run.model is None or run.recipe is None or run.model.uncounted:
        return None
    try:
        one = count(run.model.config, seq_len, run.recipe.batch_size, doc_len or run.recipe.doc_len)
    except Uncountable:
        return None
    share = run.recipe.grad_accum / run.recipe.sp_size
    return Count(one.attention_tflop * share, one.dense_tflop * share)


def step_tokens(run, seq_len: int) -> float:
    """Tokens one GPU trains on in a step: seqlen x batch x accumulation, shared by the GPUs of one sequence."""
    recipe = run.recipe
    return seq_len * recipe.batch_size * recipe.grad_accum / recipe.sp_size if recipe else float(seq_len)


def parameters(config: dict) -> int:
    """Matrix weights held: all experts, the embedding, and lm_head unless tied. To estimate memory before a model is
    built: norms, biases and learned positions, well under 1 %, are left out. Raises Uncountable."""
    model, tied = _read(config), _text(config).get("tie_word_embeddings")
    if not isinstance(tied, bool):
        raise Uncountable("config has no tie_word_embeddings: the number of parameters depends on it")
    return model.held + model.table * (1 if tied else 2)


def shapes() -> list[str]:
    """Names of the shipped model shapes (models.toml)."""
    return list(_SHIPPED)


def shape(name: str) -> dict:
    """A shipped model's Hugging Face config, a fresh copy; raises KeyError naming the ones there are."""
    if name not in _SHIPPED:
        raise KeyError(f"no shipped model shape {name!r}; there are: {', '.join(shapes())}")
    return copy.deepcopy({key: value for key, value in _SHIPPED[name].items() if key != "hub_id"})


def hub_id(name: str) -> str | None:
    """Where the Hugging Face hub has a shipped shape's real weights; None where there are none."""
    return _SHIPPED.get(name, {}).get("hub_id")


def _text(config: dict) -> dict:
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def _positive(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Uncountable(f"{name}={value!r}: a positive whole number is needed")
    return value


def _size(config: dict, *keys: str) -> int:
    """The first of `keys` that the config sets: names of the same thing in different families."""
    for key in keys:
        if config.get(key) is not None:
            return _positive(config[key], key)
    raise Uncountable(f"config has no {' or '.join(keys)}")


def _read(config: dict) -> _Model:
    c = _text(config)
    for key, value in [*config.items(), *c.items()]:
        if (_FOREIGN.search(key) and value) or (key == "is_causal" and value is False):
            raise Uncountable(f"{key}={value!r}: a model of this kind is not counted")
    matrices, rule = _kind(c)
    hidden, layers = _size(c, "hidden_size", "n_embd"), _size(c, "num_hidden_layers", "n_layer")
    heads = _size(c, "num_attention_heads", "n_head")
    kv_heads = heads if c.get("num_key_value_heads") is None else _size(c, "num_key_value_heads")
    if heads % kv_heads:
        raise Uncountable(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if c.get("head_dim") is None and (hidden % heads or c.get("model_type") in _OWN_HEAD_DIM):
        raise Uncountable(f"config has no head_dim, and hidden_size / heads = {hidden} / {heads} need not be it")
    head_dim = hidden // heads if c.get("head_dim") is None else _size(c, "head_dim")

    active = held = layers * 2 * hidden * head_dim * (heads + kv_heads)  # q and o, k and v
    sparse, mlp = _sparse_layers(c, layers), matrices * hidden  # mlp: weights per unit of intermediate width
    if dense := layers - sparse:
        gpt2_default = "n_embd" in c and c.get("n_inner") is None
        width = 4 * hidden if gpt2_default else _size(c, "intermediate_size", "n_inner")
        active, held = active + dense * mlp * width, held + dense * mlp * width
    if sparse:
        experts, chosen = _size(c, *_EXPERTS), _size(c, "num_experts_per_tok")
        width = _size(c, "moe_intermediate_size", "intermediate_size")
        always = hidden * experts  # the router
        if c.get("shared_expert_intermediate_size") is not None:
            always += mlp * _size(c, "shared_expert_intermediate_size") + hidden  # with its one-column gate
        elif any(c.get(key) for key in _SHARED):
            always += mlp * _size(c, *_SHARED) * width
        if chosen > experts:
            raise Uncountable(f"num_experts_per_tok={chosen} of only {experts} experts")
        active += sparse * (always + chosen * mlp * width)
        held += sparse * (always + experts * mlp * width)
    return _Model(head_dim * heads, _size(c, "vocab_size") * hidden, _windows(c, rule, layers), active, held)


def _kind(c: dict) -> tuple[int, str]:
    name, act = c.get("model_type"), c.get("hidden_act", "silu")
    if name and name not in _TYPES:
        raise Uncountable(f"model_type {name!r} is none of those whose count was checked: {' '.join(sorted(_TYPES))}")
    if not name and "n_embd" not in c and act != "silu":
        raise Uncountable(f"hidden_act={act!r} without a model_type: the MLP may be gated or plain")
    return _TYPES[name or ("gpt2" if "n_embd" in c else "qwen2" if "max_window_layers" in c else "mistral")]


def _windows(c: dict, rule: str, layers: int) -> list[int | None]:
    used = c.get("use_sliding_window", not str(c.get("model_type")).startswith("qwen"))
    window, kinds = c.get("sliding_window") if used else None, c.get("layer_types")
    if kinds is None:
        if used and (rule == "listed" or (rule == "upper" and c.get("max_window_layers") is None)):
            raise Uncountable("config does not say which layers have a window; transformers' AutoConfig fills that in")
        first = layers if window is None or rule == "ignores" else 0 if rule == "every" else c["max_window_layers"]
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise Uncountable(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    if unknown := sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"}):
        raise Uncountable(f"layer_types has {', '.join(unknown)}: only full and sliding attention are counted")
    return [None if kind == "full_attention" else _positive(window, "sliding_window") for kind in kinds]


def _sparse_layers(c: dict, layers: int) -> int:
    """How many layers have experts in place of one MLP. An expert key not known here is refused, not passed over."""
    found = {key for key, value in c.items() if re.search("expert|moe", key) and value is not None and key[0] != "_"}
    if strange := sorted(key for key in found - _EXPERT_KEYS if c[key]):
        raise Uncountable(f"keys of experts this module does not know: {', '.join(strange)}")
    if not found & set(_EXPERTS):
        if found & _EXPERT_KEYS:
            raise Uncountable(f"{', '.join(sorted(found))} without a number of experts")
        return 0
    first, step = c.get("first_k_dense_replace") or 0, _positive(c.get("decoder_sparse_step", 1), "decoder_sparse_step")
    return sum(i not in (c.get("mlp_only_layers") or ()) and (i + 1) % step == 0 for i in range(first, layers))
