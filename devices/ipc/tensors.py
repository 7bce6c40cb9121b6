"""Export and import of tensors between processes of one user on one machine, the same for every device.

``export_tensors`` returns handles, which are plain data; ``import_tensors`` opens them in another process as mappings;
``revoke`` asks every process to close its mappings, and then releases the exporter's memory. No call synchronises:
export after the work that fills the tensor is done, or order it by an interprocess event.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from rlcore._torch_private import storage_key
from rlcore.device import Device
from rlcore.devices.ipc.exporter import Export, exporter
from rlcore.devices.ipc.importer import Wanted, importer
from rlcore.devices.ipc.mapping import Mapping
from rlcore.devices.ipc.messages import Claim
from rlcore.devices.ipc.sharing import SharedMemory, Sharing
from rlcore.devices.ipc.socket import pid_of
from rlcore.errors import InvalidInputError, StateError
from rlcore.process.status import boot_id
from rlcore.types import IpcHandle

OnRevoke = Callable[[Mapping], None]

_LONGEST_S = 7 * 86400.0  # poll(2) counts milliseconds in 32 bits

_requests = itertools.count(1)


class TensorIpc:
    """Exports and imports of one device."""

    def __init__(self, device: Device, sharing: Sharing) -> None:
        self._device = device
        self._sharing = sharing

    def export_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[list[IpcHandle], list[tuple[int, int]]]:
        device = self._device.torch_device
        for tensor in tensors:
            _check_exportable(tensor, device)
        of_tensors = [tensor.untyped_storage() for tensor in tensors]
        keys = list(map(storage_key, of_tensors))
        storages = dict(zip(keys, of_tensors, strict=True))
        empty = [storage for storage in storages.values() if not storage.nbytes()]
        blocks = [empty] if empty else []
        blocks += self._sharing.blocks([storage for storage in storages.values() if storage.nbytes()])
        exports: dict[int, Export] = {}
        before = {row.export_id for row in exporter().ledger()}
        try:
            for block in blocks:
                exports |= exporter().export({storage_key(one): one for one in block}, self.uuid, self._share)
        except BaseException:  # all or none: the caller has no handles with which to revoke some
            for export_id in {export.export_id for export in exports.values()} - before:
                exporter().revoke(export_id, timeout_s=0.0)
            raise
        numbers = {export: number for number, export in enumerate(dict.fromkeys(exports.values()))}
        begins = {key: (numbers[export], storages[key].data_ptr() - export.address) for key, export in exports.items()}
        places = []
        for tensor, key in zip(tensors, keys, strict=True):
            number, first = begins[key]
            places.append((number, first + int(tensor.storage_offset()) * tensor.element_size()))
        return [self._whole(export) for export in numbers], places

    def _whole(self, export: Export) -> IpcHandle:
        """Return a handle of all bytes of an export."""
        return IpcHandle(
            device=self._device.spec.name,
            device_uuid=self.uuid,
            boot_id=_boot_id(),
            exporter=exporter().path,
            export_id=export.export_id,
            payload=export.memory.payload,
            storage_bytes=export.nbytes,
            storage_offset_bytes=0,
            dtype="uint8",
            shape=(export.nbytes,),
            stride=(1,),
        )

    def import_tensors(
        self, handles: Sequence[IpcHandle], on_revoke: OnRevoke | None, timeout_s: float
    ) -> list[Mapping]:
        for handle in handles:
            self._check_importable(handle, on_revoke, timeout_s)
        paths = {handle.exporter for handle in handles}
        if len(paths) > 1:
            raise InvalidInputError(f"handles that are imported together are of one process, these of {len(paths)}")
        wanted = [self._wanted(handle, on_revoke) for handle in handles]

        def make() -> list[Mapping]:
            self._device.activate()  # each thread has its own current device
            if exporter().path not in paths:
                return importer().open(paths.pop(), wanted, self._device.name, timeout_s)
            return self._import_here(handles, wanted, on_revoke)

        return _all_or_none(make) if handles else []

    def _import_here(
        self, handles: Sequence[IpcHandle], wanted: Sequence[Wanted], on_revoke: OnRevoke | None
    ) -> list[Mapping]:
        mappings: list[Mapping] = []
        try:
            for handle, one in zip(handles, wanted, strict=True):

                def make(export: Export, handle: IpcHandle = handle) -> Mapping:
                    storage, first = export.storage_at(handle.storage_offset_bytes)
                    view = _view(handle, storage, first)
                    return Mapping(handle, view, release=exporter().close_here, on_revoke=on_revoke)

                mappings.append(exporter().open_here(one.claim, make))
        except BaseException:
            for mapping in mappings:
                mapping.close()
            raise
        return mappings

    def _wanted(self, handle: IpcHandle, on_revoke: OnRevoke | None) -> Wanted:
        return Wanted(
            Claim(next(_requests), handle.export_id, handle.device_uuid, handle.payload, handle.storage_bytes),
            open_storage=lambda descriptor: self._open(handle, descriptor),
            close_storage=lambda: self._close(handle),
            make=lambda storage, release: Mapping(handle, _view(handle, storage), release=release, on_revoke=on_revoke),
        )

    def revoke(self, handle: IpcHandle, timeout_s: float) -> None:
        if not isinstance(handle, IpcHandle):
            raise InvalidInputError(f"revoke takes the IpcHandle of an export, got {type(handle).__name__}")
        _check_timeout(timeout_s)
        if handle.exporter != exporter().path:
            raise StateError(
                f"export {handle.export_id} belongs to process {pid_of(handle.exporter)}: only that one can revoke it; "
                "here, close the mapping"
            )
        exporter().revoke(handle.export_id, timeout_s)

    @functools.cached_property
    def uuid(self) -> str:
        return self._device.properties().uuid

    def _share(self, storage: torch.UntypedStorage) -> SharedMemory:
        return self._sharing.share(storage) if storage.nbytes() else SharedMemory()

    def _open(self, handle: IpcHandle, descriptor: int | None) -> torch.UntypedStorage:
        if not handle.storage_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device.torch_device).untyped_storage()
        return self._sharing.open(SharedMemory(handle.payload, descriptor), handle.storage_bytes)

    def _close(self, handle: IpcHandle) -> None:
        if handle.storage_bytes:
            self._sharing.close(SharedMemory(handle.payload))

    def _check_importable(self, handle: IpcHandle, on_revoke: OnRevoke | None, timeout_s: float) -> None:
        if not isinstance(handle, IpcHandle):
            raise InvalidInputError(
                f"import_ipc takes an IpcHandle, got {type(handle).__name__}; bytes become one by IpcHandle.from_bytes"
            )
        if handle.device != self._device.spec.name:
            raise InvalidInputError(
                f"this handle is of a {handle.device!r} device; import it with get_device({handle.device!r}), "
                f"not {self._device.name!r}"
            )
        if handle.boot_id != _boot_id():
            raise InvalidInputError(
                f"this handle was made on another machine, or before this one was restarted (boot {handle.boot_id}, "
                f"here {_boot_id()}); memory is shared only within one running machine"
            )
        if not isinstance(getattr(torch, handle.dtype, None), torch.dtype):
            raise InvalidInputError(f"this torch {torch.__version__} has no dtype {handle.dtype!r}")
        if on_revoke is not None and not callable(on_revoke):
            raise InvalidInputError(f"on_revoke is called with the mapping, and {on_revoke!r} cannot be called")
        _check_timeout(timeout_s)
        dtype: torch.dtype = getattr(torch, handle.dtype)
        if handle.storage_offset_bytes % dtype.itemsize:
            raise InvalidInputError(
                f"this handle describes a tensor that begins at byte {handle.storage_offset_bytes}, within a value of "
                f"{handle.dtype}"
            )
        end_bytes = handle.storage_offset_bytes + _span_bytes(handle)
        if end_bytes > handle.storage_bytes:
            raise InvalidInputError(
                f"this handle describes a tensor that ends at byte {end_bytes} of a storage of {handle.storage_bytes}"
            )


def _all_or_none(make: Callable[[], list[Mapping]]) -> list[Mapping]:
    """Call ``make`` outside the main thread, and close its mappings if Ctrl-C interrupts the wait for them.

    In the main thread Ctrl-C could come between any two instructions, and leave mappings that nobody can close, while
    their exporter waits for them.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    made: Future[list[Mapping]] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    try:
        threading.Thread(target=run, name="rlcore-ipc-import", daemon=True).start()
        return made.result()
    except KeyboardInterrupt:
        made.add_done_callback(_close_all)
        raise


def _close_all(made: Future[list[Mapping]]) -> None:
    if not made.exception():
        for mapping in made.result():
            mapping.close()


def _view(handle: IpcHandle, storage: torch.UntypedStorage, first: int = 0) -> torch.Tensor:
    """Return the tensor of a handle in a storage that begins ``first`` bytes after the export."""
    dtype: torch.dtype = getattr(torch, handle.dtype)
    offset = (handle.storage_offset_bytes - first) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, handle.shape, handle.stride)


def _span_bytes(handle: IpcHandle) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if 0 in handle.shape:
        return 0
    dtype: torch.dtype = getattr(torch, handle.dtype)
    last = sum((size - 1) * stride for size, stride in zip(handle.shape, handle.stride, strict=True))
    return (last + 1) * dtype.itemsize


def _check_exportable(tensor: torch.Tensor, device: torch.device) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidInputError(
            f"export_ipc takes a plain torch.Tensor, got {type(tensor).__name__}; of a DTensor give to_local()"
        )
    if tensor.device != device:
        raise InvalidInputError(f"this tensor is on {tensor.device}; export it with that device, not {device}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise InvalidInputError(
            f"export_ipc takes a strided tensor that is what its memory says, got layout {tensor.layout}, "
            f"quantized {tensor.is_quantized}, conjugate {tensor.is_conj()}, negative {tensor.is_neg()}; "
            "give to_dense(), dequantize(), resolve_conj() or resolve_neg() of it"
        )


def _check_timeout(timeout_s: float) -> None:
    if not (isinstance(timeout_s, int | float) and 0 <= timeout_s <= _LONGEST_S):
        raise InvalidInputError(f"timeout_s must be seconds, 0 to {_LONGEST_S:.0f} (a week), got {timeout_s!r}")


@functools.cache
def _boot_id() -> str:
    return boot_id()
