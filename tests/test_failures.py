"""The rule table: what a launch died of, from what it printed."""

from __future__ import annotations

import pytest

from harness.failure_kinds import FailureKind
from harness.measure.failures import ADVICE, RULES, classify, hang
from harness.records import RankError


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
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total",
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`",
        "RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: Triton Error [HIP]:  Code: 2, Messsage: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:66",
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
        "pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
        "cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorMemoryAllocation: out of memory",
        "node:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'",
        "node:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        "node:392:494 [2] enqueue.cc:43 NCCL WARN HIP failure 'out of memory'",
        "[rank0]:[E1104] Process group watchdog thread terminated with exception: CUDA error: out of memory",
        "  what():  CUDA error: out of memory",
        "torch.AcceleratorError: HIP error: out of memory",
        "HIP driver error 'hipErrorOutOfMemory'",
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
        "Try a smaller batch if you see `RuntimeError: CUDA out of memory. Tried to allocate`",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True when you hit CUDA_ERROR_OUT_OF_MEMORY",
        "Hint: CUBLAS_STATUS_ALLOC_FAILED means that the GPU is full",
        "  except torch.cuda.OutOfMemoryError:",
        "No valid triton configs. OutOfMemoryError: out of resource: flex_backward Required: 348224",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 172032",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`",
        "[INFO] [config.py:1005:print]   zero_config ... 'offload_optimizer': {'device': 'cpu', 'pin_memory': True}",
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


COMPATIBLE = (
    "Installed CUDA version 13.2 does not match the version torch was compiled with 13.0 "
    "but since the APIs are compatible, accepting this combination"
)


def test_a_toolkit_that_is_accepted_is_no_failure():
    """Printed by each rank before whatever really happens."""
    assert classify([COMPATIBLE] * 8, 1).kind == "crashed"
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert classify([COMPATIBLE] * 8 + [oom], 1).kind == "gpu_oom"
    killed = "[ERROR] [launch.py:325:sigkill_handler] ['python'] exits with return code = -9"
    assert classify([COMPATIBLE, killed], 247).kind == "killed_sig9"
    skipped = COMPATIBLE.partition(" but")[0] + ".Detected `DS_SKIP_CUDA_CHECK=1`: Allowing this combination of CUDA"
    assert classify([skipped, "ValueError: x"], 1).kind == "crashed"
    refused = "Exception: >- DeepSpeed Op Builder: Installed CUDA version 12.0 does not match the version torch was "
    refused += "compiled with 11.7, unable to compile cuda/cpp extensions without a matching cuda version."
    assert classify([COMPATIBLE, refused], 1).kind == "toolkit_missing"


TIMED_OUT = (
    "[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600067 milliseconds before timing out."
)


@pytest.mark.parametrize("size", ["more than 1EB memory", "17179869184.00 GiB"])
def test_an_impossible_size_is_a_consequence(size):
    impossible = f"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}."
    error = RankError(rank=4, error=impossible)
    assert classify([TIMED_OUT, impossible], 1).kind == "timeout"
    assert classify([TIMED_OUT, impossible], 1, [error]).kind == "timeout"
    alone = classify([], 1, [error])
    assert (alone.kind, alone.rank, alone.error) == ("crashed", 4, impossible)
    real = impossible.replace(size, "3.91 GiB")
    assert classify([TIMED_OUT, impossible, real], 1).kind == "gpu_oom"


@pytest.mark.parametrize(
    "line",
    [
        TIMED_OUT,
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 clients joined.",
        "[E1104] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
        "[E1104] ProcessGroupNCCL's watchdog got stuck. Heartbeat monitor timed out!",
    ],
)
def test_timeouts(line):
    assert classify([line], 1).kind == "timeout"


PINNING = """\
Traceback (most recent call last):
  File "/x/deepspeed/runtime/zero/stage_1_and_2.py", line 485, in __init__
    self.initialize_optimizer_states()
  File "/x/deepspeed/accelerator/cuda_accelerator.py", line 296, in pin_memory
    return tensor.cpu().pin_memory()
           ^^^^^^^^^^^^^^^^^^^^^^^^^
"""


@pytest.mark.parametrize(
    "error", ["CUDA error: out of memory", "CUDA error: invalid argument", "HIP error: out of memory"]
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_an_error_in_pin_memory_is_the_hosts_memory(error, prefix):
    """DeepSpeed pins the optimizer's states; the driver's error for that is the one for the GPU's memory."""
    text = PINNING + f"RuntimeError: {error}\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"
    lines = [prefix + line for line in text.splitlines()]
    assert classify(lines, 1).kind == "host_oom"
    mixed = [other for line in lines for other in (line, "[rank1]: a line of another rank")]
    assert classify(mixed, 1).kind == "host_oom"
    written = RankError(rank=3, error=f"RuntimeError: {error}", traceback=PINNING + f"RuntimeError: {error}\n")
    assert classify([], 1, [written]).kind == "host_oom"


def test_pin_memory_in_an_outer_frame_or_before_another_traceback_is_not_the_cause():
    later = '  File "/x/model.py", line 3, in forward\n    return self.w(x)\nRuntimeError: CUDA error: out of memory'
    assert classify((PINNING + later).splitlines(), 1).kind == "gpu_oom"
    crash = "RuntimeError: Need to provide pin_memory allocator to use pin memory."
    assert classify([crash], 1).kind == "crashed"
    illegal = PINNING + "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert classify(illegal.splitlines(), 1).kind == "kernel_limit"  # reported late, by whoever comes next


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: unable to mmap 4993859720 bytes from file <m.safetensors>: Cannot allocate memory (12)",
        "OSError: [Errno 12] Cannot allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 16.0 GiB for an array with shape (4294967296,)",
        "failed to alloc 34359738368 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "RuntimeError: cudaHostAlloc failed: out of memory",
        "could not allocate pinned host memory of size: 34359738368: out of memory",
        "RuntimeError: Caught RuntimeError in pin memory thread for device 0.",
    ],
)
def test_host_memory(line):
    assert classify([line], 1).kind == "host_oom"


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.",
    ],
)
def test_killed_for_memory(line):
    assert classify([line], 1).kind == "killed_sig9"


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: HIP error: an illegal memory access was encountered",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA error (/x/hopper/flash_fwd_launch_template.h:198): an illegal memory access was encountered",
        "node:411:502 [3] enqueue.cc:1500 NCCL WARN Cuda failure 'an illegal memory access was encountered'",
        "Memory access fault by GPU node-2 (Agent handle: 0x38b6960) on address 0x1000. Reason: Page not present",
        "RuntimeError: Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
        "RuntimeError: CUDA error: invalid configuration argument",
        "RuntimeError: Triton Error [HIP]:  Code: 1, Messsage: invalid argument",
        "RuntimeError: integer out of range",
    ],
)
def test_a_kernels_limit_is_a_kind_of_its_own(line):
    """Offsets of 32 bits: tokens x width over 2^31. Under that it is a fault like any other."""
    peers = "[rank0]: torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited"
    assert classify([peers, TIMED_OUT, line], 1).kind == "kernel_limit"
    assert classify([line], 1, elements=2**31).kind == "kernel_limit"
    small = classify([line], 1, elements=2**31 - 1)
    assert small.kind == "crashed" and small.error in line
    assert classify([line, "RuntimeError: CUDA error: out of memory"], 1).kind == "gpu_oom"
