"""State of one GPU while it works: SM clock, power, temperature, throttle reasons, energy, through NVML.

Each rank watches its own GPU with one light thread; nothing is read inside the timed part by the measuring thread
itself. What NVML does not tell (an old driver, a virtual GPU, no GPU) is None.
"""

import threading
import time
from functools import reduce
from operator import or_

import pynvml

from harness.records import GpuState

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h). Idle and application-clock settings are no throttling.
THROTTLE_BITS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
# The software power cap is how a GPU under full load normally runs; these mean the box is in trouble.
TROUBLE = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
READINGS = ("clock_mhz", "power_w", "temperature_c", "bits", "energy_j")


def ask(function: str, *arguments):
    """What this NVML function answers, None where it does not: an old driver or library, a virtual GPU."""
    try:
        return getattr(pynvml, function)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def handle(uuid: str):
    """NVML's handle of the GPU with this UUID, with "GPU-" before it or without. Raises NVMLError."""
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def told(rows: list[dict], key: str) -> list:
    """The values of `key` that are known."""
    return [row[key] for row in rows if row[key] is not None]


class Sampler:
    """Samples the GPU with this UUID until closed; `uuid` None gives a sampler whose states are all None."""

    def __init__(self, uuid: str | None, period_s: float = 0.25):
        self._handle = None
        self._lock = threading.Lock()
        self._samples: list[dict] = []  # since the last `take`
        self._stop = threading.Event()
        if uuid is None:
            return
        try:
            pynvml.nvmlInit()
            self._handle = handle(uuid)
        except pynvml.NVMLError:
            return
        self._energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        self._thread = threading.Thread(target=self._loop, args=(period_s,), daemon=True, name="nvml")
        self._thread.start()

    def _loop(self, period_s: float) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(period_s)

    def sample(self) -> None:
        """Read once, now."""
        seen = {
            "clock": ask("nvmlDeviceGetClockInfo", self._handle, pynvml.NVML_CLOCK_SM),
            "power": ask("nvmlDeviceGetPowerUsage", self._handle),  # mW
            "temperature": ask("nvmlDeviceGetTemperature", self._handle, pynvml.NVML_TEMPERATURE_GPU),
            "bits": ask("nvmlDeviceGetCurrentClocksEventReasons", self._handle),
        }
        with self._lock:
            self._samples.append(seen)

    def take(self) -> dict[str, float | None]:
        """This GPU since the last call: lowest clock, mean power, highest temperature, throttle bits, energy in J."""
        if self._handle is None:
            return dict.fromkeys(READINGS)
        with self._lock:
            samples, self._samples = self._samples, []

        before, self._energy_mj = self._energy_mj, ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        power, bits = told(samples, "power"), told(samples, "bits")
        return {
            "clock_mhz": min(told(samples, "clock"), default=None),
            "power_w": sum(power) / len(power) / 1000 if power else None,
            "temperature_c": max(told(samples, "temperature"), default=None),
            "bits": reduce(or_, bits) if bits else None,
            "energy_j": None if None in (before, self._energy_mj) else (self._energy_mj - before) / 1000,
        }

    def close(self) -> None:
        self._stop.set()
        if self._handle is not None:
            self._thread.join(timeout=2)


def combine(states: list[dict[str, float | None]]) -> GpuState | None:
    """Several GPUs' `take` results to one record: the worst clock, temperature and throttling, power and energy added.

    None when no GPU told anything; a sum is None unless every GPU told its part.
    """

    known = {key: told(states, key) for key in READINGS}
    if not any(known.values()):
        return None
    power, energy = (sum(known[k]) if len(known[k]) == len(states) else None for k in ("power_w", "energy_j"))
    every_bit = reduce(or_, map(int, known["bits"]), 0)
    return GpuState(
        sm_clock_mhz=min(known["clock_mhz"], default=None),
        power_w=power,
        temperature_c=max(known["temperature_c"], default=None),
        throttle=[name for bit, name in THROTTLE_BITS.items() if every_bit & bit] if known["bits"] else None,
        energy_j=energy,
    )


def busy_processes(handles: list) -> list[str]:
    """Processes that hold memory on these NVML handles, as "GPU 0: process 4242 holds 10.2 GiB"."""
    found = []
    for handle in handles:
        for p in ask("nvmlDeviceGetComputeRunningProcesses", handle) or ():
            held = "unknown memory" if p.usedGpuMemory is None else f"{p.usedGpuMemory / 2**30:.1f} GiB"
            found.append(f"GPU {ask('nvmlDeviceGetIndex', handle)}: process {p.pid} holds {held}")
    return found


def used_bytes(handle) -> int:
    return pynvml.nvmlDeviceGetMemoryInfo(handle).used


def wait_until_free(handles: list, before: list[int], timeout_s: float = 60) -> bool:
    """Wait until each GPU's used memory is back to `before` (bytes) plus 1 GiB; else the next length fails falsely."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all(used_bytes(h) <= then + 2**30 for h, then in zip(handles, before, strict=True)):
            return True
        time.sleep(0.5)
    return False
