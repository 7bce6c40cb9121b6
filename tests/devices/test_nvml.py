"""NVML's answers as typed figures.

Against a FAKE library object, which proves how answers are read and errors told, and nothing about a GPU; and, on a
machine with one, against the real library and what torch says.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
import sys
import types
from typing import Any

import pytest
import torch

from rlcore.devices.cuda.device import CudaDevice
from rlcore.errors import DeviceError, MissingDependencyError
from rlcore.registry import registry

NOT_SUPPORTED, GPU_IS_LOST, INVALID_ARGUMENT, NOT_FOUND = 3, 15, 2, 6


class FakeNVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 15: "GPU is lost", 2: "Invalid Argument", 6: "Not Found"}.get(value, "?"))
        self.value = value


class FakeMismatchError(Exception):
    pass


class FakeLibrary(types.ModuleType):
    """Two GPUs under nvidia-ml-py's names; ``errors`` makes functions fail."""

    NVMLError, NVMLLibraryMismatchError = FakeNVMLError, FakeMismatchError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_NVLINK_MAX_LINKS = 0, 1, 2, 18

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.uuids = ["GPU-aa", "GPU-bb"]
        self.errors: dict[str, Exception] = {}
        self.open = 0
        self.bits = 0
        self.peers = {0: 0, 2: 5}

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattribute__(self, name: str) -> Any:
        errors = super().__getattribute__("__dict__").get("errors", {})
        if name not in errors:
            return super().__getattribute__(name)

        def fail(*_: Any) -> None:
            raise errors[name]

        return fail

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetName": lambda gpu: b"NVIDIA H200" if gpu else "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda gpu: ["GPU-aa", "GPU-bb"][gpu],
            "nvmlDeviceGetPciInfo": lambda gpu: types.SimpleNamespace(busId=b"00000000:0%d:00.0" % gpu),
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, 0),
            "nvmlDeviceGetMigMode": lambda gpu: [gpu, gpu],
            "nvmlDeviceGetMemoryInfo": lambda gpu: types.SimpleNamespace(total=1000, used=300, free=700),
            "nvmlDeviceGetUtilizationRates": lambda gpu: types.SimpleNamespace(gpu=42, memory=7),
            "nvmlDeviceGetPowerUsage": lambda gpu: 123_456,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 5_000_500,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 36,
            "nvmlDeviceGetClockInfo": lambda gpu, which: {1: 1830, 2: 3201}[which],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, which: {1: 1980, 2: 3202}[which],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: self.bits,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x8,
            "nvmlDeviceGetNvLinkState": self._link_state,
            "nvmlDeviceGetP2PStatus": lambda first, second, what: self.peers[what],
            "nvmlDeviceGetTopologyCommonAncestor": lambda first, second: 30,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                types.SimpleNamespace(pid=7, usedGpuMemory=100),
                types.SimpleNamespace(pid=8, usedGpuMemory=None),
            ],
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def _by_uuid(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise FakeNVMLError(NOT_FOUND)
        return self.uuids.index(uuid)

    def _link_state(self, gpu: int, link: int) -> int:
        if link >= 4 * gpu:
            raise FakeNVMLError(INVALID_ARGUMENT)
        return int(link != 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def nvml(library: FakeLibrary) -> Any:
    from rlcore.devices.cuda.nvml import Nvml

    return Nvml()


def test_identity(nvml: Any) -> None:
    first, second = nvml.gpus()
    assert (first.number, first.name, first.uuid, first.pci_address) == (0, "NVIDIA H200", "aa", "00000000:00:00.0")
    assert (second.name, second.uuid, second.capability, second.total_bytes) == ("NVIDIA H200", "bb", "9.0", 1000)
    assert [gpu.num_nvlinks for gpu in (first, second)] == [0, 3]
    assert [gpu.is_partitioned for gpu in (first, second)] == [False, True]
    assert (nvml.driver_version(), nvml.cuda_version()) == ("580.65.06", (13, 1))


def test_a_device_tells_the_driver_where_it_can_be_asked(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    spec, _ = registry().devices["cuda"]
    assert CudaDevice(spec, 0).versions() == {"CUDA": "13.0", "driver": "580.65.06"}
    library.errors["nvmlSystemGetDriverVersion"] = FakeNVMLError(GPU_IS_LOST)
    assert CudaDevice(spec, 0).versions() == {"CUDA": "13.0"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert CudaDevice(spec, 0).versions() == {"CUDA": "13.0"}


def test_status_is_in_the_units_of_its_names(nvml: Any, library: FakeLibrary) -> None:
    library.bits = 0x1 | 0x4 | 0x40
    found = nvml.status("bb")
    assert (found.used_bytes, found.free_bytes) == (300, 700)
    assert (found.power_w, found.power_limit_w, found.energy_j) == (123.456, 700.0, 5000.5)
    assert (found.temperature_c, found.busy_percent) == (36, 42)
    assert (found.sm_clock_mhz, found.sm_clock_limit_mhz) == (1830, 1980)
    assert (found.memory_clock_mhz, found.memory_clock_limit_mhz) == (3201, 3202)
    assert found.throttle_reasons == ("software power cap", "hardware thermal slowdown")  # idle is no throttling
    assert found.unknown == {}


def test_what_a_gpu_does_not_tell_is_none(nvml: Any, library: FakeLibrary) -> None:
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates",
                 "nvmlDeviceGetMigMode"):  # fmt: skip
        library.errors[name] = FakeNVMLError(NOT_SUPPORTED)
    found = nvml.status("aa")
    assert (found.power_w, found.temperature_c, found.busy_percent) == (None, None, None)
    assert found.power_limit_w == 700.0
    assert found.unknown == {
        "power_w": "nvmlDeviceGetPowerUsage: Not Supported",
        "temperature_c": "nvmlDeviceGetTemperature: Not Supported",
        "busy_percent": "nvmlDeviceGetUtilizationRates: Not Supported",
    }
    assert not nvml.gpus()[0].is_partitioned


def test_of_a_part_of_a_gpu_there_is_its_memory_and_why_not_the_rest(nvml: Any, library: FakeLibrary) -> None:
    """A MIG part: its handle is found by "MIG-" and its uuid, and answers for little besides memory and processes."""
    library.uuids[1] = "MIG-cc"
    clocks = ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetCurrentClocksEventReasons")
    power = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTotalEnergyConsumption")
    for name in (*clocks, *power, "nvmlDeviceGetUtilizationRates"):
        library.errors[name] = FakeNVMLError(NOT_SUPPORTED)
    library.errors["nvmlDeviceGetTemperature"] = FakeNVMLError(INVALID_ARGUMENT)
    found = nvml.status("cc")
    assert (found.used_bytes, found.free_bytes) == (300, 700)
    told = {"used_bytes", "free_bytes", "unknown"}
    figures = {field.name for field in dataclasses.fields(found)} - told
    assert len(figures) == 10 and {getattr(found, name) for name in figures} == {None}
    assert found.unknown.keys() == figures
    assert found.unknown["temperature_c"] == "nvmlDeviceGetTemperature: Invalid Argument"
    assert found.unknown["throttle_reasons"] == "nvmlDeviceGetCurrentClocksEventReasons: Not Supported"
    assert len(nvml.processes("cc")) == 2


def test_a_uuid_that_nothing_has_is_an_error(nvml: Any, library: FakeLibrary) -> None:
    with pytest.raises(DeviceError, match=r"^NVML cannot answer nvmlDeviceGetHandleByUUID: Not Found; see nvidia-smi$"):
        nvml.status("dd")
    library.errors["nvmlDeviceGetHandleByUUID"] = FakeNVMLError(GPU_IS_LOST)
    with pytest.raises(DeviceError, match=r"^NVML cannot answer nvmlDeviceGetHandleByUUID: GPU is lost; "):
        nvml.processes("aa")


def test_an_older_driver_names_throttling_otherwise(nvml: Any, library: FakeLibrary) -> None:
    library.errors["nvmlDeviceGetCurrentClocksEventReasons"] = FakeNVMLError(13)
    assert nvml.status("aa").throttle_reasons == ("hardware slowdown",)
    library.errors["nvmlDeviceGetCurrentClocksThrottleReasons"] = FakeNVMLError(13)
    assert nvml.status("aa").throttle_reasons is None


def test_processes_and_links(nvml: Any) -> None:
    assert [(process.pid, process.used_bytes) for process in nvml.processes("aa")] == [(7, 100), (8, None)]
    (link,) = nvml.links()
    assert (link.first, link.second, link.pcie_path) == (0, 1, "a host bridge")
    assert (link.has_peer_access, link.has_nvlink) == (True, False)


def test_of_all_that_nvml_answers_about_peers_only_ok_is_access(nvml: Any, library: FakeLibrary) -> None:
    """NVML_P2P_STATUS_*: 0 is OK; 1 to 6 say what is missing, the last that it is not known."""
    for read, nvlink in itertools.product(range(7), repeat=2):
        library.peers = {0: read, 2: nvlink}
        (link,) = nvml.links()
        assert (link.has_peer_access, link.has_nvlink) == (read == 0, nvlink == 0)
    library.errors["nvmlDeviceGetP2PStatus"] = FakeNVMLError(NOT_SUPPORTED)
    (link,) = nvml.links()
    assert (link.has_peer_access, link.has_nvlink) == (False, False)


def test_a_lost_gpu_is_an_error_and_not_none(nvml: Any, library: FakeLibrary) -> None:
    library.errors["nvmlDeviceGetPowerUsage"] = FakeNVMLError(GPU_IS_LOST)
    with pytest.raises(DeviceError, match=r"^NVML cannot answer nvmlDeviceGetPowerUsage: GPU is lost; see nvidia-smi$"):
        nvml.status("aa")
    library.errors["nvmlDeviceGetComputeRunningProcesses"] = FakeMismatchError("wrong versions")
    with pytest.raises(DeviceError, match="nvmlDeviceGetComputeRunningProcesses: wrong versions"):
        nvml.processes("aa")


def test_it_is_closed_after_use(library: FakeLibrary) -> None:
    from rlcore.devices.cuda.nvml import Nvml

    with pytest.raises(KeyError), Nvml():
        assert library.open == 1
        raise KeyError
    assert library.open == 0


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.devices.cuda.nvml import Nvml

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingDependencyError, match=r"needs the package 'nvidia-ml-py'; run: pip install 'rlcore\[c"):
        Nvml()


def test_every_name_it_uses_is_one_of_the_real_package() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py, of rlcore[cuda], is not installed")
    from rlcore.devices.cuda import nvml

    used = re.findall(r"\"(nvml[A-Z]\w+|NVML_\w+)\"|_library\.(\w+)", inspect.getsource(nvml))
    names = {name for pair in used for name in pair if name}
    assert len(names) > 25
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []


def test_without_a_driver_the_error_says_so(run_python: Any) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py, of rlcore[cuda], is not installed")
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has a driver")
    result = run_python("from rlcore.devices.cuda.nvml import Nvml; Nvml()")
    assert "DeviceError: NVML cannot answer nvmlInit: NVML Shared Library Not Found; see nvidia-smi" in result.stderr


# ------------------------------------------------------------------------------------------------ with a GPU

REAL = """
import os, torch
from rlcore.devices.cuda.nvml import Nvml
from rlcore.registry import get_device, launch
device = get_device("cuda")
with Nvml() as nvml:
    gpus = nvml.gpus()
    uuids = launch("cuda").visible_uuids([gpu.uuid for gpu in gpus])
    print(torch.cuda.is_initialized())
    found = device.properties()
    print(torch._C._cuda_hasPrimaryContext(0))
    (gpu,) = [gpu for gpu in gpus if gpu.uuid == found.uuid]
    print(uuids[0] == found.uuid, gpu.name == found.name, gpu.capability == found.capability)
    print(0.9 < found.total_bytes / gpu.total_bytes <= 1)
    before = nvml.status(gpu.uuid)
    held = torch.ones(2**30, dtype=torch.uint8, device="cuda"); torch.cuda.synchronize()
    after = nvml.status(gpu.uuid)
    print(torch._C._cuda_hasPrimaryContext(0), after.used_bytes - before.used_bytes >= 2**30)
    print(0 < after.power_w <= 1.5 * after.power_limit_w, 0 < after.temperature_c < 120,
          0 < after.sm_clock_mhz <= after.sm_clock_limit_mhz, after.throttle_reasons is not None)
    print(len(nvml.links()) == len(gpus) * (len(gpus) - 1) // 2, nvml.cuda_version() >= (12, 0))
"""


@pytest.mark.gpu
def test_nvml_and_torch_agree_and_identity_makes_no_context(run_python: Any) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py, of rlcore[cuda], is not installed")
    result = run_python(REAL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["False", "False"]  # NVML initialises nothing; properties() makes no context
    assert set(" ".join(lines[2:]).split()) == {"True"}, result.stdout
