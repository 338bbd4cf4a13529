"""GPU state and the choice of GPUs, through a stand-in for NVML: the calls are the library's own names."""

from __future__ import annotations

import pynvml
import pytest

from harness import records
from harness.measure import box, telemetry


class Nvml:
    """Two GPUs that answer what they are told to; a None answer is "not supported"."""

    def __init__(self, **answers):
        self.answers = {
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 650_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x04,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000,
        } | answers

    def install(self, monkeypatch, names=("NVIDIA H200", "NVIDIA H200")):
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(names))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda u: int(u[-1]))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda h: f"GPU-aa{h}")
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda h: names[h])
        for name in self.answers:
            monkeypatch.setattr(pynvml, name, self.reader(name))
        return self

    def reader(self, name):
        def read(*args):
            if self.answers[name] is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self.answers[name]

        return read


def test_worst_state_and_the_energy_of_the_interval(monkeypatch):
    nvml = Nvml().install(monkeypatch)
    sampler = telemetry.Sampler("GPU-aa0", period_s=1000)
    sampler.take()
    nvml.answers |= {"nvmlDeviceGetClockInfo": 1500, "nvmlDeviceGetCurrentClocksEventReasons": 0x40}
    sampler.sample()
    nvml.answers |= {"nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetTotalEnergyConsumption": 17_500}
    sampler.sample()
    state = sampler.take()
    sampler.close()
    assert state["clock_mhz"] == 1500
    assert state["power_w"] == 650
    assert state["energy_j"] == 12.5
    combined = telemetry.combine([state, state | {"clock_mhz": 1700, "bits": 0x04}])
    assert combined.sm_clock_mhz == 1500
    assert combined.power_w == 1300
    assert combined.energy_j == 25
    assert combined.throttle == ["sw_power_cap", "hw_thermal"]


def test_what_nvml_does_not_tell_is_null(monkeypatch):
    Nvml(**dict.fromkeys(Nvml().answers)).install(monkeypatch)
    sampler = telemetry.Sampler("GPU-aa0", period_s=1000)
    sampler.sample()
    state = sampler.take()
    sampler.close()
    assert set(state.values()) == {None}
    assert telemetry.combine([state, state]) is None
    some = telemetry.combine([state, state | {"power_w": 600.0, "clock_mhz": 1980}])
    assert some.sm_clock_mhz == 1980
    assert some.power_w is None  # of one GPU only: no sum
    assert some.throttle is None
    nothing = telemetry.Sampler(None)
    assert set(nothing.take().values()) == {None}
    nothing.close()


def test_cuda_visible_devices_by_index_and_uuid(monkeypatch, capsys):
    Nvml().install(monkeypatch, names=("NVIDIA H200", "NVIDIA B200"))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert box.visible_gpus() == [(0, 0, "GPU-aa0", "NVIDIA H200"), (1, 1, "GPU-aa1", "NVIDIA B200")]
    for asked in ("1", "GPU-aa1", " 1 ", "01"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
        assert [g.name for g in box.visible_gpus()] == ["NVIDIA B200"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert box.visible_gpus() == []
    for asked in ("7", "GPU-bb", "MIG-123", "GPU-aa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
        with pytest.raises(SystemExit, match="2"):
            box.visible_gpus()
        assert f"wrong setting: CUDA_VISIBLE_DEVICES={asked}: " in capsys.readouterr().err


def test_a_torch_that_cannot_use_the_gpu_that_is_here_is_an_error(monkeypatch, capsys):
    """case 12: not a quiet run on the CPU, in any of the scripts."""
    Nvml().install(monkeypatch)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SystemExit, match="2"):
        box.use_accelerator()
    assert "NVIDIA H200 is here, this torch cannot use it: run ./install.sh" in capsys.readouterr().err
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert box.use_accelerator() == "cpu"


def facts(**changed):
    return {
        "name": "NVIDIA H200",
        "capability": (9, 0),
        "memory_gib": 139.8,
        "sm_count": 132,
        "uuid": "GPU-aa0",
    } | changed


@pytest.mark.parametrize(
    "other", [{"name": "NVIDIA H100 80GB HBM3"}, {"capability": (10, 0)}, {"sm_count": 114}, {"memory_gib": 79.1}]
)
def test_unlike_gpus_stop_the_run(monkeypatch, other):
    """case 26"""
    Nvml().install(monkeypatch)
    with pytest.raises(box.MixedGpus, match="unlike GPUs"):
        box.gpu_record("cuda", [facts()] * 7 + [facts(**other)])


def test_gpu_record_names_peak_and_slice(monkeypatch):
    Nvml().install(monkeypatch)
    record = box.gpu_record("cuda", [facts(), facts(memory_gib=139.81)])
    assert (record.count, record.peak_tflops, record.mig) == (2, 989, False)
    assert box.gpu_record("cuda", [facts(name="NVIDIA H200 MIG 1g.18gb", memory_gib=17.0)]).mig
    unknown = box.gpu_record("cuda", [facts(name="NVIDIA X900")])
    assert unknown.peak_tflops is None
    assert "X900" in unknown.peak_source
    assert box.gpu_record("cuda", [facts(name="NVIDIA X900")], 1234).peak_tflops == 1234
    assert isinstance(record, records.Gpu)
