"""harness.architectures against torch's own counter on real models, transformers' defaults and published totals.

python -m pytest -n 0 -s -k published tests/test_architectures.py      # prints the table of published configs
"""

import json
import math
from pathlib import Path

import pytest

from harness import architectures, flops
from tests.test_flops import SMALL

PUBLISHED = json.loads((Path(__file__).parent / "data" / "model_configs.json").read_text(encoding="utf-8"))
COUNTED = [name for name in PUBLISHED if "refused" not in PUBLISHED[name]]

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"num_key_value_heads": 4}
ROUTED = {**MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
WINDOW = {"sliding_window": 7}
UPPER = {**WINDOW, "use_sliding_window": True, "max_window_layers": 3}
SPECIAL = {
    "mistral": WINDOW,
    "mixtral": {**EXPERTS, **WINDOW},
    "qwen2": UPPER,
    "qwen3": {**UPPER, "head_dim": 32, "max_window_layers": 1},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "granitemoe": EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**EXPERTS, **WINDOW, "head_dim": 32},
    "minimax_m2": {**EXPERTS, "head_dim": 24},
    "glm4_moe": {**ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots1": {**ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 3},
    "gemma2": {**WINDOW, "head_dim": 24},
    "gemma3_text": {**WINDOW, "head_dim": 24, "num_hidden_layers": 7},
    **dict.fromkeys(("cohere2", "exaone4", "ministral3", "olmo3", "phi3", "starcoder2"), WINDOW),
    "deepseek_v2": {**LATENT, **ROUTED, "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, **ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "glm4_moe_lite": {**LATENT, **ROUTED, "n_shared_experts": 1},
    "youtu": LATENT,
    "llama4_text": {**EXPERTS, "head_dim": 24, "attention_chunk_size": 7, "intermediate_size_mlp": 80},
    "qwen2_vl_text": UPPER,
    "qwen2_5_vl_text": UPPER,
    "qwen3_vl_text": {"head_dim": 24},
    "qwen3_vl_moe_text": {**MOE, "num_experts": 4, "head_dim": 24, "decoder_sparse_step": 2},
    "falcon": {"num_hidden_layers": 2},
}
SPECIAL["llama4_text"] |= {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1}
NO_WINDOW = "bitnet cohere ernie4_5 gemma glm glm4 granite llama olmo olmo2 seed_oss smollm3 stablelm apertus arcee"
NO_WINDOW += " gpt2 gpt_neox nemotron phi"
SAME_CLASS = {"kimi_k2": "deepseek_v3", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
VISION = {"hidden_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32}
MROPE = {16: [2, 3, 3], 24: [4, 4, 4]}  # halves of head_dim, in three
VISION |= {"deepstack_visual_indexes": [0]}


def build(config, attention="watched"):
    """A real model with random weights of a text config, as transformers completes it, and that config as a dict."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **config}
    name, auto = SAME_CLASS.get(text.pop("model_type"), config["model_type"]), AutoModelForCausalLM
    if "_vl_" in name and name.endswith("_text"):  # there is no text model alone
        auto, vision = AutoModelForImageTextToText, {**VISION, "out_hidden_size": 64}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": MROPE[text.get("head_dim", 16)]}
        text = {"text_config": {**text, "rope_parameters": rope}, "vision_config": vision}
        name = name.removesuffix("_text")
    full = AutoConfig.for_model(name, **text)
    options = {"attn_implementation": "eager" if name == "falcon" else attention, "experts_implementation": "eager"}
    return auto.from_config(full, **options).train(), full.to_dict()


def small_model(model_type):
    shape = dict(SMALL) if model_type in SPECIAL else {**SMALL, "num_hidden_layers": 2}
    if model_type == "gpt2":
        shape = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160, "n_positions": 64}
    if model_type in ("gpt_neox", "falcon"):  # know no grouped heads by that key
        del shape["num_key_value_heads"]
    if model_type == "falcon":
        del shape["intermediate_size"]
    return build({"model_type": model_type, **shape, **SPECIAL.get(model_type, {})})


@pytest.fixture(scope="module")
def masks():
    """Registers "watched": each model's own eager attention, noting the pairs its mask allows, a layer at a time."""
    pytest.importorskip("transformers")
    import sys

    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: threads only wait for each other
    seen = []

    def watched(module, query, key, value, attention_mask, **kwargs):
        seen.append(int((attention_mask[0, 0] == 0).sum()))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("watched", watched)
    ALL_MASK_ATTENTION_FUNCTIONS.register("watched", eager_mask)
    yield seen
    torch.set_num_threads(threads)


def torch_count(model, config, masks, batch, seq_len, doc_len):
    """(dense, attention) FLOPs of a real forward and backward, and the pairs its masks allow, summed over layers.

    In eager attention the two products of a layer are `bmm`, everything with weights is `mm` or `addmm`. The rotary
    embedding makes its angles with a bmm, which is no model FLOP: its own module's count is taken off. Llama 4's
    class runs every expert on every token, most of them on zeros, and as a bmm: the chosen ones' part is dense.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(3, 160, (batch, seq_len))
    positions = torch.tensor([[i % doc_len for i in range(seq_len)]] * batch)
    masks.clear()
    for module in model.modules():
        if type(module).__name__ == "FalconAttention":  # has no attention to register
            module.register_forward_pre_hook(
                lambda _, args, kwargs: masks.append(int((kwargs["attention_mask"][0, 0] == 0).sum())), with_kwargs=True
            )
    with FlopCounterMode(display=False, depth=None) as counter:
        model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for module, ops in counts.items() if module.endswith("rotary_emb"))
    experts = sum(
        n for name, ops in counts.items() if name.endswith(".experts") for op, n in ops.items() if "bmm" in str(op)
    )
    bmm = sum(n for op, n in counts["Global"].items() if "bmm" in str(op))
    chosen = config["num_experts_per_tok"] / config["num_local_experts"] if experts else 0
    return counter.get_total_flops() - bmm + experts * chosen, bmm - experts - rotary, sum(masks)


def cut(seq_len, doc_len, chunk):
    """Lengths of what lies between the ends of documents and chunks, a token at a time."""
    ends = [i for i in range(1, seq_len + 1) if i == seq_len or i % doc_len == 0 or i % chunk == 0]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def ratios(model, config, raw, masks, doc_len, batch=2, seq_len=24):
    """Ours over torch's: dense, attention."""
    text = config.get("text_config") or config
    theirs_dense, square, allowed = torch_count(model, text, masks, batch, seq_len, doc_len)
    ours = flops.count(raw, seq_len, batch, doc_len=doc_len)

    # torch counts the whole square of every layer; the mask says how much of it is left. An area leaves out half
    # of the diagonal of a triangle; of a window's band it leaves out half of the shorter side.
    documents = cut(seq_len, doc_len, seq_len)
    window, chunk = text.get("sliding_window") or math.inf, text.get("attention_chunk_size")
    half_diagonals = 0
    for mask in masks:
        whole = sum(n * (n + 1) // 2 for n in documents)
        local = mask < whole
        pieces = cut(seq_len, doc_len, chunk) if local and chunk else documents
        half_diagonals += sum(min(n, window if local and not chunk else n) / 2 for n in pieces)
    theirs_attention = square * (allowed - half_diagonals) / (len(masks) * seq_len**2)
    return ours.dense_tflop * 1e12 / theirs_dense, ours.attention_tflop * 1e12 / theirs_attention


def exactly_one():
    return pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("model_type", [*SPECIAL, *NO_WINDOW.split()])
def test_equal_to_torch_counter(model_type, masks):
    model, config = small_model(model_type)
    for doc_len in (24, 10):
        # The masks of these never see plain position ids: their eager attention would cross documents.
        across = model_type in ("gpt_oss", "falcon") or "_vl_" in model_type
        if doc_len < 24 and (across or model_type not in {*SPECIAL, "llama"}):
            continue
        assert ratios(model, config, config, masks, doc_len) == (exactly_one(), exactly_one())
        special = SPECIAL.get(model_type, {})
        local = any(special.get(key) for key in ("sliding_window", "attention_chunk_size"))
        assert local == (min(masks) < sum(n * (n + 1) // 2 for n in cut(24, doc_len, 24)))


@pytest.mark.parametrize("change", [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": False}])
def test_the_other_falcons(change, masks):
    raw = {key: value for key, value in SMALL.items() if key not in ("intermediate_size", "num_key_value_heads")}
    raw |= {"model_type": "falcon", "alibi": False, "num_hidden_layers": 2, **change}
    model, config = build(raw)
    assert ratios(model, config, raw, masks, 24) == (exactly_one(), exactly_one())


def test_every_counted_type_is_held_against_torch():
    assert {*SPECIAL, *NO_WINDOW.split(), *SAME_CLASS} == set(architectures.TYPES)


@pytest.mark.parametrize("model_type", sorted({*architectures.TYPES} - {*SAME_CLASS}))
def test_a_key_left_out_is_what_transformers_fills_in(model_type):
    """Or it is refused: it is never counted as something else."""
    transformers = pytest.importorskip("transformers")
    given = {"model_type": model_type, **SMALL, "num_hidden_layers": 8, **SPECIAL.get(model_type, {})}
    if model_type == "gpt2":
        given = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160}
    counted = 0
    for key in [None, *sorted({*given} - {"model_type"})]:
        raw = {k: v for k, v in given.items() if k != key} | {"pad_token_id": 0}
        full = transformers.AutoConfig.for_model(**raw).to_dict()
        try:
            ours = flops.count(raw, 64), flops.parameters(raw)
        except flops.Uncountable as reason:
            assert key, reason
            continue
        tied = {} if "tie_word_embeddings" in full else {"tie_word_embeddings": False}  # the wrapper decides
        assert ours == (flops.count(full, 64), flops.parameters({**full, **tied})), key
        counted += 1
    assert counted


# --- configs as their model pages have them ---------------------------------------------------------------------


def text_of(config):
    return config.get("text_config") or config


SMALLER = {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 80, "moe_intermediate_size": 32}
SMALLER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 4}
SMALLER |= {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "n_group": 1}
SMALLER |= {"topk_group": 1, **LATENT, **WINDOW, "attention_chunk_size": 7, "num_hidden_layers": 8, "vocab_size": 512}


def smaller(config):
    """The same config with small sizes: every key that it has, and no other."""
    shrunk = {key: SMALLER.get(key, value) if value else value for key, value in config.items()}
    shrunk = {key: value[:8] if key in ("layer_types", "attn_type_list") else value for key, value in shrunk.items()}
    if "kv_lora_rank" in config:
        shrunk["num_key_value_heads"] = 4
    return {k: v for k, v in shrunk.items() if not k.endswith("token_id") and k not in ("quantization_config",)}


@pytest.mark.parametrize("name", COUNTED)
def test_published_parameters(name):
    """Within 1 % of what is published, beside the parts the fixture says are in that figure and not in ours."""
    row = PUBLISHED[name]
    ours = flops.parameters(row["config"]) + sum(row.get("beside", {}).values())
    assert ours == pytest.approx(row["published"], rel=0.01)
    print(f"\n{name}: {ours / 1e9:.2f} of {row['published'] / 1e9:.2f} x 10^9 ({ours / row['published']:.4f})", end="")


@pytest.mark.parametrize("name", COUNTED)
def test_published_config_against_torch_counter(name, masks):
    """The page's own file, with small sizes, read raw; and as transformers completes the whole of it."""
    config = PUBLISHED[name]["config"]
    wrapped = "text_config" in config
    text = smaller(text_of(config))
    raw = {**config, "text_config": text} if wrapped else {**config, **text}
    raw = {key: value for key, value in raw.items() if wrapped or key in text}
    build_from = {key: value for key, value in text.items() if key not in ("vision_config", "attn_type_list")}
    model, full = build(build_from)
    dense, attention = ratios(model, full, raw, masks, 24)
    print(f"\n{name}: FlopCounterMode ratio dense {dense:.6f} attention {attention:.6f}", end="")
    assert (dense, attention) == (exactly_one(), exactly_one())


@pytest.mark.parametrize("name", COUNTED)
def test_published_config_builds_and_counts_the_same(name):
    """Completed by transformers it counts the same, and the model built of it has these weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = PUBLISHED[name]["config"]
    asked = {k: v for k, v in raw.items() if k != "quantization_config"}
    config = transformers.AutoConfig.for_model(
        **{**asked, "model_type": {"kimi_k2": "deepseek_v3"}.get(raw["model_type"], raw["model_type"])}
    )
    full = config.to_dict()
    for seq_len in (512, 65536):
        assert flops.count(full, seq_len) == flops.count(raw, seq_len)
    assert flops.parameters(full) == flops.parameters(raw)
    assert [s.split(":")[0] for s in flops.left_out(raw) if "vision" in s] == ["vision_config"] * (
        "vision_config" in raw
    )
    auto = transformers.AutoModelForImageTextToText if "vision_config" in raw else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    weights = {k: p.numel() for k, p in model.named_parameters() if p.dim() > 1 and not k.endswith("bias")}
    beside = sum(n for k, n in weights.items() if "vis" in k or "multi_modal" in k)
    assert flops.parameters(raw) == sum(weights.values()) - beside


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "refused" in PUBLISHED[name]])
def test_published_config_refused_with_the_reason(name):
    with pytest.raises(flops.Uncountable, match=PUBLISHED[name]["refused"]) as refused:
        flops.count(PUBLISHED[name]["config"], 8192)
    print(f"\n{name}: refused, {refused.value}", end="")


def test_what_is_left_out_is_named():
    def named(model):
        return [part.split(":")[0] for part in flops.left_out(PUBLISHED[model]["config"])]

    assert named("deepseek-ai/DeepSeek-V3") == ["multi-token prediction (num_nextn_predict_layers=1)"]
    assert named("MiniMaxAI/MiniMax-M2") == ["multi-token prediction (num_mtp_modules=3)"]
    assert named("moonshotai/Kimi-K2-Instruct") == named("openai/gpt-oss-20b") == []
    assert named("google/gemma-3-27b-it") == ["vision_config"]
