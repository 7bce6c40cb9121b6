"""This process in the default group of torch.distributed, and the all-gather of bytes over it, without pickle.

``torch.distributed.all_gather_object`` would unpickle what other processes send, and ``rlcore.collectives.containers``
needs a group of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a default group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_gather_bytes(data: bytes, device: torch.device) -> list[bytes]:
    """Return the bytes of every rank, by rank; all ranks call it together.

    Args:
        data: may differ in length between ranks.
        device: the bytes travel as tensors on it.
    """
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    sizes: list[Any] = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device))
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
