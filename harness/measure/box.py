"""What this box is: its device, how many, which GPUs exactly, and whether they are all alike.

The one place that tells a GPU from a CPU. Without a GPU everything runs on DeepSpeed's CPU accelerator.
"""

import os
from typing import NamedTuple

import pynvml

from harness import gpus, records
from harness.measure import stack, telemetry
from harness.measure.settings import fail_setting
from harness.measure.telemetry import ask


class MixedGpus(RuntimeError):
    """Unlike GPUs in one run: the slow ones would set the pace and the peak would be of another card."""

    kind = "mixed_gpus"


def has_gpu() -> bool:
    """Whether torch can use a CUDA device; DS_ACCELERATOR=cpu says no in any case."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def use_accelerator() -> str:
    """ "cuda" or "cpu"; on the CPU DeepSpeed is told so before it is imported. Exits 2 on a GPU that cannot be used."""
    if has_gpu():
        return "cuda"
    if visible := visible_gpus():
        fail_setting(f"{visible[0].name} is here, this torch cannot use it: run ./install.sh (or DS_ACCELERATOR=cpu)")
    os.environ["DS_ACCELERATOR"] = "cpu"
    return "cpu"


def device_facts(device: str, index: int = 0) -> dict:
    """Name, capability, memory (GiB), SM count and UUID of one device; on a CPU the processor's name and the RAM."""
    if device == "cuda":
        import torch

        p = torch.cuda.get_device_properties(index)
        return {
            "name": p.name,
            "capability": (p.major, p.minor),
            "memory_gib": p.total_memory / 2**30,
            "sm_count": p.multi_processor_count,
            "uuid": f"GPU-{str(p.uuid).removeprefix('GPU-')}",
        }
    host = stack.host()
    return {"name": host.cpu or "CPU", "capability": None, "memory_gib": host.ram_gib, "sm_count": None, "uuid": None}


def gpu_record(device: str, facts: list[dict], peak_override: float | None = None, step: str = "bf16") -> records.Gpu:
    """All ranks' devices as one record; the peak is that of the step's format. Raises MixedGpus naming what differs."""
    first = facts[0]
    for key in ("name", "capability", "sm_count", "memory_gib"):
        # Equal cards differ by some MiB in what the driver leaves; a GiB apart they are different cards.
        values = {round(f[key]) if key == "memory_gib" else f[key] for f in facts}
        if len(values) > 1 and device == "cuda":
            raise MixedGpus(
                f"unlike GPUs in one run ({key}: {', '.join(sorted(map(str, values)))}); "
                "choose equal ones with CUDA_VISIBLE_DEVICES"
            )
    uuids, told = [f["uuid"] for f in facts if f["uuid"]], {}
    name, capability, memory_gib = first["name"], first["capability"], first["memory_gib"]
    peak = (peak_override, "PEAK_TFLOPS") if peak_override else (None, "no GPU: figures of this CPU, no peak")
    if device == "cuda":
        peak, told = gpus.peak(name, capability, memory_gib, peak_override, step), nvml_facts(uuids)
    return records.Gpu(
        device=device, name=name, count=len(facts), capability=capability, memory_gib=round(memory_gib, 2),
        sm_count=first["sm_count"], uuids=uuids, mig="MIG" in name.split(), peak_tflops=peak[0], peak_source=peak[1],
        **told,
    )  # fmt: skip


def nvml_facts(uuids: list[str]) -> dict:
    """Driver, power limit, highest SM clock and link kinds of these GPUs; {} where NVML does not answer."""
    try:
        pynvml.nvmlInit()
        handles = [telemetry.handle(u) for u in uuids]
    except pynvml.NVMLError:
        return {}
    power = ask("nvmlDeviceGetEnforcedPowerLimit", handles[0])
    return {
        "driver": ask("nvmlSystemGetDriverVersion"),
        "power_limit_w": None if power is None else power / 1000,
        "max_sm_clock_mhz": ask("nvmlDeviceGetMaxClockInfo", handles[0], pynvml.NVML_CLOCK_SM),
        "links": links(handles),
    }


def links(handles: list) -> list[str]:
    """Link kinds between these GPUs as nvidia-smi topo names them: NV18 (active NVLinks), PIX, NODE, SYS."""
    names = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
    found = set()
    for handle, other in zip(handles, handles[1:] + handles[:1], strict=True) if len(handles) > 1 else ():
        states = [ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
        if active := sum(filter(None, states)):
            found.add(f"NV{active}")
        else:
            found.add(names.get(ask("nvmlDeviceGetTopologyCommonAncestor", handle, other), "?"))
    return sorted(found)


class VisibleGpu(NamedTuple):
    """A GPU that a sweep may use, without torch."""

    index: int  # NVML's, in PCI order
    handle: object  # NVML's
    uuid: str
    name: str


def capability(visible: list[VisibleGpu]) -> tuple[int, int] | None:
    """Compute capability of the first of these GPUs, without torch; None where NVML does not say, or there is none."""
    found = ask("nvmlDeviceGetCudaComputeCapability", visible[0].handle) if visible else None
    return tuple(found) if found else None


def visible_gpus() -> list[VisibleGpu]:
    """GPUs by NVML that CUDA_VISIBLE_DEVICES (indices or UUIDs) allows; none without a driver or by DS_ACCELERATOR=cpu.

    Exits 2 on an entry that names no GPU, and on a MIG slice, whose figures compare with nothing.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    here = [
        VisibleGpu(i, handle, pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle))
        for i, handle in enumerate(handles)
    ]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return here
    chosen = []
    for word in filter(None, (w.strip() for w in asked.split(","))):
        if word == "-1":
            break  # CUDA takes what stands before it: alone it hides every GPU
        if word.startswith("MIG"):
            fail_setting(f"CUDA_VISIBLE_DEVICES={asked}: a MIG slice does not compare with a whole GPU")
        bare = word.removeprefix("GPU-")
        matches = [g for g in here if (g.index == int(word) if word.isdecimal() else g.uuid[4:].startswith(bare))]
        if len(matches) != 1:
            fail_setting(f"CUDA_VISIBLE_DEVICES={asked}: no GPU {word!r} here")
        chosen += matches
    return chosen
