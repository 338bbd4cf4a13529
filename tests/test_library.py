"""The library of published measurements: what a row is, what is refused, which rows make a pair, the pages by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import plot_results
from harness import gpus
from harness.report import library, published
from harness.report.box import NothingUsable
from harness.report.published import Narrow
from tests.handmade import upgrade

ROOT = Path(__file__).resolve().parent.parent
H100, H200, B200, GB300 = (gpus.by_key(name) for name in ("H100", "H200", "B200", "GB300"))
HEAD = "system,model,seq_len,precision,gpus,global_batch,tokens_per_s_per_gpu,model_tflops_per_gpu,release,kind"
GOOD = "DGX-H100,LLAMA3_8B,8192,FP8,8,128,14451,744,1.0,Pre-Training"
NEXT = "DGX-B200,LLAMA3_8B,8192,FP8,8,128,30624,1576,1.0,Pre-Training"


def write(folder: Path, *lines: str, name: str = "made.csv") -> library.Library:
    (folder / name).write_text("\n".join(lines) + "\n")
    return library.load.__wrapped__(folder)  # read anew


def test_what_is_published_is_read_and_one_row_of_it_cannot_be():
    found = library.load()
    by_source = {}
    for row in found.rows:
        by_source.setdefault(row.source, []).append(row)
    assert {name: len(rows) for name, rows in by_source.items()} == {
        "llm_foundry": 216,
        "megatron_bridge": 191,
        "guide": 20,
    }
    assert found.problems == [
        "megatron_bridge.csv:48: TFLOPS of 4.753e+07 are over the B200 SXM's peak of 10000: left out"
    ]
    text = (library.FOLDER / "megatron_bridge.csv").read_text().splitlines()
    for row in by_source["megatron_bridge"]:
        cells = text[int(row.where.rpartition(":")[2]) - 1].split(",")
        assert cells[3] == row.model and cells[4].endswith(row.gpu.label.split()[0]) and cells[0] == row.origin
        assert (int(cells[5]), int(cells[9]), float(cells[15])) == (row.count, row.seq_len, row.tokens_per_s_per_gpu)


@pytest.mark.parametrize(
    ("text", "key"),
    [("DGX-GB300", "gb300"), ("dgx-h100", "h100-sxm"), ("h100_80gb", "h100-sxm"), ("a100_80gb", "a100-sxm-80gb"),
     ("a100_40gb", "a100-sxm-40gb"), ("NVIDIA DGX-B200", "b200-sxm"), ("GB200 NVL72", "gb200"),
     ("HGX H200", "h200-sxm"), ("NVIDIA B300 SXM6 AC", "b300-sxm"), ("MI355X", "mi355x")],
)  # fmt: skip
def test_names_of_systems(text, key):
    assert library.system(text).key == key


@pytest.mark.parametrize(
    ("model", "parallel", "work"),
    [("LLAMA3.1_405B", "ep n/a", "dense"), ("mpt-760m", "", "dense"), ("Qwen3_30B_a3B", "", "experts"),
     ("GPT OSS 120B", "", "experts"), ("Nemotron_3_Super", "", "experts"), ("Kimi_K2", "", "experts"),
     ("DeepSeekV3 (w/o MTP)", "", "experts"), ("Mixtral-8x7B", "", "experts"), ("Qwen3_32B", "", "dense"),
     ("something new", "tp 1 ep 8", "experts"), ("something new", "tp 1 ep 1", None)],
)  # fmt: skip
def test_dense_or_experts(model, parallel, work):
    assert library.kind_of_work(model, parallel) == work


@pytest.mark.parametrize(
    ("said", "precision", "form"),
    [("BF16", "bf16", "bf16"), ("amp_bf16", "bf16", "bf16"), ("FP8-CS", "fp8", "fp8"), ("amp_fp8", "fp8", "fp8"),
     ("FP8-MX", "fp8", "fp8-mx"), ("MXFP8", "fp8", "fp8-mx"), ("NVFP4", "nvfp4", "nvfp4")],
)  # fmt: skip
def test_precisions(tmp_path, said, precision, form):
    (row,) = write(tmp_path, HEAD, NEXT.replace("FP8", said)).rows
    assert (row.precision, row.precision_said, library._form(row)) == (precision, said, form)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (GOOD.replace("14451", "0"), "tokens_per_s_per_gpu '0': input should be greater than 0"),
        (GOOD.replace("14451", "-1"), "tokens_per_s_per_gpu '-1': input should be greater than 0"),
        (GOOD.replace("14451", "nan"), "tokens_per_s_per_gpu 'nan': input should be"),
        (GOOD.replace("14451", "inf"), "tokens_per_s_per_gpu 'inf': input should be"),
        (GOOD.replace("14451", "fast"), "tokens_per_s_per_gpu 'fast': input should be a valid number"),
        (GOOD.replace("14451", ""), "no tokens_per_s_per_gpu"),
        (GOOD.replace(",744,", ",7440,"), "TFLOPS of 7440 are over the H100 SXM's peak of 1979"),
        (GOOD.replace("14451", "14451000"), "tokens/s, as TFLOPS of 6.936e+05 are over the H100 SXM's peak of 1979"),
        (GOOD.replace("8192", "8192.5"), "seq_len '8192.5'"),
        (GOOD.replace("DGX-H100", "DGX-Z900"), "no GPU 'DGX-Z900'"),
        (GOOD.replace("FP8", "INT3"), "precision 'INT3' is none of nvfp4, fp4, fp8, bf16"),
        (GOOD.replace("LLAMA3_8B", "n/a"), "no model"),
        (GOOD + ",more", "11 cells under 10 headings"),
        (GOOD, "the same as made.csv:2"),
        (GOOD.replace("14451", "14452"), "the same as made.csv:2, with another figure"),
    ],
)
def test_a_row_that_cannot_be_is_named_and_the_rest_used(tmp_path, line, problem):
    found = write(tmp_path, HEAD, GOOD, line, NEXT)
    assert [row.where for row in found.rows] == ["made.csv:2", "made.csv:4"]
    (told,) = found.problems
    assert told.startswith("made.csv:3: ") and problem in told and told.endswith("left out")


@pytest.mark.parametrize("gone", ["system", "model", "seq_len", "precision", "tokens_per_s_per_gpu"])
def test_a_file_without_a_column_is_named_and_the_others_used(tmp_path, gone):
    (tmp_path / "bad.csv").write_text(HEAD.replace(gone, "other") + f"\n{GOOD}\n")
    found = write(tmp_path, HEAD, NEXT)
    assert len(found.rows) == 1 and found.problems[0].startswith("bad.csv:1: no column ")
    assert {"system": "gpu"}.get(gone, gone) in found.problems[0]


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b'"never closed\n' * 3, b"", b"\n\n", b"a\x00b\n"])
def test_a_damaged_file_does_not_end_it(tmp_path, damage):
    (tmp_path / "bad.csv").write_bytes(damage)
    found = write(tmp_path, HEAD, NEXT)
    assert len(found.rows) == 1 and found.problems and all(p.startswith("bad.csv") for p in found.problems)


def test_other_headings_and_step_times(tmp_path):
    head = "GPU Type,Model,Sequence Length,dtype,# GPUs,GBS,Step Time (ms),Tokens / sec / GPU"
    found = write(
        tmp_path, head, 'B200,Llama 3 8B,"8,192",bf16,64,256,4000,', 'H100,Llama 3 8B,8192,bf16,64,256,,"3,000"'
    )
    a, b = found.rows
    assert not found.problems and (a.seq_len, a.count, a.global_batch) == (8192, 64, 256)
    assert a.tokens_per_s_per_gpu == 8192 * 256 / 64 / 4.0  # 4 s a step
    assert b.tokens_per_s_per_gpu == 3000
    found = write(tmp_path, head, "B200,Llama 3 8B,8192,bf16,,256,4000,", name="other.csv")
    assert found.problems


def test_training_of_another_kind_is_never_paired(tmp_path):
    rows = write(tmp_path, HEAD, GOOD.replace("Pre-Training", "LoRA"), NEXT, NEXT.replace("Pre-Training", "LoRA")).rows
    pairs = [p for p in library.matched(rows) if p.old.gpu.key == "h100-sxm"]
    assert [(p.work, p.new.where) for p in pairs] == [("dense lora", "made.csv:4")]


def test_like_forms_go_together_and_the_nearest_count(tmp_path):
    lines = [
        GOOD,
        NEXT,
        NEXT.replace("FP8", "MXFP8"),
        GOOD.replace(",8,128,", ",64,1024,"),
        NEXT.replace("FP8", "NVFP4"),
    ]
    rows = write(tmp_path, HEAD, *lines).rows
    pairs = {(p.old.where[-1], p.new.where[-1]) for p in library.matched(rows) if p.old.gpu.key == "h100-sxm"}
    # with the H100 row of 8 GPUs, not the one of 64; MXFP8 has no like on the H100, and FP8 has
    assert pairs == {("2", "3"), ("2", "6")}
    rows = write(tmp_path, HEAD, *lines, GOOD.replace("FP8", "MXFP8")).rows
    pairs = [p for p in library.matched(rows) if p.new.precision_said == "MXFP8"]
    assert {p.old.precision_said for p in pairs if p.old.gpu.key == "h100-sxm"} == {"MXFP8"}


BY_HAND = [  # H100 to B200: work, model, release, tokens/s of both as they stand in megatron_bridge.csv
    ("dense", "LLAMA3_8B", "25.11", 14451, 30624), ("dense", "LLAMA3.1_405B", "25.11", 292, 661),
    ("experts", "GPT OSS 120B", "25.11", 5630, 8213), ("experts", "GPT OSS 120B", "26.02", 5993, 8047),
    ("experts", "GPT OSS 120B", "26.02.01", 5984, 13722), ("experts", "GPT OSS 120B", "26.04", 5810, 13045),
    ("experts", "GPT OSS 120B", "26.04.01", 5824, 13568), ("experts", "Nemotron_3_Nano", "26.04.01", 14336, 32768),
    ("experts", "Qwen3_235B_a22B", "25.11", 1575, 3269), ("experts", "Qwen3_235B_a22B", "26.02", 1633, 3805),
    ("experts", "Qwen3_235B_a22B", "26.04.01", 1712, 3776), ("experts", "Qwen3_30B_a3B", "25.11", 5275, 9299),
    ("experts", "Qwen3_30B_a3B", "26.02", 5113, 9691), ("experts", "Qwen3_30B_a3B", "26.02.01", 9058, 26695),
    ("experts", "Qwen3_30B_a3B", "26.04", 8901, 26859), ("experts", "Qwen3_30B_a3B", "26.04.01", 8960, 27136),
]  # fmt: skip


def test_every_figure_of_a_page_followed_by_hand():
    code, text, _ = upgrade("H100", "B200", "--price-ratio", "2.2", "--json")
    found = json.loads(text)["published"]
    seen = [(p["work"], p["model"], p["release"], p["old"]["tokens_per_s_per_gpu"], p["new"]["tokens_per_s_per_gpu"])
            for p in found["pairs"]]  # fmt: skip
    assert code == 0 and sorted(seen) == sorted(BY_HAND)
    for p in found["pairs"]:
        for side in ("old", "new"):
            file, _, line = p[side]["where"].rpartition(":")
            cells = (library.FOLDER / file).read_text().splitlines()[int(line) - 1].split(",")
            assert cells[15] == str(round(p[side]["tokens_per_s_per_gpu"])) and cells[0] == p[side]["origin"]
    lines = {(x["work"], x["old_precision"], x["new_precision"]): x for x in found["lines"]}
    assert set(lines) == {("dense", "fp8", "fp8"), ("experts", "bf16", "bf16"), ("experts", "fp8", "fp8")}
    dense = lines["dense", "fp8", "fp8"]
    assert (dense["low"], dense["high"]) == pytest.approx((30624 / 14451, 661 / 292))
    assert dense["median"] == dense["break_even"] == pytest.approx((30624 / 14451 + 661 / 292) / 2)
    assert dense["outcomes"] == {"wins": 1, "loses": 1} and dense["outcome"] == "depends"
    experts = lines["experts", "fp8", "fp8"]  # 3776/1712 = 2.206 is break-even at 2.2, 32768/14336 = 2.286 the median
    assert experts["median"] == pytest.approx(32768 / 14336)
    assert experts["outcomes"] == {"wins": 5, "break-even": 1, "loses": 3}
    code, page, _ = upgrade("H100", "B200", "--price-ratio", "2.2")
    assert "Dense, fp8 -> fp8: loses in 1, wins in 1: 2.12-2.26x the speed (2 pairs of 2 models, median 2.19x)" in page
    assert "megatron_bridge.csv:48" in page and "GPUs 1024/128, batch 512/64" in page


def test_exact_pairs_of_one_software():
    wanted = "a100-sxm-80gb", "h100-sxm", "bf16", "bf16"
    pairs = library.matched(library.load().rows)
    exact = [p for p in pairs if (p.old.gpu.key, p.new.gpu.key, *p.precisions) == wanted and not p.differs]
    assert len(exact) == 36 and all(p.old.parallel == p.new.parallel for p in exact)
    ends = {p.old.seq_len: p.speedup for p in exact if p.old.model == "mpt-3b"}
    assert (ends[512], ends[65536]) == pytest.approx((27965 / 12127, 3262 / 1767))


@pytest.mark.parametrize(
    ("pair", "lines"),
    [
        (("H100", "GB300"), {"dense fp8 fp8", "dense fp8 nvfp4", "experts bf16 bf16", "experts fp8 fp8"}),
        (("B200", "B300"), {"experts bf16 bf16", "experts fp8 fp8", "experts fp8 nvfp4", "experts nvfp4 nvfp4"}),
        (("A100", "H100"), {"dense bf16 bf16", "dense bf16 fp8"}),
        (("H200", "B200"), {"dense bf16 bf16"}),
    ],
)
def test_pages_of_pairs(pair, lines):
    code, text, _ = upgrade(*pair, "--json")
    found = json.loads(text)
    assert (
        code == 0
        and {f"{x['work']} {x['old_precision']} {x['new_precision']}" for x in found["published"]["lines"]} == lines
    )
    assert all(v["outcome"] is None and "pays up to that price ratio" in v["sentence"] for v in found["verdict"])


def test_the_guide_s_own_pair_is_one_source_more():
    code, text, _ = upgrade("H200", "B200", "--json")
    gains = {(p["seq_len"], "decompose" in p["release"]): p["speedup"] for p in json.loads(text)["published"]["pairs"]}
    wanted = {(8192, False): 167 / 141, (32768, False): 524 / 324, (65536, False): 719 / 391,
              (131072, False): 836 / 420, (196608, False): 852 / 422,
              (262144, False): 852 / 419, (8192, True): 778.4 / 461}  # fmt: skip
    assert code == 0 and gains == pytest.approx(wanted, rel=2e-3)


def test_narrowed():
    def kept(*args):
        code, text, _ = upgrade("H100", "GB300", "--json", *args)
        return code, json.loads(text)["published"]["pairs"] if code == 0 else []

    assert {p["model"] for p in kept("--model", "llama3_70b")[1]} == {"LLAMA3_70B"}
    assert {p["seq_len"] for p in kept("--seq-len", "4096")[1]} == {4096}
    found = kept("--precision", "fp8", "--new-precision", "nvfp4")[1]
    assert {(p["old"]["said"], p["new"]["said"]) for p in found} == {("FP8", "NVFP4")}
    code, _, error = upgrade("H100", "GB300", "--model", "no such")
    assert code == 4 and "is of that; there are: " in error and "LLAMA3_70B at 8192, fp8 to nvfp4" in error


def test_more_bits_only_when_asked_for():
    assert not any(x["new_precision"] == "bf16" for x in published.compare(H100, GB300, Narrow(), None)["lines"] if
                   x["old_precision"] == "fp8")  # fmt: skip
    found = published.compare(H100, GB300, Narrow(precision="fp8", new_precision="bf16"), None)
    assert {p["model"] for p in found["pairs"]} == {"Qwen3_235B_a22B"}


def test_no_pairs_and_what_is_near():
    with pytest.raises(NothingUsable, match="no published pair of H100 SXM and H200 SXM. Nearest: H100 SXM to "):
        published.compare(H100, H200, Narrow(), None)
    code, _, error = upgrade("H200", "GB200")
    assert code == 4 and "H200 SXM to B200 SXM (7 pairs)" in error and error.count("\n") == 1
    assert upgrade("H200", "B999")[0] == 4
    code, _, error = upgrade("--model", "llama")
    assert code == 2 and "two GPUs by name" in error


def test_the_list_counts_every_pair():
    counts = published.coverage()
    assert counts["h100-sxm", "b200-sxm"] == len(BY_HAND) and counts["h200-sxm", "b200-sxm"] == 7
    assert ("b200-sxm", "h100-sxm") not in counts
    code, page, _ = upgrade("--list")
    assert code == 0 and "H100 SXM B200 SXM 16" in page


def test_a_folder_by_the_name_of_a_gpu_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "H100").mkdir()
    code, _, error = upgrade("H100", "B200")
    assert code == 4 and "nothing usable" in error


def test_drawn(tmp_path, capsys):
    assert plot_results.main(["H100", "B200", "--price-ratio", "2.2", "-o", str(tmp_path / "a.svg")]) == 0
    assert "break-even at price ratio 2.2" in (tmp_path / "a.svg").read_text()
    assert plot_results.main(["H100", "H200"]) == 4
    capsys.readouterr()
    assert plot_results.main(["B200", "B300", "--tables"]) == 0
    assert "| experts | nvfp4 -> nvfp4 | 1 | 1 | 1.26 |" in capsys.readouterr().out


def test_a_picture_has_a_mark_a_pair():
    from harness.report import decision, figure

    result = decision.published(H100, B200, decision.Options(price_ratio=2.2))
    (axes,) = figure.draw_pairs(result).axes
    marks = [y for line in axes.lines[:3] for y in line.get_ydata()]
    assert sorted(marks) == pytest.approx(sorted(new / old for *_, old, new in BY_HAND))
    assert [text.get_text().split("\n")[0] for text in axes.get_xticklabels()] == [
        "dense, fp8 to fp8", "experts, bf16 to bf16", "experts, fp8 to fp8"]  # fmt: skip


def test_no_torch_and_no_network():
    code = (
        "import socket, sys; socket.socket = None; import should_upgrade; should_upgrade.main(['H100', 'B200']); "
        "should_upgrade.main(['H100', '--project-to', 'B200']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
