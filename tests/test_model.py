"""Where a model comes from, what is refused, and what its notes say, on this CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers

from harness import flops
from harness.measure import attention, model
from harness.measure.settings import Settings
from tests.conftest import ROOT, environment

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 128,
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}  # fmt: skip


def settings(**more) -> Settings:
    return Settings(_cli_parse_args=[], **({"recipe": "short-context", "seq_len": 64} | more)).resolve(False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(TINY))
    return tmp_path / "small"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache; cache(weights) puts Llama-3.1-8B there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("DATA_FAST", raising=False)
    hub_id = flops.hub_id("llama-3.1-8b")

    def fill(*files: str):
        home = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("abc")
        snapshot = home / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for name in files:
            (snapshot / name).write_text("{}")
        return snapshot

    return fill


def test_weights_in_the_cache_are_found_and_half_a_download_is_not(cache):
    hub_id = flops.hub_id("llama-3.1-8b")
    assert model.cached_weights(hub_id) is None
    snapshot = cache("config.json")
    assert model.cached_weights(hub_id) is None  # no weights among it
    (snapshot / "model-00001-of-00004.safetensors").write_text("")
    assert model.cached_weights(hub_id) == str(snapshot)
    assert model.hf_config(settings(model="llama-3.1-8b"))[1] == str(snapshot)
    assert model.hf_config(settings(model="llama-3.1-8b", weights="random"))[1] is None
    assert model.cached_weights(None) is None  # a shape that no hub has


def test_fast_local_disk_comes_first(cache, tmp_path, monkeypatch):
    cache("model.safetensors")
    staged = tmp_path / "fast" / flops.hub_id("llama-3.1-8b")
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_text("")
    monkeypatch.setenv("DATA_FAST", str(tmp_path / "fast"))
    assert model.cached_weights(flops.hub_id("llama-3.1-8b")) == str(staged)


def test_real_weights_that_are_not_here_say_how_to_get_them(cache):
    with pytest.raises(model.ModelUnavailable, match="hf download meta-llama/Llama-3.1-8B"):
        model.hf_config(settings(model="llama-3.1-8b", weights="real"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "./nowhere"}, r"MODEL=\./nowhere: no such folder"),
        ({"model": "tiny", "num_layers": 99}, "NUM_LAYERS=99: tiny has 4"),
    ],
)
def test_what_cannot_be_is_refused(asked, said):
    with pytest.raises(model.ModelUnavailable, match=said):
        model.hf_config(settings(**asked))


def test_a_folder_without_a_config_or_without_weights(folder, tmp_path):
    with pytest.raises(model.ModelUnavailable, match="MODEL="):
        (tmp_path / "empty").mkdir()
        model.hf_config(settings(model=str(tmp_path / "empty")))
    assert model.hf_config(settings(model=str(folder)))[1] is None  # auto: random
    with pytest.raises(model.ModelUnavailable, match="MODEL=.*small"):
        model.build(settings(model=str(folder), weights="real"), "sdpa", "cpu", None)


def test_fewer_layers_have_fewer_layer_types():
    config, _ = model.hf_config(settings(model="qwen3-8b", num_layers=3, weights="random"))
    assert (config.num_hidden_layers, len(config.layer_types)) == (3, 3)
    assert config.use_cache is False


def test_notes_of_a_built_model(folder):
    built = model.build(settings(model=str(folder), seq_len=256), "sdpa", "cpu", None)
    assert built.record.weights == "random" and built.record.parameters == sum(
        p.numel() for p in built.model.parameters()
    )
    assert any("256 tokens exceed the 128" in note for note in built.notes)
    assert any("random weights" in note for note in built.notes)
    assert built.record.name == "small" and built.record.uncounted is None
    unknown = built.record.config | {"layer_types": ["some_new_attention"] * 2}
    assert "some_new_attention" in model.counted(unknown)["uncounted"]


SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
          "num_hidden_layers": 1, "patch_size": 14, "image_size": 28}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
GEMMA = {key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
GEMMA |= {"model_type": "gemma3_text", "vocab_size": 64, "sliding_window": 8, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        ({"model_type": "gemma3", "text_config": GEMMA, "vision_config": SIGLIP}, "vision_config"),
        ({**TINY, "model_type": "qwen2_5_vl", "vision_config": QWEN_VISION, "pad_token_id": 0,
          "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "vision_config"),
        ({**TINY, "model_type": "deepseek_v3", "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": None,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1,
          "num_experts_per_tok": 2, "topk_group": 1, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1,
          "moe_intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, "multi-token"),
    ],
)  # fmt: skip
def test_a_page_s_config_builds_trains_and_says_what_is_not_counted(config, left_out, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "architectures"}))
    asked = settings(model=str(tmp_path), weights="random")
    built = model.build(asked, "sdpa", "cpu", None)
    ids = torch.arange(32)[None]
    built.model(input_ids=ids, labels=ids, position_ids=ids, use_cache=False).loss.backward()
    described = built.record
    assert described.uncounted is None and [part.split(" ")[0].rstrip(":") for part in described.left_out] == [left_out]
    assert flops.count(described.config, 64) == flops.count(config, 64)


def test_another_attention_than_asked_for_is_refused(folder, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "sdpa", "eager")
    original = transformers.AutoModelForCausalLM.from_config
    replaced = lambda config, **options: original(config, **(options | {"attn_implementation": "sdpa"}))  # noqa: E731
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", replaced)
    with pytest.raises(attention.AttentionUnavailable, match="the model uses sdpa") as raised:
        model.build(settings(model=str(folder)), "sdpa", "cpu", None)
    assert raised.value.kind == "attn_mismatch"


def test_a_model_without_parameters_is_refused(folder, monkeypatch):
    empty = torch.nn.Identity()
    empty.config = transformers.AutoConfig.for_model("llama", attn_implementation="sdpa")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda config, **options: empty)
    with pytest.raises(model.ModelUnavailable, match="no parameters"):
        model.build(settings(model=str(folder)), "sdpa", "cpu", None)


def test_liger_where_it_cannot_be(folder, monkeypatch):
    applied, [note] = model.apply_liger("llama", "cpu")
    assert not applied and "need a GPU" in note
    applied, [note] = model.apply_liger("no_such_type", "cuda")
    assert not applied and "does not know model type no_such_type" in note
    # It says it was applied, and the classes of the built model are transformers' own.
    monkeypatch.setattr(model, "apply_liger", lambda model_type, device: (True, []))
    built = model.build(settings(model=str(folder), use_liger=True), "sdpa", "cpu", None)
    assert not built.liger_applied and any("no module of the model uses it" in note for note in built.notes)


def test_liger_really_patched_in_is_seen(folder):
    """In a process of its own: Liger's patches last as long as the process."""
    code = (
        "import sys; from harness.measure import model; from harness.measure.settings import Settings\n"
        "original = model.apply_liger; model.apply_liger = lambda model_type, device: original(model_type, 'cuda')\n"
        "asked = Settings(_cli_parse_args=[], recipe='short-context', use_liger=True, seq_len=64, model=sys.argv[1])\n"
        "print(model.build(asked, 'sdpa', 'cpu', None).liger_applied)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
