"""The driver's management library (NVML): identity, health and links of GPUs. CUDA is not initialised.

It is called through nvidia-ml-py, of the extra [cuda]. NVML numbers the GPUs of the whole machine by their PCI address
and ignores CUDA_VISIBLE_DEVICES. So a device is found here by its uuid, which is ``DeviceProperties.uuid``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from rlcore.errors import DeviceError, MissingDependencyError
from rlcore.types import DeviceProcess, DeviceStatus

_PATHS = {0: "one board", 10: "a PCIe switch", 20: "PCIe switches", 30: "a host bridge", 40: "a NUMA node"}
"""NVML_TOPOLOGY_*: the common part of two GPUs' PCIe paths; for other values it is the whole machine."""
_PEER_READ, _PEER_NVLINK = 0, 2  # NVML_P2P_CAPS_INDEX_*; nvidia-ml-py has the first as a tuple
_NO_FUNCTION = 13
_OLDER_NAMES = {"nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons"}  # before 535
_UNKNOWN = {2, 3, 4, _NO_FUNCTION}
"""NVML's errors for: invalid for a part of a GPU, not supported, not permitted, unknown to this driver."""
_ELSEWHERE = {2, 6}  # errors for a uuid that no GPU has
_THROTTLE = {
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
"""Bits of nvmlClocksEventReason*, without those that somebody asked for (idle, set clocks, sync boost)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The constant properties of a GPU."""

    number: int
    name: str
    uuid: str
    """Without the "GPU-" that nvidia-smi prints before it."""
    pci_address: str
    capability: str
    """Such as "9.0"."""
    total_bytes: int
    """Installed memory, with the part that the driver reserves."""
    num_nvlinks: int
    """Number of active links."""
    is_partitioned: bool
    """It is in MIG mode: processes use parts of it, which have their own uuids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLink:
    """The connection of two GPUs."""

    first: int
    second: int
    has_nvlink: bool
    has_peer_access: bool
    """Each can read the other's memory without the host."""
    pcie_path: str
    """The part that their PCIe paths have in common, such as "a PCIe switch"."""


class Nvml:
    """An open connection to NVML; close it, or use it in a ``with`` statement.

    Raises:
        MissingDependencyError: nvidia-ml-py is not installed.
        DeviceError: there is no driver, or it does not answer; every method may raise it.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise MissingDependencyError("nvidia-ml-py", needed_for="reading NVML", extra="cuda") from error
        self._library: Any = pynvml
        self._ask("nvmlInit")

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def driver_version(self) -> str:
        return str(self._ask("nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> tuple[int, int]:
        """Return the newest version of CUDA that the driver supports."""
        version = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return version // 1000, version % 1000 // 10

    def gpus(self) -> list[Gpu]:
        """Return every GPU of the machine, by number."""
        return [self._gpu(number) for number in range(self._ask("nvmlDeviceGetCount"))]

    def status(self, uuid: str) -> DeviceStatus:
        """Return the status of the GPU, or the part of a GPU, with this uuid."""
        handle = self._handle(uuid)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        figures: dict[str, Any] = {}
        unknown: dict[str, str] = {}
        for name, (converted, function, which) in _FIGURES.items():
            try:
                figures[name] = converted(self._figure(function, handle, which))
            except self._library.NVMLError as error:
                if error.value not in _UNKNOWN:
                    raise _failure(function, error) from error
                figures[name], unknown[name] = None, f"{function}: {error}"
        return DeviceStatus(used_bytes=memory.used, free_bytes=memory.free, **figures, unknown=unknown)

    def processes(self, uuid: str) -> list[DeviceProcess]:
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", self._handle(uuid))
        return [DeviceProcess(pid=process.pid, used_bytes=process.usedGpuMemory) for process in found]

    def links(self) -> list[GpuLink]:
        """Return the connection of every pair of GPUs."""
        numbers = range(self._ask("nvmlDeviceGetCount"))
        return [self._link(first, second) for first, second in itertools.combinations(numbers, 2)]

    def _gpu(self, number: int) -> Gpu:
        handle = self._ask("nvmlDeviceGetHandleByIndex", number)
        major, minor = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        partitioned = self._ask_or_none("nvmlDeviceGetMigMode", handle)
        return Gpu(
            number=number,
            name=_text(self._ask("nvmlDeviceGetName", handle)),
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle)).removeprefix("GPU-"),
            pci_address=_text(self._ask("nvmlDeviceGetPciInfo", handle).busId),
            capability=f"{major}.{minor}",
            total_bytes=self._ask("nvmlDeviceGetMemoryInfo", handle).total,
            num_nvlinks=self._num_nvlinks(handle),
            is_partitioned=partitioned is not None and partitioned[0] == 1,
        )

    def _num_nvlinks(self, handle: Any) -> int:
        states = []
        for link in range(self._library.NVML_NVLINK_MAX_LINKS):
            try:
                states.append(self._call("nvmlDeviceGetNvLinkState", handle, link))
            except self._library.NVMLError:  # it has no NVLink, or no more of them
                break
        return sum(states)

    def _link(self, first: int, second: int) -> GpuLink:
        pair = [self._ask("nvmlDeviceGetHandleByIndex", number) for number in (first, second)]
        return GpuLink(
            first=first,
            second=second,
            has_nvlink=self._ask_or_none("nvmlDeviceGetP2PStatus", *pair, _PEER_NVLINK) == 0,
            has_peer_access=self._ask_or_none("nvmlDeviceGetP2PStatus", *pair, _PEER_READ) == 0,
            pcie_path=_PATHS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", *pair), "the whole machine"),
        )

    def _figure(self, function: str, handle: Any, which: str | None) -> Any:
        arguments = (handle,) if which is None else (handle, getattr(self._library, which))
        try:
            return self._call(function, *arguments)
        except self._library.NVMLError as error:
            if error.value != _NO_FUNCTION or function not in _OLDER_NAMES:
                raise
            return self._call(_OLDER_NAMES[function], *arguments)

    def _handle(self, uuid: str) -> Any:
        try:
            return self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        except self._library.NVMLError as error:
            if error.value not in _ELSEWHERE:
                raise _failure("nvmlDeviceGetHandleByUUID", error) from error
        return self._ask("nvmlDeviceGetHandleByUUID", f"MIG-{uuid}")  # the uuid of a part

    def _ask_or_none(self, function: str, *arguments: Any) -> Any:
        try:
            return self._call(function, *arguments)
        except self._library.NVMLError as error:
            if error.value in _UNKNOWN:
                return None
            raise _failure(function, error) from error

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return self._call(function, *arguments)
        except (self._library.NVMLError, self._library.NVMLLibraryMismatchError) as error:
            raise _failure(function, error) from error

    def _call(self, function: str, *arguments: Any) -> Any:
        call: Callable[..., Any] = getattr(self._library, function)
        return call(*arguments)


def _thousandth(value: int) -> float:
    return value / 1000


def _throttle_reasons(bits: int) -> tuple[str, ...]:
    return tuple(reason for bit, reason in _THROTTLE.items() if bits & bit)


_FIGURES: dict[str, tuple[Callable[[Any], Any], str, str | None]] = {
    "power_w": (_thousandth, "nvmlDeviceGetPowerUsage", None),
    "power_limit_w": (_thousandth, "nvmlDeviceGetEnforcedPowerLimit", None),
    "energy_j": (_thousandth, "nvmlDeviceGetTotalEnergyConsumption", None),
    "temperature_c": (int, "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    "sm_clock_mhz": (int, "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    "sm_clock_limit_mhz": (int, "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    "memory_clock_mhz": (int, "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    "memory_clock_limit_mhz": (int, "nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
    "busy_percent": (operator.attrgetter("gpu"), "nvmlDeviceGetUtilizationRates", None),
    "throttle_reasons": (_throttle_reasons, "nvmlDeviceGetCurrentClocksEventReasons", None),
}
"""Field of ``DeviceStatus`` -> conversion of NVML's answer, NVML's function, and the sensor or clock to read."""


def _failure(function: str, error: Exception) -> DeviceError:
    return DeviceError(f"NVML cannot answer {function}: {error}; see nvidia-smi")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
