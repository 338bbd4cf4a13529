"""What a Hugging Face config.json says of a model's matmuls: read(config) -> Shape. No torch.

The config may be one that transformers completed (`config.to_dict()`) or a model page's own file, which leaves out
what is a default of the type's class: architectures.toml has those defaults, and what else no key says. Only a model
type listed there is read, because only those were held against the real model; a config without a model_type is taken
as llama-like. Of a multimodal config the text part is read, and what that leaves out is named.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

_DATA = tomllib.loads(Path(__file__).with_name("architectures.toml").read_text(encoding="utf-8"))
TYPES: dict[str, dict] = _DATA["types"]
_REFUSED: dict[str, str] = _DATA["refused"]
_EXPERTS, _SHARED = ("num_local_experts", "num_experts", "n_routed_experts"), ("n_shared_experts", "num_shared_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token")
_EXPERT_KEYS = {*_EXPERTS, *_SHARED, *_CHOSEN, "moe_intermediate_size", "shared_expert_intermediate_size"}
# Say which layers have experts, or how a shared one is mixed in.
_EXPERT_KEYS |= {"moe_layers", "interleave_moe_layer_step", "moe_layer_freq", "shared_moe_mode"}
_PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
_LISTS = ("layer_types", "no_rope_layers", "attn_type_list", "mlp_layer_types", "moe_layers", "mlp_only_layers")


class Uncountable(ValueError):
    """The FLOPs of this config are not known, and the message says why. They are null then, never a guess."""


class Shape(NamedTuple):
    width: int  # heads * (head_dim of queries and keys + head_dim of values)
    table: int  # vocabulary * hidden: the embedding's weights, and lm_head's
    reach: list[tuple[str, int]]  # one a layer: ("full", 0), ("window", tokens) or ("chunk", tokens)
    active: int  # weights of the layers a token goes through
    held: int  # weights of the layers, with all experts
    tied: bool | None  # lm_head is the embedding; None: the config does not say
    left_out: list[str]  # parts of the model that are none of the above


def read(config: dict) -> Shape:
    """Raises Uncountable, naming the key that is missing, wrong or of a kind that is not counted."""
    c = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    both = {**config, **c}
    for key in _LISTS:
        if not isinstance(both.get(key), list | None):
            raise Uncountable(f"{key}={both[key]!r}: a list is needed")
    if not isinstance(c.get("model_type"), str | None):
        raise Uncountable(f"model_type={c['model_type']!r}: a name is needed")
    for key in ("max_window_layers", "first_k_dense_replace"):
        if c.get(key) is not None and c[key] != 0:
            positive(c[key], key)
    _refuse_foreign(both, TYPES.get(c.get("model_type"), {}).get("knows", ()))
    kind = _kind(c)
    tied = [x["tie_word_embeddings"] for x in (config, c) if isinstance(x.get("tie_word_embeddings"), bool)]
    left_out = _left_out(config, c)
    c = ({"tie_word_embeddings": False} if c.get("model_type") else {}) | kind.get("default", {}) | c

    hidden, layers = size(c, "hidden_size", "n_embd"), size(c, "num_hidden_layers", "n_layer")
    heads = size(c, "num_attention_heads", "n_head")
    latent = "kv_lora_rank" in kind.get("knows", ())
    attention, width = (_latent if latent else _grouped)(c, hidden, heads)
    active, held = _mlps(c, kind, hidden, layers)
    return Shape(
        width=width,
        table=size(c, "vocab_size") * hidden,
        reach=_reach(c, kind["window"], layers),
        active=layers * attention + active,
        held=layers * attention + held,
        tied=tied[0] if tied else c.get("tie_word_embeddings"),
        left_out=left_out,
    )


def positive(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Uncountable(f"{name}={value!r}: a positive whole number is needed")
    return value


def size(config: dict, *keys: str) -> int:
    """The first of `keys` that the config sets: names of the same thing in different families."""
    for key in keys:
        if config.get(key) is not None:
            return positive(config[key], key)
    raise Uncountable(f"config has no {' or '.join(keys)}")


def _refuse_foreign(both: dict, knows: tuple[str, ...]) -> None:
    for keys, why in _REFUSED.items():
        for key in both:
            if both[key] and key not in knows and re.search(keys, key):
                raise Uncountable(f"{key}={both[key]!r}: {why}")
    if both.get("is_causal") is False or any(kind != 1 for kind in both.get("attn_type_list") or ()):
        raise Uncountable("is_causal=False or an attn_type_list of more than 1: no causal attention in every layer")


def _kind(c: dict) -> dict:
    name, act = c.get("model_type"), c.get("hidden_act", "silu")
    if name and name not in TYPES:
        raise Uncountable(f"model_type {name!r} is none of those whose count was checked: {' '.join(sorted(TYPES))}")
    if not name and "n_embd" not in c and act != "silu":
        raise Uncountable(f"hidden_act={act!r} without a model_type: the MLP may be gated or plain")
    if name:
        return TYPES[name]
    like = TYPES["gpt2" if "n_embd" in c else "qwen2" if "max_window_layers" in c else "mistral"]
    return {key: value for key, value in like.items() if key != "default"}


def _left_out(config: dict, c: dict) -> list[str]:
    parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    return [
        f"{part}: not counted, a step on text alone does not run that part"
        for part in parts
        if part not in ("text_config", "quantization_config")
    ] + [
        f"multi-token prediction ({key}={c[key]}): not counted, a step here does not run it"
        for key in _PREDICTORS
        if c.get(key)
    ]


def _grouped(c: dict, hidden: int, heads: int) -> tuple[int, int]:
    """Weights of one layer's attention, and its width, where groups of heads share keys and values."""
    if c.get("multi_query") is not None and not c.get("new_decoder_architecture"):  # Falcon
        kv_heads = 1 if c["multi_query"] else heads
    else:
        names = ("num_key_value_heads", "num_kv_heads")
        kv_heads = heads if all(c.get(name) is None for name in names) else size(c, *names)
    if heads % kv_heads:
        raise Uncountable(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if c.get("head_dim") is None and hidden % heads:
        raise Uncountable(f"config has no head_dim, and hidden_size / heads = {hidden} / {heads} is none")
    head_dim = hidden // heads if c.get("head_dim") is None else size(c, "head_dim")
    return 2 * hidden * head_dim * (heads + kv_heads), 2 * head_dim * heads  # q and o, k and v


def _latent(c: dict, hidden: int, heads: int) -> tuple[int, int]:
    """The same where queries, keys and values come out of a low rank, and one rotary key serves every head."""
    rank, rope = size(c, "kv_lora_rank"), size(c, "qk_rope_head_dim")
    nope, value = size(c, "qk_nope_head_dim"), size(c, "v_head_dim")
    queries = heads * (nope + rope)
    q = hidden * queries if c.get("q_lora_rank") is None else size(c, "q_lora_rank") * (hidden + queries)
    kv = hidden * (rank + rope) + rank * heads * (nope + value)
    return q + kv + heads * value * hidden, queries + heads * value


def _mlps(c: dict, kind: dict, hidden: int, layers: int) -> tuple[int, int]:
    """Weights of all layers' MLPs that a token goes through, and that are held."""
    sparse, mlp = _sparse_layers(c, layers), hidden * {"gated": 3, "plain": 2}[kind["mlp"]]
    active = held = 0
    if dense := layers - sparse:
        names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size")
        left_to_class = "wide" in kind and all(c.get(name) is None for name in names)
        active = held = dense * mlp * (kind["wide"] * hidden if left_to_class else size(c, *names))
    if sparse:
        experts, chosen = size(c, *_EXPERTS), size(c, *_CHOSEN)
        if any(c[key] != chosen for key in _CHOSEN if c.get(key) is not None):
            raise Uncountable(f"{' and '.join(_CHOSEN)} differ")
        if chosen > experts:
            raise Uncountable(f"num_experts_per_tok={chosen} of only {experts} experts")
        inner = size(c, "moe_intermediate_size", "intermediate_size")
        always = hidden * experts  # the router
        if c.get("shared_expert_intermediate_size"):
            always += mlp * size(c, "shared_expert_intermediate_size") + hidden  # with its one-column gate
        elif any(c.get(key) for key in _SHARED):
            always += mlp * size(c, *_SHARED) * inner
        active += sparse * (always + chosen * mlp * inner)
        held += sparse * (always + experts * mlp * inner)
    return active, held


def _reach(c: dict, rule: str, layers: int) -> list[tuple[str, int]]:
    """How far back each layer's queries look."""
    window = c.get("sliding_window") if c.get("use_sliding_window", True) else None
    kinds, full, local = c.get("layer_types"), "full_attention", "sliding_attention"
    if kinds is None and rule == "chunk":
        every = size(c, "no_rope_layer_interval")
        rotary = c.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]  # 1 where there is rotary
        kinds = ["chunked_attention" if x else full for x in rotary]
    elif kinds is None and (rule == "never" or window is None):
        kinds = [full] * layers
    elif kinds is None and rule == "pattern":
        every = size(c, "sliding_window_pattern")
        kinds = [local if (i + 1) % every else full for i in range(layers)]
    elif kinds is None:
        if rule == "listed" or (rule == "upper" and c.get("max_window_layers") is None):
            raise Uncountable("config does not say which layers have a window; transformers' AutoConfig fills that in")
        first = 0 if rule == "every" else c["max_window_layers"]
        kinds = [full if i < first else local for i in range(layers)]
    if len(kinds) != layers:
        raise Uncountable(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    known = {
        full: ("full", 0),
        local: ("window", window),
        "chunked_attention": ("chunk", c.get("attention_chunk_size")),
    }
    if unknown := sorted(set(map(str, kinds)) - set(known)):
        raise Uncountable(f"layer_types has {', '.join(unknown)}: only full and local attention are counted")
    for kind in {*kinds} - {full}:
        positive(known[kind][1], "sliding_window" if kind == local else "attention_chunk_size")
    return [known[kind] for kind in kinds]


def _sparse_layers(c: dict, layers: int) -> int:
    """How many layers have experts in place of one MLP. An expert key not known here is refused, not passed over."""
    found = {key for key, value in c.items() if re.search("expert|moe", key) and value is not None and key[0] != "_"}
    if strange := sorted(key for key in found - _EXPERT_KEYS if c[key]):
        raise Uncountable(f"keys of experts this module does not know: {', '.join(strange)}")
    if not found & set(_EXPERTS):
        if found & _EXPERT_KEYS:
            raise Uncountable(f"{', '.join(sorted(found))} without a number of experts")
        return 0
    if c.get("moe_layer_freq", 1) != 1:
        raise Uncountable(f"moe_layer_freq={c['moe_layer_freq']!r}: only experts in every layer are counted")
    if c.get("moe_layers") is not None:
        return sum(i in c["moe_layers"] for i in range(layers))
    if c.get("mlp_layer_types") is not None:
        kinds = c["mlp_layer_types"][:layers]
        if len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise Uncountable(
                f"mlp_layer_types names {', '.join(sorted({*kinds}))} for {len(kinds)} of {layers} layers"
            )
        return kinds.count("sparse")
    steps = [c[key] for key in ("decoder_sparse_step", "interleave_moe_layer_step") if key in c]
    first, step = c.get("first_k_dense_replace") or 0, positive(steps[0] if steps else 1, "decoder_sparse_step")
    return sum(i not in (c.get("mlp_only_layers") or ()) and (i + 1) % step == 0 for i in range(first, layers))
