"""What this box is: its device, how many, which GPUs exactly, and whether they are all alike.

The one place that tells a GPU from a CPU. Without a GPU everything runs on DeepSpeed's CPU accelerator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from harness import gpus, records
from harness.measure import stack
from harness.measure.settings import fail_setting


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
    if names := visible_gpus().names:
        fail_setting(f"{names[0]} is here, this torch cannot use it: run ./install.sh (or DS_ACCELERATOR=cpu)")
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
            "uuid": f"GPU-{p.uuid}",
        }
    host = stack.host()
    return {"name": host.cpu or "CPU", "capability": None, "memory_gib": host.ram_gib, "sm_count": None, "uuid": None}


def gpu_record(device: str, facts: list[dict], peak_override: float | None = None) -> records.Gpu:
    """All ranks' devices as one record. Raises MixedGpus naming what differs."""
    first = facts[0]
    for key in ("name", "capability", "sm_count", "memory_gib"):
        # Equal cards differ by some MiB in what the driver leaves; a GiB apart they are different cards.
        values = {round(f[key]) if key == "memory_gib" else f[key] for f in facts}
        if len(values) > 1 and device == "cuda":
            raise MixedGpus(
                f"unlike GPUs in one run ({key}: {', '.join(sorted(map(str, values)))}); "
                "choose equal ones with CUDA_VISIBLE_DEVICES"
            )
    record = records.Gpu(
        device=device,
        name=first["name"],
        count=len(facts),
        capability=first["capability"],
        memory_gib=round(first["memory_gib"], 2),
        sm_count=first["sm_count"],
        uuids=[f["uuid"] for f in facts if f["uuid"]],
        mig="MIG" in first["name"].split(),
    )
    if device == "cuda":
        record.peak_tflops, record.peak_source = gpus.peak(
            first["name"], first["capability"], first["memory_gib"], peak_override
        )
        for key, value in nvml_facts(record.uuids).items():
            setattr(record, key, value)
    elif peak_override:
        record.peak_tflops, record.peak_source = peak_override, "PEAK_TFLOPS"
    else:
        record.peak_source = "no GPU: figures of this CPU, no peak"
    return record


def nvml_facts(uuids: list[str]) -> dict:
    """Driver, power limit, highest SM clock and link kinds of these GPUs; {} where NVML does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(u) for u in uuids]
    except pynvml.NVMLError:
        return {}

    def ask(function, *args):
        try:
            return function(*args)
        except pynvml.NVMLError:
            return None

    power = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handles[0])
    return {
        "driver": ask(pynvml.nvmlSystemGetDriverVersion),
        "power_limit_w": None if power is None else power / 1000,
        "max_sm_clock_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, handles[0], pynvml.NVML_CLOCK_SM),
        "links": links(handles),
    }


def links(handles: list) -> list[str]:
    """Link kinds between these GPUs as nvidia-smi topo names them: NV18 (active NVLinks), PIX, NODE, SYS."""
    import pynvml

    names = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t
    found = set()
    for i, handle in enumerate(handles if len(handles) > 1 else []):
        active = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
            except pynvml.NVMLError:
                break
        if active:
            found.add(f"NV{active}")
            continue
        other = handles[i - 1]
        try:
            found.add(names.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other), "?"))
        except pynvml.NVMLError:
            found.add("?")
    return sorted(found)


@dataclass
class Visible:
    """The GPUs a sweep may use, without torch: NVML indices in PCI order, their NVML handles and UUIDs."""

    indices: list[int] = field(default_factory=list)
    handles: list = field(default_factory=list)
    uuids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def first(self, n: int) -> Visible:
        return Visible(self.indices[:n], self.handles[:n], self.uuids[:n], self.names[:n])


def visible_gpus() -> Visible:
    """GPUs by NVML that CUDA_VISIBLE_DEVICES (indices or UUIDs) allows; none without a driver or by DS_ACCELERATOR=cpu.

    Exits 2 on an entry that names no GPU, and on a MIG slice, whose figures compare with nothing.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return Visible()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Visible()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(h) for h in handles]
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = list(range(len(handles)))
    if asked is not None:
        chosen = []
        for word in filter(None, (w.strip() for w in asked.split(","))):
            if word.startswith("MIG"):
                fail_setting(f"CUDA_VISIBLE_DEVICES={asked}: a MIG slice does not compare with a whole GPU")
            matches = [int(word)] if word.isdecimal() else [i for i, u in enumerate(uuids) if u.startswith(word)]
            if len(matches) != 1 or matches[0] >= len(handles):
                fail_setting(f"CUDA_VISIBLE_DEVICES={asked}: no GPU {word!r} here")
            chosen += matches
    return Visible(
        chosen,
        [handles[i] for i in chosen],
        [uuids[i] for i in chosen],
        [pynvml.nvmlDeviceGetName(handles[i]) for i in chosen],
    )
