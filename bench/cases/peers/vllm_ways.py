"""The ways in which real vLLM gets new weights, each timed as its user sees it, and the limits they are judged by."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import Quantity
from rlcore.bench.cases.offload import Link
from rlcore.bench.cases.peers import vllm_worker
from rlcore.bench.cases.peers.vllm_pair import VllmPair, joined
from rlcore.bench.cases.timing import median_time, timed
from rlcore.device import Device
from rlcore.registry import get_device
from rlcore.types import SyncReport

_PIECE_BYTES = 1 << 30
_NUM_COPIES = 8
"""Copies of a piece; the time of all bytes is taken from them."""


class Limits(NamedTuple):
    """Rates and times that this device was seen to reach just before, without an engine."""

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


def measured_limits(pair: VllmPair) -> Limits:
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

    def allocate() -> None:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
        if is_zeroed:
            memory.zero_()

    _, seconds = timed(allocate, device)
    device.memory.empty_cache()
    return seconds


def _copy_s(to: Any, from_: Any, nbytes: int) -> float:
    piece = min(_PIECE_BYTES, nbytes)
    source = torch.ones(piece, dtype=torch.uint8, device=from_.torch_device)
    destination = torch.empty_like(source, device=to.torch_device)
    _, seconds = median_time(_NUM_COPIES - 1, lambda: destination.copy_(source), to, from_, warm_up=1)
    return seconds * (nbytes / piece)


# ---------------------------------------------------------------------------------------------------- the ways


class Done(NamedTuple):
    seconds: float
    """Seconds of the whole call, as its user sees it."""
    state: int
    """The state of the trainer's weights, 0 or 1."""
    sums: list[dict[str, int]]
    """Checksums of vLLM's parameters, by rank."""
    quantities: Mapping[str, Quantity] = {}
    report: SyncReport | None = None


class Ways:
    """The ways in which vLLM gets new weights; each leaves it and the trainer on the device."""

    def __init__(self, pair: VllmPair, limits: Limits) -> None:
        self._pair, self._limits = pair, limits
        self._senders: dict[bool, vllm_worker.VllmIpcSender] = {}

    def turn(self) -> Done:
        """Take a turn as in docs/weight_sync.md: the trainer makes a step while vLLM is away, then syncs and leaves.

        The limit of vLLM's tags is what their memory alone takes to come back just before: as many pieces, at the same
        addresses, as captured graphs need them.
        """
        pair, limits = self._pair, self._limits
        train, infer = pair.train, pair.infer
        train.offload()
        train.onload()  # as after the turn before: its memory is not where vLLM knew it
        pair.step()
        infer.meta()
        pieces: dict[str, int] = {}

        def bare_s(tag: str) -> float:
            seconds, pieces[tag] = pair.bare_s(tag)
            return seconds

        phases = (
            _Phase("wake_weights", lambda: infer.onload("weights"), lambda: bare_s("weights")),
            _Phase("sync", lambda: train.sync_weights(infer), lambda: limits.copy_s),
            _Phase("trainer_offload", train.offload, lambda: pair.nbytes / limits.to_host),
            _Phase("wake_kv_cache", lambda: infer.onload("kv_cache"), lambda: bare_s("kv_cache")),
        )
        seconds, found, least = {}, {}, {}
        for phase in phases:
            least[phase.name] = phase.limit()
            started = time.perf_counter()
            found[phase.name] = phase.step()
            seconds[phase.name] = time.perf_counter() - started
        train.onload()
        report: SyncReport = found["sync"]
        quantities = {
            **_named("{}", seconds),
            **_named("{}_limit", least),
            **{f"{name}_of_limit": Quantity(one / least[name], "1") for name, one in seconds.items()},
            **_named("{}_moving", {name: joined(found[name]).seconds for name in ("wake_weights", "wake_kv_cache")}),
            "wake_weights_of_allocation": Quantity(seconds["wake_weights"] / limits.weights_s, "1"),
            "wake_kv_cache_of_allocation": Quantity(seconds["wake_kv_cache"] / limits.kv_cache_s, "1"),
            **{f"pieces_of_{tag}": Quantity(count, "piece") for tag, count in pieces.items()},
            "turn": Quantity(sum(seconds.values()), "s"),
            "read_amplification": Quantity(report.moved_bytes / report.needed_bytes, "1"),
            **self._first_moves(),
        }
        if limits.peer is not None:
            bound = 2 * report.needed_bytes / self._num_receivers / limits.peer + 0.020
            quantities["sync_of_bound"] = Quantity(seconds["sync"] / bound, "1")
        return self._done(seconds["sync"], quantities, report)

    def _first_moves(self) -> dict[str, Quantity]:
        """Return the moves of vLLM's weights to the host and back, when the engine was new."""
        found = {"first_sync": Quantity(self._pair.first_s, "s")}
        rates = self._limits.to_host, self._limits.to_device
        for kind, both in self._pair.left.items():
            for way, seconds, rate in zip(("to_host", "to_device"), both, rates, strict=True):
                found[f"{kind}_{way}"] = Quantity(seconds, "s")
                found[f"{kind}_{way}_of_link"] = Quantity(self._pair.moved_bytes / seconds / rate, "1")
        if self._pair.left:
            found["reserved_of_moved"] = Quantity(self._pair.ready_bytes / self._pair.moved_bytes, "1")
        return found

    @property
    def _num_receivers(self) -> int:
        return self._pair.layout.tensor_parallel * self._pair.layout.replicas

    def again(self) -> Done:
        """Nothing else was moved since the last sync, which had new weights too, or it would have opened nothing."""
        self._pair.step()
        self._pair.train.sync_weights(self._pair.infer)
        return self._timed(lambda: self._pair.train.sync_weights(self._pair.infer))

    def packed(self) -> Done:
        return self._timed(lambda: self._pair.train.sync_weights(self._pair.infer, route="packed"))

    def nothing_new(self) -> Done:
        self._pair.train.sync_weights(self._pair.infer)
        return self._timed(lambda: self._pair.train.sync_weights(self._pair.infer), is_new=False)

    def per_tensor(self) -> Done:
        """Send each weight by name as a copy, a handle and a call to the engine's own loader, as in RLite."""
        memory = self._pair.device.memory

        def loop() -> None:
            for name, weight in self.named():
                copy = weight.clone(memory_format=torch.contiguous_format)
                handle = memory.export_ipc(copy)
                self._pair.device.synchronize()
                self._pair.ask("take", name, handle.to_bytes())
                memory.revoke(handle)

        return self._timed(loop)

    def vllm_ipc(self, *, is_packed: bool) -> Done:
        """Raises UnsupportedError where vLLM's own way is not to be had."""
        if is_packed not in self._senders:
            ask = functools.partial(self._pair.ask, "transfer")
            device = self._pair.device
            self._senders[is_packed] = vllm_worker.VllmIpcSender(device, self.named, ask, is_packed=is_packed)
        return self._timed(self._senders[is_packed].send)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The trainer's own tensors: it is in this process."""
        yield from self._pair.train.call("named")[0]

    def _timed(self, send: Callable[[], Any], *, is_new: bool = True) -> Done:
        if is_new:
            self._pair.step()
        self._pair.device.synchronize()
        started = time.perf_counter()
        found = send()
        seconds = time.perf_counter() - started
        return self._done(seconds, {}, found if isinstance(found, SyncReport) else None)

    def _done(self, seconds: float, quantities: Mapping[str, Quantity], report: SyncReport | None) -> Done:
        sums = [one for replica in self._pair.ask_each("sums") for one in replica]
        parts = {} if report is None else _parts(report)
        return Done(seconds, self._pair.state, sums, {**quantities, **parts}, report)


class _Phase(NamedTuple):
    """One phase of a turn."""

    name: str
    step: Callable[[], Any]
    limit: Callable[[], float]
    """Seconds; asked for just before the step."""


_IN_RECORDS = {
    "open_staging_buffers": "open_slabs",
    "open_events": "open_marks",
    "import_events": "know_marks",
}
"""Steps of a sync by the names that records have for them, so that ``compare`` finds them in those of before."""


def _parts(report: SyncReport) -> dict[str, Quantity]:
    """Return where the time of a sync went."""
    calls_s = {_IN_RECORDS.get(name, name): seconds for name, seconds in report.calls_s.items()}
    found = {**_named("call_{}", calls_s), f"route_{report.route}": Quantity(1, "1")}
    if report.handles_opened:
        found["handles_opened"] = Quantity(report.handles_opened, "handle")
    if report.slabs_wait_by:
        found[f"waits_by_{report.slabs_wait_by}"] = Quantity(1, "1")
    return found


def _named(pattern: str, seconds: Mapping[str, float]) -> dict[str, Quantity]:
    return {pattern.format(name): Quantity(one, "s") for name, one in seconds.items()}
