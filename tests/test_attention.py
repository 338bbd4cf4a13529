"""The choice of attention, every way its package can be broken, and transformers' real code path with stand-ins."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.measure import attention
from tests import standins

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("capability", "backend"),
    [((9, 0), "fa3"), ((10, 0), "fa4"), ((10, 3), "fa4"), (None, "sdpa")]  # case 15, 68
    + [((8, 0), "sdpa"), ((8, 9), "sdpa"), ((11, 0), "sdpa"), ((12, 0), "sdpa"), ((12, 1), "sdpa")],  # case 16
)
def test_the_automatic_choice_goes_by_capability(capability, backend):
    assert attention.choose("auto", capability) == backend


@pytest.mark.parametrize(
    ("backend", "fits"), [("fa3", {8, 9}), ("fa4", {9, 10}), ("fa2", {8, 9, 10, 12}), ("sdpa", {7, 8, 9, 10, 11, 12})]
)
def test_a_backend_the_silicon_cannot_train_with_is_refused_by_name(backend, fits):
    for major in range(7, 13):
        if major in fits:
            assert attention.choose(backend, (major, 0)) == backend
        else:
            with pytest.raises(
                attention.AttentionUnavailable, match=rf"{backend} trains on.* is {major}\.0: use ATTN="
            ):
                attention.choose(backend, (major, 0))
    if backend != "sdpa":
        with pytest.raises(attention.AttentionUnavailable, match="needs an NVIDIA GPU"):
            attention.choose(backend, None)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of stand-in packages, first on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("flash_attn")]:
        del sys.modules[name]


def refusal(backend, capability) -> attention.AttentionUnavailable:
    importlib.invalidate_caches()
    with pytest.raises(attention.AttentionUnavailable) as caught:
        attention.require(backend, capability)
    assert "\n" not in str(caught.value)
    return caught.value


def test_sdpa_needs_no_package():
    attention.require("sdpa", None)
    attention.require("sdpa", (12, 0))


def test_nothing_installed_says_what_to_run(site):
    assert str(refusal("fa3", (9, 0))) == "flash-attn-3 is not installed: run ./install.sh --force fa3"


def test_a_hub_kernel_package_that_would_step_in_is_named(site):  # case 9
    standins.module(site, "kernels", standins.HUB_KERNELS)
    assert "`kernels` package here would replace it quietly" in str(refusal("fa4", (10, 0)))


def test_another_abi_is_not_called_missing(site):  # case 6
    error = 'raise ImportError("/x/flash_attn_3/_C.abi3.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE")'
    standins.fa3(site, error)
    found = refusal("fa3", (9, 0))
    assert found.kind == "abi_mismatch"
    assert torch.__version__ in str(found) and "undefined symbol" in str(found) and "not installed" not in str(found)


def test_the_mirrored_layout_of_flash_attention_3_is_explained(site):  # case 7
    standins.distribution(site, "flash_attn_3", "3.0.0b1", "flash_attn_3")
    standins.module(site, "flash_attn_3.flash_attn_interface", standins.FA3)
    text = str(refusal("fa3", (9, 0)))
    assert "flash-attn-3 3.0.0b1 is installed" in text and "only flash_attn_3.flash_attn_interface" in text


def test_two_distributions_in_one_folder_are_refused(site):  # case 8
    standins.fa4(site, 'raise AttributeError("ThrMma")')
    standins.distribution(site, "flash-attn", "2.8.3", "flash_attn")
    text = str(refusal("fa4", (10, 0)))
    assert "flash-attn-4 4.0.0b22 and flash-attn 2.8.3 write the same folder" in text and "pip uninstall both" in text


def test_any_exception_of_the_import_is_reported(site):  # case 8
    standins.fa4(site, 'raise AttributeError("ThrMma")')
    assert "cannot be imported (AttributeError: ThrMma): run ./install.sh --force fa4" in str(refusal("fa4", (10, 0)))


def test_a_module_without_the_functions_is_refused(site):
    standins.fa4(site, "")
    assert "flash_attn_func" in str(refusal("fa4", (10, 0)))


def test_a_package_transformers_does_not_take_is_refused(site):
    standins.fa3(site)  # all is there, but torch sees no GPU
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: transformers takes it")
    assert str(refusal("fa3", (9, 0))).endswith("transformers does not take it: torch sees no GPU")


def test_the_probe_names_function_and_kernel_and_measures_its_error():
    probe = attention.probe("sdpa", "cpu", heads=4, kv_heads=2, head_dim=64, seqlen=96)
    assert probe.function == "torch.nn.functional.scaled_dot_product_attention"
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in probe.kernels
    assert 0 < probe.max_error < attention.MAX_RELATIVE_ERROR


def test_the_error_sees_a_wrong_scale_a_lost_mask_and_a_lost_gradient():
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 32, 16) for _ in range(4))

    def results(scale=16**-0.5, causal=True, lost=None):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = torch.softmax(
            (inputs[0] @ inputs[1].mT * scale).masked_fill(torch.ones(32, 32).triu(1).bool() & causal, -torch.inf), -1
        )
        out = out @ inputs[2]
        out.backward(grad)
        grads = [t.grad for t in inputs]
        if lost is not None:
            grads[lost] = torch.zeros_like(grads[lost])
        return [out.detach(), *grads]

    def error(*args, **kwargs):
        return attention.relative_error(results(*args, **kwargs), [q, k, v], grad)

    assert error() < 1e-5
    assert error(scale=1.1 * 16**-0.5) > attention.MAX_RELATIVE_ERROR
    assert error(causal=False) > attention.MAX_RELATIVE_ERROR
    assert min(error(lost=i) for i in range(3)) == pytest.approx(1)


# ---- transformers' real path: each test is one process, as its checks are cached for the life of a process ----------

PREAMBLE = """
import json, sys
import torch
CAPABILITY = (9, 0)
torch.cuda.is_available = lambda: True  # before transformers looks
torch.cuda.get_device_capability = lambda *device: CAPABILITY
import torch.utils._triton
torch.utils._triton.has_triton = lambda: False  # torchao, which transformers imports, would look at that GPU
from transformers import AutoModelForCausalLM, LlamaConfig
from harness.measure import attention

def build(backend, **options):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.BACKENDS[backend], **options)

def refused(function, *arguments):
    try:
        function(*arguments)
    except attention.AttentionUnavailable as error:
        return [error.kind, str(error)]
"""


def run_with(site: Path, code: str):
    """What `code` leaves in `result`, run in a process that sees the stand-ins; its stderr where it fails."""
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PREAMBLE + code + "\nprint('RESULT' + json.dumps(result))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


BATCH = """
from types import SimpleNamespace
from harness.measure.settings import Settings
from harness.measure.training import Trainer

def batch(backend, **settings):  # the very batches that benchmark.py makes
    maker = SimpleNamespace(settings=Settings(_cli_parse_args=[], **settings), rank=0, vocab=64, device="cpu",
                            run=SimpleNamespace(attention=SimpleNamespace(backend=backend)))
    return Trainer.make_batch(maker, 40)
"""

WIRING = """
import flash_attn_interface, flash_attn.cute

def loss(model, inputs):
    value = model(**inputs).loss
    value.backward()
    return [value.item(), model.model.layers[0].self_attn.q_proj.weight.grad.norm().item()]

result = {}
for backend, module in (("fa3", flash_attn_interface), ("fa4", flash_attn.cute)):
    attention.require(backend, CAPABILITY)
    for name, settings in (("dense", {"batch_size": 2}), ("packed", {"doc_len": 16})):
        model, plain = build(backend), build("sdpa")
        module.CALLS.clear()
        used = loss(model, batch(backend, **settings))
        calls = list(module.CALLS)
        inputs = batch("sdpa", **settings)
        if name == "packed":  # the reference runs each document by itself, with no mask that could be wrong
            total, labels, start = 0, 0, 0
            for length in (16, 16, 8):
                part = {k: inputs[k][:, start:start + length] for k in ("input_ids", "position_ids")}
                shifted = inputs["labels"][:, start + 1:start + length]
                logits = plain(**part, use_cache=False).logits[:, :-1].flatten(0, 1)
                total = total + torch.nn.functional.cross_entropy(logits, shifted.flatten(), reduction="sum")
                labels, start = labels + shifted.numel(), start + length
            (total / labels).backward()
            reference = [(total / labels).item(), plain.model.layers[0].self_attn.q_proj.weight.grad.norm().item()]
        else:
            reference = loss(plain, inputs)
        result[f"{backend} {name}"] = {"used": used, "reference": reference, "calls": calls,
                                       "mismatch": attention.check_model(model, backend)}
    probe = attention.probe(backend, "cpu", heads=4, kv_heads=2, head_dim=32, seqlen=64)
    result[backend + " probe"] = [probe.function, probe.max_error]
"""


@pytest.fixture(scope="module")
def wiring(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    standins.fa3(folder)
    standins.fa4(folder)
    return run_with(folder, BATCH + WIRING)


@pytest.mark.parametrize("backend", ["fa3", "fa4"])
def test_dense_batches_reach_the_dense_function(wiring, backend):
    run = wiring[f"{backend} dense"]
    assert run["mismatch"] is None
    assert len(run["calls"]) == 2  # one a layer
    for call in run["calls"]:
        assert call["function"] == "flash_attn_func"
        assert call["q"] == [2, 40, 4, 16] and call["k"] == [2, 40, 2, 16]  # GQA heads not repeated
        assert call["arguments"]["causal"] == ["bool", None, True]
        assert call["arguments"]["softmax_scale"][2] == pytest.approx(16**-0.5)
        assert call["arguments"]["deterministic"][2] is False
    assert run["used"] == pytest.approx(run["reference"], rel=1e-5)


@pytest.mark.parametrize("backend", ["fa3", "fa4"])
def test_packed_batches_reach_the_varlen_function(wiring, backend):
    run = wiring[f"{backend} packed"]
    assert len(run["calls"]) == 2
    for call in run["calls"]:
        assert call["function"] == "flash_attn_varlen_func"
        assert call["q"] == [40, 4, 16] and call["k"] == [40, 2, 16]
        arguments = call["arguments"]
        assert arguments["causal"][2] is True
        assert arguments["cu_seqlens_q"] == arguments["cu_seqlens_k"] == ["Tensor", "torch.int32", [0, 16, 32, 40]]
        assert arguments["max_seqlen_q"] == arguments["max_seqlen_k"] == ["int", None, 16]  # a tensor breaks some FA4
    assert run["used"] == pytest.approx(run["reference"], rel=1e-5)


def test_the_probe_names_the_function_that_was_called(wiring):
    assert wiring["fa3 probe"][0] == "flash_attn_interface.flash_attn_func"
    assert wiring["fa4 probe"][0] == "flash_attn.cute.flash_attn_func"
    assert max(wiring["fa3 probe"][1], wiring["fa4 probe"][1]) < attention.MAX_RELATIVE_ERROR


def test_every_silent_replacement_is_caught(tmp_path):  # case 9
    standins.fa3(tmp_path)
    standins.fa4(tmp_path, standins.FA4.replace("causal, softmax_scale), None", "False, softmax_scale), None"))
    result = run_with(
        tmp_path,
        """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
small = ("cpu", 4, 2, 32, 64)
model = build("fa3")
model.set_attn_implementation("sdpa")
result = {"model": attention.check_model(model, "fa3"), "numbers": refused(attention.probe, "fa4", *small)}
model = build("fa3")
model.model.layers[1].self_attn.config = build("sdpa").config
result["one layer"] = attention.check_model(model, "fa3")
ALL_ATTENTION_FUNCTIONS["flash_attention_3"] = sdpa_attention_forward
result["function"] = refused(attention.probe, "fa3", *small)
""",
    )
    assert result["model"] == "fa3 (flash_attention_3) was asked for, the model uses sdpa"
    assert result["one layer"] == "fa3 (flash_attention_3) was asked for, the model uses flash_attention_3, sdpa"
    assert result["function"][0] == result["numbers"][0] == "attn_mismatch"
    assert "torch.nn.functional.scaled_dot_product_attention was called" in result["function"][1]
    assert "fa4 computes wrong numbers" in result["numbers"][1]


def test_a_hub_kernel_in_place_of_flash_attention_is_caught(tmp_path):  # case 9
    standins.module(tmp_path, "kernels", standins.HUB_KERNELS)
    standins.distribution(tmp_path, "kernels", "0.15.2", "kernels")
    result = run_with(
        tmp_path,
        """
model = build("fa3")  # transformers only warns
result = [attention.check_model(model, "fa3"), refused(attention.require, "fa3", (9, 0))[1]]
""",
    )
    assert result[0].startswith("fa3 (flash_attention_3) was asked for, the model uses kernels-community/")
    assert "would replace it quietly" in result[1]


def test_a_flash_attention_4_too_old_for_the_gpu_is_named(tmp_path):  # case 15
    old = "\n\ndef flash_attn_func(*a, **k):\n    raise AssertionError('Unsupported compute capability')\n"
    standins.fa4(tmp_path, standins.FA4 + old, version="4.0.0b9")
    result = run_with(tmp_path, "CAPABILITY = (10, 3)\nresult = refused(attention.probe, 'fa4', 'cpu', 4, 2, 32, 64)")
    assert result[1].startswith(
        "flash-attn-4 4.0.0b9 is too old for sm_103: run ./install.sh --force fa4 [AssertionError"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_the_chosen_attention_runs_on_this_gpu():
    capability = torch.cuda.get_device_capability()
    backend = attention.choose("auto", capability)
    attention.require(backend, capability)
    assert attention.probe(backend, "cuda").kernels
