"""IPC by torch's own reduction of tensors, where what it gives is plain: bytes and whole numbers, no pickle.

``torch.multiprocessing.reductions.reduce_tensor`` has such a form for the device type "cuda" alone, from torch 2.11 to
2.15, which on ROCm is HIP's memory. XPU and MPS have none: their storages would have to be pickled, and cannot be.

Nobody has run this on ROCm. What is tested is the form in each torch, and the way of a tensor between processes over
the simulated CANN, where torch_npu's reduction has the same form.

Torch counts the receivers of each tensor that it sends. The count starts at 1, and one receiver decrements it: a block
that nobody or two processes open would never be freed. Here the ledger counts instead. The exporter decrements its
count at once, and an importer passes a count of its own to be decremented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import msgspec
import torch

from rlcore.decoding import decode
from rlcore.devices._torch_private import release_ipc_counter
from rlcore.devices.ipc.sharing import SharedMemory, Sharing
from rlcore.errors import DeviceError, UnsupportedError, first_line

FIELDS = (
    *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
    *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
    *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
)
"""The arguments of the function by which torch opens a tensor, in their order."""


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a handle: torch's arguments for opening a storage, and the uuid of its device."""

    device_uuid: str
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    event_handle: bytes
    event_sync_required: bool


@final
class TorchSharing(Sharing):
    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        _, found = self._reduced(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        release_ipc_counter(found["ref_counter_handle"], found["ref_counter_offset"])
        arguments = {name: found[name] for name in _Payload.__struct_fields__ if name in found}
        return SharedMemory(payload=msgspec.msgpack.encode(_Payload(self._uuid(), **arguments)))

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        name = decode(memory.payload, _Payload, f"payload of {self._device.spec.name} memory", error=DeviceError)
        if name.device_uuid != (here := self._uuid()):
            raise DeviceError(
                f"this memory is of the device {name.device_uuid}; {self._device.name} is {here}. It is opened where "
                "it lies: import the handle with the device of that uuid, and copy from there"
            )
        # A token that is sent to nobody has the count. The device of the arguments is the importer's own.
        token = torch.empty(1, dtype=torch.uint8, device=self._device.torch_device)
        rebuild, own = self._reduced(token)
        fields = msgspec.structs.asdict(name)
        del fields["device_uuid"]
        whole = {"tensor_size": torch.Size([name.storage_size_bytes]), "tensor_stride": (1,), "tensor_offset": 0}
        tensor: torch.Tensor = rebuild(*(own | fields | whole).values())
        return tensor.untyped_storage()

    def close(self, memory: SharedMemory) -> None:
        """Let torch unmap memory to which no tensor refers any more."""
        torch.get_device_module(self._device.type).ipc_collect()

    def _reduced(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        """Return the function by which torch opens a tensor, and its arguments by name."""
        what = f"export_ipc on {self._device.name}"
        reduce_tensor: Any = torch.multiprocessing.reductions.reduce_tensor  # an extension of torch may replace it
        try:
            with torch.get_device_module(self._device.type).device(self._device.index):
                rebuild, arguments = reduce_tensor(tensor)
        except RuntimeError as error:
            raise UnsupportedError(
                what,
                f"torch cannot share this block: {first_line(error)}; memory of expandable segments or of an allocator "
                "of its own has no handle",
            ) from error
        found = dict(zip(FIELDS, arguments, strict=False))
        if len(arguments) != len(FIELDS) or not isinstance(found["storage_handle"], bytes):
            raise UnsupportedError(what, f"torch {torch.__version__} hands over no plain handle of {self._device.type}")
        return rebuild, found

    def _uuid(self) -> str:
        if uuid := self._device.properties().uuid:
            return uuid
        raise UnsupportedError(f"IPC on {self._device.name}", "torch tells no uuid by which processes pair devices")
