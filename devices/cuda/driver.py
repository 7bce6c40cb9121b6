"""The few calls of NVIDIA's driver that torch does not offer, through ctypes.

The package cuda-bindings is not used: torch depends on it on some platforms only, and converting lists of thousands of
addresses for it costs more than the copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

from rlcore.devices.copy_batch import Numbers
from rlcore.errors import DeviceError

_IS_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class _CudaIpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """The structure CUmemcpyAttributes; its location hints matter for managed memory only."""

    _fields_ = (("access_order", c_int), ("hints", c_int * 4), ("flags", c_uint))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [c_void_p, _CudaIpcHandle, c_uint]
    return library


def _call(function: str, *arguments: object) -> None:
    """Call a function of the driver. Raises DeviceError with the driver's error text."""
    code = getattr(_library(), function)(*arguments)
    if code:
        text = c_char_p()
        _library().cuGetErrorString(code, byref(text))
        words = (text.value or b"unknown error").decode()
        raise DeviceError(f"{function} of the NVIDIA driver failed with {code}: {words}")


@functools.cache
def _primary_context(index: int) -> c_void_p:
    """Return the primary context of a device, which torch uses."""
    device, context = c_int(), c_void_p()
    _call("cuInit", c_uint(0))
    _call("cuDeviceGet", byref(device), c_int(index))
    _call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


@contextlib.contextmanager
def current(index: int) -> Iterator[None]:
    """Make device ``index`` the current one for driver calls of this thread."""
    _call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))


def is_ipc_capable(address: int) -> bool:
    """Return True if the block at a device address is memory for which the driver has IPC handles."""
    answer = c_uint64()
    _call("cuPointerGetAttribute", byref(answer), c_int(_IS_LEGACY_IPC_CAPABLE), c_uint64(address))
    return bool(answer.value)


def block_at(address: int) -> tuple[int, int]:
    """Return start and bytes of the allocation that contains ``address``."""
    start, size = c_uint64(), c_size_t()
    _call("cuMemGetAddressRange_v2", byref(start), byref(size), c_uint64(address))
    return start.value, size.value


def ipc_handle(start: int) -> bytes:
    handle = _CudaIpcHandle()
    _call("cuIpcGetMemHandle", byref(handle), c_uint64(start))
    return bytes(handle.reserved)


def open_ipc_handle(handle: bytes) -> int:
    """Map another process's block; return its start in this process."""
    start = c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2", byref(start), _CudaIpcHandle.from_buffer_copy(handle), c_uint(_LAZY_ENABLE_PEER_ACCESS)
    )
    return start.value


def close_ipc_handle(start: int) -> None:
    _call("cuIpcCloseMemHandle", c_uint64(start))


def register_host(address: int, nbytes: int) -> None:
    """Lock pages of host memory and let every device of this process copy from and to them."""
    _call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(_PORTABLE))


def unregister_host(address: int) -> None:
    _call("cuMemHostUnregister", c_void_p(address))


def can_copy_batch() -> bool:
    """Return True for drivers of CUDA 12.8 and newer."""
    try:
        return hasattr(_library(), "cuMemcpyBatchAsync")
    except OSError:  # no driver
        return False


def copy_batch(dst: Numbers, src: Numbers, sizes: Numbers, stream: int) -> None:
    """Queue all copies in one call; not on the legacy default stream, which is 0."""
    attributes, first, failed = _CopyAttributes(access_order=_STREAM_ORDER), c_size_t(0), c_size_t()
    _call(
        "cuMemcpyBatchAsync",
        dst.ctypes.data_as(c_void_p),
        src.ctypes.data_as(c_void_p),
        sizes.ctypes.data_as(c_void_p),
        c_size_t(len(dst)),
        byref(attributes),
        byref(first),
        c_size_t(1),
        byref(failed),
        c_void_p(stream),
    )
