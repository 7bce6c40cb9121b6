"""Every order of a round's messages, at a real receiver: none ends in a mixture of versions that is called whole.

The search delivers each message of two rounds in each state that a receiver can reach, however often and in whatever
order: so it has all that a channel can lose, repeat and reorder, a sender that ends after any message, and one that
votes or commits too early. Some messages fail midway, with a part of the weights written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor, nn

from rlcore.engines.weight_sync import receiver as receiver_module
from rlcore.engines.weight_sync.messages import Packing
from rlcore.engines.weight_sync.named_source import NamedSourceTensors
from rlcore.engines.weight_sync.planning.execution import CopyExecution, PlanExecution
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.round_state import RoundState, RoundStep
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.target import Target, Weights, meta_copy
from rlcore.errors import RlcoreError, SyncError
from rlcore.registry import get_device

TRAINER = "trainer"
SLOT_BYTES = 1024
ELEMENTS = 128
"""Of each weight: the two lie in buckets of their own."""


class Model(nn.Module):
    """Two weights of an engine: ``plain`` as the trainer has it, ``state`` perhaps as -exp of it."""

    def __init__(self, *, is_changed: bool) -> None:
        super().__init__()
        self.is_changed = is_changed
        self.plain = nn.Parameter(torch.zeros(ELEMENTS))
        self.state = nn.Parameter(torch.zeros(ELEMENTS))

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            changed = name == "state" and self.is_changed
            getattr(self, name).copy_(-torch.exp(weight) if changed else weight)

    def versions(self) -> set[float]:
        """The versions of all elements; another number for what is of none."""
        state = self.state.detach()
        return {
            *self.plain.detach().tolist(),
            *((-state).log() if self.is_changed else state).nan_to_num(-1.0).round(decimals=3).tolist(),
        }


class ModelTarget(Target):
    def __init__(self, model: Model) -> None:
        self.device = get_device("cpu")
        self._model = model

    def meta_model(self) -> Any:
        meta = meta_copy(self._model)
        return meta, meta.load_weights

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def reload(self, weights: Weights) -> None:
        self._model.load_weights(weights)

    def committed(self, version: int) -> None:
        pass


class World:
    """A trainer, whose weights have the number of its version as values, and a receiver."""

    def __init__(self, *, is_changed: bool = False, is_staged: bool = False) -> None:
        cpu = get_device("cpu")
        self.is_staged = is_staged
        self.given = {"plain": torch.zeros(ELEMENTS), "state": torch.zeros(ELEMENTS)}
        source = NamedSourceTensors(lambda: self.given, 1)
        source.refresh()
        self.sender = Sender(source, cpu)
        self.model = Model(is_changed=is_changed)
        self.receiver = Receiver(ModelTarget(self.model))
        self.manifest_digest = self.sender.begin(False)[1]
        self.begin(99, is_staged=False)
        self.prepare()
        self.receiver.self_test()
        self.open()
        (self.digest,) = self.receiver._plans
        self.load_digest = self.receiver.plan_load([1])
        self.sender.take_plan(self.digest, SLOT_BYTES, self.receiver.pieces(self.digest)[0])

    def begin(self, version: int, *, is_staged: bool | None = None, trainer: str = TRAINER) -> None:
        staged = self.is_staged if is_staged is None else is_staged
        self.receiver.begin(version, trainer, self.manifest_digest, False, staged)

    def prepare(self) -> None:
        self.receiver.prepare(TRAINER, self.sender.manifest(), [self.sender.describe()], 0)

    def open(self) -> None:
        self.receiver.open_staging_buffers([self.sender.open_staging_buffers(SLOT_BYTES)])
        self.receiver.open_offers([self.sender.offer(False)[0]])

    def pull(self, version: int, digest: str) -> None:
        self._trained(version)
        self.receiver.pull(version, digest, False)

    def load_pull(self, version: int) -> None:
        """Bring the weight that the engine's own loader takes into scratch memory."""
        self.pull(version, self.load_digest)

    def unpack(self, version: int, bucket: int, slot_version: int, *, is_interrupted: bool = False) -> None:
        """Unpack a bucket from a slot that holds the one of ``slot_version``, stale or not."""
        order = Packing(
            round_id=slot_version, digest=self.digest, slot_bytes=SLOT_BYTES, bucket=bucket, slot=0, is_checked=True
        )
        self._trained(slot_version)
        self.sender.pack(msgspec.msgpack.encode(order))
        wanted = msgspec.structs.replace(order, round_id=version)
        with interrupted(version) if is_interrupted else nullcontext():
            self.receiver.unpack(msgspec.msgpack.encode([wanted]))

    def unpack_changes(self, version: int, bucket: int, base: int, *, is_base_another: bool = False) -> None:
        """Unpack a bucket that is told as what changed since a round.

        Args:
            is_base_another: what the sender has kept of that round has half of the new values already, so that it tells
                the other half alone.
        """
        whole = Packing(
            round_id=base,
            digest=self.digest,
            slot_bytes=SLOT_BYTES,
            bucket=bucket,
            slot=0,
            is_checked=True,
            is_kept=True,
        )
        self.sender.keep_sent([self.digest], SLOT_BYTES)
        self._trained(base)
        if is_base_another:
            for tensor in self.given.values():
                tensor[: ELEMENTS // 2] = version
        self.sender.pack(msgspec.msgpack.encode(whole))
        self._trained(version)
        order = msgspec.structs.replace(whole, round_id=version, base=base)
        self.sender.pack(msgspec.msgpack.encode(order))
        self.receiver.unpack(msgspec.msgpack.encode([order]))

    def _trained(self, version: int) -> None:
        for tensor in self.given.values():
            tensor.fill_(version)

    def reset(self) -> None:
        """Complete a round of version 0, at a receiver that has seen no other."""
        self.receiver._round._begun.clear()
        self.begin(0, is_staged=False)
        if self.receiver._round.step is RoundStep.BEGUN or len(self.receiver._plans) > 1:
            self.prepare()
        self.open()
        assert self.receiver._planning().is_tested
        self.pull(0, self.digest)
        if self.model.is_changed:
            self.load(0)
        assert self.receiver.ready(0) == 0
        self.receiver.commit(0, 0, True)

    def load(self, version: int) -> None:
        self.receiver.plan_load([1])
        self.load_pull(version)
        self.receiver.load(version, [1])

    def state(self) -> tuple[Any, ...]:
        """What later messages may depend on."""
        receiver = self.receiver
        came = [(one.is_pulled, one.is_wanted, frozenset(one.done)) for one in receiver._plans.values()]
        staged = [float(tensor.sum()) for tensor in receiver._staged.values()]
        scratch = [float(tensor[0]) for tensor in receiver._scratch.values()] if self._is_loading() else []
        held = [[float(part[0]), float(part[-1])] for part in self.model.state_dict().values()]
        rest = (tuple(receiver._loaded), str(came), str(staged), str(scratch), str(held), receiver.version or 0)
        begun = frozenset(receiver._round._begun)
        return (*(vars(receiver._round) | {"_begun": begun}).values(), *rest)

    def _is_loading(self) -> bool:
        return any(plan.is_pulled for plan in self.receiver._loads.values())


class Message(NamedTuple):
    name: str
    deliver: Callable[[World], object]


@contextmanager
def interrupted(version: int) -> Iterator[None]:
    """Copies write half of each tensor, and fail then."""

    def run(own: CopyExecution, sources: Any, destinations: Any) -> None:
        for name in own._to._keys:
            destinations[name][: ELEMENTS // 2].fill_(version)
        raise RuntimeError("the process that writes was interrupted")

    with mock.patch.object(CopyExecution, "run", run):
        yield


def pull_interrupted(world: World, version: int) -> None:
    with interrupted(version):
        world.pull(version, world.digest)


def unpack(version: int, bucket: int, slot_version: int, world: World) -> None:
    world.unpack(version, bucket, slot_version)


def unpack_of_another_cut(version: int, world: World) -> None:
    """A bucket of slots twice as large, into which the whole plan fits."""
    order = Packing(round_id=version, digest=world.digest, slot_bytes=2 * SLOT_BYTES, bucket=0, slot=0, is_checked=True)
    world.receiver.unpack(msgspec.msgpack.encode([order]))


def unpack_interrupted(version: int, world: World) -> None:
    world.unpack(version, 0, version, is_interrupted=True)


def commit_interrupted(version: int, world: World) -> None:
    """Copy one of the staged tensors, and fail then."""

    def copy_one(destinations: list[Tensor], sources: list[Tensor]) -> None:
        destinations[0].copy_(sources[0])
        raise RuntimeError("the process that copies was interrupted")

    with mock.patch.object(receiver_module, "copy_all", copy_one):
        world.receiver.commit(version, version, True)


def steps_of(version: int) -> list[Message]:
    """All messages of a round whatever the route, and those that end it midway."""
    return [
        Message(f"begin {version}", lambda world: world.begin(version)),
        Message(f"begin {version} by another trainer", lambda world: world.begin(version, trainer="another")),
        Message("prepare", lambda world: world.prepare()),
        Message("abandon", lambda world: world.receiver.abandon()),
        Message(f"ready {version}", lambda world: world.receiver.ready(version)),
        Message(f"commit {version}", lambda world: world.receiver.commit(version, version, True)),
        Message(
            f"commit {version}, not changed",
            lambda world: world.receiver.commit(version, (world.receiver.version or 0), False),
        ),
    ]


def in_place(version: int) -> list[Message]:
    return [
        *steps_of(version),
        Message(f"pull {version}", lambda world: world.pull(version, world.digest)),
        Message(f"pull {version}, interrupted", lambda world: pull_interrupted(world, version)),
    ]


def packed(version: int) -> list[Message]:
    return [
        *steps_of(version),
        *(
            Message(f"unpack {version}/{bucket} from {slot}", partial(unpack, version, bucket, slot))
            for bucket in (0, 1)
            for slot in (1, 2)
        ),
        Message(f"unpack {version}/-1", partial(unpack, version, -1, version)),
        Message(f"unpack {version}/0 of larger slots", partial(unpack_of_another_cut, version)),
        Message(f"unpack {version}/0, interrupted", partial(unpack_interrupted, version)),
    ]


def packed_alone(version: int) -> list[Message]:
    """The messages of a round that nobody gives up, and a stale one."""
    return [
        Message(f"begin {version}", lambda world: world.begin(version)),
        *(Message(f"unpack {version}/{bucket}", partial(unpack, version, bucket, version)) for bucket in (0, 1)),
        Message(f"unpack {version}/1, stale", partial(unpack, version, 1, 3 - version)),
        Message(f"ready {version}", lambda world: world.receiver.ready(version)),
        Message(f"commit {version}", lambda world: world.receiver.commit(version, version, True)),
    ]


def unpack_changes(version: int, bucket: int, is_base_another: bool, world: World) -> None:
    world.unpack_changes(version, bucket, 3 - version, is_base_another=is_base_another)


def told(version: int) -> list[Message]:
    """Rounds 1 and 2, whose buckets come whole or as changes since the other."""
    return [
        *(message for message in steps_of(version) if "another" not in message.name),
        *(Message(f"unpack {version}/{bucket}", partial(unpack, version, bucket, version)) for bucket in (0, 1)),
        *(
            Message(f"unpack {version}/{bucket} as changes", partial(unpack_changes, version, bucket, False))
            for bucket in (0, 1)
        ),
        Message(f"unpack {version}/0 as changes of another base", partial(unpack_changes, version, 0, True)),
    ]


def staged(version: int) -> list[Message]:
    return [*packed(version), Message(f"commit {version}, interrupted", partial(commit_interrupted, version))]


def loaded(version: int) -> list[Message]:
    return [
        *in_place(version),
        Message("plan_load", lambda world: world.receiver.plan_load([1])),
        Message(f"pull the load {version}", lambda world: world.load_pull(version)),
        Message(f"load {version}", lambda world: world.receiver.load(version, [1])),
    ]


KINDS = {
    "in place": (World, in_place),
    "packed alone": (World, packed_alone),
    "packed": (World, packed),
    "told": (World, told),
    "staged": (lambda: World(is_staged=True), staged),
    "loaded": (lambda: World(is_changed=True), loaded),
}


class Finding(NamedTuple):
    """What a search saw: how many states, and the first orders that ended in a mixture."""

    num_states: int
    committed: set[int]
    mixtures: list[str]


def search(kind: str) -> Finding:
    """Deliver every message in every state."""
    make, messages_of = KINDS[kind]
    world = make()
    messages = list({message.name: message for version in (1, 2) for message in messages_of(version)}.values())
    world.reset()
    paths: dict[tuple[Any, ...], tuple[Message, ...]] = {world.state(): ()}
    waiting = deque(paths)
    mixtures, committed = [], set()
    while waiting:
        path = paths[waiting.popleft()]
        for message in messages:
            world.reset()
            for one in (*path, message):
                with suppress(RlcoreError, RuntimeError):
                    one.deliver(world)
            committed.add(world.receiver.version or 0)
            if world.receiver.is_whole and world.model.versions() != {float(world.receiver.version or 0)}:
                mixtures.append(" > ".join(step.name for step in (*path, message)))
            elif world.state() not in paths:
                paths[world.state()] = (*path, message)
                waiting.append(world.state())
        if len(mixtures) > 3:
            break
    return Finding(len(paths), committed, mixtures)


SLOW = {"packed", "staged", "loaded", "told"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_no_order_of_messages_ends_in_a_mixture_that_is_called_whole(kind: str) -> None:
    found = search(kind)
    assert found.mixtures == []
    assert found.committed == {0, 1, 2}, "good orders end in a commit"
    assert found.num_states > 50


@pytest.mark.parametrize(
    ("owner", "method", "answer"),
    [
        (RoundState, "check_commit", None),  # a commit is believed whenever it comes
        (RoundState, "check", None),  # and so is data after the vote
        (RoundState, "spoil", None),  # weights stay whole while they are written
        (PlanExecution, "missing", 0),  # a vote without counting
    ],
)
def test_the_search_finds_a_receiver_that_believes(owner: type, method: str, answer: Any) -> None:
    with mock.patch.object(owner, method, lambda *_, **__: answer):
        assert search("packed alone").mixtures


@pytest.mark.slow
def test_the_search_finds_a_receiver_that_applies_changes_to_whatever_it_has() -> None:
    with mock.patch.object(receiver_module, "check_sum"):
        found = search("told").mixtures
    assert found and all("as changes of another base" in order for order in found)


def test_versions_are_read_from_all_elements() -> None:
    model = Model(is_changed=True)
    model.load_weights([("plain", torch.full((ELEMENTS,), 2.0)), ("state", torch.full((ELEMENTS,), 2.0))])
    assert model.versions() == {2.0}
    model.state.data[7] = 0.0
    assert model.versions() != {2.0}


def test_a_round_that_has_begun_once_does_not_begin_again() -> None:
    state = RoundState()
    state.begin(1, TRAINER, is_staged=False, is_prepared=True)
    for _ in ("within it", "after its end"):
        step = state.step
        with pytest.raises(SyncError, match=r"begin\(\) of weight sync 1 came again: it has begun before"):
            state.begin(1, TRAINER, is_staged=True, is_prepared=False)
        assert (state.step, state.is_staged) == (step, False)
        state.end()
    state.begin(2, TRAINER, is_staged=False, is_prepared=False)
    assert (state.step, state.round_id) == (RoundStep.BEGUN, 2)


def committed_state() -> RoundState:
    """Return the state after a whole round of the trainer."""
    state = RoundState()
    state.begin(1, TRAINER, is_staged=False, is_prepared=True)
    state.moves("data", writes_weights=True)
    state.complete()
    state.commit(has_moved=True)
    return state


def test_weights_are_a_trainers_own_until_they_come_from_elsewhere_or_a_plan_is_made() -> None:
    state = committed_state()
    state.begin(2, TRAINER, is_staged=False, is_prepared=True)
    state.check_commit(has_moved=False)
    state.prepare()
    with pytest.raises(SyncError, match=r"does not have them: its round is under way, and it holds what this trainer"):
        state.check_commit(has_moved=False)
    state.reloaded()
    state.begin(3, TRAINER, is_staged=False, is_prepared=True)
    with pytest.raises(SyncError, match=r"does not have them: its round is under way, and it holds weights from else"):
        state.check_commit(has_moved=False)


def test_nothing_is_written_outside_a_round_or_when_all_has_come() -> None:
    state = committed_state()
    with pytest.raises(SyncError, match=r"^data came out of order: this receiver's round has not begun"):
        state.moves("data", writes_weights=True)
    state.begin(2, TRAINER, is_staged=False, is_prepared=True)
    state.complete()
    for late in (lambda: state.moves("data", writes_weights=True), state.complete):
        with pytest.raises(SyncError, match=r"came out of order: this receiver's round is complete, and waits for its"):
            late()
    assert state.is_whole
