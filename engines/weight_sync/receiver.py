"""The receiving side of a weight sync: one worker's share of an inference engine, written by plan and by version.

Its methods take and give plain data, so that they can be called over any channel. Nothing here knows of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlcore.engines.weight_sync.endpoint import Place, decoded, place_of
from rlcore.engines.weight_sync.planning.execution import Planned, Summary
from rlcore.engines.weight_sync.planning.manifest import Manifest, dtype_of
from rlcore.engines.weight_sync.planning.planner import Planner
from rlcore.engines.weight_sync.planning.self_test import checksums
from rlcore.engines.weight_sync.sender import Packing
from rlcore.engines.weight_sync.target import Target
from rlcore.engines.weight_sync.transports.events import Marks
from rlcore.engines.weight_sync.transports.ipc_memory import Reach
from rlcore.engines.weight_sync.transports.process_group import Meeting
from rlcore.engines.weight_sync.transports.slabs import Bucket, check, check_slot_bytes, views
from rlcore.errors import StateError, SyncError, UnsupportedError


class Receiver:
    """Writes what senders give it into a ``Target``."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device = target.device
        self._place = place_of(self._device)
        self._reach = Reach(self._device)
        self._marks = Marks(self._device)
        self._trainer = ""
        """Whose slabs and tensors are open."""
        self._planner: Planner | None = None
        self._plans: dict[str, Planned] = {}
        self._loads: dict[tuple[int, ...], Planned] = {}
        """Of ``plan_load``, by its weights."""
        self._scratch: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        """The target's tensors, until something may put others in their place."""
        self._staging: dict[str, Tensor] = {}
        self._is_staged = False
        self._round_id = 0
        self._is_reloading = False
        self._reloading = ExitStack()
        self._remembered: dict[str, int] = {}
        self._buffer: Tensor | None = None
        self._meeting: Meeting | None = None
        self.is_whole = True
        """What the target holds is of one version: it may be used."""
        self.why_abandoned = ""

    # ---------------------------------------------------------------------------------------------- agree

    def describe(self) -> bytes:
        """The ``Place``."""
        return msgspec.msgpack.encode(self._place)

    def begin(self, round_id: int, trainer: str, manifest: str, is_same: bool, is_staged: bool) -> list[Any]:
        """A new round; what is left of an earlier one, or is open to another trainer, is dropped.

        Args:
            trainer: a name that no other trainer has.

        Returns:
            place, whether this trainer's last call of ``prepare`` was for this manifest, and ``is_same`` for all ranks
            to see.
        """
        self._drop_round()
        is_prepared = trainer == self._trainer and self._planning().manifest.digest == manifest
        if not is_prepared:
            self._let_go_of_trainer()
        self._round_id, self._is_staged = round_id, is_staged
        return [self.describe(), is_prepared, is_same]

    def prepare(self, trainer: str, manifest: bytes, senders: list[bytes], number: int) -> bytes:
        """Plan for this trainer, as receiver ``number`` of all; the ``Summary``. Writes nothing.

        Raises:
            SyncError: the trainer's model is not this engine's.
        """
        described = Manifest.from_bytes(manifest)
        places = [decoded(place, Place, "place") for place in senders]
        if self._planner is None or not self._planner.serves(described, places, number):
            self._planner = Planner(self._target, described, places, self._place, number)
        self._trainer = trainer
        return self._planned()

    def prove(self) -> bytes:
        """Try the plan on known values, in the live weights; what it gets wrong is left to the engine's own loader."""
        self.is_whole = False
        self._planning().prove()
        self._live = {}
        return self._planned()

    def _planned(self) -> bytes:
        planner = self._planning()
        plan = Planned(
            planner.plan.digest,
            planner.pieces(),
            self._destinations,
            read_bytes=planner.plan.needed_bytes,
            is_scratch=False,
        )
        self._plans, self._loads = {plan.digest: plan}, {}
        return msgspec.msgpack.encode(
            Summary(
                digest=plan.digest,
                needed_bytes=planner.needed_bytes(),
                fallback=planner.fallback,
                is_proven=planner.is_proven,
            )
        )

    def plan_load(self, weights: list[int]) -> str:
        """Plan to have whole weights in scratch memory, by their numbers in the manifest; the plan's digest."""
        planner = self._planning()
        found = [planner.manifest.weights[number] for number in weights]
        if tuple(weights) not in self._loads:
            pieces = planner.whole(weights)
            self._loads[tuple(weights)] = Planned(
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
        if not self._is_staged:
            return self._live
        if not self._staging:
            self._staging = self._stage({name: self._live[name] for name in self._planning().destination_names})
        return self._staging

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        needed, free = sum(tensor.nbytes for tensor in tensors.values()), self._device.memory.info().free_bytes
        if needed > free:
            raise UnsupportedError(
                f"staged=True on {self._device.name}", f"a second copy takes {needed} bytes, and {free} are free"
            )
        # What no weight reaches stays as it is.
        return {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in tensors.items()}

    # ------------------------------------------------------------------------------------------ local, direct

    def open_offers(self, offers: list[bytes], timeout_s: float = 30.0) -> int:
        """Reach the tensors of all senders; the handles that had to be opened.

        Args:
            timeout_s: for each sender to answer.

        Raises:
            DeviceError, StateError: a handle cannot be opened; says why.
        """
        return self._reach.open_offers(offers, timeout_s)

    def pull(self, round_id: int, digest: str, is_last: bool) -> list[int]:
        """Copy a whole plan from the senders' tensors. Done on the device when this returns.

        Returns:
            its bytes, and, if nothing else is to come in this round, what ``ready`` returns.
        """
        plan = self._writing(round_id, digest)
        with self._reach.using():
            plan.whole().run(self._reach.sources(), plan.destinations())
            self._device.synchronize()
        plan.is_pulled = True
        return [plan.read_bytes, self.ready(round_id)] if is_last else [plan.read_bytes]

    def _plan(self, round_id: int, digest: str) -> Planned:
        self._check_round(round_id)
        if digest not in self._plans:
            raise SyncError(f"plan {digest} is not this receiver's, which has {', '.join(self._plans) or 'none'}")
        return self._plans[digest]

    def _writing(self, round_id: int, digest: str) -> Planned:
        """A plan whose destinations are about to be written."""
        plan = self._plan(round_id, digest)
        self.is_whole = self.is_whole and (self._is_staged or plan.is_scratch)
        return plan

    def _check_round(self, round_id: int) -> None:
        if round_id != self._round_id:
            raise SyncError(f"a message of weight sync {round_id} came within {self._round_id or 'none'}")

    # ------------------------------------------------------------------------------------- packed, collective

    def pieces(self, digest: str | None) -> list[bytes]:
        """What a plan wants from each sender; nothing for None."""
        return [] if digest is None else [msgspec.msgpack.encode(own) for own in self._plans[digest].pieces]

    def open_slabs(self, handles: list[bytes], timeout_s: float = 30.0) -> int:
        """Reach the slabs of all senders, as ``open_offers`` does; the handles that had to be opened."""
        return self._reach.open_slabs(handles, timeout_s)

    def unpack(self, packings: bytes) -> int:
        """Empty slots, as a list of ``Packing`` says; the payload's bytes. Done when this returns, unless marked."""
        orders = decoded(packings, list[Packing], "list of Packing")
        moved = 0
        with self._reach.using():
            for order in orders:
                if order.is_marked:
                    self._marks.wait(order.slot, order.sender)
                nbytes = self._bucket(order).nbytes
                moved += self._take(order, self._reach.received(order.sender, order.slot, nbytes))
            for slot in {order.slot for order in orders if order.is_marked}:
                self._marks.set(slot)
            if not all(order.is_marked for order in orders):
                self._device.synchronize()
        return moved

    def open_marks(self, senders: list[list[Any]]) -> list[bytes]:
        """Take the senders' marks, and give this receiver's; none where devices cannot wait for each other.

        A process does not open its own events.
        """
        is_own = any(process == self._place.process for process, _ in senders)
        if is_own or not self._marks.know([handles for _, handles in senders]):
            return []
        return self._marks.make()

    def join(self, meeting: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Form the group of the route "collective", through a folder; all senders and receivers together."""
        self.leave()
        self._meeting = Meeting(self._device, meeting, rank, world_size, timeout_s)

    def leave(self) -> None:
        """Leave the group."""
        meeting, self._meeting, self._buffer = self._meeting, None, None
        if meeting is not None:
            meeting.leave()

    def receive(self, packings: bytes) -> int:
        """Receive and unpack bucket after bucket; the payload's bytes."""
        if self._meeting is None:
            raise StateError("receive() needs a group; call join() first")
        moved = 0
        for order in decoded(packings, list[Packing], "list of Packing"):
            if self._buffer is None or self._buffer.numel() != order.slot_bytes:
                check_slot_bytes(order.slot_bytes)
                self._buffer = torch.empty(order.slot_bytes, dtype=torch.uint8, device=self._device.torch_device)
            bucket = self._bucket(order)
            self._meeting.receive(self._buffer[: bucket.nbytes], order.sender)
            moved += self._take(order, self._buffer)
        self._device.synchronize()
        return moved

    def _take(self, order: Packing, slot: Tensor) -> int:
        plan, bucket = self._writing(order.round_id, order.digest), self._bucket(order)
        if (order.sender, order.bucket) in plan.done:
            raise SyncError(f"bucket {order.bucket} of sender {order.sender} came twice")
        check(slot, order.round_id, order.bucket, bucket, is_checked=order.is_checked)
        plan.unpacker(order.sender, order.bucket).run(views(slot, bucket), plan.destinations())
        plan.done.add((order.sender, order.bucket))
        return bucket.payload_bytes

    def _bucket(self, order: Packing) -> Bucket:
        return self._plan(order.round_id, order.digest).buckets(order.slot_bytes)[order.sender][order.bucket]

    # --------------------------------------------------------------------------------------- load and verify

    def load(self, round_id: int, weights: list[int]) -> None:
        """Give what a plan of ``plan_load`` brought to the engine's own loader."""
        self._check_round(round_id)
        self.is_whole = False
        if not self._is_reloading:
            self._reloading.enter_context(self._target.reloading())
            self._is_reloading = True
        names = [self._planning().manifest.weights[number].name for number in weights]
        self._target.reload((name, self._scratch[name]) for name in names)
        self._device.synchronize()
        self._loads[tuple(weights)].let_go()  # else every group's copy would stay, until all are a second model
        self._scratch, self._live = {}, {}

    def remember(self, round_id: int) -> None:
        """The sum of each tensor, to compare with what is there later."""
        self._finish_writing(round_id)
        self._remembered = self._sums()

    def compare(self, round_id: int) -> list[str]:
        """The tensors that are not what ``remember`` saw."""
        self._finish_writing(round_id)
        now, self._remembered, before = self._sums(), {}, self._remembered
        return sorted(name for name, total in now.items() if before[name] != total)

    def _sums(self) -> dict[str, int]:
        tensors = self._target.tensors()
        return dict(zip(tensors, checksums(tensors.values()), strict=True))

    def _finish_writing(self, round_id: int) -> None:
        self._check_round(round_id)
        self._planning().plan.fill(self._destinations())
        self._end_reload()
        self._device.synchronize()

    def _end_reload(self) -> None:
        self._is_reloading, self._live = False, {}
        self._reloading.close()

    # ------------------------------------------------------------------------------------------ vote, commit

    def ready(self, round_id: int) -> int:
        """The buckets that have not come: 0 is this receiver's vote for the new weights."""
        self._finish_writing(round_id)
        return sum(plan.missing() for plan in self._plans.values())

    def commit(self, round_id: int, version: int) -> None:
        """The new weights are what is served."""
        self._check_round(round_id)
        if self._staging:
            self.is_whole = False
            live = self._target.tensors()
            torch._foreach_copy_([live[name] for name in self._staging], list(self._staging.values()))
            self._device.synchronize()
        self._target.committed(version)
        self.is_whole = True
        self._drop_round()

    def abandon(self, meeting: str = "", why: str = "") -> None:
        """A round has failed: what it held is given up, with the group ``meeting``. What was written stays."""
        self.why_abandoned = why
        self._drop_round()
        self._let_go_of_trainer()

    def _let_go_of_trainer(self) -> None:
        self._trainer = ""
        self.leave()
        self._reach.close()
        self._marks.drop()

    def reloaded(self) -> None:
        """The target was loaded whole from elsewhere, such as from disk."""
        self._drop_round()
        self.is_whole = True

    def _drop_round(self) -> None:
        with contextlib.suppress(Exception):  # of a round that has failed: the weights are not whole anyway
            self._end_reload()
        self._round_id, self._is_staged = 0, False
        self._scratch, self._staging, self._live, self._remembered = {}, {}, {}, {}
        for plan in self._plans.values():
            plan.forget_round()
        for plan in self._loads.values():
            plan.let_go()

    def close(self) -> None:
        """Let go of everything of others."""
        self.abandon()
        self._planner, self._plans, self._loads = None, {}, {}
