"""Which sweeps may be set side by side, and what is said about them."""

from pathlib import Path

import pytest

from harness import records
from harness.report import comparing
from harness.report.box import Sweep
from tests.handmade import box, ceiling, decomposition, point, run

B200 = "NVIDIA B200"


def compared(old, new):
    return comparing.pair(box(old, point(8192, 100), point(131072, 900)), box(new, point(8192, 60), point(131072, 450)))


def test_equal_boxes_differ_in_nothing():
    pair = compared(run(), run(B200))
    assert pair.comparable and not pair.never and not pair.differences
    assert pair.common == [8192, 131072]


def test_the_attention_package_and_backend_may_differ():
    new = run(B200, **{"stack.attention_package": "flash-attn-4 4.0.0"})
    assert compared(run(**{"stack.attention_package": "flash-attn-3 3.0.0"}), new).comparable


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stack.torch": "2.10.0+cu129", "stack.cuda": "12.9"}, "torch: 2.10.0 and 2.13.0"),  # case 74
        ({"stack.cuda": "12.9"}, "cuda: 12.9 and 13.0"),
        ({"stack.python": "3.11.2"}, "python: 3.11 and 3.12"),
        ({"stack.transformers": "5.0.0"}, "transformers: 5.0.0 and 5.14.1"),
        ({"world_size": 4}, "number of GPUs: 4 and 8"),
        ({"flop_convention": "12*s^2"}, "FLOP convention: 12*s^2 and causal"),
        ({"model.num_layers": 2}, "layers: 2 and 32"),
        ({"model.weights": "random"}, "weights: random and real"),
        ({"model.config": {"hidden_size": 1024}}, "config hidden_size: 1024 and 4096"),
        ({"recipe.zero_stage": 2}, "recipe zero_stage: 2 and 3"),
        ({"recipe.batch_size": 2}, "recipe batch_size: 2 and 1"),
        ({"recipe.liger_applied": False}, "recipe liger_applied: False and True"),
        ({"recipe.deterministic": True}, "recipe deterministic: True and False"),  # case 66
        ({"recipe.doc_len": 8192}, "documents: 8192 and one per sequence"),
        ({"environment": {"FLASH_ATTENTION_DETERMINISTIC": "1"}}, "FLASH_ATTENTION_DETERMINISTIC: 1 and 0"),  # case 66
        ({"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
         "allocator setting: expandable_segments:True and default"),  # case 64
        ({"attention": records.Attention(requested="fa3", backend="fa3", mismatch="ran sdpa")},
         "attention on OLD: ran sdpa"),  # case 9
    ],
)  # fmt: skip
def test_each_difference_is_named_and_refused(change, text):
    pair = compared(run(**change), run(B200))
    assert not pair.comparable and not pair.never
    assert any(difference.startswith(text) for difference in pair.differences), pair.differences


def test_a_recipe_is_what_it_does_and_not_its_name():
    assert compared(run(**{"recipe.name": "custom"}), run(B200)).comparable


def test_every_difference_is_listed_not_the_first():
    pair = compared(run(**{"stack.torch": "2.10.0+cu129", "stack.cuda": "12.9", "world_size": 4}), run(B200))
    assert len(pair.differences) == 3


def test_of_two_kernels_on_one_box_the_newer_sweep_is_taken():
    old = box(run(), point(8192, 100), name="fa2.jsonl")
    fa3 = records.Attention(requested="fa3", backend="sdpa")
    old.sweeps.append(Sweep(Path("later.jsonl"), run(attention=fa3), {8192: point(8192, 90)}))
    found = comparing.pairs(old, box(run(B200), point(8192, 60)))
    assert [p.old.file.name for p in found] == ["later.jsonl", "fa2.jsonl"]


def test_a_log_that_does_not_name_its_torch_is_not_a_torch_without_cuda():
    unknown = run(**{"stack.torch": "unknown", "stack.cuda": None})
    pair = compared(unknown, run(B200))
    assert not pair.never and any("torch is not recorded on OLD" in w for w in pair.warnings)


def test_both_names_of_the_allocator_variable_are_one():  # case 64
    old = run(environment={"PYTORCH_CUDA_ALLOC_CONF": "x:1"})
    assert compared(old, run(B200, environment={"PYTORCH_ALLOC_CONF": "x:1"})).comparable


def test_what_one_side_did_not_record_is_said_and_not_a_difference():
    pair = compared(run(**{"stack.triton": "3.7.1"}), run(B200))
    assert pair.comparable and any("triton is not recorded on NEW" in w for w in pair.warnings)
    guide_log = run(B200, settings={}, **{"stack.python": "unknown"})
    pair = compared(run(environment={"PYTORCH_ALLOC_CONF": "x:1", "NCCL_DEBUG": "INFO"}), guide_log)
    assert pair.comparable and any("allocator setting is not recorded on NEW" in w for w in pair.warnings)
    assert not any("NCCL_DEBUG" in w for w in pair.warnings)


def test_a_shipped_shape_equals_the_full_config_of_the_same_model():
    full = run().model.config | {"_name_or_path": "x", "transformers_version": "5.1", "attention_bias": False}
    pair = compared(run(**{"model.config": full}), run(B200))
    assert pair.comparable and not any("config" in w for w in pair.warnings)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            run(),
            run(B200, **{"stack.cuda": None, "stack.torch": "2.13.0+cpu"}),
            "NEW ran a torch without it",
        ),  # case 12
        (run(**{"stack.cuda": None}), run(B200, **{"stack.cuda": None}), "OLD ran a torch without it"),
        (run(**{"gpu.device": "cpu", "stack.cuda": None}), run(B200), "device: cpu and cuda"),
        (run(**{"gpu.mig": True, "gpu.name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}), run(B200), "MIG slice"),  # case 23
    ],
)
def test_what_no_flag_overrides(old, new, text):
    pair = compared(old, new)
    assert any(text in never for never in pair.never), pair.never


def test_two_cpus_are_compared_and_said_to_be_no_gpu():
    cpu = run(**{"gpu.device": "cpu", "gpu.name": "EPYC", "stack.cuda": None})
    pair = compared(cpu, cpu)
    assert pair.comparable and any("a CPU and no GPU" in w for w in pair.warnings)


def test_a_sick_card_is_no_witness():  # case 28
    sick = [(run(kind="ceilings"), ceiling("bf16", 74.0, unhealthy=True, reason="GPU 3"))]
    pair = comparing.pair(box(run(), point(8192, 100), ceilings=sick), box(run(B200), point(8192, 60)))
    assert pair.differences == ["unhealthy card on OLD: bf16 reaches 74 TFLOPS (GPU 3)"]


WARNINGS = [
    ({"stack.attention_package": "flash-attn-4 4.0.0b22"}, "NEW: the attention kernel is a pre-release"),
    ({"gpu.power_limit_w": 500.0}, "NEW: power limit 500 W of the card's 1000 W"),
    ({"gpu.links": ["SYS"]}, "links differs: NV18 and SYS"),  # case 73
    ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE differs: unset and 1"),  # case 73
    ({"environment": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS differs: unset and 1"),  # case 65
    ({"host.cpu": "Xeon"}, "host cpu differs: EPYC and Xeon"),  # case 65
    ({"host.omp_threads": 1}, "host omp_threads differs: 12 and 1"),  # case 65
    ({"gpu.driver": "560.35"}, "driver differs: 570.1 and 560.35"),  # case 74
    ({"stack.python": "3.12.9"}, "python patch level differs: 3.12.12 and 3.12.9"),
]


@pytest.mark.parametrize(("change", "text"), WARNINGS)
def test_warnings_that_leave_the_comparison_standing(change, text):
    known = {"gpu.links": ["NV18"], "host.cpu": "EPYC", "host.omp_threads": 12, "gpu.driver": "570.1"}
    pair = compared(run(**known), run(B200, **(known | change)))
    assert pair.comparable and any(text in w for w in pair.warnings), pair.warnings


def test_no_warning_without_its_reason():
    known = {"gpu.links": ["NV18"], "host.cpu": "EPYC", "gpu.power_limit_w": 690.0}
    quiet = compared(run(**known), run(**known)).warnings
    assert [w for w in quiet if "host (offload)" not in w and "short lengths" not in w and "same file" not in w] == []


def test_random_weights_on_both_are_said():  # case 62
    both = {"model.weights": "random"}
    assert sum("random weights" in w for w in compared(run(**both), run(B200, **both)).warnings) == 2


def test_the_long_context_recipe_is_said_to_be_unrepresentative_only_where_short():
    texts = compared(run(), run(B200)).warnings
    assert any("short lengths (8192) is overhead" in w for w in texts) and not any("131072" in w for w in texts)
    light = {"recipe.offload_optimizer": False}
    assert not any("overhead" in w or "host" in w for w in compared(run(**light), run(B200, **light)).warnings)


def test_points_that_are_unsteady_throttled_short_or_warned_about():
    shaky = point(8192, 100, warnings=["one step was 3x the others"])
    shaky.steady, shaky.throttled = False, True
    pair = comparing.pair(
        box(run(), shaky, point(32768, 300, outcome="partial", steps=2)),
        box(run(B200), point(8192, 60), point(32768, 150)),
    )
    for text in ("throttled at 8192", "not steady at 8192", "fewer than three steady steps at 32768", "8192: one step"):
        assert any(w.startswith(f"OLD: {text}") for w in pair.warnings), pair.warnings
    assert pair.common == [8192]  # case 82: two steps enter no verdict


def test_a_one_off_spike_is_said_and_kept():  # case 60
    spiky = point(8192, 100)
    spiky.times_ms = (*spiky.times_ms[:-1], 300.0)
    pair = comparing.pair(box(run(), spiky), box(run(B200), point(8192, 60)))
    assert "OLD: a step over twice the median at 8192" in pair.warnings and pair.common == [8192]


def test_a_step_in_which_the_gpu_is_idle_is_host_bound():  # case 58
    step = [(run(kind="decompose"), decomposition(8192, busy=0.03, attention=1, everything_else=9))]
    pair = comparing.pair(box(run(), point(8192, 100)), box(run(B200), point(8192, 3000), decompositions=step))
    assert any("GPU busy 3% of a step at 8192" in w for w in pair.warnings)


def test_the_pair_with_the_fewest_differences_is_chosen_then_the_most_lengths():
    old = box(run(**{"stack.torch": "2.10.0+cu129"}), point(8192, 130), point(32768, 300), point(65536, 800))
    old.sweeps += [
        Sweep(Path("b.jsonl"), run(**{"recipe.zero_stage": 2}), {8192: point(8192, 90)}),
        Sweep(Path("c.jsonl"), run(), {8192: point(8192, 100), 32768: point(32768, 300)}),
    ]
    new = box(run(B200), point(8192, 60), point(32768, 150), point(65536, 400))
    new.sweeps.append(Sweep(Path("d.jsonl"), run(B200, **{"recipe.zero_stage": 2}), {8192: point(8192, 50)}))
    found = comparing.pairs(old, new)
    assert (found[0].old.file.name, found[0].common) == ("c.jsonl", [8192, 32768])
    assert (found[1].old.file.name, found[1].comparable) == ("b.jsonl", True)
    assert not found[2].comparable


def test_files_of_one_configuration_are_one_sweep_the_last_measured_counts():  # case 80
    old = box(run(), point(8192, 100), point(32768, 300))
    old.sweeps += [
        Sweep(Path("later.jsonl"), run(run_id="b2"), {8192: point(8192, 110), 32768: point(32768, outcome="failed")}),
        Sweep(Path("last.jsonl"), run(run_id="c3"), {131072: point(131072, 900)}),
    ]
    (one,) = comparing.joined(old)
    assert {n: p.median_ms for n, p in one.points.items()} == {8192: pytest.approx(110), 32768: pytest.approx(300),
                                                               131072: pytest.approx(900)}  # fmt: skip
    assert sum("joined with" in note for note in one.notes) == 2
    assert list(old.sweeps[0].points) == [8192, 32768]  # the box itself is left alone


def test_no_sweep_no_pair():
    empty = box(run(), point(8192, 1))
    empty.sweeps.clear()
    assert comparing.pair(empty, box(run(B200), point(8192, 1))) is None


def test_models_that_only_have_a_name_are_told_apart_by_it():
    bare = {"model.config": {}}
    pair = comparing.pair(
        box(run(**bare), point(8192, 100)), box(run(**bare, **{"model.name": "70b"}), point(8192, 50))
    )
    assert pair.differences == ["model: 8b and 70b"]
