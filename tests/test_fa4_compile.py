"""FlashAttention-4's forward and backward compile for Hopper, Blackwell and Blackwell Ultra without a GPU.

The pinned package is installed once into pytest's cache (about 200 MB to download). Its compiler then makes real
machine code from tensors that have a shape and no memory. That the code runs, only a GPU can show.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from harness import kernels

pytestmark = pytest.mark.compile
PINNED = Path(__file__).parents[1] / "requirements" / "pinned.txt"
# flash-attn-4 and what it needs beside torch and triton, which are the environment's own.
PACKAGES = re.compile(
    r"(flash-attn-4|nvidia-cutlass-dsl.*|apache-tvm-ffi|quack-kernels|torch-c-dlpack-ext|einops|cuda-(core|bindings|pathfinder)|protobuf)=="
)

# Llama-3.1-8B's attention: 32 heads, 8 key-value heads of 128, bf16, causal. The autograd wrapper needs a GPU, so the
# functions inside it are called. _flash_attn_fwd gives (out, lse, ...), _flash_attn_bwd gives (dq, dk, dv).
COMPILE = """
import site, sys
site.addsitedir(sys.argv[1])  # it runs the .pth file by which cutlass is found
import torch
from torch._subclasses import FakeTensorMode
from flash_attn.cute import interface

packed = sys.argv[2] == "packed"
with FakeTensorMode():
    lead = (2048,) if packed else (1, 2048)
    q, grad = (torch.empty(*lead, 32, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = (torch.empty(*lead, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    options = {"causal": True}
    if packed:
        offsets = torch.empty(5, dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 512, "max_seqlen_k": 512}
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)
    dq, dk, dv = interface._flash_attn_bwd(q, k, v, out, grad, lse, **options)
assert (out.shape, dq.shape, dk.shape, dv.shape) == (q.shape, q.shape, k.shape, v.shape)
assert {t.dtype for t in (out, dq, dk, dv)} == {torch.bfloat16}
"""


@pytest.fixture(scope="module")
def package(pytestconfig):
    """Folder with the pinned packages; a killed installation is started over."""
    pins = [line for line in PINNED.read_text().splitlines() if PACKAGES.match(line)]
    version = next(line for line in pins if line.startswith("flash-attn-4")).partition("==")[2]
    folder = Path(pytestconfig.cache.mkdir(f"flash-attn-4-{version}"))
    if not (folder / "complete").exists():
        shutil.rmtree(folder)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *pins]
        subprocess.run(command, check=True)
        (folder / "complete").touch()
    return folder


def machine_code(folder: Path) -> list[tuple[str, int, str]]:
    """(fwd, bwd, ...; architecture; kernel name) of every compiled object, each an ELF file with the GPU's inside."""
    found = []
    for path in folder.rglob("*.o"):
        data = path.read_bytes()
        start = data.index(b"\x7fELF", 1)
        machine, flags = struct.unpack_from("<H", data, start + 18)[0], struct.unpack_from("<I", data, start + 48)[0]
        assert machine == 190  # EM_CUDA
        name = re.search(rb"\.text\.(kernel_\w+)", data)[1].decode()
        found.append((path.parent.name, flags >> 8 & 0xFF, name))
    return found


@pytest.mark.parametrize(
    ("arch", "batch"), [("90a", "dense"), ("100a", "dense"), ("103a", "dense"), ("100a", "packed")]
)
def test_forward_and_backward_compile(package, tmp_path, arch, batch):
    number = arch.rstrip("a")
    environment = os.environ | {
        "FLASH_ATTENTION_ARCH": f"sm_{number}",  # which kernels
        "CUTE_DSL_ARCH": f"sm_{arch}",  # for which machine
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # keeps the compiled objects
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(package), batch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    code = machine_code(tmp_path)
    assert {"fwd", "bwd", "bwd_pre", "bwd_post"} <= {part for part, _, _ in code}
    assert {architecture for _, architecture, _ in code} == {int(number)}
    family = {"90": "Sm90", "100": "Sm100", "103": "Sm100"}[number]  # Blackwell Ultra runs Blackwell's kernels
    assert all(family in name for part, _, name in code if part in ("fwd", "bwd"))
    assert {kernels.classify(name) for _, _, name in code} == {"attention"}
