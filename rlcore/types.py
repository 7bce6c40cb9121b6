"""Plain data that several folders use: registrations of plugins, answers of devices, reports of moves.

It needs no torch: a plugin's registration must import in milliseconds on a machine without its hardware.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from rlcore.errors import InvalidInputError

PLUGIN_API = (1, 0)
"""(major, minor) of the plugin interface. A plugin for another major, or a newer minor, is refused."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_import_path(path: str, what: str) -> None:
    if not isinstance(path, str) or not _IMPORT_PATH.fullmatch(path):
        raise InvalidInputError(f"{what} must be an import path 'package.module:attribute', got {path!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Limits of a kernel's programs on a device whose programs work on whole tiles, without threads."""

    tile_bytes: int
    """Bytes of all tensors that a program holds at one time."""
    num_programs: int
    """The most that one launch may have."""
    has_float64: bool = True

    def __post_init__(self) -> None:
        for field in ("tile_bytes", "num_programs"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"ProgramLimits.{field} must be a whole number of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The registration of one kind of device."""

    name: str
    """The name that users give, such as "cuda"."""
    vendor: str
    """The maker, for people to read."""
    torch_type: str
    """``torch.device(...).type`` of its tensors."""
    priority: int
    """Among available accelerators the highest is the default; the built-in CPU has 0."""
    loader: str
    """Import path of the ``Device`` class: ``probe()`` tells whether it can run; made with (spec, index)."""
    collective_backend: str
    """Name of its torch.distributed back end."""
    api_version: tuple[int, int]
    """``PLUGIN_API`` of the rlcore that this registration was written for, as numbers: (1, 0)."""
    visible_devices_variable: str | None = None
    """Environment variable that restricts which devices a process sees."""
    visible_devices_rise: bool = False
    """The ids in that variable are numbers in rising order."""
    ray_resource: str | None = None
    """The resource name by which Ray schedules it."""
    vllm_plugin: str | None = None
    """The distribution by which vLLM runs on it, such as "vllm-ascend"; None: vLLM by itself."""
    torch_build: str | None = None
    """Entry of ``torch.version`` that must be set, such as "hip", where vendors share a torch type."""
    is_host: bool = False
    """It is the host's processor and memory, not an accelerator beside them."""
    program_limits: ProgramLimits | None = None
    """Limits of Triton kernels; None where programs have threads, and the compiler finds room for a tile."""
    warp_lanes: tuple[int, ...] = (32,)
    """Threads of a warp for which Triton kernels are built there, where programs have threads."""

    def __post_init__(self) -> None:
        for field in ("name", "torch_type"):
            value = getattr(self, field)
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise InvalidInputError(f"DeviceSpec.{field} must be lower case letters, digits and '_', got {value!r}")
        if type(self.priority) is not int:
            raise InvalidInputError(f"DeviceSpec.priority must be a whole number, got {self.priority!r}")
        if not isinstance(self.api_version, tuple) or list(map(type, self.api_version)) != [int, int]:
            raise InvalidInputError(
                f"DeviceSpec.api_version must be two numbers such as {PLUGIN_API}, got {self.api_version!r}"
            )
        check_import_path(self.loader, "DeviceSpec.loader")
        for field in ("vendor", "collective_backend"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"DeviceSpec.{field} must be a str that is not empty, got {value!r}")
        if not isinstance(self.warp_lanes, tuple) or any(
            type(lanes) is not int or lanes < 1 for lanes in self.warp_lanes
        ):
            raise InvalidInputError(
                f"DeviceSpec.warp_lanes must be whole numbers such as (32,), got {self.warp_lanes!r}"
            )
        for field, kind in _OPTIONAL_FIELDS.items():
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                raise InvalidInputError(f"DeviceSpec.{field} must be {kind.__name__} or None, got {value!r}")
        for field in ("is_host", "visible_devices_rise"):
            if type(getattr(self, field)) is not bool:
                raise InvalidInputError(f"DeviceSpec.{field} must be True or False, got {getattr(self, field)!r}")


_OPTIONAL_FIELDS = {
    "visible_devices_variable": str,
    "ray_resource": str,
    "vllm_plugin": str,
    "torch_build": str,
    "program_limits": ProgramLimits,
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The availability of a kind of device on this machine, found without initialising one."""

    count: int
    """Number of usable devices; 0 means not available."""
    reason: str = ""
    """The reason why it is not available."""

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 0:
            raise InvalidInputError(f"Probe.count must be a whole number of at least 0, got {self.count!r}")
        if not isinstance(self.reason, str):
            raise InvalidInputError(f"Probe.reason must be a str, got {self.reason!r}")
        if self.count == 0 and not self.reason:
            raise InvalidInputError("Probe(0) must say the reason why the device is not available")

    @property
    def is_available(self) -> bool:
        return self.count > 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One row of ``rlcore.list_devices()``."""

    name: str
    vendor: str
    count: int
    is_available: bool
    reason: str
    """The reason why it is not available; empty when it is."""
    plugin: str
    """The plugin that registered it."""
    is_broken: bool = False
    """Its probe raised, hung or gave a wrong answer; ``reason`` says how."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    name: str
    """Product name."""
    uuid: str
    total_bytes: int
    capability: str
    """The vendor's generation, such as "9.0"; empty where there is none."""
    cores: int
    """Streaming multiprocessors, AI cores or CPU cores."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory that this process's allocator holds on the device."""

    allocated_bytes: int
    """The memory of tensors; not that which the allocator keeps for later ones."""
    reserved_bytes: int
    peak_allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """The state of a device now; a figure that the device or its driver does not give is None.

    For a part of a GPU (MIG) NVML gives the memory only: power, temperature, clocks and use belong to the whole GPU.
    """

    used_bytes: int
    free_bytes: int
    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    """Energy used since the driver was loaded."""
    temperature_c: int | None
    sm_clock_mhz: int | None
    sm_clock_limit_mhz: int | None
    memory_clock_mhz: int | None
    memory_clock_limit_mhz: int | None
    busy_percent: int | None
    """The share of the last sampling period (up to a second) in which any kernel ran."""
    throttle_reasons: tuple[str, ...] | None
    """The reasons why it runs below the requested clocks; empty when it does not."""
    unknown: dict[str, str]
    """Name of each figure that is None -> the driver's function and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process with a context on a device."""

    pid: int
    """The id on the host; inside a container the id may differ."""
    used_bytes: int | None


Support = Literal["native", "emulated", "unsupported"]
Evidence = Literal["hardware", "simulated", "declared"]


@dataclass(frozen=True, slots=True)
class Capability:
    """The support of a feature by a device, and how it is known."""

    support: Support
    evidence: Evidence
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulation of a vendor's libraries, and the operators that this run has called."""

    name: str
    """Such as "simulated CANN"."""
    operators: tuple[str, ...]
    """Operators that it computed, in this process and in those that share its log."""
    refused: tuple[str, ...]
    """Operators that it does not have, so that they failed."""

    def __str__(self) -> str:
        return f"{self.name}: {len(self.operators)} operators simulated, refused: {', '.join(self.refused) or 'none'}"

    def counted(self) -> dict[str, str | int | list[str]]:
        """Return the counts for JSON reports."""
        counts = {"operators_simulated": len(self.operators), "operators_refused": len(self.refused)}
        return {"name": self.name, **counts, "refused": list(self.refused)}


class _Handle:
    """Base of plain data that may travel to another process by any means."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        """Return the fields as msgpack."""
        import msgspec

        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the bytes of ``to_bytes``. Raises InvalidInputError for any others."""
        from rlcore.decoding import decode

        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidInputError(f"{cls.__name__}.from_bytes takes what to_bytes gave, got {type(data).__name__}")
        handle: Self = decode(data, cls, cls.__name__, error=InvalidInputError)
        if handle.to_bytes() != data:  # unknown fields belong to another kind of handle
            raise InvalidInputError(f"these {len(data)} bytes are no {cls.__name__}, but have some of its fields")
        return handle


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcHandle(_Handle):
    """One exported tensor, as plain data: another process of this machine opens it without unpickling anything."""

    device: str
    """Registered name of the kind of device, such as "cuda"."""
    device_uuid: str
    """Uuid of the device that holds the memory; devices are matched by it, never by ordinal."""
    boot_id: str
    """Id of the running kernel: a handle is invalid on another machine, and after a restart."""
    exporter: str
    """Path of the Unix socket at which the exporting process answers importers."""
    export_id: str
    """Id of the export; all tensors in one storage share it, and each process opens it once."""
    payload: bytes
    """The vendor's handle of the memory; empty where the exporter sends a descriptor over its socket."""
    storage_bytes: int
    """Bytes of the export: one storage, or several of one block with the bytes between them."""
    storage_offset_bytes: int
    """The first byte of the tensor in the export."""
    dtype: str
    """Such as "bfloat16"."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements."""

    def __post_init__(self) -> None:
        numbers = (self.storage_bytes, self.storage_offset_bytes, *self.shape, *self.stride)
        if min(numbers) < 0 or len(self.shape) != len(self.stride):
            raise InvalidInputError(
                "IpcHandle needs sizes, strides and offsets of at least 0 and a stride for each size, got "
                f"shape {self.shape}, stride {self.stride}, offset {self.storage_offset_bytes} of {self.storage_bytes}"
            )
        # Both are in errors, and no handle commands a terminal.
        if not (self.exporter.startswith("/") and self.exporter.isprintable()):
            raise InvalidInputError(f"IpcHandle.exporter must be the path of a socket, got {self.exporter!r}")
        if not self.export_id.isprintable():
            raise InvalidInputError(f"IpcHandle.export_id must be printable, got {self.export_id!r}")


@dataclass(frozen=True, slots=True)
class IpcExport:
    """One row of ``device.memory.ledger()``: a storage that other processes may open, kept alive until revoked."""

    export_id: str
    device_uuid: str
    address: int
    """Address of the storage in this process; 0 after its owner has freed or resized it, because other memory may be
    there now."""
    storage_bytes: int
    claims: dict[int, int]
    """Process id -> the number of its imports that keep the export from being revoked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHandle(_Handle):
    """An interprocess event, as plain data: a stream of another process of this machine can wait for it."""

    device: str
    """Registered name of the kind of device, such as "cuda"."""
    device_uuid: str
    boot_id: str
    payload: bytes
    """The vendor's handle of the event."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Memory that one pool of this process holds on the device."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int
    """Bytes taken from the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """The measured result of one offload or onload."""

    moved_bytes: int
    freed_device_bytes: int
    """Negative when the move took device memory."""
    seconds: float
    pinned: bool
    first_use: bool
    """Host memory was allocated during this move; later moves reuse it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The measured result of one weight sync."""

    version: int
    route: str
    """"local", "direct", "packed", "collective" or "relayed"."""
    moved_bytes: int
    needed_bytes: int
    """Bytes of the receiver's weights; more moved than needed is read amplification."""
    fallback_bytes: int
    """Bytes that went through the engine's own loader instead of planned copies."""
    handles_opened: int
    seconds: float
    calls_s: Mapping[str, float]
    """Seconds of each call to the two sides by its method, such as "pull"; calls may run side by side."""
    staging_waits_by: str = ""
    """How the two sides of staging buffers wait for each other: "event", their devices by interprocess events; "host",
    each process for its own device; "" where no staging buffer was used."""
    why_on_host: str = ""
    """The reason why "packed" used shared memory of the host instead of the devices; "" if it did not."""
    network_bytes: int = 0
    """Bytes of weights that went from one machine to another, once for each machine, however many receivers it has;
    those that ``verify=True`` sends again are among them."""

    is_delta: bool = False
    """Only what had changed since the receivers' version was told; ``moved_bytes`` are those of the changes."""
    why_dense: str = ""
    """The reason why all was told though ``delta=True`` was asked for; "" otherwise."""

    @property
    def slabs_wait_by(self) -> str:
        """The former name of ``staging_waits_by``, deprecated."""
        warnings.warn(
            "SyncReport.slabs_wait_by is called staging_waits_by now, and the next version no longer has it",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.staging_waits_by
