"""Memory of the device and of the host: how fast it is read, written, copied between them, and allocated.

``copies`` measure the links. ``host_memory`` compares buffers of exact size with torch's, and batches of tensors with
one large copy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore._torch_private import copy_all
from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.timing import median_time
from rlcore.device import Device
from rlcore.errors import UnsupportedError
from rlcore.registry import get_device

Way = Literal["to_device", "to_host"]

_BYTES, _HOST_BYTES = 1 << 30, 1 << 27
_LINK_BYTES = _PAIR_BYTES = 1 << 28
_BUFFER_BYTES = 2 << 30
_NUM_TENSORS, _LARGEST_BYTES = 5000, 512 << 10
_REPEATS = 5


# ------------------------------------------------------------------------------------ the device's own memory


def _prepare_bandwidth(device: Device) -> Work:
    numel = (_HOST_BYTES if device.spec.is_host else _BYTES) // 4
    source, other = (torch.full((numel,), value, device=device.torch_device) for value in (1.0, 2.0))

    def contender(name: str, passes: int, run: Callable[[], Any], check: Callable[[Any], None]) -> Contender:
        nbytes = passes * 4 * numel
        return Contender(name, run, check, params={"bytes": nbytes}, limits={"memory": nbytes})

    def writing(name: str, passes: int, write: Callable[[Tensor], Any], value: float) -> Contender:
        target = torch.empty_like(source)  # its own: it is checked after the others have run

        def check(_: Any) -> None:
            expect(bool((target == value).all()), f"{name} left something else than {value}")

        return contender(name, passes, lambda: write(target), check)

    def check_sum(total: Tensor) -> None:
        # Partial sums above 2 ** 24 are rounded where their sizes are no powers of two.
        expect(abs(float(total) - numel) <= numel * 2**-20, f"ones sum up to {float(total)}, not {numel}")

    return Work(
        (
            writing("copy", 2, lambda target: target.copy_(source), 1.0),
            writing("fill", 1, lambda target: target.fill_(3.0), 3.0),
            writing("triad", 3, lambda target: torch.add(source, other, alpha=2.0, out=target), 5.0),
            contender("read", 1, source.sum, check_sum),
        ),
        {"dtype": "float32"},
        runs_on="stream",
    )


# ------------------------------------------------------------------------------- between the host and a device


def _need(device: Device, way: Way, nbytes: int, kind: str = "pinned") -> dict[str, int]:
    """Return the bytes needed of the link; where the device is the host, of its memory, which is read and written."""
    return {"memory": 2 * nbytes} if device.spec.is_host else {f"{way}/{kind}": nbytes}


def _pinned(device: Device, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.memory.can_pin)


def _copies(device: Device, way: Way, hosts: Mapping[str, Tensor], limits: Callable[[str], dict[str, int]]) -> Work:
    """Copy between the device and each of ``hosts``, which are of one size."""
    nbytes = next(iter(hosts.values())).nbytes
    pattern = torch.arange(nbytes // 8).view(torch.uint8)
    there = pattern.to(device.torch_device, copy=True)

    def contender(name: str, host: Tensor) -> Contender:
        host.copy_(pattern)
        to, from_ = (there, host) if way == "to_device" else (host, there)

        def run() -> Any:
            return to.copy_(from_, non_blocking=True)

        return Contender(name, run, lambda _: _check_again(run, [to], pattern, device), limits=limits(name))

    return Work(tuple(contender(*host) for host in hosts.items()), {"bytes": nbytes})


def _check_again(run: Callable[[], Any], targets: list[Tensor], pattern: Tensor, *devices: Any) -> None:
    """Run once more into cleared memory: after the first run it holds the pattern anyway."""
    for target in targets:
        target.zero_()
    for device in devices:
        device.synchronize()
    run()
    for device in devices:
        device.synchronize()
    expect(all(torch.equal(target.cpu(), pattern) for target in targets), "other bytes arrived")


def _prepare_link(way: Way, device: Device) -> Work:
    _refuse_host(device, "a copy between host and device")
    hosts = {"pageable": torch.empty(_LINK_BYTES, dtype=torch.uint8)}
    if device.memory.can_pin:
        hosts = {"pinned": _pinned(device, _LINK_BYTES), **hosts}
    return _copies(device, way, hosts, lambda kind: _need(device, way, _LINK_BYTES, kind))


def _prepare_buffers(way: Way, device: Device) -> Work:
    hosts = {
        "host_alloc": device.memory.host_alloc(_BUFFER_BYTES).tensor,
        "torch_pinned": _pinned(device, _BUFFER_BYTES),
    }
    return _copies(device, way, hosts, lambda _: _need(device, way, _BUFFER_BYTES))


def _prepare_both_ways(device: Device) -> Work:
    _refuse_host(device, "a copy between host and device")
    if not device.memory.can_pin:
        raise UnsupportedError("copying both ways at once", "this device cannot pin memory of the host")
    pattern = torch.arange(_LINK_BYTES // 8).view(torch.uint8)
    hosts = [_pinned(device, _LINK_BYTES).copy_(pattern) for _ in range(2)]
    there = [pattern.to(device.torch_device) for _ in range(2)]
    streams = [device.streams.new() for _ in range(2)]

    def run() -> None:
        for stream, to, from_ in zip(streams, (there[0], hosts[1]), (hosts[0], there[1]), strict=True):
            with device.streams.use(stream):
                to.copy_(from_, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    contender = Contender("pinned", run, lambda _: _check_again(run, [there[0], hosts[1]], pattern, device))
    return Work((contender,), {"bytes": 2 * _LINK_BYTES}, limits=_need(device, "to_device", _LINK_BYTES))


def _prepare_batch(way: Way, device: Device) -> Work:
    """Tensors of uneven size, one behind the other in one buffer on the host, anywhere on the device."""
    sizes = [1 + (number * 7919) % _LARGEST_BYTES for number in range(_NUM_TENSORS)]
    host, whole_host = (device.memory.host_alloc(sum(sizes)).tensor for _ in range(2))
    on_host = list(torch.split(host, sizes))
    on_device = [torch.full((size,), size % 251, dtype=torch.uint8, device=device.torch_device) for size in sizes]
    whole = torch.cat(on_device)
    for one in (host, whole_host):
        one.copy_(whole)
    is_to_device = way == "to_device"
    dst, src = (on_device, on_host) if is_to_device else (on_host, on_device)
    one_dst, one_src = (whole, whole_host) if is_to_device else (whole_host, whole)
    runs = {
        "copy_batch": lambda: device.memory.copy_batch(dst, src),
        "foreach": lambda: copy_all(dst, src, non_blocking=True),
        "one_copy": lambda: one_dst.copy_(one_src, non_blocking=True),
    }

    def check(_: Any) -> None:
        device.synchronize()
        expect(torch.equal(torch.cat(on_device).cpu(), host) and torch.equal(whole.cpu(), host), "other bytes arrived")

    return Work(
        tuple(Contender(name, run, check) for name, run in runs.items()),
        {"tensors": _NUM_TENSORS, "bytes": sum(sizes)},
        limits=_need(device, way, sum(sizes)),
    )


def _prepare_alloc(device: Device) -> Work:
    def exact() -> int:
        buffer = device.memory.host_alloc(_BUFFER_BYTES)
        nbytes = int(buffer.tensor.numel())
        device.memory.host_free(buffer)
        return nbytes

    def check(nbytes: int) -> None:
        expect(nbytes == _BUFFER_BYTES, f"{nbytes} bytes were allocated")

    return Work((Contender("host_alloc", exact, check),), {"bytes": _BUFFER_BYTES})


# -------------------------------------------------------------------------------------------- between devices


def _refuse_host(device: Device, feature: str) -> None:
    if device.spec.is_host:
        raise UnsupportedError(f"{feature} on {device.name}", "the device is the host itself")


def _prepare_peers(device: Device) -> Work:
    _refuse_host(device, "a link between devices")
    if device.count() < 2:
        raise UnsupportedError("a link between devices", f"there is one {device.spec.name} device")
    devices = [get_device(f"{device.spec.name}:{index}") for index in range(device.count())]
    pattern = torch.arange(_PAIR_BYTES // 8)
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


_QUICK: dict[str, Any] = {"effort": "quick", "estimate_s": 1.0}
_WAYS: tuple[tuple[Way, str, str], ...] = (
    ("to_device", "from the host to the device", "from"),
    ("to_host", "from the device to the host", "to"),
)
_BATCH = "copy_batch, torch's foreach, and as many bytes at once"

cases = (
    Case(
        "memory/bandwidth",
        "copy, fill, sum and a + 2 b of large arrays in device memory",
        _prepare_bandwidth,
        effort="quick",
        estimate_s=4.0,
    ),
    *(
        Case(
            f"copies/{way}",
            f"256 MiB {direction}, {at} pinned and {at} pageable memory",
            functools.partial(_prepare_link, way),
            **_QUICK,
        )
        for way, direction, at in _WAYS
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
        **_QUICK,
    ),
    Case("host_memory/alloc", "allocate and free 2 GiB of host memory that the device copies from", _prepare_alloc),
    *(
        Case(
            f"host_memory/{way}",
            f"copy 2 GiB {direction}, {at} host_alloc and {at} torch's pinned memory",
            functools.partial(_prepare_buffers, way),
            estimate_s=20.0,
        )
        for way, direction, at in _WAYS
    ),
    *(
        Case(
            f"host_memory/batch_{way}",
            f"copy 5,000 tensors {direction}: {_BATCH}",
            functools.partial(_prepare_batch, way),
            estimate_s=20.0,
        )
        for way, direction, _ in _WAYS
    ),
)
