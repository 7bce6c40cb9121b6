"""Memory kept apart under a tag: that it is, that it is counted, and that it can be shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.errors import StateError, UnsupportedError
from rlcore.registry import get_device

MB = 2**20


@pytest.fixture
def gpu() -> Any:
    return get_device("cuda")


def test_a_device_without_pools_says_why() -> None:
    with pytest.raises(UnsupportedError, match=r"^memory.pool on cpu:0 is not supported: torch.cpu has no MemPool$"):
        get_device("cpu").memory.pool("weights")


@pytest.mark.gpu
def test_what_is_allocated_inside_is_counted_there(gpu: Any) -> None:
    pool = gpu.memory.pool("counted")
    assert pool is gpu.memory.pool("counted") is not gpu.memory.pool("another")
    assert pool.stats().reserved_bytes == 0
    outside = torch.ones(8 * MB, dtype=torch.uint8, device="cuda")
    with (
        pool,
        gpu.memory.pool("another"),
        pytest.raises(StateError, match=r"pool 'counted' is in use; leave its other"),
    ):
        pool.__enter__()
    with pool:
        inside = torch.ones(32 * MB, dtype=torch.uint8, device="cuda")
    torch.ones(8 * MB, dtype=torch.uint8, device="cuda")
    assert pool.stats().allocated_bytes == 32 * MB
    assert pool.stats().reserved_bytes >= 32 * MB
    assert gpu.memory.pool("another").stats().allocated_bytes == 0
    assert inside.sum().item() == 32 * MB and outside.sum().item() == 8 * MB


@pytest.mark.gpu
def test_empty_cache_gives_a_pool_back_once_it_is_unused(gpu: Any) -> None:
    gpu.memory.empty_cache()
    before = gpu.memory.stats().reserved_bytes
    pool = gpu.memory.pool("given back")
    with pool:
        tensor = torch.ones(256 * MB, dtype=torch.uint8, device="cuda")
    gpu.memory.empty_cache()
    assert pool.stats().allocated_bytes == 256 * MB and tensor.sum().item() == 256 * MB
    del tensor
    assert pool.stats().reserved_bytes == 256 * MB
    gpu.memory.empty_cache()
    assert pool.stats().reserved_bytes == 0
    assert gpu.memory.stats().reserved_bytes <= before
    with pool:
        again = torch.ones(MB, dtype=torch.uint8, device="cuda")
    assert pool.stats().allocated_bytes == MB and again.sum().item() == MB
