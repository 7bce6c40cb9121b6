"""What a device does without an engine, by which a turn with real vLLM is judged."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from rlcore.bench.cases.offload import Link
from rlcore.bench.cases.vllm_pair import VllmPair
from rlcore.device import Device
from rlcore.registry import get_device

_PIECE_BYTES = 1 << 30
_NUM_COPIES = 8
"""Of a piece; the time of all bytes is taken from them."""


class Limits(NamedTuple):
    """What this device was seen to do just before, without an engine."""

    to_host: float
    to_device: float
    """Bytes a second."""
    weights_s: float
    """To allocate as many bytes as vLLM's weights have, in one piece."""
    kv_cache_s: float
    """To allocate in one piece, and set to zero, as many as its KV cache has."""
    copy_s: float
    """To copy as many bytes as the weights have, within the device."""
    peer: float | None
    """Bytes a second from the next device, where there are several."""


def measure(pair: VllmPair) -> Limits:
    link = Link(pair.device)
    rates = link.rates()
    del link
    return Limits(
        *rates,
        weights_s=_allocation_s(pair.device, pair.nbytes, is_zeroed=False),
        kv_cache_s=_allocation_s(pair.device, pair.kv_bytes, is_zeroed=True),
        copy_s=_copy_s(pair.device, pair.device, pair.nbytes),
        peer=_peer_rate(pair) if pair.layout.devices > 1 else None,
    )


def _peer_rate(pair: VllmPair) -> float:
    other = get_device(f"{pair.device.spec.name}:{pair.device.index + 1}")
    return pair.nbytes / _copy_s(pair.device, other, pair.nbytes)


def _allocation_s(device: Device, nbytes: int, *, is_zeroed: bool) -> float:
    device.memory.empty_cache()
    device.synchronize()
    started = time.perf_counter()
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    if is_zeroed:
        memory.zero_()
    device.synchronize()
    seconds = time.perf_counter() - started
    del memory
    device.memory.empty_cache()
    return seconds


def _copy_s(to: Any, from_: Any, nbytes: int) -> float:
    piece = min(_PIECE_BYTES, nbytes)
    source = torch.ones(piece, dtype=torch.uint8, device=from_.torch_device)
    destination = torch.empty_like(source, device=to.torch_device)
    seconds = []
    for _ in range(_NUM_COPIES):
        for device in (to, from_):
            device.synchronize()
        started = time.perf_counter()
        destination.copy_(source)
        for device in (to, from_):
            device.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]) * (nbytes / piece)
