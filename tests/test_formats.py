"""DTYPE: what each format needs is asked first, which layers take it, and that they compute in it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from harness import gpus
from harness.measure import box, formats
from harness.measure.settings import Settings, SweepSettings, load
from harness.measure.sweep import sweep_key
from tests.conftest import ROOT, environment

H200, B200, A100 = (9, 0), (10, 0), (8, 0)


def settings(*flags: str) -> Settings:
    return load(Settings, list(flags)).resolve(has_gpu=False)


@pytest.mark.parametrize(
    ("flags", "capability", "said"),
    [
        (["--dtype=mxfp8", "--compile=1"], None, "DTYPE=mxfp8: its kernels need compute capability 10.x and there"),
        (["--dtype=mxfp8", "--compile=1"], H200, "its kernels need compute capability 10.x and this GPU is 9.0"),
        (["--dtype=nvfp4", "--compile=1"], (12, 0), "its kernels need compute capability 10.x and this GPU is 12.0"),
        (["--dtype=nvfp4"], B200, "DTYPE=nvfp4: it needs COMPILE=1"),
        (["--dtype=nvfp4", "--compile=1", "--seqlens=256 320"], B200, "must be divisible by 128, not so at [320]"),
        (["--dtype=mxfp8", "--compile=1", "--seqlens=48 64"], B200, "must be divisible by 32, not so at [48]"),
        (["--dtype=fp8", "--seqlens=100 64"], H200, "DTYPE=fp8: a GPU's part of a sequence must be divisible by 16"),
        (["--dtype=fp8", "--seqlens=32", "--sp-size=4"], H200, "divisible by 16, not so at [32]"),
    ],
)  # fmt: skip
def test_what_cannot_carry_a_format_is_refused_by_name(flags, capability, said):
    assert said in formats.refusal(settings(*flags), capability)


@pytest.mark.parametrize(
    ("flags", "capability"),
    [
        ([], None),
        (["--seqlens=77"], H200),
        (["--dtype=fp8"], None),
        (["--dtype=fp8_rowwise"], A100),
        (["--dtype=mxfp8", "--compile=1"], B200),
        (["--dtype=nvfp4", "--compile=1", "--seqlens=256"], (10, 3)),
    ],
)
def test_what_can_carry_it_is_not(flags, capability):
    assert formats.refusal(settings(*flags), capability) is None


def test_every_reason_is_said_at_once(monkeypatch):
    monkeypatch.setattr(formats.attention, "version", lambda name: None)
    said = formats.refusal(settings("--dtype=nvfp4", "--seqlens=100"), H200)
    assert all(word in said for word in ("torchao is not installed", "10.x", "COMPILE=1", "[100]")) and "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("script", [["benchmark.py"], ["bench_decompose.py"], ["-m", "harness.measure.sweep"]])
def test_a_refused_format_ends_before_anything_is_loaded(script, tmp_path):
    env = environment(DTYPE="mxfp8", RESULTS=str(tmp_path), MODEL="./not-there", TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, *script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("wrong setting: DTYPE=mxfp8: its kernels need")
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_torchao_that_moved_its_layer_is_a_wrong_setting_too(monkeypatch):
    monkeypatch.setitem(formats.PROTOTYPE, "nvfp4", ("moved_elsewhere", "NVFP4Linear"))
    with pytest.raises(formats.FormatUnavailable, match="DTYPE=nvfp4: torchao 0.18.0 here: No module named") as raised:
        formats.converter("nvfp4", B200)
    assert raised.value.kind == "wrong_setting"
    with pytest.raises(formats.FormatUnavailable, match="DTYPE=mxfp8: torchao 0.18.0 here: .*mxfp8"):
        formats.converter("mxfp8", B200)  # without a GPU its kernel is not there


def test_fp8_is_emulated_only_where_there_is_none():
    capabilities = (None, A100, (8, 9), H200, B200)
    assert [formats.emulated("fp8", c) for c in capabilities] == [True, True, False, False, False]
    assert formats.emulated("fp8_rowwise", A100) and not formats.emulated("bf16", None)


def test_a_sweep_asks_the_driver_for_the_capability(monkeypatch):
    """Without torch, whose context would stay on the GPU as long as the sweep lasts."""
    gpu = box.VisibleGpu(0, "handle", "GPU-1", "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(box.pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: [8, 0], raising=False)
    assert box.capability([gpu]) == A100 and box.capability([]) is None


def test_a_sweep_in_another_format_is_another_sweep():
    keys = {
        sweep_key(load(SweepSettings, [f"--dtype={d}"]).resolve(False), [], 2) for d in ("bf16", "fp8", "fp8_rowwise")
    }
    assert len(keys) == 3


class Mixture(nn.Module):
    """One layer of each fate."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.proj = nn.Linear(32, 48)
        self.odd = nn.Linear(32, 40)
        self.gate = nn.Linear(32, 16)
        self.mine = type("LoraLinear", (nn.Linear,), {})(32, 32)
        self.experts = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, 32, 32))})
        self.lm_head = nn.Linear(32, 64)

    def get_output_embeddings(self):
        return self.lm_head


def converted(model: nn.Module, dtype: str = "fp8"):
    return formats.convert(model, dtype, None, formats.converter(dtype, None))


def test_what_stays_bf16_is_listed_with_its_reason():
    model = Mixture()
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    found = converted(model)
    assert (found.converted, found.total) == (1, 6)
    assert type(model.proj).__name__ == "Float8Linear" and type(model.odd) is nn.Linear
    assert found.kept == {
        "odd": "32 x 40 is not divisible by 16",
        "gate": "Linear, a router or of its own kind",
        "mine": "LoraLinear, a router or of its own kind",
        "experts": "ParameterDict, no nn.Linear",
        "lm_head": "the output layer",
    }
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights  # ZeRO and the optimizer keep them


def test_a_model_without_a_layer_that_takes_it_is_refused():
    model = Mixture()
    del model.proj
    with pytest.raises(formats.FormatUnavailable, match="DTYPE=fp8: no layer can take it: .*the output layer"):
        converted(model)


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None, power_of_two: bool = False) -> torch.Tensor:
    """x to fp8 and back by hand, with one scale a tensor or one a row: the largest value becomes the format's."""
    most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / most.double()
    scale = (torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale).float()
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_rowwise"])
def test_the_three_matmuls_are_rounded_as_the_format_says(dtype):
    """Output and both gradients against fp8 by hand: e4m3 with one scale a tensor and gradients in e5m2, or e4m3 with
    a power-of-two scale for each row of each product's inner dimension."""
    torch.manual_seed(0)
    model = nn.Module()
    model.proj, model.get_output_embeddings = nn.Linear(64, 32, bias=False).bfloat16(), lambda: None
    w = model.proj.weight
    x = torch.randn(48, 64, dtype=torch.bfloat16).mul_(torch.rand(48, 1) * 4).requires_grad_()
    g = torch.randn(48, 32, dtype=torch.bfloat16)
    converted(model, dtype)
    y = model.proj(x)
    y.backward(g)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    if dtype == "fp8":
        of = {"x": rounded(x, e4m3), "w": rounded(w, e4m3), "g": rounded(g, e5m2)}
        expected = of["x"] @ of["w"].t(), of["g"] @ of["w"], of["g"].t() @ of["x"]
    else:
        r = {k: [rounded(t, e4m3, dim, True) for dim in (0, 1)] for k, t in (("x", x), ("w", w), ("g", g))}
        expected = r["x"][1] @ r["w"][1].t(), r["g"][1] @ r["w"][0], r["g"][0].t() @ r["x"][0]
    exact = x @ w.t(), g @ w, g.t() @ x
    for found, by_hand, unrounded in zip((y, x.grad, w.grad), expected, exact, strict=True):
        error = (found - by_hand).abs().max() / by_hand.abs().max()
        assert error < 0.01  # one bf16 rounding
        assert (found - unrounded).abs().max() / unrounded.abs().max() > 2 * error  # fp8 is seen


def test_a_layer_made_around_another_has_its_parameters():
    """torchao's MXFP8 layer, emulated: in bf16 its product is the same to fp8's four bits."""
    from functools import partial

    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    torch.manual_seed(0)
    linear, x = nn.Linear(64, 96).bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)
    layer = formats.around(linear, partial(MXFP8Linear, kernel_preference=KernelPreference.EMULATED))
    assert layer.weight is linear.weight and layer.bias is linear.bias
    layer(x).sum().backward()
    assert 0 < (layer(x) - linear(x)).norm() / linear(x).norm() < 0.06
    assert linear.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "capability", "memory", "dtype", "tflops", "said"),
    [
        # The vendor's H200 sheet prints 3,958 with sparsity; B200: 9 PFLOPS of fp8 with it, 10 dense of nvfp4.
        ("NVIDIA H200", H200, 139.8, "fp8", 1979, "dense fp8 of the H200"),
        ("NVIDIA H200", H200, 139.8, "fp8_rowwise", 1979, "dense fp8 of the H200"),
        ("NVIDIA H200", H200, 139.8, "bf16", 989, "dense bf16 of the H200"),
        ("NVIDIA B200", B200, 178.4, "mxfp8", 4500, "dense fp8 of the B200"),
        ("NVIDIA B200", B200, 178.4, "nvfp4", 10000, "dense nvfp4 of the B200"),
        ("NVIDIA A100-SXM4-80GB", A100, 79.3, "fp8", None, "no MFU: the A100 SXM 80GB has no fp8;"),
        ("Made Up 9000", H200, 100.0, "fp8", None, "set PEAK_TFLOPS to its dense fp8 TFLOPS"),
    ],
)
def test_the_peak_is_that_of_the_format(name, capability, memory, dtype, tflops, said):
    facts = {"name": name, "capability": capability, "memory_gib": memory, "sm_count": 1, "uuid": None}
    record = box.gpu_record("cuda", [facts, facts], step=dtype)
    assert record.peak_tflops == tflops and said in record.peak_source
    by_hand = box.gpu_record("cuda", [facts], 1234.5, dtype)
    assert by_hand.peak_tflops == 1234.5 and "given by hand" in by_hand.peak_source


def test_every_format_of_the_setting_has_a_peak_to_look_up():
    choices = Settings.model_fields["dtype"].annotation.__args__
    assert set(choices) == set(gpus.MATMUL) and set(gpus.MATMUL.values()) <= set(gpus.DTYPES)
    assert set(choices) - {"bf16"} == set(formats.MULTIPLE) == set(formats.RECIPE)
