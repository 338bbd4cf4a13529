"""The rule table: what a launch died of, from what it printed."""

from __future__ import annotations

import pytest

from harness.measure.failures import ADVICE, RULES, classify, hang
from harness.records import FailureKind, RankError


@pytest.mark.parametrize(
    "line",
    [  # case 48
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 2 has a total capacity of 139.8",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB",
        "RuntimeError: CUDA error: out of memory",
        "torch.AcceleratorError: CUDA error: out of memory",
        "boxa:411:502 [3] enqueue.cc:1500 NCCL WARN Cuda failure 2 'out of memory'",  # case 52
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.",
    ],
)
def test_gpu_out_of_memory_in_every_spelling(line):
    assert classify(["starting", line], 1).kind == "gpu_oom"


@pytest.mark.parametrize(
    "line",
    [
        "cuDNN Error: CUDNN_STATUS_BAD_PARAM",
        "If reserved memory is large try expandable segments to avoid out of memory situations",
        "# hint: USE_LIGER=1 helps against CUDA out of memory",
    ],
)
def test_what_only_mentions_memory_is_no_out_of_memory(line):
    assert classify([line], 1).kind == "crashed"


@pytest.mark.parametrize(
    ("kind", "code", "lines"),
    [
        # case 49
        ("killed_sig9", 247, ["[2026-03-04] [ERROR] [launch.py:325:sigkill_handler] ['python', '-u', 'benchmark.py', "
                              "'--local_rank=7'] exits with return code = -9"]),
        ("killed_sig9", 1, ["bash: line 4: 8123 Killed  deepspeed benchmark.py"]),
        ("killed_sig9", 1, ["  exitcode  : -9 (pid: 4242)"]),
        ("killed_sig9", 247, []),
        ("bus_error", 135, ["Bus error (core dumped)"]),
        # case 1: the first error, never the destructor's
        ("op_build_failed", 1, ["RuntimeError: Error building extension 'cpu_adam'",
                                "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f00aa>",
                                "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"]),
        ("crashed", 1, ["AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"]),
        # case 14
        ("shm_too_small", 1, ["boxa:411:502 [3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : "
                              "No space left on device"]),
        ("disk_full", 1, ["OSError: [Errno 28] No space left on device"]),
        # case 6
        ("abi_mismatch", 1, ["ImportError: /x/flash_attn_3/_C.abi3.so: undefined symbol: _ZN3c105ErrorC2E"]),
        # case 4
        ("toolkit_missing", 1, ["deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist"]),
        # case 52: without the WARN nothing says that it was memory
        ("nccl_error", 1, ["[rank2]: torch.distributed.DistBackendError: NCCL error in: x.cpp:33, "
                           "ncclUnhandledCudaError: Call to CUDA function failed."]),
        # case 55
        ("port_in_use", 1, ["[W socket.cpp:426] [c10d] The server socket has failed to bind to [::]:29540 "
                            "(errno: 98 - Address already in use)."]),
        ("wrong_setting", 2, ["wrong setting: STEPS=0: Input should be greater than or equal to 1"]),
        ("host_oom", 1, ["[rank1]: RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
                         "can't allocate memory: you tried to allocate 17179869184 bytes. Error code 12"]),
        ("launcher_died", 0, ["all is well"]),
        ("launcher_died", -9, []),
        ("crashed", 1, ["[rank0]: ValueError: something of our own"]),
        ("timeout", 1, ["[rank0]:[E1104] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"]),
    ],
)  # fmt: skip
def test_kind(kind, code, lines):
    cause = classify(lines, code)
    assert cause.kind == kind
    assert cause.error


def test_one_ranks_out_of_memory_wins_over_what_follows_from_it():
    """case 54: the other ranks' errors are consequences, whatever their order in the output."""
    lines = [
        "[rank0]: torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited",
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB",
        "[ERROR] [launch.py:325] ['python', 'benchmark.py', '--local_rank=7'] exits with return code = 1",
    ]
    cause = classify(lines, 1)
    assert (cause.kind, cause.rank) == ("gpu_oom", 5)
    assert cause.error.startswith("torch.OutOfMemoryError")


def test_a_ranks_own_record_counts_more_than_a_warning():
    error = RankError(rank=3, error="ValueError: the real cause")
    warning = "[W socket.cpp:426] failed to bind to [::]:29540 (errno: 98 - Address already in use)."
    cause = classify([warning], 1, [error])
    assert (cause.kind, cause.rank, cause.error) == ("crashed", 3, "ValueError: the real cause")
    named = RankError(rank=2, kind="attn_unavailable", error="AttentionUnavailable: flash-attn-4 is not installed")
    assert classify([], 1, [named]).kind == "attn_unavailable"


def test_the_rank_that_could_not_say_anything():
    """One rank was killed; all others lost their peer."""
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32426."
    errors = [RankError(rank=r, error=lost) for r in (0, 1, 3)]
    cause = classify([], 247, errors, world_size=4)
    assert (cause.kind, cause.rank) == ("killed_sig9", 2)
    assert classify([], 247, errors[:2], world_size=4).rank is None


def test_hangs_are_told_apart():
    """case 2: a left build lock, against a step that never ends."""
    root = "Using /x/torch_extensions as PyTorch extensions root..."
    assert hang(["[INFO] start", root], 60).kind == "hang_at_op_build"
    assert hang([root, "Loading extension module cpu_adam...", "Time to load cpu_adam op"], 60).kind == "timeout"
    assert "60 s" in hang([], 60).error


def test_every_kind_is_known_to_the_records():
    kinds = set(FailureKind.__args__)
    assert {kind for kind, _ in RULES} <= kinds
    assert set(ADVICE) <= kinds
