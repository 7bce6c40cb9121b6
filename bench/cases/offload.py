"""Offload of a module with Adam states, as shares of what the link does in the same run.

Four questions: a steady cycle, the first offload of a process (whose host memory is not there yet), two sets that
change places beside one after the other, and the five of a PPO step that take turns.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.device import Device
from rlcore.engines.offload.group import OffloadGroup, optimizer_tensors, swap_groups
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.offload.host_limits import cgroup_limits
from rlcore.types import OffloadReport

_CYCLE_SHARE = 0.65
"""Of the device's memory: a 7B model in float32 with Adam on 141 GB."""
_FIRST_SHARE = 0.15
"""Small, because torch's allocator rounds up to a power of two and keeps what it had."""
_SWAP_SHARE = 0.28
_HOST_SHARE = 0.7
"""Of what the control group leaves."""
_BYTES_ON_HOST = 1 << 28
"""Where the device is the host itself, and its share would be everybody's memory."""
_LINK_SHARE = 1 / 64
_NUM_RUNS = 5


class _Set:
    """Layers of a language model, with Adam states if it trains, all of random values, that can leave the device."""

    def __init__(self, device: Device, nbytes: int, *, trains: bool = True) -> None:
        hidden, inner = (3584, 18944) if nbytes > 1 << 33 else (512, 2048)
        self._copies = 3 if trains else 1
        self.module = nn.ModuleList()
        while self._num_bytes < nbytes:
            self.module.append(_layer(hidden, inner, device.torch_device))
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for parameter in self.module.parameters() if trains else ():
            moments = {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.ones(()), **moments}
        self.group = OffloadGroup(device, self._tensors, lambda guard, state: None)
        self._expected = self._sums()

    @property
    def _num_bytes(self) -> int:
        return self._copies * sum(parameter.nbytes for parameter in self.module.parameters())

    def _tensors(self) -> list[Tensor]:
        return [*self.module.parameters(), *optimizer_tensors([self.optimizer])]

    def _sums(self) -> list[int]:
        with torch.no_grad():
            sums = [tensor.view(torch.int32).sum() for tensor in self._tensors() if tensor.numel() > 1]
            return torch.stack(sums).tolist()

    def check(self) -> None:
        expect(self._sums() == self._expected, "other values came back")


def _layer(hidden: int, inner: int, device: torch.device) -> nn.Module:
    """The matrices, biases and norms of one block of Qwen2 with 7 query heads to a key."""
    wide = [nn.Linear(hidden, size, device=device) for size in (hidden, hidden // 7, hidden // 7)]
    plain = [(hidden, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    linear = [nn.Linear(*sizes, bias=False, device=device) for sizes in plain]
    return nn.ModuleList([*wide, *linear, *(nn.RMSNorm(hidden, device=device) for _ in range(2))])


def _set_bytes(device: Device, share: float, *, num_sets: int = 1) -> int:
    """Of one set, where that many are in host memory at once."""
    if device.spec.is_host:
        return _BYTES_ON_HOST
    gc.collect()
    arena_of(device).trim()  # of an earlier case
    return min(int(share * device.properties().total_bytes), int(_HOST_SHARE * room_of_host() / num_sets))


def room_of_host() -> int:
    """Bytes that this process may still take: of its control groups, and of the machine, which a run must not fill."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert available is not None
    return min([int(available[1]) * 1024, *(limit.room_bytes for limit in cgroup_limits())])


class Link:
    """One copy between host memory of exact size and the device, each way."""

    def __init__(self, device: Device) -> None:
        nbytes = _set_bytes(device, _LINK_SHARE)
        self._device = device
        self._host = device.memory.host_alloc(nbytes).tensor
        self._there = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)

    def rates(self) -> tuple[float, float]:
        """Bytes a second to the host and to the device, medians of three."""
        return self._rate(self._host, self._there), self._rate(self._there, self._host)

    def _rate(self, dst: Tensor, src: Tensor) -> float:
        seconds = []
        for _ in range(3):
            self._device.synchronize()
            started = time.perf_counter()
            self._device.memory.copy_batch([dst], [src])
            self._device.synchronize()
            seconds.append(time.perf_counter() - started)
        return dst.nbytes / statistics.median(seconds)


class _Moved(NamedTuple):
    out: OffloadReport
    in_: OffloadReport
    seconds: float
    link: tuple[float, float]
    """Bytes a second to the host and to the device, measured just before."""


def _quantities(moved: _Moved) -> Mapping[str, Quantity]:
    rates = [report.moved_bytes / report.seconds for report in (moved.out, moved.in_)]
    return {
        "to_host": Quantity(rates[0], "B/s"),
        "to_device": Quantity(rates[1], "B/s"),
        "link_to_host": Quantity(moved.link[0], "B/s"),
        "link_to_device": Quantity(moved.link[1], "B/s"),
        "to_host_of_link": Quantity(rates[0] / moved.link[0], "1"),
        "to_device_of_link": Quantity(rates[1] / moved.link[1], "1"),
    }


def _contender(name: str, run: Callable[[], _Moved], *sets: _Set) -> Contender:
    def check(moved: _Moved) -> None:
        expect(moved.out.moved_bytes == -moved.in_.freed_device_bytes > 0, f"unequal moves: {moved}")
        for one in sets:
            if not one.group.is_away:
                one.check()

    return Contender(
        implementation=name, run=run, check=check, seconds=lambda moved: moved.seconds, quantities=_quantities
    )


def _prepare_cycle(device: Device) -> Work:
    link, one = Link(device), _Set(device, _set_bytes(device, _CYCLE_SHARE))
    first = one.group.offload()
    one.group.onload()

    def cycle() -> _Moved:
        rates = link.rates()
        out = one.group.offload()
        in_ = one.group.onload()
        return _Moved(out, in_, out.seconds + in_.seconds, rates)

    return Work(
        contenders=(_contender("arena", cycle, one),),
        params={"bytes": first.moved_bytes, "tensors": len(one._tensors())},
        num_runs=_NUM_RUNS,
    )


def _prepare_first(device: Device) -> Work:
    link, one = Link(device), _Set(device, _set_bytes(device, _FIRST_SHARE))
    nbytes = one.group.device_bytes
    arena = arena_of(device)

    def first(is_reserved: bool) -> _Moved:
        gc.collect()
        arena.trim()
        if is_reserved:
            arena.reserve(nbytes + (nbytes >> 10))  # a little for alignment
            arena.wait()
        rates = link.rates()
        out = one.group.offload()
        expect(out.first_use is not is_reserved, "the host memory was there, or was not")
        return _Moved(out, one.group.onload(), out.seconds, rates)

    def torch_pinned() -> _Moved:
        """A pinned tensor for each, from torch's allocator, as the usual offload loops make them."""
        arena.trim()
        rates = link.rates()
        started = time.perf_counter()
        there = [tensor.detach() for tensor in one._tensors() if tensor.device == device.torch_device]
        host = [torch.empty_like(tensor, device="cpu", pin_memory=device.memory.can_pin) for tensor in there]
        for to, from_ in zip(host, there, strict=True):
            to.copy_(from_, non_blocking=True)
        device.synchronize()
        seconds = time.perf_counter() - started
        moved = sum(tensor.nbytes for tensor in there)
        return _Moved(_report(moved, seconds), _report(-moved, seconds), seconds, rates)

    return Work(
        contenders=(
            _contender("arena", lambda: first(False), one),
            _contender("arena_reserved", lambda: first(True), one),
            _contender("torch_pin_memory", torch_pinned, one),
        ),
        params={"bytes": nbytes},
        num_runs=1,
    )


def _report(moved: int, seconds: float) -> OffloadReport:
    return OffloadReport(moved_bytes=abs(moved), freed_device_bytes=moved, seconds=seconds, pinned=True, first_use=True)


def _prepare_swap(device: Device) -> Work:
    link = Link(device)
    nbytes = _set_bytes(device, _SWAP_SHARE)
    here, away = _Set(device, nbytes), _Set(device, nbytes)
    places = [here.group, away.group]
    places[1].offload()
    for _ in range(2):  # host memory and streams are there
        swap_groups([places[0]], [places[1]])
        places.reverse()

    def swap() -> _Moved:
        rates = link.rates()
        started = time.perf_counter()
        out, in_ = swap_groups([places[0]], [places[1]])
        seconds = time.perf_counter() - started
        places.reverse()
        return _Moved(out, in_, seconds, rates)

    def sequential() -> _Moved:
        rates = link.rates()
        started = time.perf_counter()
        out = places[0].offload()
        in_ = places[1].onload()
        seconds = time.perf_counter() - started
        places.reverse()
        return _Moved(out, in_, seconds, rates)

    return Work(
        contenders=(_contender("swap", swap, here, away), _contender("one_after_the_other", sequential, here, away)),
        params={"bytes": here.group.device_bytes or away.group.device_bytes},
        num_runs=_NUM_RUNS,
    )


def _prepare_five(device: Device) -> Work:
    link = Link(device)
    nbytes = _set_bytes(device, _SWAP_SHARE, num_sets=3)  # two that train, and three that have a third of that
    sets = []
    for trains in (True, True, False, False, False):
        one = _Set(device, nbytes if trains else nbytes // 3, trains=trains)
        one.group.offload()
        sets.append(one)
    turns = list(zip(sets, [*sets[1:], sets[0]], strict=True))
    sets[0].group.onload()

    def round_of(turn: Callable[[_Set, _Set], tuple[OffloadReport, OffloadReport]]) -> Callable[[], _Moved]:
        def play() -> _Moved:
            rates = link.rates()
            started = time.perf_counter()
            reports = [turn(here, following) for here, following in turns]
            seconds = time.perf_counter() - started
            out, in_ = (_together(some, seconds) for some in zip(*reports, strict=True))
            return _Moved(out, in_, seconds, rates)

        return play

    def swap(here: _Set, following: _Set) -> tuple[OffloadReport, OffloadReport]:
        out, in_ = swap_groups([here.group], [following.group])
        return out, in_

    def sequential(here: _Set, following: _Set) -> tuple[OffloadReport, OffloadReport]:
        return here.group.offload(), following.group.onload()

    contenders = {"swap": round_of(swap), "one_after_the_other": round_of(sequential)}
    for _ in range(2):  # host memory and streams are there
        contenders["swap"]()
    return Work(
        contenders=tuple(_contender(name, play, *sets) for name, play in contenders.items()),
        params={"bytes_trained": nbytes, "bytes_frozen": nbytes // 3},
        num_runs=3,  # of five changes of place each
    )


def _together(reports: Iterable[OffloadReport], seconds: float) -> OffloadReport:
    every = list(reports)
    return OffloadReport(
        moved_bytes=sum(report.moved_bytes for report in every),
        freed_device_bytes=sum(report.freed_device_bytes for report in every),
        seconds=seconds,
        pinned=all(report.pinned for report in every),
        first_use=any(report.first_use for report in every),
    )


cycle_case = Case(
    name="offload/cycle",
    description="offload and onload a module with Adam states, in the steady state; shares of the link's rate",
    prepare=_prepare_cycle,
)
first_case = Case(
    name="offload/first",
    description="the first offload of a process: with and without reserved host memory, beside torch's pin_memory",
    prepare=_prepare_first,
    estimate_s=30.0,
)
swap_case = Case(
    name="offload/swap",
    description="two modules with Adam states change places: both directions at once, and one after the other",
    prepare=_prepare_swap,
    estimate_s=30.0,
)
five_case = Case(
    name="offload/five_engines",
    description="actor, critic, reference, reward and rollout in turns on a device: a round of five changes of place",
    prepare=_prepare_five,
    estimate_s=50.0,
)
