"""The types of a device and of its parts: the members of every device, and their contracts.

``rlcore.get_device()`` returns a `Device`. A vendor's plugin derives from
``rlcore.devices.generic.GenericTorchDevice``, which implements all of this over torch, and replaces the parts where
its hardware can do more. A member that a device does not have raises ``UnsupportedError`` with the reason that
``capabilities()`` gives; no member silently does nothing. ``pytest --pyargs rlcore.conformance --device NAME`` proves a
device against these contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NotRequired, Protocol, TypedDict

from rlcore.launch import LaunchFacts
from rlcore.types import (
    Capability,
    DeviceProcess,
    DeviceProperties,
    DeviceSpec,
    DeviceStatus,
    EventHandle,
    Evidence,
    IpcExport,
    IpcHandle,
    MemoryInfo,
    MemoryStats,
    PoolStats,
    Simulation,
)

if TYPE_CHECKING:
    import torch

    from rlcore._torch_private import Backend, ProcessGroup, Store

DEFAULT_COLLECTIVE_TIMEOUT_S = 300.0
"""How long a collective operation, and the forming of a group, may take."""


class HostMemory(Protocol):
    """Host memory of ``Memory.host_alloc``; it lives until ``host_free``, or until nothing refers to it."""

    nbytes: int
    is_pinned: bool
    """The buffer is page-locked for the device: copies run at the link's speed, and the host can work meanwhile."""

    @property
    def tensor(self) -> torch.Tensor:
        """[nbytes] uint8, the buffer itself. Raises StateError after it was freed."""
        ...

    def free(self) -> None:
        """Free the memory. Raises StateError if it was freed before, or if a tensor still refers to it."""


class ImportedTensor(AbstractContextManager["ImportedTensor"], Protocol):
    """A tensor of another process, imported by ``Memory.import_ipc``, valid until ``close()``."""

    handle: IpcHandle
    is_revoked: bool
    """The exporter wants its memory back, or has ended: call ``close()`` soon."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor on the importing device, without gradient. Raises StateError after ``close()``."""
        ...

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None:
        """End the use of the memory; queued work that uses it must be done. A second call does nothing."""


class MemoryPool(AbstractContextManager["MemoryPool"], Protocol):
    """Device memory kept apart under a tag: inside ``with pool:`` allocations of this thread come from it."""

    tag: str

    def stats(self) -> PoolStats: ...

    def empty_cache(self) -> None:
        """Give the memory back to the device, once no tensor is in the pool."""


OnRevoke = Callable[[ImportedTensor], None]


class DevicePart(Protocol):
    """One part of a device."""

    name: ClassVar[str]
    """The attribute of the device that holds the part, such as "memory"."""
    members: ClassVar[tuple[str, ...]]
    """Names of all members of the part, for which ``capabilities()`` answers."""

    def limits(self) -> dict[str, Capability]:
        """Return member -> how it is supported, for those that are not native. Does not initialise the device."""
        ...

    def capabilities(self) -> dict[str, Capability]:
        """Return "<part>.<member>" -> how it is supported, for every member."""
        ...


class Memory(DevicePart, Protocol):
    """Memory of a device: totals, this process's use, pinned host memory, copies, and sharing with other processes."""

    @property
    def can_pin(self) -> bool:
        """Copies to and from this device are faster from page-locked host memory."""
        ...

    def info(self) -> MemoryInfo:
        """Return free and total bytes of the whole device, whoever uses it."""
        ...

    def stats(self) -> MemoryStats:
        """Return what this process's allocator holds."""
        ...

    def reset_peak(self) -> None:
        """Start a new measurement of ``stats().peak_allocated_bytes``."""

    def empty_cache(self) -> None:
        """Return cached free memory of the allocator to the device, and the memory of pools that hold no tensor."""

    def pool(self, tag: str) -> MemoryPool:
        """Return the memory kept apart under ``tag``. The same tag gives the same pool."""
        ...

    def host_alloc(self, nbytes: int) -> HostMemory:
        """Return ``nbytes`` (at least 1) of host memory for copies at the speed of this device's link.

        It begins at a page, and all its pages are present.

        Raises:
            DeviceError: the host has too little memory, or the driver cannot page-lock it.
        """
        ...

    def host_free(self, buffer: HostMemory) -> None:
        """Free a buffer of ``host_alloc`` after all work queued on this device is done.

        Raises:
            StateError: it was freed before, or a tensor still refers to it.
        """

    def copy_batch(
        self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], stream: torch.Stream | None = None
    ) -> None:
        """Copy each ``src[i]`` into ``dst[i]`` in few driver calls, queued on ``stream`` (None: the current stream).

        Args:
            dst: tensors on this device or in host memory, contiguous or not.
            src: of the same shapes and dtypes, on this device or in host memory.

        The order is not defined, so no destination may overlap another one or a source; contiguous tensors are checked.
        Host memory is read and written after the call has returned: wait for the stream before using it.

        Raises:
            InvalidInputError: lists of unequal length, pairs that differ, were freed, or overlap.
        """

    def export_ipc(self, tensor: torch.Tensor) -> IpcHandle:
        """Return a handle with which other processes of this user on this machine import ``tensor``.

        The whole storage stays alive, and in the ledger, until ``revoke``. Tensors of one storage share one export.
        Do not free or resize the storage in place before ``revoke``; on the CPU torch cannot grow it afterwards either.
        This call does not synchronise: the work that fills the tensor must be done before another process reads it,
        or be ordered by an interprocess event.

        Raises:
            UnsupportedError: this device's memory, or this block of it, cannot be shared; says why.
            InvalidInputError: the tensor is elsewhere, or is more than its memory (a subclass, quantized, conjugate).
        """
        ...

    def export_ipc_together(self, tensors: Sequence[torch.Tensor]) -> tuple[list[IpcHandle], list[tuple[int, int]]]:
        """Export many tensors; those in one block of memory share one export and are revoked together.

        A storage that is exported already keeps the export that it has.

        Returns:
            One handle for each export, of all its bytes (uint8); and for each tensor the index of its handle and its
            first byte there.

        Raises:
            UnsupportedError, InvalidInputError: as ``export_ipc``.
        """
        ...

    def import_ipc(
        self, handle: IpcHandle, on_revoke: OnRevoke | None = None, *, timeout_s: float = 30.0
    ) -> ImportedTensor:
        """Import another process's tensor on this device without a copy; several imports of it share one mapping.

        Args:
            handle: from ``export_ipc``, of any device of this kind on this machine whose memory this one can access.
            on_revoke: called once with the mapping when the exporter wants its memory back or has ended, in a thread
                that hears the exporter; it may close the mapping.
            timeout_s: for the exporter to answer.

        Raises:
            StateError: the export was revoked or freed.
            DeviceError: the exporter has ended or does not answer, or the memory cannot be reached from here.
            InvalidInputError: the handle is of another kind of device or another machine.
        """
        ...

    def import_ipc_together(
        self, handles: Sequence[IpcHandle], on_revoke: OnRevoke | None = None, *, timeout_s: float = 30.0
    ) -> Sequence[ImportedTensor]:
        """Import many handles of one process, all or none; requests to that process overlap with opening memory.

        Args:
            on_revoke: called once for each mapping.
            timeout_s: for the exporter to answer for all.

        Raises:
            StateError, DeviceError, InvalidInputError: as ``import_ipc``.
        """
        ...

    def revoke(self, handle: IpcHandle, *, timeout_s: float = 30.0) -> None:
        """End the export of ``handle``: ask its importers to close, wait for them, and release the memory.

        A process that ends has closed. Only the exporting process can do this.

        Raises:
            StateError: it was revoked before, another process exported it, or some process still has it open after
                ``timeout_s`` seconds: names them. Then the memory stays exported, nobody new may import it, and
                revoke may be called again.
        """

    def ledger(self) -> list[IpcExport]:
        """Return the exports of this process from this device that are not revoked."""
        ...


class Streams(DevicePart, Protocol):
    """Queues of work on a device, and events that order them.

    A stream has ``wait_stream``, ``wait_event``, ``record_event``, ``query``, ``synchronize``; an event has ``record``,
    ``wait``, ``query``, ``synchronize``, ``elapsed_time`` (milliseconds, with their fractions). They are torch's, or
    behave like them: an event is about its last record, and has the time when its stream came to it.

    Copies between host and device have a place in the current stream. One that is not ``non_blocking`` has read or
    written the host's memory when it returns.
    """

    def new(self, priority: int = 0) -> torch.Stream:
        """Return a new stream on this device. Lower priorities run first; the device takes the nearest that it has."""
        ...

    def current(self) -> torch.Stream:
        """Return the stream on which this thread queues work now."""
        ...

    def use(self, stream: torch.Stream) -> AbstractContextManager[torch.Stream]:
        """Queue work on ``stream`` inside a ``with`` statement, however it ends.

        This orders nothing; ``wait_stream`` does.
        """
        ...

    def event(self, timing: bool = False, interprocess: bool = False) -> torch.Event:
        """Return an event that is not recorded yet.

        Args:
            timing: ``first.elapsed_time(second)`` gives milliseconds.
            interprocess: the event can be exported by ``export_event``; excludes timing.

        Raises:
            InvalidInputError: both.
            UnsupportedError: this device has no interprocess events.
        """
        ...

    def export_event(self, event: torch.Event) -> EventHandle:
        """Return a handle by which another process waits for an interprocess event. Keep the event while it is used.

        Raises:
            InvalidInputError: the event was not made with ``interprocess=True``.
        """
        ...

    def import_event(self, handle: EventHandle) -> torch.Event:
        """Import another process's event; its ``wait(stream)`` orders work here after the work recorded there.

        Raises:
            InvalidInputError: the handle is of another kind of device, of one not visible here, or another machine; or
                the event is gone with its process.
        """
        ...


class GroupArguments(TypedDict):
    """Keyword arguments of ``torch.distributed.init_process_group`` that depend on the device."""

    backend: str
    """The library for each type of device, such as "cpu:gloo,cuda:nccl"."""
    timeout: timedelta
    pg_options: NotRequired[object]
    """The library's own options, where it has some."""
    device_id: NotRequired[torch.device]
    """The device to which the group is bound; left out on the host."""


class Collectives(DevicePart, Protocol):
    """The collective library of a device: its capabilities, and how a process group is made with it."""

    @property
    def backend(self) -> str:
        """Name of the torch.distributed back end."""
        ...

    def init_kwargs(
        self, *, timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S, is_high_priority: bool = False
    ) -> GroupArguments:
        """Return keyword arguments for ``torch.distributed.init_process_group``.

        Host tensors go through gloo beside the device's library, and the group is bound to this device.

        Args:
            timeout_s: of each collective operation, and of forming the group.
            is_high_priority: the library's kernels run on a high-priority stream.

        Raises:
            UnsupportedError: the library has no streams with priorities.
        """
        ...

    def reduce_ops(self) -> dict[str, Capability]:
        """Return operator -> how float32 tensors are reduced by it, or int32 tensors where it is bitwise."""
        ...

    def dtypes(self) -> dict[torch.dtype, Capability]:
        """Return dtype -> how tensors of it are summed."""
        ...

    def reduction(self, op: str, dtype: torch.dtype) -> Capability:
        """Return how ``op`` reduces tensors of ``dtype``.

        Raises:
            InvalidInputError: no such operator, or ``dtype`` is not a torch.dtype.
        """
        ...

    def new_backend(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_high_priority: bool = False,
        is_one_host: bool = False,
        name: str = "",
    ) -> Backend | ProcessGroup:
        """Return the library's back end for a ``torch.distributed.ProcessGroup``; all ranks call this together.

        Args:
            store: the rendezvous of the ranks, used by this group alone.
            is_one_host: all ranks share this host's loopback interface.

        Returns:
            A ``torch.distributed`` back end, or a whole ProcessGroup from a back end written in Python.
        """
        ...


class Profiler(DevicePart, Protocol):
    """Named ranges in traces, and recording of traces to files."""

    def range(self, name: str) -> AbstractContextManager[None]:
        """Name a range of the trace: ``with device.profiler.range("step"):``."""
        ...

    def start(self, path: str | Path) -> None:
        """Record the work of this process on the host and on its devices until ``stop``.

        Args:
            path: of the trace, ``.json`` or ``.json.gz``, for chrome://tracing or ui.perfetto.dev.

        Raises:
            StateError: a trace is being recorded.
        """

    def stop(self) -> Path:
        """End the recording, write it, and return the path it was given.

        Raises:
            StateError: none is being recorded.
        """
        ...


class Device(Protocol):
    """One device, bound to one index among the visible ones of its kind."""

    spec: DeviceSpec
    index: int
    memory: Memory
    streams: Streams
    collectives: Collectives
    profiler: Profiler
    launch: LaunchFacts
    """Facts for starting processes that use such devices."""

    @property
    def evidence(self) -> Evidence:
        """Return how the answers of ``capabilities()`` are known."""
        ...

    @property
    def name(self) -> str:
        """Registered name and index, such as "cuda:1"."""
        ...

    @property
    def vendor(self) -> str: ...

    @property
    def type(self) -> str:
        """``torch.device.type``."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    def count(self) -> int:
        """Return the number of such devices visible to this process."""
        ...

    def properties(self) -> DeviceProperties:
        """Return product name, uuid, memory, generation and cores; unknown values are empty or 0."""
        ...

    def simulation(self) -> Simulation | None:
        """Return the simulation of the vendor's libraries below torch; None where the vendor's own are loaded."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the versions of extension, libraries and driver below torch by the vendor's names, for reports.

        Unknown versions are left out.
        """
        ...

    def driver_version(self) -> str:
        """Return the version of the vendor's driver. Raises UnsupportedError where it cannot be asked."""
        ...

    def telemetry(self) -> DeviceStatus:
        """Return clocks, power, temperature and energy now. Raises UnsupportedError where they cannot be asked."""
        ...

    def processes(self) -> Sequence[DeviceProcess]:
        """Return the processes with memory on it. Raises UnsupportedError where they cannot be asked."""
        ...

    def activate(self) -> None:
        """Make this the current device of its type, on which tensors without an index are allocated."""

    def synchronize(self) -> None:
        """Wait until all work queued on this device is done."""

    def seed(self, value: int) -> None:
        """Seed the default random generator of this device, and of no other, by all 64 bits of ``value``."""

    def rng_state(self) -> torch.Tensor:
        """Return the state of the default generator, a uint8 host tensor."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state of ``rng_state()``. Raises InvalidInputError for anything else."""

    def capabilities(self) -> dict[str, Capability]:
        """Return "<part>.<member>" -> native, emulated or unsupported, why, and how that is known."""
        ...
