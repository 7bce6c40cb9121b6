"""New weights for real vLLM, inside the loop in which trainer and sampler alternate on their devices.

One start of vLLM serves all of a case: the steady sync, the turn around it by phase, the first time that the engine
leaves its device, and, where the replica has one device, the ways that others send. Every way has to leave the same
bytes in vLLM's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.bench.cases.offload import Link
from rlcore.bench.cases.peers import vllm_worker
from rlcore.bench.cases.peers.vllm_pair import Layout, VllmPair, joined
from rlcore.bench.cases.timing import median_time, timed
from rlcore.bench.cases.weight_sync import send_one_by_one
from rlcore.device import Device
from rlcore.errors import MissingDependencyError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import SyncReport

_NUM_RUNS = 5
_MOST_NAMES_ONE_BY_ONE = 1000
"""More would take minutes."""
_FEW_RUNS = 2
"""Runs of each of vLLM's own ways where there are more names: it loads them one by one, for seconds."""
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
    peer = None
    if pair.layout.devices > 1:
        other = get_device(f"{pair.device.spec.name}:{pair.device.index + 1}")
        peer = pair.nbytes / _copy_s(pair.device, other, pair.nbytes)
    return Limits(
        *rates,
        weights_s=_allocation_s(pair.device, pair.nbytes, is_zeroed=False),
        kv_cache_s=_allocation_s(pair.device, pair.kv_bytes, is_zeroed=True),
        copy_s=_copy_s(pair.device, pair.device, pair.nbytes),
        peer=peer,
    )


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

        phases: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
            "wake_weights": (lambda: infer.onload("weights"), lambda: bare_s("weights")),
            "sync": (lambda: train.sync_weights(infer), lambda: limits.copy_s),
            "trainer_offload": (train.offload, lambda: pair.nbytes / limits.to_host),
            "wake_kv_cache": (lambda: infer.onload("kv_cache"), lambda: bare_s("kv_cache")),
        }
        seconds, found, least = {}, {}, {}
        for name, (step, limit) in phases.items():
            least[name] = limit()  # just before the step
            found[name], seconds[name] = timed(step)
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
            receivers = pair.layout.tensor_parallel * pair.layout.replicas
            bound = 2 * report.needed_bytes / receivers / limits.peer + 0.020
            quantities["sync_of_bound"] = Quantity(seconds["sync"] / bound, "1")
        return self._done(seconds["sync"], quantities, report)

    def _first_moves(self) -> dict[str, Quantity]:
        """Return the syncs, and the moves of vLLM's weights to the host and back, when the engine was new."""
        found = _named("{}", self._pair.first)
        rates = self._limits.to_host, self._limits.to_device
        for kind, both in self._pair.left.items():
            for way, seconds, rate in zip(("to_host", "to_device"), both, rates, strict=True):
                found[f"{kind}_{way}"] = Quantity(seconds, "s")
                found[f"{kind}_{way}_of_link"] = Quantity(self._pair.moved_bytes / seconds / rate, "1")
        if self._pair.left:
            found["reserved_of_moved"] = Quantity(self._pair.ready_bytes / self._pair.moved_bytes, "1")
        return found

    def again(self) -> Done:
        """Sync twice in a row, each time with new weights: the second sync finds all memory opened by the first."""
        self._pair.step()
        self._pair.train.sync_weights(self._pair.infer)
        return self._timed(lambda: self._pair.train.sync_weights(self._pair.infer))

    def packed(self) -> Done:
        return self._timed(lambda: self._pair.train.sync_weights(self._pair.infer, route="packed"))

    def nothing_new(self) -> Done:
        self._pair.train.sync_weights(self._pair.infer)
        return self._timed(lambda: self._pair.train.sync_weights(self._pair.infer), is_new=False)

    def per_tensor(self) -> Done:
        """Send each tensor by itself, as RLite does."""
        take = functools.partial(self._pair.ask, "take")
        return self._timed(lambda: send_one_by_one(self._pair.device, self.named(), take))

    def vllm_ipc(self, *, is_packed: bool) -> Done:
        """Raises UnsupportedError where vLLM's own way is not to be had."""
        ask = functools.partial(self._pair.ask, "transfer")
        return self._timed(vllm_worker.VllmIpcSender(self._pair.device, self.named, ask, is_packed=is_packed).send)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trainer's own tensors: it is in this process."""
        yield from self._pair.train.call("named")[0]

    def _timed(self, send: Callable[[], Any], *, is_new: bool = True) -> Done:
        if is_new:
            self._pair.step()
        self._pair.device.synchronize()
        found, seconds = timed(send)
        return self._done(seconds, {}, found if isinstance(found, SyncReport) else None)

    def _done(self, seconds: float, quantities: Mapping[str, Quantity], report: SyncReport | None) -> Done:
        sums = [one for replica in self._pair.ask_each("sums") for one in replica]
        parts = {} if report is None else _parts(report)
        return Done(seconds, self._pair.state, sums, {**quantities, **parts}, report)


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
    if report.staging_waits_by:
        found[f"waits_by_{report.staging_waits_by}"] = Quantity(1, "1")
    return found


def _named(pattern: str, seconds: Mapping[str, float]) -> dict[str, Quantity]:
    return {pattern.format(name): Quantity(one, "s") for name, one in seconds.items()}


# ------------------------------------------------------------------------------------------------------ cases


class _SameSums:
    """Holds what the ways left in vLLM against each other."""

    def __init__(self) -> None:
        self._sums: dict[int, list[dict[str, int]]] = {}
        """State of the trainer's weights -> checksums of vLLM's parameters."""

    def check(self, done: Done) -> None:
        wanted = self._sums.setdefault(done.state, done.sums)
        expect(done.sums == wanted, "vLLM's parameters are not those that another way, or an earlier round, made")
        expect(self._sums.get(0) != self._sums.get(1), "the weights of two steps are the same")
        if done.report is not None:
            expect(
                done.report.fallback_bytes == 0, f"{done.report.fallback_bytes} bytes went through vLLM's own loader"
            )

    def check_again(self, done: Done) -> None:
        """Check a sync after which nothing has moved."""
        self.check(done)
        num_handles = done.report.handles_opened if done.report else 0
        expect(num_handles == 0, f"{num_handles} handles were opened anew, and nothing had moved")


def _contenders(pair: VllmPair, ways: Ways) -> Iterator[Contender]:
    same_sums, is_one_by_one_slow = _SameSums(), pair.num_names > _MOST_NAMES_ONE_BY_ONE
    runs = {"turn": ways.turn, "again": ways.again, "packed": ways.packed, "nothing_new": ways.nothing_new}
    if pair.layout.devices == 1:
        for name, is_packed in (("vllm_ipc", False), ("vllm_ipc_packed", True)):
            runs[name] = functools.partial(ways.vllm_ipc, is_packed=is_packed)
        if not is_one_by_one_slow:
            runs["per_tensor"] = ways.per_tensor
    for name, run in runs.items():
        yield Contender(
            name,
            most_runs=_FEW_RUNS if is_one_by_one_slow and name.startswith("vllm_ipc") else None,
            run=run,
            check=same_sums.check_again if name == "again" else same_sums.check,
            seconds=lambda done: done.seconds,
            quantities=lambda done: done.quantities,
        )


def _prepare(model: ModelShape, layout: Layout, device: Device) -> Work:
    if layout.devices > max(1, device.count()):
        raise UnsupportedError(f"this case on {device.spec.name}", f"it takes {layout.devices} devices")
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError("vllm", needed_for="this case", extra="vllm") from error
    pair = VllmPair(model, layout, device)
    steps.begin("limits")
    try:
        limits = measured_limits(pair)  # while there is room
        pair.start()
    except BaseException:
        pair.close()
        raise
    return Work(
        tuple(_contenders(pair, Ways(pair, limits))),
        {
            "model": pair.name,
            "bytes": pair.nbytes,
            "names": pair.num_names,
            "trainer": layout.shards,
            "tensor_parallel": layout.tensor_parallel,
            "replicas": layout.replicas,
            "vllm": vllm.__version__,
        },
        num_runs=_NUM_RUNS,
        close=pair.close,
    )


def _case(name: str, model: ModelShape, layout: Layout, estimate_s: float) -> Case:
    shape = f"{layout.shards} to {layout.tensor_parallel} x {layout.replicas}, " if layout.devices > 1 else ""
    return Case(
        f"weight_sync/vllm/{name}",
        f"new weights for real vLLM, {shape}{model.name} shapes (tiny on a host), and the turn around it",
        functools.partial(_prepare, model, layout),
        effort="full",
        estimate_s=estimate_s,
    )


cases = (
    _case("7b", QWEN_7B, Layout(), 100.0),
    _case("30b_a3b", QWEN_30B_A3B, Layout(), 230.0),
    _case("7b_2_to_tp2", QWEN_7B, Layout(2, 2), 90.0),
    _case("7b_4_to_tp2_dp2", QWEN_7B, Layout(4, 2, 2), 120.0),
    _case("30b_a3b_2_to_tp2", QWEN_30B_A3B, Layout(2, 2), 180.0),
    _case("30b_a3b_4_to_tp2_dp2", QWEN_30B_A3B, Layout(4, 2, 2), 240.0),
)
