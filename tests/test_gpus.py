"""harness.gpus: every published device name is itself, nothing else is anything, and the figures are the dense ones."""

import math
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness import gpus

# (what the driver says, capability, total memory in GiB, key, dense bf16): published names, memory as seen on devices.
DEVICES = [
    ("Tesla V100-SXM2-16GB", (7, 0), 15.8, "v100-sxm2-16gb", None),
    ("Tesla V100-SXM2-32GB", (7, 0), 31.7, "v100-sxm2-32gb", None),
    ("NVIDIA A800-SXM4-80GB", (8, 0), 79.3, "a800-sxm-80gb", 312),
    ("NVIDIA A10", (8, 6), 22.0, "a10", 125),
    ("NVIDIA RTX A6000", (8, 6), 47.5, "rtx-a6000", 154.8),
    ("NVIDIA L4", (8, 9), 22.0, "l4", 121),
    ("NVIDIA GeForce RTX 4090", (8, 9), 23.6, "rtx-4090", 165.2),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 47.4, "rtx-6000-ada", 364.2),
    ("NVIDIA H800", (9, 0), 79.2, "h800-sxm", 989),
    ("NVIDIA GB10", (12, 1), 119.7, "gb10", None),  # case 16
    ("NVIDIA GeForce RTX 5090", (12, 0), 31.4, "rtx-5090", 209.5),
    ("AMD Instinct MI350X", (9, 5), 288.0, "mi350x", 2300),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 79.3, "a100-sxm-80gb", 312),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, "a100-sxm-40gb", 312),
    ("NVIDIA A100 80GB PCIe", (8, 0), 79.3, "a100-pcie-80gb", 312),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 39.4, "a100-pcie-40gb", 312),
    ("NVIDIA L40S", (8, 9), 44.4, "l40s", 362),
    ("NVIDIA H100 80GB HBM3", (9, 0), 79.2, "h100-sxm", 989),  # cases 19, 21
    ("NVIDIA H100 PCIe", (9, 0), 79.2, "h100-pcie", 756),
    ("NVIDIA H100 NVL", (9, 0), 93.1, "h100-nvl", 835),
    ("NVIDIA H200", (9, 0), 139.8, "h200-sxm", 989),
    ("NVIDIA H200 NVL", (9, 0), 139.8, "h200-nvl", 835),
    ("NVIDIA H20", (9, 0), 95.1, "h20-96gb", 148),
    ("NVIDIA H20", (9, 0), 140.4, "h20-141gb", 148),
    ("NVIDIA H20-3e", (9, 0), 140.4, "h20-141gb", 148),
    ("NVIDIA GH200 480GB", (9, 0), 94.5, "gh200-96gb", 989),  # case 21
    ("NVIDIA GH200 480GB", (9, 0), 142.5, "gh200-141gb", 989),
    ("NVIDIA GH200 144G HBM3e", (9, 0), 142.5, "gh200-141gb", 989),
    ("NVIDIA B200", (10, 0), 178.4, "b200-sxm", 2250),
    ("NVIDIA GB200", (10, 0), 184.3, "gb200", 2500),
    ("NVIDIA B300 SXM6 AC", (10, 3), 267.7, "b300-sxm", 2250),  # case 15
    ("NVIDIA GB300", (10, 3), 276.6, "gb300", 2500),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 95.0, "rtx-pro-6000-server", 503.8),  # case 16
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 95.0, "rtx-pro-6000-workstation", 503.8),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), 95.0, "rtx-pro-6000-max-q", 438.9),
    ("AMD Instinct MI300X", (9, 4), 192.0, "mi300x", 1300),
    ("AMD Instinct MI325X", (9, 4), 256.0, "mi325x", 1300),
    ("AMD Instinct MI355X", (9, 5), 288.0, "mi355x", 2500),
]
NAMES = sorted({name for gpu in gpus.load().values() for name in gpu.names})


@pytest.mark.parametrize(("name", "capability", "memory_gib", "key", "bf16"), DEVICES)
def test_every_published_name_is_itself(name, capability, memory_gib, key, bf16):
    assert gpus.identify(name, capability, memory_gib) is gpus.load()[key]
    tflops, source = gpus.peak(name, capability, memory_gib, None)
    assert tflops == bf16
    assert gpus.load()[key].label in source and (gpus.load()[key].source in source) == (bf16 is not None)
    for spelling in (name.removeprefix("NVIDIA "), name.lower(), f" {name} "):
        assert gpus.identify(spelling, capability, memory_gib) is gpus.load()[key]


def test_every_gpu_of_the_table_is_among_them():
    assert {key for *_, key, _ in DEVICES} == set(gpus.load())


def test_a_name_alone_is_enough_where_it_is_told_apart():
    for name, _, _, key, _ in DEVICES:
        if sum(name in gpu.names for gpu in gpus.load().values()) == 1:
            assert gpus.identify(name).key == key
    assert gpus.identify("NVIDIA H20").key == "h20-96gb"
    assert gpus.identify("NVIDIA GH200 480GB").key == "gh200-96gb"


@pytest.mark.parametrize(
    ("name", "capability", "memory_gib", "reason"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 9.8, "MIG slice"),  # case 23
        ("NVIDIA H100 80GB HBM3", (9, 0), 9.8, "9.8 GiB"),  # a slice that does not say so
        ("NVIDIA H100 80GB HBM3", (9, 0), 63.6, "63.6 GiB"),  # a variant sold under the name
        ("NVIDIA GH200 480GB", (9, 0), 480.0, "96 GB or 141 GB"),
        ("NVIDIA H200", (10, 0), 139.8, "capability"),
        ("NVIDIA B300 SXM6 AC", (10, 0), 267.7, "capability"),
        ("NVIDIA H1000", (9, 0), 79.2, "not in"),
        ("NVIDIA H100", (9, 0), 79.2, "not in"),  # a driver names the form factor or the memory
        ("NVIDIA A100", (8, 0), 79.2, "not in"),
        ("NVIDIA H100 80GB HBM3 Plus", (9, 0), 79.2, "not in"),
        ("NVIDIA H200 PCIe", (9, 0), 139.8, "not in"),
        ("NVIDIA H200+", (9, 0), 139.8, "not in"),
        ("AMD H200", (9, 0), 139.8, "not in"),
        ("NVIDIA BB200", (10, 0), 178.4, "not in"),
        ("NVIDIA GB10", (12, 1), 119.7, "no dense bf16 figure is known for GB10"),  # case 16
        ("Tesla V100-SXM2-32GB", (7, 0), 31.7, "the V100 SXM2 32GB has no bf16"),
        ("NVIDIA GeForce RTX 4090 D", (8, 9), 23.5, "not in"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 15.7, "not in"),
        ("NVIDIA GeForce RTX 5090 D", (12, 0), 31.4, "not in"),
        ("NVIDIA A10G", (8, 6), 22.1, "not in"),
        ("NVIDIA A800 40GB Active", (8, 0), 39.5, "not in"),
        ("NVIDIA H800 PCIe", (9, 0), 79.2, "not in"),
        ("NVIDIA Thor", (11, 0), 122.8, "not in"),
        ("", None, None, "not in"),
    ],
)
def test_unknown_has_no_peak_and_says_why(name, capability, memory_gib, reason):  # case 18
    assert (gpus.identify(name, capability, memory_gib) is None) == ("bf16" not in reason)
    tflops, why = gpus.peak(name, capability, memory_gib, None)
    assert tflops is None
    assert reason in why and "PEAK_TFLOPS" in why and "\n" not in why


def test_neighbours_are_not_each_other():  # case 19
    pairs = [
        ("NVIDIA GB200", "NVIDIA B200"),
        ("NVIDIA GH200 480GB", "NVIDIA H200"),
        ("NVIDIA GB300", "NVIDIA B300 SXM6 AC"),
    ]
    pairs += [
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("NVIDIA H100 NVL", "NVIDIA H100 PCIe"),
        ("NVIDIA H20", "NVIDIA H200"),
    ]
    for one, other in pairs:
        assert gpus.identify(one) is not gpus.identify(other)


# Letters, digits and real words of names: what a vendor would add.
WORD = st.one_of(
    st.text(string.ascii_letters + string.digits + "+.@()", min_size=1, max_size=6),
    st.sampled_from(
        sorted({word for name in NAMES for word in name.split()} | {"MIG", "Super", "Ti", "SXM5", "141GB"})
    ),
)


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(NAMES), word=WORD, place=st.integers(0, 8), joint=st.sampled_from([" ", "-", "_", ""]))
@example(name="NVIDIA H200", word="NVL", place=9, joint=" ")
@example(name="NVIDIA B200", word="G", place=1, joint="")
def test_one_more_word_never_misidentifies(name, word, place, joint):
    """Either the longer name is another published one, and then it is that GPU, or it is nothing."""
    words = name.split()
    at = min(place, len(words))
    longer = " ".join(words[:at]) + (" " if at and joint else "") + word
    longer = (longer + (joint or "") + " ".join(words[at:])).strip(" -_")
    plain = " ".join(longer.replace("-", " ").replace("_", " ").lower().split())
    published = {n.replace("-", " ").lower(): n for n in NAMES}
    published |= {n.split(" ", 1)[1]: full for n, full in published.items()}
    gpu = gpus.identify(longer)
    if plain in published:
        assert published[plain] in gpu.names
    else:
        assert gpu is None


@settings(max_examples=200, deadline=None)
@given(name=st.text(max_size=40), memory=st.none() | st.floats(allow_nan=False), capability=st.none() | st.just((9, 0)))
def test_any_text_is_answered(name, memory, capability):
    tflops, why = gpus.peak(name, capability, memory, None)
    assert (tflops is None) == why.startswith("no MFU")


def test_a_peak_by_hand_is_named_as_such():
    tflops, source = gpus.peak("NVIDIA H200", (9, 0), 139.8, 1234.5)
    assert tflops == 1234.5 and "PEAK_TFLOPS=1234.5" in source and "by hand" in source and "989" in source
    tflops, source = gpus.peak("Made Up 9000", None, None, 100.0)
    assert tflops == 100.0 and "by hand" in source
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="PEAK_TFLOPS"):
            gpus.peak("NVIDIA H200", None, None, wrong)


def test_what_people_type():
    for text, key in {
        "B200": "b200-sxm",
        "b200": "b200-sxm",
        "h200-sxm": "h200-sxm",
        "H200 SXM": "h200-sxm",
        "H200 NVL": "h200-nvl",
        "RTX PRO 6000": "rtx-pro-6000-workstation",
        "GB300": "gb300",
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "mi300x": "mi300x",
        "4090": "rtx-4090",
        "RTX4090": "rtx-4090",
        "rtx 4090": "rtx-4090",
        "GeForce RTX 4090": "rtx-4090",
        "2x4090": "rtx-4090",
        "h100 sxm5": "h100-sxm",
        "8xH100": "h100-sxm",
        "8 x NVIDIA H100 SXM": "h100-sxm",
        "NVIDIA H100 SXM": "h100-sxm",
        "H100-SXM5-80GB": "h100-sxm",
        "H100 80GB": None,  # SXM or PCIe
        "A100-80GB": "a100-sxm-80gb",
        "A100 40GB": "a100-sxm-40gb",
        "NVIDIA A100 PCIe": "a100-pcie-80gb",
        "B300 SXM6": "b300-sxm",
        "AMD MI350X": "mi350x",
        "Instinct MI355X": "mi355x",
        "H800": "h800-sxm",
        "A800": "a800-sxm-80gb",
        "RTX 6000 Ada": "rtx-6000-ada",
        "A6000": "rtx-a6000",
        "DGX Spark": "gb10",
        "MI350": None,  # the series: two cards
        "V100": None,  # two sizes of memory
        "RTX 6000": None,  # three cards of that name
        "RTX 4090 D": None,
        "A10G": None,
        "H100 MIG": None,
        "8x": None,
        "": None,
    }.items():
        if key:
            assert gpus.by_key(text).key == key, text
        else:
            with pytest.raises(KeyError, match="no GPU"):
                gpus.by_key(text)
    with pytest.raises(KeyError, match="did you mean H100 (SXM|NVL|PCIe), H100 "):
        gpus.by_key("H100 80GB")
    with pytest.raises(KeyError, match="did you mean RTX 4090, "):
        gpus.by_key("RTX4080")
    with pytest.raises(KeyError, match="did you mean MI350X, MI355X"):
        gpus.by_key("MI350")
    with pytest.raises(KeyError, match="did you mean V100 SXM2 (16|32)GB, V100 SXM2"):
        gpus.by_key("V100")
    with pytest.raises(KeyError, match="H200 NVL.*GB200"):
        gpus.by_key("B2000")
    typed = [(gpus._plain(t), g.key) for g in gpus.load().values() for t in (g.key, g.label, *g.aliases)]
    assert len({plain for plain, _ in typed}) == len(set(typed))  # nothing typed means two


def test_published_ratios():
    """The ratios of the published specification tables, H200 to B200 to B300, come out of the table's figures."""
    h200, b200, b300 = (gpus.by_key(k) for k in ("H200", "B200", "B300"))
    rtx = gpus.by_key("RTX PRO 6000")
    assert round(b200.bf16 / h200.bf16, 2) == 2.28
    assert round(b200.fp8 / h200.fp8, 2) == 2.27
    assert round(b200.memory_gb / h200.memory_gb, 2) == 1.28
    assert round(b200.bandwidth_tb_s / h200.bandwidth_tb_s, 2) == 1.67
    assert round(b200.power_w / h200.power_w, 2) == 1.43
    assert round(b200.ceilings["bf16"].tflops / h200.ceilings["bf16"].tflops, 2) == 2.20
    assert round(b200.ceilings["fp8"].tflops / h200.ceilings["fp8"].tflops, 2) == 2.36
    assert (b300.bf16, b300.fp8, b300.bandwidth_tb_s) == (b200.bf16, b200.fp8, b200.bandwidth_tb_s)
    assert (b200.fp4, b300.fp4, b200.nvfp4, b300.nvfp4) == (9000, 12600, 10000, 15000)
    assert round(b300.memory_gb / b200.memory_gb, 1) == 1.6
    assert round(b200.bf16 / rtx.bf16, 2) == round(b200.bandwidth_tb_s / rtx.bandwidth_tb_s, 2) == 4.47


@pytest.mark.parametrize("gpu", gpus.load().values(), ids=lambda g: g.key)
def test_figures_are_dense_and_complete(gpu):
    assert gpu.source and gpu.names and gpu.memory_gb > 0 and gpu.power_w > 0
    for dtype in gpus.DTYPES:
        figure = getattr(gpu, dtype)
        assert figure is None or figure > 0
        assert not (figure and dtype in gpu.unsupported)
    assert gpu.bf16 or "bf16" in gpu.unsupported or gpu.key == "gb10"  # of which no rate but fp4's is published
    if gpu.fp8:  # dense to dense: a sparse figure on one side would make this 4 or 1
        assert gpu.fp8 / gpu.bf16 == pytest.approx(2, rel=0.02)
    if gpu.capability and gpu.capability < (10, 0):
        assert {"fp6", "fp4", "nvfp4"} <= gpu.unsupported
    assert (gpu.nvlink_gb_s is None) == ("nvlink" in gpu.unsupported)
    for dtype, ceiling in gpu.ceilings.items():
        assert 0.5 < ceiling.tflops / getattr(gpu, dtype) < 1
        assert len(ceiling.shape) == 3 and ceiling.torch[0].isdigit()
