"""The receiving side of a weight sync: it writes one worker's shard of an inference engine, by plan and by version.

Its methods take and return plain data, so that they can be called over any channel. Nothing here knows of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rlcore._torch_private import copy_all
from rlcore.engines.weight_sync.channels.shared_store import Ask, store_of
from rlcore.engines.weight_sync.endpoint import EndpointInfo, endpoint_info
from rlcore.engines.weight_sync.messages import Packing, PlanSummary, Reception, decoded
from rlcore.engines.weight_sync.planning.buckets import ALIGNMENT, Bucket
from rlcore.engines.weight_sync.planning.execution import PlanExecution
from rlcore.engines.weight_sync.planning.manifest import WeightManifest, dtype_of
from rlcore.engines.weight_sync.planning.planner import Planner
from rlcore.engines.weight_sync.planning.self_test import checksums
from rlcore.engines.weight_sync.round_state import RoundState, RoundStep
from rlcore.engines.weight_sync.target import Target
from rlcore.engines.weight_sync.transports.bucket_header import BucketHeader, check_sum, checked_header
from rlcore.engines.weight_sync.transports.events import SlotEvents
from rlcore.engines.weight_sync.transports.ipc_memory import ImportedMemory
from rlcore.engines.weight_sync.transports.process_group import SyncGroup
from rlcore.engines.weight_sync.transports.reach import why_unreached
from rlcore.engines.weight_sync.transports.received_buckets import ReceivedBuckets, changed
from rlcore.engines.weight_sync.transports.staging_buffers import check_slot_bytes, host_device, views
from rlcore.errors import StateError, SyncError, UnsupportedError


class _Coming(NamedTuple):
    """A bucket that a sender tells of, and what it is by the receiver's own plan."""

    order: Packing
    plan: PlanExecution
    bucket: Bucket

    def checked_header(self, slot: Tensor) -> BucketHeader:
        """Return the header of a slot; raises SyncError unless it is this bucket's."""
        order = self.order
        nbytes = self.bucket.nbytes
        return checked_header(slot, round_id=order.round_id, bucket=order.bucket, nbytes=nbytes, base=order.base)

    def write(self, whole: Tensor) -> int:
        """Write what the whole bucket has where it belongs; returns its bytes."""
        copies = self.plan.unpacker(self.order.sender, self.order.bucket)
        copies.run(views(whole, self.bucket), self.plan.destinations())
        return self.bucket.payload_bytes

    def note(self) -> None:
        """Note that it has come, and is what it should be."""
        self.plan.done.add((self.order.sender, self.order.bucket))


class Receiver:
    """Writes what senders give it into a ``Target``.

    Args:
        ask: asks the sender for values of its store, where the two share a channel and no folder.
        address: of this host, at which the senders' hosts reach it; "" if it is not known.
    """

    def __init__(self, target: Target, *, ask: Ask | None = None, address: str = "") -> None:
        self._target = target
        self._ask = ask
        self._address = address
        self._device = target.device
        self._info = endpoint_info(self._device)
        self._imported = ImportedMemory(self._device, self._forget_copies)
        self._events = SlotEvents(self._device)
        self._trainer = ""
        """The trainer whose staging buffers and tensors are open."""
        self._planner: Planner | None = None
        self._plans: dict[str, PlanExecution] = {}
        self._loads: dict[tuple[int, ...], PlanExecution] = {}
        """Plans of ``plan_load``, by its weights."""
        self._scratch: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        """The target's tensors, until something may put others in their place."""
        self._staged: dict[str, Tensor] = {}
        """The new weights of a staged round, until its commit."""
        self._round = RoundState()
        self._loaded: set[str] = set()
        """Names of the weights that the engine's own loader has loaded in this round."""
        self._is_reloading = False
        self._reloading = ExitStack()
        self._remembered: dict[str, int] = {}
        self._buckets = ReceivedBuckets(self._device)
        self._group: SyncGroup | None = None
        self.why_abandoned = ""
        self.version: int | None = None
        """Number of the weights of the last commit; None before it."""

    @property
    def is_whole(self) -> bool:
        """The target's weights are of one version: it may be used."""
        return self._round.is_whole

    # ---------------------------------------------------------------------------------------------- agree

    def describe(self) -> bytes:
        """Return the ``EndpointInfo``, encoded."""
        return msgspec.msgpack.encode(self._info)

    def begin(
        self, round_id: int, trainer: str, manifest: str, is_same: bool, is_staged: bool
    ) -> tuple[bytes, bool, bool, int]:
        """Begin a new round; what is left of an earlier one, or is open of another trainer, is dropped.

        Args:
            trainer: a name that no other trainer has.

        Returns:
            The endpoint info, True if this trainer's last call of ``prepare`` was for this manifest, ``is_same`` for
            all ranks to see, and the round of this trainer whose weights are here, 0 if there is none.
        """
        self._drop_round()
        is_prepared = trainer == self._trainer and self._planning().manifest.digest == manifest
        if not is_prepared:
            self._let_go_of_trainer()
        self._round.begin(round_id, trainer, is_staged=is_staged, is_prepared=is_prepared)
        return self.describe(), is_prepared, is_same, self._round.base

    def prepare(
        self,
        trainer: str,
        manifest: bytes,
        senders: list[bytes],
        number: int,
        samples: list[bytes] | None = None,
    ) -> bytes:
        """Plan for this trainer, as receiver ``number`` of all; returns the ``PlanSummary``. Writes nothing.

        Args:
            samples: memory of each sender, to try whether it can be opened here; None: none has shown any.

        Raises:
            SyncError: the trainer's model is not this engine's.
        """
        self._round.prepare()
        described = WeightManifest.from_bytes(manifest)
        ranks = [decoded(one, EndpointInfo, "endpoint info") for one in senders]
        unreached = why_unreached(ranks, self._info, samples)
        if self._planner is None or not self._planner.serves(described, ranks, unreached, number):
            self._planner = Planner(self._target, described, ranks, unreached, receiver=self._info, number=number)
        self._trainer = trainer
        return self._summary()

    def self_test(self) -> bytes:
        """Run the plan on known values, in the live weights; what it gets wrong is left to the engine's own loader."""
        self._round.moves("self_test()", writes_weights=True)
        self._planning().run_self_test()
        self._live = {}
        return self._summary()

    def _summary(self) -> bytes:
        planner = self._planning()
        plan = PlanExecution(
            planner.plan.digest,
            planner.pieces(),
            self._destinations,
            read_bytes=planner.plan.needed_bytes,
            is_scratch=False,
            quantized=planner.quantized,
        )
        self._plans, self._loads, self._loaded = {plan.digest: plan}, {}, set()
        return msgspec.msgpack.encode(
            PlanSummary(
                digest=plan.digest,
                needed_bytes=planner.needed_bytes(),
                fallback=planner.fallback,
                is_tested=planner.is_tested,
                unreached=planner.unreached,
                are_reached=planner.are_reached,
                unreadable=planner.unreadable,
            )
        )

    def plan_load(self, weights: list[int]) -> str:
        """Plan to have whole weights in scratch memory, by their numbers in the manifest; returns the plan's digest."""
        self._round.moves("plan_load()")
        planner = self._planning()
        found = [planner.manifest.weights[number] for number in weights]
        if tuple(weights) not in self._loads:
            pieces = planner.whole(weights)
            self._loads[tuple(weights)] = PlanExecution(
                f"load:{hashlib.sha256(msgspec.msgpack.encode(pieces)).hexdigest()}",
                pieces,
                lambda: self._scratch,
                read_bytes=sum(one.nbytes for one in found),
                is_scratch=True,
            )
        plan = self._loads[tuple(weights)]
        plan.want_again()
        self._plans[plan.digest] = plan
        self._scratch = {
            one.name: torch.empty(one.shape, dtype=dtype_of(one.dtype), device=self._device.torch_device)
            for one in found
        }
        return plan.digest

    def _planning(self) -> Planner:
        if self._planner is None:
            raise StateError("the receiver has no manifest; call prepare() first")
        return self._planner

    def _destinations(self) -> dict[str, Tensor]:
        if not self._live:
            self._live = self._target.tensors()
        if not self._round.is_staged:
            return self._live
        if not self._staged:
            self._require_plain("staged=True")
            self._staged = self._stage({name: self._live[name] for name in self._planning().destination_names})
        return self._staged

    def _require_plain(self, what: str) -> None:
        """Refuse what has no whole matrices at hand, of which the scales are computed."""
        if self._planner is not None and self._planner.quantized:
            raise UnsupportedError(
                f"{what} into an engine with weights in float8",
                "they are quantised where the trainer's memory can be read: take the route local or direct",
            )

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        needed = sum(_empty_as(tensor, "meta").untyped_storage().nbytes() for tensor in tensors.values())
        free = self._device.memory.info().free_bytes
        if needed > free:
            raise UnsupportedError(
                f"staged=True on {self._device.name}", f"a second copy takes {needed} bytes, and {free} are free"
            )
        # Elements that no weight is written to stay as they are.
        return {name: _empty_as(tensor, tensor.device).copy_(tensor) for name, tensor in tensors.items()}

    # ------------------------------------------------------------------------------------------ local, direct

    def open_offers(self, offers: list[bytes], timeout_s: float = 30.0) -> int:
        """Open the tensors of all senders; returns how many handles had to be opened.

        Args:
            timeout_s: for each sender to answer.

        Raises:
            DeviceError, StateError: a handle cannot be opened; says why.
        """
        return self._imported.open_offers(offers, self._are_reached(len(offers)), timeout_s)

    def _forget_copies(self) -> None:
        for plan in [*self._plans.values(), *self._loads.values()]:
            plan.let_go()

    def _are_reached(self, num_senders: int) -> list[bool]:
        """Return for each sender True if its memory can be opened here. The plan reads no other sender's memory."""
        return [True] * num_senders if self._planner is None else self._planner.are_reached

    def pull(self, round_id: int, digest: str, is_last: bool) -> list[int]:
        """Copy a whole plan from the senders' tensors. The device is done when this returns.

        Returns:
            The plan's bytes, and, if nothing else comes in this round, what ``ready`` returns.
        """
        with self._imported.using():
            sources = self._imported.sources()
            plan = self._plan(round_id, digest)
            self._begin_writing(plan)
            plan.whole().run(sources, plan.destinations())
            if self._planning().quantized:
                plan.quantizing().run(sources, self._target.quantized())
            self._device.synchronize()
        plan.is_pulled = True
        return [plan.read_bytes, self.ready(round_id)] if is_last else [plan.read_bytes]

    def _plan(self, round_id: int, digest: str) -> PlanExecution:
        self._round.check_id(round_id)
        if digest not in self._plans:
            raise SyncError(f"plan {digest} is not this receiver's, which has {', '.join(self._plans) or 'none'}")
        return self._plans[digest]

    def _begin_writing(self, plan: PlanExecution) -> None:
        """Note that a plan's destinations are about to be written."""
        self._round.moves("data", writes_weights=not (self._round.is_staged or plan.is_scratch))

    # ------------------------------------------------------------------------------------- packed, collective

    def pieces(self, digest: str | None) -> list[bytes]:
        """Return what a plan wants from each sender; nothing for None."""
        return [] if digest is None else [msgspec.msgpack.encode(own) for own in self._plans[digest].pieces]

    def open_staging_buffers(self, handles: list[bytes], timeout_s: float = 30.0) -> int:
        """Open the staging buffers of all senders, as ``open_offers`` does; returns how many handles were opened."""
        self._require_plain("the route packed")
        return self._imported.open_staging_buffers(handles, self._are_reached(len(handles)), timeout_s)

    def unpack(self, packings: bytes) -> int:
        """Unpack slots, as a list of ``Packing`` says; returns the bytes that they tell.

        The device is done when this returns, unless it waits by events.
        """
        orders = decoded(packings, list[Packing], "list of Packing")
        moved = 0
        with self._imported.using():
            for one in self._coming(orders):
                order = one.order
                if order.waits_by_event:
                    self._events.wait(order.slot, order.holder)
                moved += self._take(one, self._imported.received(order.holder, order.slot, one.bucket.nbytes))
            for slot in {order.slot for order in orders if order.waits_by_event}:
                self._events.record(slot)
            if not all(order.waits_by_event for order in orders):
                self._device.synchronize()
        return moved

    def open_events(self, senders: list[list[Any]]) -> list[bytes]:
        """Open the senders' events, and return this receiver's; none where devices cannot wait for each other.

        A process does not open its own events.
        """
        is_own = any(process == self._info.process for process, _ in senders)
        if (
            is_own
            or not all(self._are_reached(len(senders)))
            or not self._events.import_([handles for _, handles in senders])
        ):
            return []
        return self._events.export()

    def join(self, rendezvous: str, rank: int, world_size: int, timeout_s: float, is_on_host: bool) -> None:
        """Form the process group of the route "collective"; all senders and receivers together.

        Args:
            is_on_host: it is a group of hosts, whatever the devices are.
        """
        self._require_plain("a sync by buckets")
        self.leave()
        meet = store_of(rendezvous, self._ask)
        device = host_device() if is_on_host else self._device
        self._group = SyncGroup(device, meet, rank, world_size, timeout_s, address=self._address)

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        group, self._group = self._group, None
        self._buckets.drop()
        if group is not None:
            group.leave()

    def receive(self, receptions: bytes) -> list[int]:
        """Receive, pass on and unpack bucket after bucket; returns the bytes that each tells.

        The headers of those that are told whole are read at the end, so that the host does not wait for each of them.
        """
        if self._group is None:
            raise StateError("receive() needs a group; call join() first")
        orders = decoded(receptions, list[Reception], "list of Reception")
        with self._group:  # the senders wait for this member, whatever it refuses
            coming = self._coming([order.packing for order in orders])
        moved: list[int] = []
        unread: list[tuple[_Coming, Tensor]] = []
        slots = self._buckets.received(self._group, orders, [one.bucket for one in coming])
        with contextlib.closing(slots), self._group:
            for slot, one in zip(slots, coming, strict=True):
                if one.order.base or one.order.is_checked:
                    moved.append(self._take(one, slot))
                else:
                    unread.append((one, slot[:ALIGNMENT].clone()))
                    self._begin_writing(one.plan)
                    moved.append(one.write(slot))
            if unread:
                headers = torch.stack([header for _, header in unread]).cpu()
                for (one, _), header in zip(unread, headers, strict=True):
                    one.checked_header(header)
                    one.note()
            self._device.synchronize()
        return moved

    def _coming(self, orders: Sequence[Packing]) -> list[_Coming]:
        """Return the buckets that these orders are for, in the plans of this round.

        Raises:
            SyncError: a plan has no such bucket, or it has come before, or is there twice; or they are of two cuts.
        """
        found: list[_Coming] = []
        places: set[tuple[str, int, int]] = set()
        for order in orders:
            check_slot_bytes(order.slot_bytes)
            plan = self._plan(order.round_id, order.digest)
            bucket = plan.bucket(order.slot_bytes, order.sender, order.bucket)
            place = order.digest, order.sender, order.bucket
            if place in places or place[1:] in plan.done:
                raise SyncError(f"bucket {order.bucket} of sender {order.sender} came twice")
            if order.slot_bytes != orders[0].slot_bytes:
                raise SyncError(
                    f"buckets came together that were cut for slots of {orders[0].slot_bytes} bytes and of "
                    f"{order.slot_bytes}"
                )
            places.add(place)
            found.append(_Coming(order, plan, bucket))
        return found

    def _take(self, one: _Coming, slot: Tensor) -> int:
        """Check a bucket and write it where it belongs; returns the bytes that it tells."""
        order, whole = one.order, slot
        self._begin_writing(one.plan)
        self._round.check_base(order.base)
        header = one.checked_header(slot)
        if order.base:
            copies = one.plan.repacker(order.sender, order.bucket)
            here = self._buckets.repacked(copies, one.plan.destinations(), one.bucket, order.slot_bytes)
            whole = changed(here, one.bucket, slot, header)
        if order.base or order.is_checked:
            check_sum(whole, header)
        payload_bytes = one.write(whole)
        one.note()
        return header.message_bytes - ALIGNMENT if order.base else payload_bytes

    # --------------------------------------------------------------------------------------- load and verify

    def load(self, round_id: int, weights: list[int]) -> None:
        """Give the weights that a plan of ``plan_load`` brought to the engine's own loader."""
        self._round.check_id(round_id)
        plan = self._loads.get(tuple(weights))
        if plan is None or plan.digest not in self._plans or plan.missing():
            raise SyncError(f"load() of {len(weights)} weights came before they were planned and had all come")
        self._round.moves("load()", writes_weights=True)
        if not self._is_reloading:
            self._reloading.enter_context(self._target.reloading())
            self._is_reloading = True
        names = [self._planning().manifest.weights[number].name for number in weights]
        self._target.reload((name, self._scratch[name]) for name in names)
        self._device.synchronize()
        self._loaded.update(names)
        plan.let_go()  # else every group's copy would stay, until all are a second model
        del self._plans[plan.digest]  # it has nowhere to write any more, and is counted by what was loaded
        self._scratch, self._live = {}, {}

    def remember(self, round_id: int) -> None:
        """Keep the sum of each tensor, to compare it with a later one."""
        self._round.check_id(round_id)
        self._finish_writing("remember()")
        self._remembered = self.sums()

    def compare(self, round_id: int) -> list[str]:
        """Return the names of tensors whose sum is not the one that ``remember`` kept."""
        self._round.check_id(round_id)
        self._finish_writing("compare()")
        now, self._remembered, before = self.sums(), {}, self._remembered
        return sorted(name for name, total in now.items() if before[name] != total)

    def sums(self) -> dict[str, int]:
        """Return a number of each of the target's tensors that changes with any of its bits; in a round or outside."""
        tensors = self._target.tensors()
        return dict(zip(tensors, checksums(tensors.values()), strict=True))

    def _finish_writing(self, what: str) -> None:
        self._round.moves(what, writes_weights=not self._round.is_staged)
        self._planning().plan.fill(self._destinations())
        self._end_reload()
        self._device.synchronize()

    def _end_reload(self) -> None:
        self._is_reloading, self._live = False, {}
        self._reloading.close()

    # ------------------------------------------------------------------------------------------ vote, commit

    def ready(self, round_id: int) -> int:
        """Return how many buckets and loads have not come: 0 is this receiver's vote for the new weights.

        Raises:
            SyncError: it comes before the plan was tested, or outside a round.
        """
        self._round.check_id(round_id)
        self._round.check("ready()", RoundStep.PREPARED, RoundStep.COMPLETE)
        if self._round.step is RoundStep.COMPLETE:
            return 0
        if not self._planning().is_tested:
            raise SyncError("ready() came out of order: this receiver's plan has not been tested")
        num_missing = sum(plan.missing() for plan in self._plans.values())
        num_missing += len(set(self._planning().fallback) - self._loaded)
        if not num_missing:
            self._finish_writing("ready()")
            self._round.complete()
        return num_missing

    def commit(self, round_id: int, version: int, has_moved: bool) -> None:
        """Serve the new weights from now on.

        Args:
            has_moved: False: they are the ones that are here, and nothing was moved.

        Raises:
            SyncError: they are not here.
        """
        self._round.check_id(round_id)
        self._round.check_commit(has_moved=has_moved)
        if self._staged:
            self._round.spoil()
            live = self._target.tensors()
            copy_all([live[name] for name in self._staged], list(self._staged.values()))
            self._device.synchronize()
        self._target.committed(version)
        self.version = version
        self._round.commit(has_moved=has_moved)
        self._drop_round()

    def abandon(self, rendezvous: str = "", why: str = "") -> None:
        """Release what a round held that has failed, with the group ``rendezvous``. What was written stays."""
        self.why_abandoned = why
        self._drop_round()
        self._let_go_of_trainer()

    def _let_go_of_trainer(self) -> None:
        self._trainer = ""
        self.leave()
        self._imported.close()
        self._events.drop()

    def lose_weights(self) -> None:
        """Note that the target's memory was released without a copy: the next round brings all weights."""
        self._round.lose()

    def reloaded(self) -> None:
        """Take the target for whole: it was loaded from elsewhere, such as from disk."""
        self._round.reloaded()
        self._drop_round()

    def _drop_round(self) -> None:
        with contextlib.suppress(Exception):  # of a round that has failed: the weights are not whole anyway
            self._end_reload()
        self._round.end()
        if self._staged:
            for plan in self._plans.values():
                plan.let_go()
        self._scratch, self._staged, self._live, self._remembered, self._loaded = {}, {}, {}, {}, set()
        self._buckets.drop_rebuilt()
        self._plans = {digest: plan for digest, plan in self._plans.items() if not plan.is_scratch}
        for plan in self._plans.values():
            plan.forget_round()
        for plan in self._loads.values():
            plan.let_go()

    def close(self) -> None:
        """Close all memory of others."""
        self.abandon()
        self._planner, self._plans, self._loads = None, {}, {}


def _empty_as(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return memory with a tensor's own strides, gaps included: a plan's copies are for these."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
