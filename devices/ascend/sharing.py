"""IPC of NPU memory by torch_npu's reductions of tensors and ``rebuild_npu_tensor``.

torch_npu has a reference count for each tensor that it sends. It starts at 1, and one receiver decrements it: a block
that nobody or two processes open would never be freed. Here the ledger counts instead. The exporter decrements its
count at once, and an importer passes a count of its own to be decremented.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, final

import msgspec
import torch

from rlcore.decoding import decode
from rlcore.devices.ascend.npu import npu
from rlcore.devices.ascend.versions import CANN_FOR_IPC, DRIVER_FOR_IPC, cann, driver
from rlcore.devices.ipc.sharing import SharedMemory, Sharing
from rlcore.errors import DeviceError, UnsupportedError, first_line


class _NpuPayload(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a handle: torch_npu's arguments for opening a storage, and the uuid of its device."""

    device_uuid: str
    handle: bytes
    storage_bytes: int
    offset_bytes: int
    event: bytes
    is_event_needed: bool


def why_no_ipc() -> str:
    """Return why this torch_npu, CANN or driver cannot share memory between processes, or ""."""
    if not hasattr(torch.TypedStorage, "_share_npu_"):
        return "this torch_npu has no IPC of tensors, which came with its 7.2.0 releases"
    for what, found, floor in (("CANN", cann(), CANN_FOR_IPC), ("the driver", driver(), DRIVER_FOR_IPC)):
        if found is not None and found < floor:
            return f"IPC needs {what} {floor} or newer, this is {found}"
    return ""


@final
class AscendSharing(Sharing):
    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        if reason := why_no_ipc():
            raise UnsupportedError(f"export_ipc on {self._device.name}", reason)
        contents = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        try:
            with npu().device(self._device.index):
                arguments = _sent(contents)
        except RuntimeError as error:
            raise UnsupportedError(
                "export_ipc of this block of memory",
                f"torch_npu cannot share it: {first_line(error)}; memory of expandable segments or of an "
                "allocator of its own has no key: allocate it without expandable_segments in PYTORCH_NPU_ALLOC_CONF",
            ) from error
        handle, storage_bytes, offset_bytes, _, counter, counter_offset, event, is_event_needed = arguments[7:15]
        torch.TypedStorage._release_ipc_counter_npu(counter, counter_offset, device=self._device.index)  # type: ignore[attr-defined]
        uuid = self._device.properties().uuid
        name = _NpuPayload(uuid, handle, storage_bytes, offset_bytes, event, is_event_needed)
        return SharedMemory(payload=msgspec.msgpack.encode(name))

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        name = _decoded(memory.payload)
        here = self._device.properties().uuid
        if name.device_uuid != here:
            raise DeviceError(
                f"this memory is of the NPU {name.device_uuid}; {self._device.name} is {here}. An NPU's memory is "
                "opened on that NPU: import the handle with the device of that uuid, and copy from there"
            )
        counter, counter_offset = self._counter()
        # The index of the device is the importer's own: the exporter may see other devices.
        tensor = _reductions().rebuild_npu_tensor(
            torch.Tensor,
            torch.Size([name.storage_bytes]),
            (1,),
            0,
            torch.TypedStorage,
            torch.uint8,
            self._device.index,
            name.handle,
            name.storage_bytes,
            name.offset_bytes,
            False,
            counter,
            counter_offset,
            name.event,
            name.is_event_needed,
        )
        storage: torch.UntypedStorage = tensor.untyped_storage()
        return storage

    def _counter(self) -> tuple[bytes, int]:
        """Return the count of a new tensor that is sent to nobody."""
        with npu().device(self._device.index):
            token = torch.empty(1, dtype=torch.uint8, device=self._device.torch_device)
            arguments = _sent(token)
        return arguments[11], arguments[12]

    def close(self, memory: SharedMemory) -> None:
        """Let torch_npu unmap memory to which no tensor refers any more."""
        npu().ipc_collect()


def _sent(tensor: torch.Tensor) -> Any:
    """Return the arguments of ``rebuild_npu_tensor`` for a tensor."""
    reduce_tensor: Any = torch.multiprocessing.reductions.reduce_tensor  # torch_npu replaces it when it is loaded
    return reduce_tensor(tensor)[1]


def _decoded(payload: bytes) -> _NpuPayload:
    return decode(payload, _NpuPayload, "payload of an NPU's memory", error=DeviceError)


def _reductions() -> Any:
    return importlib.import_module("torch_npu.multiprocessing.reductions")
