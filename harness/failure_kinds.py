"""What a failed length is called, and how the GPU memory that ran out is told in any log. No torch.

The rules that choose a kind are in measure/failures.toml.
"""

from typing import Literal

FailureKind = Literal[
    "gpu_oom", "host_oom", "killed_sig9", "timeout", "hang_at_op_build", "op_build_failed", "abi_mismatch",
    "attn_unavailable", "attn_mismatch", "shm_too_small", "disk_full", "nccl_error", "port_in_use",
    "bus_error", "toolkit_missing", "mixed_gpus", "non_finite_loss", "interrupted", "launcher_died",
    "model_unavailable", "wrong_setting", "kernel_limit", "crashed",
]  # fmt: skip

# GPU memory that ran out, as torch, Triton, NCCL, the drivers and the vendors' libraries put it. Not: a kernel that
# asks for more shared memory than there is ("out of resource"), and a size no GPU has (a dying process makes it up).
# Each alternative begins with a letter, which makes the search twice as fast.
GPU_OOM = (
    r"(?:torch\.(?:cuda\.)?OutOfMemoryError: (?!out of resource)|OutOfMemoryError: (?!out of resource)"
    r"|CUDA (?:out of memory\. Tried|(?:driver )?[Ee]rror: out of memory)|Error: (?:CUDA|HIP) out of memory"
    r"|HIP (?:out of memory\. Tried|(?:driver )?[Ee]rror: out of memory)|Triton Error \[\w+\]: [^']*out of memory"
    r"|C(?:uda|UDA) failure (?:\d+ )?'out of memory'|H(?:ip|IP) failure (?:\d+ )?'out of memory'"
    r"|CU\w+_STATUS_ALLOC_FAILED|HIP\w+_STATUS_ALLOC_FAILED|BLAS_STATUS_NOT_INITIALIZED.*blas(?:Lt)?Create"
    r"|Failed to (?:CUDA|HIP) [mc]alloc|cu(?:Mem\w+ failed|da runtime error \(2\) ?): out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory|cudaErrorMemoryAllocation|hipError(?:OutOfM|MemoryA)\w+)"
    r"(?!.*allocate (?:more than 1EB|\d{7,}(?:\.\d+)? GiB))"
)
