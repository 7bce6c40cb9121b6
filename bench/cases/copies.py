"""Copies between host and device, and between devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.timing import median_time
from rlcore.device import Device
from rlcore.errors import UnsupportedError
from rlcore.registry import get_device

_BYTES = _PAIR_BYTES = 1 << 28
_REPEATS = 5


def _prepare_host_copies(is_to_device: bool, device: Device) -> Work:
    _refuse_host(device, "a copy between host and device")
    pattern = torch.arange(_BYTES // 8, dtype=torch.int64)
    there = pattern.to(device.torch_device)
    kinds = ["pinned", "pageable"] if device.memory.can_pin else ["pageable"]
    way = "to_device" if is_to_device else "to_host"

    def contender(kind: str) -> Contender:
        host = torch.empty_like(pattern, pin_memory=kind == "pinned").copy_(pattern)
        to, from_ = (there, host) if is_to_device else (host, there)

        def run() -> Any:
            return to.copy_(from_, non_blocking=True)

        return Contender(
            kind, run, lambda _: _check_again(run, [to], pattern, device), limits={f"{way}/{kind}": _BYTES}
        )

    return Work(tuple(map(contender, kinds)), {"bytes": _BYTES})


def _prepare_both_ways(device: Device) -> Work:
    _refuse_host(device, "a copy between host and device")
    if not device.memory.can_pin:
        raise UnsupportedError("copying both ways at once", "this device cannot pin memory of the host")
    pattern = torch.arange(_BYTES // 8, dtype=torch.int64)
    hosts = [torch.empty_like(pattern, pin_memory=True).copy_(pattern) for _ in range(2)]
    there = [pattern.to(device.torch_device) for _ in range(2)]
    streams = [device.streams.new() for _ in range(2)]

    def run() -> None:
        for stream, to, from_ in zip(streams, (there[0], hosts[1]), (hosts[0], there[1]), strict=True):
            with device.streams.use(stream):
                to.copy_(from_, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    contender = Contender("pinned", run, lambda _: _check_again(run, [there[0], hosts[1]], pattern, device))
    return Work((contender,), {"bytes": 2 * _BYTES}, limits={"to_device/pinned": _BYTES})


def _check_again(run: Callable[[], Any], targets: list[Tensor], pattern: Tensor, *devices: Any) -> None:
    """Once more into memory that does not hold the pattern already, as it does after the first run."""
    for target in targets:
        target.zero_()
    for device in devices:
        device.synchronize()
    run()
    for device in devices:
        device.synchronize()
    expect(all(torch.equal(target.cpu(), pattern) for target in targets), "other bytes arrived")


def _refuse_host(device: Device, feature: str) -> None:
    if device.spec.is_host:
        raise UnsupportedError(f"{feature} on {device.name}", "the device is the host itself")


def _prepare_peers(device: Device) -> Work:
    _refuse_host(device, "a link between devices")
    if device.count() < 2:
        raise UnsupportedError("a link between devices", f"there is one {device.spec.name} device")
    devices = [get_device(f"{device.spec.name}:{index}") for index in range(device.count())]
    pattern = torch.arange(_PAIR_BYTES // 8, dtype=torch.int64)
    sources, targets = ([pattern.to(one.torch_device, copy=True) for one in devices] for _ in range(2))
    streams = {(way, one.index): one.streams.new() for way in range(2) for one in devices}

    def copy(*pairs: tuple[int, int]) -> None:
        """Copy from the first of each pair to the second; each has a stream on either side, or they would queue."""
        for way, (i, j) in enumerate(pairs):
            with devices[i].streams.use(streams[way, i]), devices[j].streams.use(streams[way, j]):
                targets[j].copy_(sources[i], non_blocking=True)

    def seconds(*pairs: tuple[int, int]) -> float:
        return median_time(_REPEATS, lambda: copy(*pairs), *(devices[index] for index in pairs[0]), warm_up=1)[1]

    def run() -> dict[str, Quantity]:
        rates = {}
        for i, j in itertools.permutations(range(len(devices)), 2):
            rates[f"{i}_to_{j}"] = Quantity(_PAIR_BYTES / seconds((i, j)), "B/s")
            if i < j:
                rates[f"{i}_and_{j}"] = Quantity(2 * _PAIR_BYTES / seconds((i, j), (j, i)), "B/s")
        return rates

    contender = Contender("torch.copy_", run, lambda _: _check_again(run, targets, pattern, *devices), quantities=dict)
    return Work((contender,), {"bytes": _PAIR_BYTES, "devices": len(devices)}, num_runs=_REPEATS)


cases = (
    Case(
        "copies/to_device",
        "256 MiB from the host to the device, from pinned and from pageable memory",
        functools.partial(_prepare_host_copies, True),
        effort="quick",
        estimate_s=1.0,
    ),
    Case(
        "copies/to_host",
        "256 MiB from the device to the host, to pinned and to pageable memory",
        functools.partial(_prepare_host_copies, False),
        effort="quick",
        estimate_s=1.0,
    ),
    Case(
        "copies/both_ways",
        "256 MiB each way between device and pinned memory at once",
        _prepare_both_ways,
        estimate_s=1.0,
    ),
    Case(
        "copies/peers",
        "256 MiB from each device to each other one, and both ways at once: a rate for each pair",
        _prepare_peers,
        effort="quick",
        estimate_s=1.0,
    ),
)
