"""Moving memory between host and device: buffers of exact size beside torch's, batches beside one large copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlcore.bench.case import Case, Contender, Work, expect
from rlcore.device import Device

_BUFFER_BYTES = 2 << 30
_NUM_TENSORS = 5000
_LARGEST_BYTES = 512 << 10


def _pinned(device: Device, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.memory.can_pin)


def _needs(device: Device, to_device: bool, nbytes: int) -> dict[str, int]:
    """Return the bytes needed of the link; where the device is the host, of its memory, which is read and written."""
    if device.spec.is_host:
        return {"memory": 2 * nbytes}
    return {f"{'to_device' if to_device else 'to_host'}/pinned": nbytes}


def _prepare_alloc(device: Device) -> Work:
    def exact() -> int:
        buffer = device.memory.host_alloc(_BUFFER_BYTES)
        nbytes = int(buffer.tensor.numel())
        device.memory.host_free(buffer)
        return nbytes

    def check(nbytes: int) -> None:
        expect(nbytes == _BUFFER_BYTES, f"{nbytes} bytes were allocated")

    return Work((Contender("host_alloc", exact, check),), {"bytes": _BUFFER_BYTES})


def _prepare_copies(to_device: bool, device: Device) -> Work:
    on_device = torch.randint(0, 256, (_BUFFER_BYTES,), dtype=torch.uint8, device=device.torch_device)
    buffers = {
        "host_alloc": device.memory.host_alloc(_BUFFER_BYTES).tensor,
        "torch_pinned": _pinned(device, _BUFFER_BYTES),
    }

    def contender(name: str, host: torch.Tensor) -> Contender:
        host.copy_(on_device)
        to, from_ = (on_device, host) if to_device else (host, on_device)

        def check(copied: torch.Tensor) -> None:
            expect(torch.equal(copied.cpu(), from_.cpu()), "other bytes arrived")

        return Contender(name, lambda: to.copy_(from_, non_blocking=True), check)

    return Work(
        tuple(contender(name, host) for name, host in buffers.items()),
        {"bytes": _BUFFER_BYTES},
        limits=_needs(device, to_device, _BUFFER_BYTES),
    )


def _prepare_batch(to_device: bool, device: Device) -> Work:
    """Tensors of uneven size, one behind the other in one buffer on the host, anywhere on the device."""
    sizes = [1 + (number * 7919) % _LARGEST_BYTES for number in range(_NUM_TENSORS)]
    host = device.memory.host_alloc(sum(sizes)).tensor
    on_host = list(torch.split(host, sizes))
    on_device = [torch.full((size,), size % 251, dtype=torch.uint8, device=device.torch_device) for size in sizes]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=device.torch_device)
    whole_host = device.memory.host_alloc(sum(sizes)).tensor
    torch.cat(on_device, out=whole)
    host.copy_(whole)
    whole_host.copy_(whole)
    dst, src = (on_device, on_host) if to_device else (on_host, on_device)
    one_dst, one_src = (whole, whole_host) if to_device else (whole_host, whole)

    def check(_: Any) -> None:
        device.synchronize()
        expect(torch.equal(torch.cat(on_device).cpu(), host) and torch.equal(whole.cpu(), host), "other bytes arrived")

    def contender(name: str, run: Callable[[], Any]) -> Contender:
        return Contender(name, run, check)

    return Work(
        (
            contender("copy_batch", lambda: device.memory.copy_batch(dst, src)),
            contender("foreach", lambda: torch._foreach_copy_(dst, src, non_blocking=True)),
            contender("one_copy", lambda: one_dst.copy_(one_src, non_blocking=True)),
        ),
        {"tensors": _NUM_TENSORS, "bytes": sum(sizes)},
        limits=_needs(device, to_device, sum(sizes)),
    )


cases = (
    Case("host_memory/alloc", "allocate and free 2 GiB of host memory that the device copies from", _prepare_alloc),
    Case(
        "host_memory/to_device",
        "copy 2 GiB to the device, from host_alloc and from torch's pinned memory",
        lambda device: _prepare_copies(True, device),
        estimate_s=20.0,
    ),
    Case(
        "host_memory/to_host",
        "copy 2 GiB to the host, to host_alloc and to torch's pinned memory",
        lambda device: _prepare_copies(False, device),
        estimate_s=20.0,
    ),
    Case(
        "host_memory/batch_to_device",
        "copy 5,000 tensors to the device: copy_batch, torch's foreach, and as many bytes at once",
        lambda device: _prepare_batch(True, device),
        estimate_s=20.0,
    ),
    Case(
        "host_memory/batch_to_host",
        "copy 5,000 tensors to the host: copy_batch, torch's foreach, and as many bytes at once",
        lambda device: _prepare_batch(False, device),
        estimate_s=20.0,
    ),
)
