"""harness.flops against torch's own counter on real models, published totals, and cases worked out by hand."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness import flops
from harness.architectures import TYPES

LLAMA_8B = flops.shape("llama-3.1-8b")
# The smallest config with every key that matters: h=64, 4 heads of 16 over 2 kv heads, MLP 96, vocabulary 160.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
ARCHITECTURE_KEYS = [
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "no_rope_layers", "attention_chunk_size", "attn_type_list", "multi_query", "new_decoder_architecture",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts",
    "num_experts_per_tok", "experts_per_token", "moe_intermediate_size", "n_shared_experts", "moe_layers",
    "mlp_layer_types", "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq",
]  # fmt: skip
SMALL_DENSE = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 160 * 64  # weights in matmuls, by hand


def dense(config, tokens=1000, **kwargs):
    """Weights a token goes through, out of the dense count."""
    return round(flops.count(config, tokens, **kwargs).dense_tflop * 1e12 / (6 * tokens))


def pairs(config, seq_len, doc_len=None):
    """Query-key pairs summed over SMALL's layers, out of the attention count."""
    return flops.count(config, seq_len, doc_len=doc_len).attention_tflop * 1e12 / (12 * 64)


# --- published figures and cases worked out by hand -------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_len", "total", "share"),
    [
        (8192, 421.6, 12.5),
        (32768, 2319.9, 36.4),
        (65536, 6328.7, 53.4),
        (131072, 19412.7, 69.6),
        (196608, 39252.2, 77.4),
        (262144, 65847.0, 82.1),
    ],
)
def test_published_totals_and_shares(seq_len, total, share):
    c = flops.count(LLAMA_8B, seq_len)
    assert round(c.total_tflop, 1) == total
    assert round(100 * c.attention_share, 1) == share


def test_head_dim_is_not_hidden_over_heads():  # case 29
    config = {**SMALL, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config |= {"num_hidden_layers": 36, "intermediate_size": 9728, "vocab_size": 151936}
    naive = {**config, "head_dim": 2560 // 32}
    for seq_len, ratio in ((131072, 1.48), (8192, 1.18)):
        right, wrong = flops.count(config, seq_len), flops.count(naive, seq_len)
        assert round(right.total_tflop / wrong.total_tflop, 2) == ratio


def test_head_dim_absent_or_null_is_derived():  # case 30
    derived = flops.count({**SMALL, "head_dim": 16}, 100)
    assert flops.count(SMALL, 100) == flops.count({**SMALL, "head_dim": None}, 100) == derived
    assert flops.count({**SMALL, "model_type": "llama", "head_dim": None}, 100) == derived
    with pytest.raises(flops.Uncountable, match="head_dim"):
        flops.count({**SMALL, "num_attention_heads": 6}, 100)


def test_causal_factor_is_six():  # case 32: twelve would give 1.13x at 8k and 1.82x at 256k
    for seq_len, ratio in ((8192, 1.13), (262144, 1.82)):
        c = flops.count(LLAMA_8B, seq_len)
        assert c.attention_tflop == pytest.approx(6 * seq_len**2 * 128 * 32 * 32 / 1e12)
        assert (2 * c.attention_tflop + c.dense_tflop) / c.total_tflop == pytest.approx(ratio, abs=0.006)
    assert "6*s^2" in flops.CONVENTION and "recompute not counted" in flops.CONVENTION


def test_lm_head_once_whatever_the_tying_and_look_up_free():  # case 33
    tied, untied = ({**LLAMA_8B, "tie_word_embeddings": t} for t in (True, False))
    assert flops.count(tied, 8192) == flops.count(untied, 8192)
    assert round(flops.count(LLAMA_8B, 8192).dense_tflop, 1) == 368.9  # 394.7 with the table counted twice
    assert flops.parameters(untied) - flops.parameters(tied) == 128256 * 4096


def test_active_experts_only():  # case 34
    config = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    config |= {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    config |= {"head_dim": 128, "vocab_size": 151936}
    assert round(flops.count(config, 8192).total_tflop, 1) == 228.7
    assert round(flops.count({**config, "num_experts_per_tok": 128}, 8192).total_tflop, 1) == 1564.6
    mixtral = {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}
    router, expert = 64 * 8, 3 * 64 * 96
    assert dense(mixtral) == SMALL_DENSE + 4 * (router + expert)  # two experts where SMALL has one MLP


@pytest.mark.parametrize("experts", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_expert_keys_shared_experts_and_dense_layers(experts):  # case 34
    moe = {**SMALL, experts: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    router, expert, mlp = 64 * 6, 3 * 64 * 32, 3 * 64 * 96
    attention = SMALL_DENSE - 4 * mlp
    assert dense(moe) == attention + 4 * (router + 2 * expert)
    assert dense({**moe, "n_shared_experts": 2}) == attention + 4 * (router + 4 * expert)
    shared = {**moe, "shared_expert_intermediate_size": 40}
    assert dense(shared) == attention + 4 * (router + 2 * expert + 3 * 64 * 40 + 64)
    three = attention + 3 * (router + 2 * expert) + mlp
    assert dense({**moe, "first_k_dense_replace": 1}) == dense({**moe, "mlp_only_layers": [2]}) == three
    assert dense({**moe, "decoder_sparse_step": 2}) == attention + 2 * (router + 2 * expert) + 2 * mlp


def test_packed_documents():  # case 39
    whole, packed = flops.count(LLAMA_8B, 262144), flops.count(LLAMA_8B, 262144, doc_len=8192)
    assert whole.attention_tflop / packed.attention_tflop == pytest.approx(32)
    assert packed.dense_tflop == whole.dense_tflop
    assert packed.attention_share == pytest.approx(flops.count(LLAMA_8B, 8192).attention_share)
    assert pairs(SMALL, 100, doc_len=30) == pytest.approx(4 * (3 * 30**2 + 10**2) / 2)  # the last one is shorter
    assert flops.count(SMALL, 100, doc_len=100) == flops.count(SMALL, 100, doc_len=500) == flops.count(SMALL, 100)


def test_windows():
    band = 100 * 30 - 30**2 / 2
    every = {**SMALL, "sliding_window": 30}
    assert pairs(every, 100) == pytest.approx(4 * band)
    assert pairs({**every, "model_type": "mistral"}, 100) == pytest.approx(4 * band)
    assert pairs({**every, "sliding_window": None}, 100) == pytest.approx(4 * 100**2 / 2)
    assert pairs(every, 30) == pytest.approx(4 * 30**2 / 2)  # a window as long as the text is no window
    assert pairs(every, 100, doc_len=40) == pytest.approx(4 * (2 * (40 * 30 - 450) + 20**2 / 2))
    listed = {**every, "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]}
    assert pairs(listed, 100) == pytest.approx(band + 3 * 100**2 / 2)
    upper = {**every, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}
    assert pairs(upper, 100) == pairs(listed, 100)
    assert pairs({**upper, "use_sliding_window": False}, 100) == pairs(SMALL, 100)


def test_chunks():
    layers = ["chunked_attention"] * 3 + ["full_attention"]
    chunks = {**SMALL, "model_type": "llama4_text", "head_dim": 16, "layer_types": layers, "attention_chunk_size": 30}
    chunks |= {"num_local_experts": 4, "num_experts_per_tok": 1}
    assert pairs(chunks, 100) == pytest.approx(3 * (3 * 30**2 + 10**2) / 2 + 100**2 / 2)
    # documents end at 40 and 80, chunks at 30, 60 and 90
    pieces = sum(n**2 for n in (30, 10, 20, 20, 10, 10)) / 2
    assert pairs(chunks, 100, doc_len=40) == pytest.approx(3 * pieces + (40**2 + 40**2 + 20**2) / 2)
    del chunks["layer_types"]  # every fourth layer has no rotary positions, and sees everything
    assert pairs(chunks, 100) == pytest.approx(3 * (3 * 30**2 + 10**2) / 2 + 100**2 / 2)


def test_latent_attention():
    latent = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5}
    config = {**SMALL, "model_type": "youtu", **latent}
    q, kv, o = 64 * 12 + 12 * 4 * 8, 64 * (10 + 2) + 10 * 4 * (6 + 5), 4 * 5 * 64
    assert dense(config) == 4 * (q + kv + o + 3 * 64 * 96) + 160 * 64
    assert dense({**config, "q_lora_rank": None}) == dense(config) + 4 * (64 * 4 * 8 - 64 * 12 - 12 * 4 * 8)
    # forward 2 * pairs * (8 + 5) a head, backward twice that
    assert flops.count(config, 100).attention_tflop * 1e12 == pytest.approx(4 * 6 * (100**2 / 2) * (8 + 5) * 4)


def test_batch_text_part_and_plain_mlp():
    assert flops.count(SMALL, 64, batch_size=3).total_tflop == pytest.approx(3 * flops.count(SMALL, 64).total_tflop)
    nested = {"model_type": "llava", "vision_config": {"hidden_size": 8}, "text_config": SMALL}
    assert flops.count(nested, 64) == flops.count(SMALL, 64)
    gpt2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": None, "vocab_size": 160}
    assert dense(gpt2) == 4 * (4 * 64 * 64 + 2 * 64 * 256) + 160 * 64
    assert dense({**gpt2, "n_inner": 96}) == 4 * (4 * 64 * 64 + 2 * 64 * 96) + 160 * 64


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (
            {"layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"]},
            "attention_chunk_size",
        ),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"linear_num_value_heads": 4}, "linear_num_value_heads"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"q_lora_rank": 1536}, "q_lora_rank"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"is_causal": False}, "is_causal"),
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 7}, "which layers have a window"),
        ({"model_type": "llama", "attention_chunk_size": 8}, "attention_chunk_size"),
        ({"model_type": "llama", "v_head_dim": 8}, "v_head_dim"),
        ({"attn_type_list": [1, 1, 0, 1]}, "attn_type_list"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16}, "qk_rope_head_dim"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 1}, "differ"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({"hidden_act": "gelu"}, "gated or plain"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"intermediate_size": [96, 96]}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_experts": 0, "num_experts_per_tok": 2}, "num_experts"),
        ({"num_experts": 8}, "num_experts_per_tok"),
        ({"num_experts": 2, "num_experts_per_tok": 4}, "only 2"),
        ({"moe_intermediate_size": 32}, "number of experts"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_num_shared_experts": 2}, "moe_num_shared_experts"),
    ],
)
def test_refused_with_the_reason(change, reason):
    with pytest.raises(flops.Uncountable, match=reason):
        flops.count({**SMALL, **change}, 64)


KEYS = sorted(
    {*SMALL, "head_dim", "model_type", "hidden_act", "text_config", "tie_word_embeddings", *ARCHITECTURE_KEYS}
)
JUNK = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.sampled_from(sorted(TYPES))
JUNK |= st.lists(st.sampled_from(["full_attention", "sliding_attention", "sparse", 0, 1, None]), max_size=4)
JUNK |= st.dictionaries(st.sampled_from(sorted(SMALL)), st.integers(1, 4))


@given(st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=6))
@example({"layer_types": 5})
@example({"model_type": ["llama"]})
@example({"max_window_layers": "3", "sliding_window": 4})
@example({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3})
@settings(deadline=None)
def test_a_config_of_anything_is_counted_or_refused(change):
    try:
        counted = flops.count({**SMALL, **change}, 16)
    except flops.Uncountable:
        return
    assert counted.total_tflop > 0


@pytest.mark.parametrize("key", [k for k in SMALL if k != "num_key_value_heads"])
def test_a_missing_key_is_refused(key):  # case 37: nothing is ever counted as zero
    with pytest.raises(flops.Uncountable, match=key):
        flops.count({k: v for k, v in SMALL.items() if k != key}, 64)


@pytest.mark.parametrize("lengths", [{"seq_len": 0}, {"seq_len": 8, "batch_size": 0}, {"seq_len": 8, "doc_len": -8}])
def test_wrong_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="positive"):
        flops.count(SMALL, **lengths)


# --- shipped shapes ---------------------------------------------------------------------------------------------

PUBLISHED_PARAMETERS = {  # from each model's card, in 10^9
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "qwen3-8b": 8.19,
    "mistral-7b": 7.24,
    "qwen3-30b-a3b": 30.53,
}


def test_shipped_shapes_are_the_published_models():
    assert {n: round(flops.parameters(flops.shape(n)) / 1e9, 2) for n in PUBLISHED_PARAMETERS} == PUBLISHED_PARAMETERS
    assert set(flops.shapes()) == {*PUBLISHED_PARAMETERS, "tiny"}
    flops.shape("tiny")["hidden_size"] = 0
    assert flops.shape("tiny")["hidden_size"] > 0  # a copy
    with pytest.raises(KeyError, match="tiny"):
        flops.shape("gpt-5")


@pytest.mark.parametrize("name", flops.shapes())
def test_shipped_shapes_build_and_count_the_same(name):
    """The config as transformers completes it gives the same count, and the model it builds has these weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = flops.shape(name)
    config = transformers.AutoConfig.for_model(**raw)
    for seq_len in (512, 8192):
        assert flops.count(config.to_dict(), seq_len) == flops.count(raw, seq_len)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert flops.parameters(raw) == sum(p.numel() for p in model.parameters() if p.dim() > 1)
