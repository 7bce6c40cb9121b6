"""The ranks of ranked_heads.py and ranked_logits.py: their number, device and group, and cuts of V columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device(os.environ["TEST_DEVICE"], RANK if os.environ["TEST_DEVICE"] == "cuda" else None)
V = 101
CUTS = {
    2: [(0, 37, V), (0, 0, V), (0, V, V)],  # uneven; a rank without tokens, first or last
    3: [(0, 37, 40, V), (0, 0, V, V), (0, 50, 50, V)],
}[SIZE]


@pytest.fixture(scope="module", autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Form the group of all ranks, in each module that imports this."""
    options: dict[str, Any] = {"backend": "gloo"}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        options = {"backend": "nccl", "device_id": DEVICE}
    store = dist.FileStore(f"{os.environ['TEST_STORE']} of {request.module.__name__}", SIZE)
    dist.init_process_group(store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=180), **options)
    yield
    if not request.session.testsfailed:  # NCCL would wait for the other ranks, and nobody read what failed here
        dist.destroy_process_group()


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
