"""Offload of a module with Adam states, as shares of what the link does in the same run.

Four questions: a steady cycle, the first offload of a process (whose host memory is not there yet), two sets that
change places beside one after the other, and the five of a PPO step that take turns.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.timing import Measured, median_time, proc_bytes, self_timed, timed
from rlcore.device import Device
from rlcore.engines.offload.group import OffloadGroup, optimizer_tensors, swap_groups
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.offload.host_limits import cgroup_limits
from rlcore.types import OffloadReport
from rlcore.weights.shards import local_part

_CYCLE_SHARE = 0.65
"""The share of the device's memory that is filled: a 7B model in float32 with Adam on 141 GB."""
_FIRST_SHARE = 0.15
"""Small, because torch's allocator rounds up to a power of two and keeps what it had."""
_SWAP_SHARE = 0.28
_HOST_SHARE = 0.7
"""The share of what the control group leaves."""
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
        while self.nbytes < nbytes:
            self.module.append(_layer(hidden, inner, device.torch_device))
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        if trains:
            fill_moments(self.optimizer)
        self.group = OffloadGroup(device, self.tensors, lambda guard, state: None)
        self._expected = bit_sums(self.tensors())

    @property
    def nbytes(self) -> int:
        return self._copies * sum(parameter.nbytes for parameter in self.module.parameters())

    def tensors(self) -> list[Tensor]:
        return [*self.module.parameters(), *optimizer_tensors([self.optimizer])]

    def check(self) -> None:
        expect(bit_sums(self.tensors()) == self._expected, "other values came back")


def fill_moments(optimizer: torch.optim.AdamW) -> None:
    """Give the optimizer random states of the shape that it has after a step, without one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.ones((), device=parameter.device if group["fused"] else "cpu")
            optimizer.state[parameter] = {"step": step, **moments}


@torch.no_grad()
def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the sum of the words of each tensor of more than one element, of a sharded one those of this rank."""
    sums = [local_part(tensor.detach()).view(torch.int32).sum() for tensor in tensors if tensor.numel() > 1]
    found: list[int] = torch.stack(sums).tolist()
    return found


def _layer(hidden: int, inner: int, device: torch.device) -> nn.Module:
    """Return the matrices, biases and norms of one block of Qwen2 with 7 query heads to a key."""
    wide = [nn.Linear(hidden, size, device=device) for size in (hidden, hidden // 7, hidden // 7)]
    plain = [(hidden, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    linear = [nn.Linear(*sizes, bias=False, device=device) for sizes in plain]
    return nn.ModuleList([*wide, *linear, *(nn.RMSNorm(hidden, device=device) for _ in range(2))])


def _set_bytes(device: Device, share: float, *, num_sets: int = 1) -> int:
    """Return the bytes of one set, where that many are in host memory at once."""
    if device.spec.is_host:
        return _BYTES_ON_HOST
    gc.collect()
    arena_of(device).trim()  # of an earlier case
    return min(int(share * device.properties().total_bytes), int(_HOST_SHARE * room_of_host() / num_sets))


def room_of_host() -> int:
    """Return the bytes that this process may still take: of its control groups, and of the machine."""
    return min([proc_bytes("meminfo", "MemAvailable"), *(limit.room_bytes for limit in cgroup_limits())])


class Link:
    """Copies between host memory of exact size and the device: one way, the other, and both at once."""

    def __init__(self, device: Device) -> None:
        nbytes = _set_bytes(device, _LINK_SHARE)
        self._device = device
        self._host = device.memory.host_alloc(nbytes).tensor
        self._there = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)

    def rates(self) -> tuple[float, float]:
        """Return the bytes a second to the host and to the device, medians of three."""
        return self._rate(self._host, self._there), self._rate(self._there, self._host)

    def rate_of_both(self) -> float:
        """Return the bytes a second that each way has while the other is used as well, the median of three."""
        host, there = self._host.chunk(2), self._there.chunk(2)
        streams = [self._device.streams.new() for _ in range(2)]

        def run() -> None:
            for stream, dst, src in zip(streams, (host[0], there[1]), (there[0], host[1]), strict=True):
                self._device.memory.copy_batch([dst], [src], stream)

        return host[1].nbytes / median_time(3, run, self._device)[1]

    def _rate(self, dst: Tensor, src: Tensor) -> float:
        return dst.nbytes / median_time(3, lambda: self._device.memory.copy_batch([dst], [src]), self._device)[1]


class Way(NamedTuple):
    """All bytes that went one way."""

    nbytes: int
    seconds: float

    @classmethod
    def of(cls, reports: Iterable[OffloadReport], seconds: float | None = None) -> Self:
        """Return the sum of moves one after the other, or of all within ``seconds``."""
        every = list(reports)
        taken = sum(report.seconds for report in every) if seconds is None else seconds
        return cls(sum(report.moved_bytes for report in every), taken)


class Moved(NamedTuple):
    """An offload and an onload, and what the link did just before."""

    out: Way
    back: Way
    link: tuple[float, float]
    """Bytes a second to the host and to the device."""
    link_of_both: float = 0.0
    """The same of each way while both are used."""

    @property
    def of_link(self) -> tuple[float, float]:
        rates = [way.nbytes / way.seconds for way in (self.out, self.back)]
        return rates[0] / self.link[0], rates[1] / self.link[1]

    def quantities(self) -> dict[str, Quantity]:
        found = {}
        for way, done, link, share in zip(("host", "device"), self[:2], self.link, self.of_link, strict=True):
            found[f"to_{way}"] = Quantity(done.nbytes / done.seconds, "B/s")
            found[f"link_to_{way}"] = Quantity(link, "B/s")
            found[f"to_{way}_of_link"] = Quantity(share, "1")
        return found


def _contender(name: str, link: Link, run: Callable[[], tuple[Way, Way, float]], *sets: _Set) -> Contender:
    """``run`` returns what went out and came back, and the seconds that count; the link is measured before."""

    def measured() -> Measured:
        rates = link.rates()
        out, back, seconds = run()
        moved = Moved(out, back, rates)
        return Measured(moved, seconds, moved.quantities())

    def check(moved: Moved) -> None:
        expect(moved.out.nbytes == moved.back.nbytes > 0, f"unequal moves: {moved}")
        for one in sets:
            if not one.group.is_away:
                one.check()

    return self_timed(name, measured, check)


def _prepare_cycle(device: Device) -> Work:
    link, one = Link(device), _Set(device, _set_bytes(device, _CYCLE_SHARE))
    first = one.group.offload()
    one.group.onload()

    def cycle() -> tuple[Way, Way, float]:
        out, back = Way.of([one.group.offload()]), Way.of([one.group.onload()])
        return out, back, out.seconds + back.seconds

    return Work(
        (_contender("arena", link, cycle, one),),
        {"bytes": first.moved_bytes, "tensors": len(one.tensors())},
        num_runs=_NUM_RUNS,
    )


def _prepare_first(device: Device) -> Work:
    link, one = Link(device), _Set(device, _set_bytes(device, _FIRST_SHARE))
    nbytes = one.group.device_bytes
    arena = arena_of(device)

    def first(is_reserved: bool) -> tuple[Way, Way, float]:
        out = one.group.offload()
        expect(out.first_use is not is_reserved, "the host memory was there, or was not")
        return Way.of([out]), Way.of([one.group.onload()]), out.seconds

    def torch_pinned() -> tuple[Way, Way, float]:
        """Make a pinned tensor for each, by torch's allocator, as the usual offload loops do."""
        started = time.perf_counter()
        there = [tensor.detach() for tensor in one.tensors() if tensor.device == device.torch_device]
        host = [torch.empty_like(tensor, device="cpu", pin_memory=device.memory.can_pin) for tensor in there]
        for to, from_ in zip(host, there, strict=True):
            to.copy_(from_, non_blocking=True)
        device.synchronize()
        way = Way(sum(tensor.nbytes for tensor in there), time.perf_counter() - started)
        return way, way, way.seconds

    def contender(name: str, run: Callable[[], tuple[Way, Way, float]], *, is_reserved: bool = False) -> Contender:
        made = _contender(name, link, run, one)

        def run_first() -> Any:
            gc.collect()
            arena.trim()
            if is_reserved:
                arena.reserve(nbytes + (nbytes >> 10))  # a little for alignment
                arena.wait()
            return made.run()

        return replace(made, run=run_first)

    return Work(
        (
            contender("arena", lambda: first(False)),
            contender("arena_reserved", lambda: first(True), is_reserved=True),
            contender("torch_pin_memory", torch_pinned),
        ),
        {"bytes": nbytes},
        num_runs=1,
    )


Change = Callable[[_Set, _Set], tuple[OffloadReport, OffloadReport]]
"""The first set leaves the device, and the second comes."""


def _swap(here: _Set, following: _Set) -> tuple[OffloadReport, OffloadReport]:
    out, back = swap_groups([here.group], [following.group])
    return out, back


def _one_after_the_other(here: _Set, following: _Set) -> tuple[OffloadReport, OffloadReport]:
    return here.group.offload(), following.group.onload()


def _changes(
    link: Link, run: Callable[[Change], tuple[Way, Way, float]], sets: Iterable[_Set], least: Callable[[Moved], float]
) -> tuple[Contender, ...]:
    """Return the contenders; ``least`` gives the seconds that copies alone would take with both ways in use."""
    for _ in range(2):  # host memory and streams are there
        run(_swap)

    def with_least(contender: Contender) -> Contender:
        def measured() -> Measured:
            rate = link.rate_of_both()
            done: Measured = contender.run()
            assert isinstance(done.seconds, float)
            share = least(done.result._replace(link_of_both=rate)) / done.seconds
            found = {"link_of_both": Quantity(rate, "B/s"), "of_least": Quantity(share, "1")}
            return done._replace(quantities={**done.quantities, **found})

        return replace(contender, run=measured)

    changes: dict[str, Change] = {"swap": _swap, "one_after_the_other": _one_after_the_other}
    return tuple(
        with_least(_contender(name, link, functools.partial(run, change), *sets)) for name, change in changes.items()
    )


def _least_s(moved: Moved, out: int, back: int) -> float:
    """Return the seconds of bytes that change places: both ways as long as both have some, then one alone."""
    alone = moved.link[0] if out > back else moved.link[1]
    return min(out, back) / moved.link_of_both + abs(out - back) / alone


def _prepare_swap(device: Device) -> Work:
    link, nbytes = Link(device), _set_bytes(device, _SWAP_SHARE)
    here, away = places = [_Set(device, nbytes), _Set(device, nbytes)]
    away.group.offload()

    def run(change: Change) -> tuple[Way, Way, float]:
        (out, back), seconds = timed(lambda: change(*places))
        places.reverse()
        return Way.of([out]), Way.of([back]), seconds

    nbytes = here.group.device_bytes or away.group.device_bytes
    contenders = _changes(link, run, places, lambda moved: _least_s(moved, nbytes, nbytes))
    return Work(contenders, {"bytes": nbytes}, num_runs=_NUM_RUNS)


def _prepare_five(device: Device) -> Work:
    link = Link(device)
    nbytes = _set_bytes(device, _SWAP_SHARE, num_sets=3)  # two that train, and three that have a third of that
    sets = []
    for trains in (True, True, False, False, False):
        one = _Set(device, nbytes if trains else nbytes // 3, trains=trains)
        one.group.offload()
        sets.append(one)
    pairs = list(zip(sets, [*sets[1:], sets[0]], strict=True))
    sets[0].group.onload()

    def run(change: Change) -> tuple[Way, Way, float]:
        reports, seconds = timed(lambda: [change(*pair) for pair in pairs])
        out, back = (Way.of(some, seconds) for some in zip(*reports, strict=True))
        return out, back, seconds

    sizes = [one.nbytes for one in sets]
    moves = list(zip(sizes, [*sizes[1:], sizes[0]], strict=True))
    contenders = _changes(link, run, sets, lambda moved: sum(_least_s(moved, *move) for move in moves))
    params = {"bytes_trained": nbytes, "bytes_frozen": nbytes // 3}
    return Work(contenders, params, num_runs=3)  # of five changes of place each


cases = (
    Case(
        "offload/cycle",
        "offload and onload a module with Adam states, in the steady state; shares of the link's rate",
        _prepare_cycle,
    ),
    Case(
        "offload/first",
        "the first offload of a process: with and without reserved host memory, beside torch's pin_memory",
        _prepare_first,
        estimate_s=30.0,
    ),
    Case(
        "offload/swap",
        "two modules with Adam states change places: both directions at once, and one after the other",
        _prepare_swap,
        estimate_s=30.0,
    ),
    Case(
        "offload/five_engines",
        "actor, critic, reference, reward and rollout in turns on a device: a round of five changes of place",
        _prepare_five,
        estimate_s=50.0,
    ),
)
