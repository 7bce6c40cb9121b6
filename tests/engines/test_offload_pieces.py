"""What comes back lies in few pieces of device memory, which other processes open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlcore.engines.offload import cargo as cargo_module
from rlcore.engines.offload.cargo import Arrival
from rlcore.engines.offload.resident import Resident
from rlcore.registry import get_device

MB = 1 << 20


def away(sizes: list[int], device: Any) -> tuple[Resident, list[torch.Tensor]]:
    tensors = [torch.full((size,), size % 251, dtype=torch.uint8, device=device.torch_device) for size in sizes]
    resident = Resident(device, lambda: tensors, lambda guard, state: None)
    resident.offload()
    return resident, tensors


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """From this many bytes on there is no piece; the bytes of those that were asked for."""
    pieces: list[int] = []
    real = torch.empty

    def start(limit: int) -> list[int]:
        def empty(*size: Any, **options: Any) -> Any:
            if options.get("dtype") == torch.uint8 and isinstance(size[0], int) and size[0] > 0:
                pieces.append(size[0])
                if size[0] >= limit:
                    raise torch.OutOfMemoryError("no such piece")
            return real(*size, **options)

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(cargo_module, "_SMALLEST_PIECE", 4096)
        return pieces

    return start


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([1000] * 3, [3072]),
        ([4096, 100, 5000, 8192], [4096, 512 + 5120, 8192]),
        ([4096] * 64, [4 * 4096] * 16),
    ],
    ids=["one", "whole storages", "at most 16"],
)
@pytest.mark.parametrize("limit", [1 << 40, 0], ids=["there", "not there"])
def test_pieces_hold_what_comes_next(
    asked: Callable[[int], list[int]], sizes: list[int], pieces: list[int], limit: int
) -> None:
    resident, tensors = away(sizes, get_device("cpu"))
    found = asked(limit)
    arrival = Arrival(resident._cargo, gathers=True)
    while arrival.has_rest:
        arrival.unpack()
    assert found == pieces
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes


def test_a_swap_gathers_nothing(asked: Callable[[int], list[int]]) -> None:
    resident, tensors = away([4096] * 8, get_device("cpu"))
    found = asked(0)
    resident.onload()
    assert not found, "nor does the host"
    assert all(tensor.eq(4096 % 251).all() for tensor in tensors)


@pytest.mark.gpu
def test_few_handles_open_what_has_come_back() -> None:
    device = get_device("cuda")
    resident, tensors = away([20 * MB + 512 * number for number in range(200)], device)
    device.memory.empty_cache()
    resident.onload()
    assert all(tensor.eq((20 * MB + 512 * number) % 251).all() for number, tensor in enumerate(tensors))
    handles = device.memory.export_ipc_together(tensors)
    exports = {handle.export_id: handle for handle in handles}
    assert len(exports) <= 16
    for handle in exports.values():
        device.memory.revoke(handle)
    before = device.memory.stats().reserved_bytes
    resident.offload()
    device.memory.empty_cache()
    assert before - device.memory.stats().reserved_bytes >= sum(tensor.numel() for tensor in tensors)
