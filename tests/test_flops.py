"""harness.flops against torch's own counter on real models, published totals, and cases worked out by hand."""

import math

import pytest

from harness import flops

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
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"]}, "chunked"),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"linear_num_value_heads": 4}, "linear_num_value_heads"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"q_lora_rank": 1536}, "q_lora_rank"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"is_causal": False}, "is_causal"),
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "gemma2", "head_dim": 16}, "which layers have a window"),
        ({"model_type": "qwen3"}, "head_dim"),
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


# --- torch's counter on real models -----------------------------------------------------------------------------

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPECIAL = {
    "mistral": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    "qwen3": {"head_dim": 32, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 7},
    "glm4_moe": {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots1": {**MOE, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 3},
    "gemma2": {"sliding_window": 7, "head_dim": 24},
    "gemma3_text": {"sliding_window": 7, "head_dim": 24, "num_hidden_layers": 7},
    **{name: {"sliding_window": 7} for name in ("cohere2", "exaone4", "ministral3", "olmo3", "phi3", "starcoder2")},
}
SPECIAL["glm4_moe"] |= {"n_group": 1, "topk_group": 1}
SPECIAL["dots1"] |= {"n_group": 1, "topk_group": 1}
NO_WINDOW = (
    "bitnet cohere ernie4_5 gemma glm glm4 granite llama olmo olmo2 seed_oss smollm3 stablelm apertus arcee gpt2 "
)
NO_WINDOW += "gpt_neox nemotron phi"


def small_model(model_type):
    """A real model of this type, random weights, and its config as transformers completes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(SMALL) if model_type in SPECIAL else {**SMALL, "num_hidden_layers": 2}
    if model_type == "gpt2":
        shape = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160, "n_positions": 64}
    if model_type == "gpt_neox":  # knows no grouped heads
        del shape["num_key_value_heads"]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{**shape, **tokens, **SPECIAL.get(model_type, {})})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="watched", experts_implementation="eager")
    return model.train(), config.to_dict()


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


def torch_count(model, masks, batch, seq_len, doc_len):
    """(dense, attention) FLOPs of a real forward and backward, and the pairs its masks allow, summed over layers.

    In eager attention the two products of a layer are `bmm`, everything with weights is `mm` or `addmm`. The rotary
    embedding makes its angles with a bmm, which is no model FLOP: its own module's count is taken off.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(3, 160, (batch, seq_len))
    positions = torch.tensor([[i % doc_len for i in range(seq_len)]] * batch)
    masks.clear()
    with FlopCounterMode(display=False, depth=None) as counter:
        model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for module, ops in counts.items() if module.endswith("rotary_emb"))
    bmm = sum(n for op, n in counts["Global"].items() if "bmm" in str(op))
    return counter.get_total_flops() - bmm, bmm - rotary, sum(masks)


@pytest.mark.parametrize("model_type", [*SPECIAL, *NO_WINDOW.split()])
def test_equal_to_torch_counter(model_type, masks):
    model, config = small_model(model_type)
    batch, seq_len = 2, 24
    window = SPECIAL.get(model_type, {}).get("sliding_window", math.inf)
    for documents in ([24], [10, 10, 4]):
        if len(documents) > 1 and (model_type == "gpt_oss" or model_type not in {*SPECIAL, "llama"}):
            continue  # GPT-OSS's masks never see the position ids: its eager attention would cross documents
        theirs_dense, square, allowed = torch_count(model, masks, batch, seq_len, documents[0])
        ours = flops.count(config, seq_len, batch, doc_len=documents[0])
        assert round(ours.dense_tflop * 1e12) == theirs_dense

        # torch counts the whole square of every layer; the mask says how much of it is left. An area leaves out half
        # of the diagonal of a triangle; of a window's band it leaves out half of the shorter side.
        windowed = [m < sum(n * (n + 1) // 2 for n in documents) for m in masks]
        half_diagonals = sum(min(n, window if w else n) / 2 for w in windowed for n in documents)
        theirs_attention = square * (allowed - half_diagonals) / (len(masks) * seq_len**2)
        assert ours.attention_tflop * 1e12 == pytest.approx(theirs_attention, rel=1e-12)
        assert any(windowed) == (window < documents[0])


def test_every_counted_type_is_held_against_torch():
    assert {*SPECIAL, *NO_WINDOW.split()} == set(flops._TYPES)


def test_a_type_with_its_own_head_dim_is_not_guessed(masks):
    """A config class that fills in a head_dim other than hidden / heads must be refused without one."""
    from transformers import AutoConfig

    for model_type in sorted(set(flops._TYPES) - {"gpt2", "gpt_neox"}):
        odd = {**SMALL, "hidden_size": 72, "num_attention_heads": 4}
        config = AutoConfig.for_model(model_type, **odd, pad_token_id=0).to_dict()
        if config.get("head_dim") not in (None, 18):
            assert model_type in flops._OWN_HEAD_DIM, model_type
