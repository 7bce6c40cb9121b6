"""Faults in a weight sync, with real processes: nothing hangs, nothing half new is used, nothing is leaked.

Damaged messages in one process are tested by default; tests that end processes are marked slow.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from small_engine import Checkpoint, Sizes, SmallModel, SmallTarget, checkpoint, expected, registered, write

import rlcore
from rlcore.engines.weight_sync import receiver as receiver_module
from rlcore.engines.weight_sync.channels.peers import LocalPeers, WorkerPeers
from rlcore.engines.weight_sync.channels.shared_store import SharedStore
from rlcore.engines.weight_sync.messages import Packing, Reception, Sending
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.errors import (
    CollectiveError,
    DeviceError,
    InvalidInputError,
    RlcoreError,
    StateError,
    SyncError,
    UnsupportedError,
    WorkerError,
)
from rlcore.registry import get_device
from tests.engines.ask import ask

SIZES = Sizes(layers=1)
STAGING_BYTES = 4096
STOPPED_S = 8.0
"""The deadline of a sync in which a process is stopped."""

# --------------------------------------------------------------------------- damaged messages, in one process


class Pair(NamedTuple):
    """A sender and a receiver of this process, in a round whose first bucket is in the staging buffer."""

    sender: Sender
    receiver: Receiver
    packing: Packing
    model: SmallModel


@pytest.fixture
def pair() -> Iterator[Pair]:
    cpu = get_device("cpu")
    weights = checkpoint(SIZES, seed=1)
    module = Checkpoint(weights)
    for name, parameter in module.named_parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(weights[name].clone()))
    model = SmallModel(SIZES, 0, 1, torch.float32)
    worker = type("Worker", (), {"device": cpu, "model": model, "versions": []})()
    worker.new_model = lambda: SmallModel(SIZES, 0, 1, torch.float32)
    sender, receiver = Sender(ModuleSourceTensors(module, 1), cpu), Receiver(SmallTarget(worker))
    manifest = sender.manifest()
    digest = sender.begin(False)[1]
    receiver.begin(5, "trainer", digest, False, False)
    receiver.prepare("trainer", manifest, [sender.describe()], 0)
    receiver.open_staging_buffers([sender.open_staging_buffers(STAGING_BYTES)])
    plan = next(iter(receiver._plans))
    sender.take_plan(plan, STAGING_BYTES, receiver.pieces(plan)[0])
    packing = Packing(round_id=5, digest=plan, slot_bytes=STAGING_BYTES, bucket=0, slot=0, is_checked=True)
    sender.pack(msgspec.msgpack.encode(packing))
    yield Pair(sender, receiver, packing, model)
    receiver.close()
    sender.close()


def unpack(pair: Pair, **changed: Any) -> int:
    order = msgspec.structs.replace(pair.packing, **changed)
    return pair.receiver.unpack(msgspec.msgpack.encode([order]))


def nothing_is_copied(pair: Pair) -> bool:
    return all(bool(tensor.isnan().all()) for tensor in pair.model.parameters())


@pytest.mark.parametrize("place", [0, 9, 17, 600, 1500, -520])
def test_a_flipped_byte_is_refused_before_it_is_copied(pair: Pair, place: int) -> None:
    slot = pair.receiver._imported.slot(0, 0)
    last = int(slot.view(torch.int64)[2])
    at = place if place >= 0 else last + place
    slot[at] ^= 1
    with pytest.raises(SyncError, match=r"another sum|was expected in a staging buffer"):
        unpack(pair)
    assert nothing_is_copied(pair)
    slot[at] ^= 1
    assert unpack(pair) > 0
    assert not nothing_is_copied(pair)


def test_a_bucket_that_is_cut_off_is_refused(pair: Pair) -> None:
    """Its end was not written, or its header says less than the plan."""
    slot = pair.receiver._imported.slot(0, 0)
    words = slot.view(torch.int64)
    nbytes = int(words[2])
    whole = slot.clone()
    for cut in (slot[nbytes - 512 : nbytes], slot[512:nbytes], slot[:nbytes]):
        cut.zero_()
        with pytest.raises(SyncError, match=r"another sum|was expected in a staging buffer"):
            unpack(pair)
        slot.copy_(whole)
    words[2] = nbytes - 512
    with pytest.raises(SyncError, match=rf"with {nbytes} bytes, and it holds bucket 0 of round 5, with {nbytes - 512}"):
        unpack(pair)
    assert nothing_is_copied(pair)
    slot.copy_(whole)
    assert unpack(pair) > 0


class OneSlot(nullcontext[None]):
    """A process group through which one slot comes again and again."""

    def __init__(self, slot: torch.Tensor) -> None:
        super().__init__()
        self._slot = slot
        self.known: list[int | None] = []
        """The bytes of each message that the receiver knew before it came."""

    def receive_message(self, slot: torch.Tensor, rank: int, nbytes: int | None) -> int:
        self.known.append(nbytes)
        slot.copy_(self._slot)
        return int(self._slot.view(torch.int64)[2])

    def send_message(self, message: torch.Tensor, ranks: Sequence[int], *, is_size_known: bool) -> None:
        assert not ranks

    def leave(self) -> None:
        pass


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_header_that_is_read_after_the_bucket_was_unpacked_still_fails_the_round(
    pair: Pair, is_checked: bool
) -> None:
    slot = pair.receiver._imported.slot(0, 0)
    pair.receiver._group = group = OneSlot(slot)  # type: ignore[assignment]
    packing = msgspec.structs.replace(pair.packing, is_checked=is_checked)
    orders = msgspec.msgpack.encode([Reception(packing=packing, source=0)])
    slot.view(torch.int64)[0] = 4
    with pytest.raises(SyncError, match=r"bucket 0 of round 5 was expected .* holds bucket 0 of round 4"):
        pair.receiver.receive(orders)
    assert nothing_is_copied(pair) == is_checked, "one with a sum is refused before it is copied"
    assert not pair.receiver.is_whole
    assert group.known == [int(slot.view(torch.int64)[2])], "no header has to come first"
    assert not any(plan.done for plan in pair.receiver._plans.values()), "it has not come"


def test_orders_that_name_a_bucket_twice_or_two_cuts_are_refused_before_anything_comes(pair: Pair) -> None:
    pair.receiver._group = group = OneSlot(pair.receiver._imported.slot(0, 0))  # type: ignore[assignment]
    first = msgspec.structs.replace(pair.packing, is_checked=False)
    another_cut = msgspec.structs.replace(first, bucket=1, slot_bytes=2 * STAGING_BYTES)
    for second, why in (
        (first, "bucket 0 of sender 0 came twice"),
        (another_cut, "buckets came together that were cut for slots of 4096 bytes and of 8192"),
    ):
        receptions = [Reception(packing=one, source=0) for one in (first, second)]
        with pytest.raises(SyncError, match=why):
            pair.receiver.receive(msgspec.msgpack.encode(receptions))
        with pytest.raises(SyncError, match=why):
            pair.receiver.unpack(msgspec.msgpack.encode([first, second]))
    assert pair.receiver.is_whole and not group.known


def test_a_bucket_that_is_stale_twice_or_missing_is_refused(pair: Pair) -> None:
    with pytest.raises(SyncError, match=r"a message of weight sync 4 came within 5"):
        unpack(pair, round_id=4)
    with pytest.raises(SyncError, match=r"bucket 1 of round 5 was expected in a staging.* holds bucket 0 of round 5"):
        unpack(pair, bucket=1)
    with pytest.raises(SyncError, match="plan 0123 is not this receiver's"):
        unpack(pair, digest="0123")
    assert unpack(pair) > 0
    with pytest.raises(SyncError, match="bucket 0 of sender 0 came twice"):
        unpack(pair)
    with pytest.raises(SyncError, match=r"ready\(\) came out of order: this receiver's plan has not been tested"):
        pair.receiver.ready(5)
    with pytest.raises(SyncError, match=r"commit\(\) came out of order: this receiver's round is under way"):
        pair.receiver.commit(5, 1, True)
    with pytest.raises(SyncError, match="a message of weight sync 6 came within 5"):
        pair.receiver.commit(6, 1, True)
    assert not pair.receiver.is_whole


def test_messages_that_are_none_are_refused(pair: Pair) -> None:
    with pytest.raises(SyncError, match=r"these 3 bytes are no list of Packing"):
        pair.receiver.unpack(b"abc")
    with pytest.raises(SyncError, match="these 1 bytes are no Manifest"):
        pair.receiver.prepare("trainer", b"\xc1", [], 0)
    with pytest.raises(SyncError, match="no packing"):
        pair.sender.pack(b"abc")
    with pytest.raises(InvalidInputError, match=r"a staging buffer must be a multiple of 512 bytes .*, got 513"):
        pair.sender.open_staging_buffers(513)
    with pytest.raises(StateError, match="has no plan 0123"):
        pair.sender.pack(msgspec.msgpack.encode(msgspec.structs.replace(pair.packing, digest="0123")))


def test_a_handle_of_another_device_or_epoch_is_refused(pair: Pair) -> None:
    handle = msgspec.msgpack.decode(pair.sender.open_staging_buffers(STAGING_BYTES))
    with pytest.raises(StateError, match="is not what this handle describes"):
        pair.receiver.open_staging_buffers([msgspec.msgpack.encode(handle | {"device_uuid": "another"})])
    offer = msgspec.msgpack.encode({"epoch": "gone", "handles": None})
    with pytest.raises(SyncError, match="sender gone is not, or no longer, in this process"):
        pair.receiver.open_offers([offer])


def test_a_round_that_lacks_a_bucket_is_not_committed(pair: Pair) -> None:
    """One that a receiver was never told of, which no header can show."""
    session = SyncSession(LocalPeers("the trainer", [pair.sender]), LocalPeers("the engine", [pair.receiver]))
    elsewhere = RoundOptions(version=1, route="packed", staging_bytes=STAGING_BYTES)
    real, lost = pair.receiver.unpack, []

    def loses(packings: bytes) -> int:
        orders = msgspec.msgpack.decode(packings, type=list[Packing])
        if any(order.bucket == 2 for order in orders) and not lost:
            lost.append(orders)
            return 0
        return real(packings)

    pair.receiver.unpack = loses
    with pytest.raises(SyncError, match=r"1 buckets did not reach the receiver on cpu:0"):
        session.run(elsewhere, nullcontext)
    assert not pair.receiver.is_whole
    assert session.run(elsewhere, nullcontext).version == 1, "the next is complete"
    assert pair.receiver.is_whole


def test_a_route_that_cannot_be_opened_leaves_no_group_behind(pair: Pair) -> None:
    session = SyncSession(LocalPeers("the trainer", [pair.sender]), LocalPeers("the engine", [pair.receiver]))

    def cannot(handles: list[bytes], timeout_s: float) -> int:
        assert pair.sender._groups, "the group came first"
        raise DeviceError("it is a test")

    pair.receiver.open_staging_buffers = cannot
    with pytest.raises(UnsupportedError, match="relayed: it is a test"):
        session.run(RoundOptions(version=1, route="relayed"), nullcontext)
    assert not pair.sender._groups and not session.stores


@pytest.fixture
def rendezvous(pair: Pair) -> Iterator[str]:
    """The name of a process group of both, whose own wait is longer than any test's."""
    store = SharedStore()
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(end.join, store.path, rank, 2, 600.0, False) for rank, end in enumerate(pair[:2])]
        for join in joins:
            join.result()
    yield store.path
    store.remove()


def in_the_group(pair: Pair, rendezvous: str) -> list[Future[Any]]:
    """Send and receive all buckets by the group; returns the two calls, which have ended."""
    (count,) = [len(plan.buckets(STAGING_BYTES)[0]) for plan in pair.receiver._plans.values()]
    packings = [
        msgspec.structs.replace(pair.packing, bucket=one, slot=one % 2, is_checked=not one) for one in range(count)
    ]
    sending = Sending(rendezvous=rendezvous, packings=packings, receivers=[[1]] * count)
    receptions = [Reception(packing=one, source=0) for one in packings]
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(pair.sender.send, msgspec.msgpack.encode(sending)),
            pool.submit(pair.receiver.receive, msgspec.msgpack.encode(receptions)),
        ]
        wait(calls)
    return calls


def test_orders_that_are_refused_end_the_senders_wait_in_the_group(
    pair: Pair, rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Receiver, "_coming", mock.Mock(side_effect=MemoryError("no memory")))
    began = time.monotonic()
    sent, received = (call.exception() for call in in_the_group(pair, rendezvous))
    assert time.monotonic() - began < 60, "the group's own wait is 600 s"
    assert isinstance(received, MemoryError)
    assert isinstance(sent, CollectiveError) and "gave up: MemoryError" in str(sent)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_an_error_of_one_side_ends_the_others_wait_in_the_group(
    pair: Pair, rendezvous: str, end: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method = (Sender, "_fill") if end == "sender" else (receiver_module._Coming, "write")
    real, numbers = getattr(owner, method), itertools.count()

    def fails_at_the_third(*arguments: Any) -> Any:
        if next(numbers) == 2:
            raise kind("no memory")
        return real(*arguments)

    monkeypatch.setattr(owner, method, fails_at_the_third)
    began = time.monotonic()
    errors = [call.exception() for call in in_the_group(pair, rendezvous)]
    assert time.monotonic() - began < 60, "the group's own wait is 600 s"
    own, others = errors if end == "sender" else errors[::-1]
    assert type(own) is kind
    assert isinstance(others, CollectiveError) and f"gave up: {kind.__name__}('no memory')" in str(others)
    assert not pair.receiver.is_whole


def test_weights_that_change_while_they_are_sent_are_not_committed(pair: Pair) -> None:
    session = SyncSession(LocalPeers("the trainer", [pair.sender]), LocalPeers("the engine", [pair.receiver]))
    real = pair.receiver.ready

    def late(round_id: int) -> int:
        pair.sender._source._module.add(1.0)
        return real(round_id)

    pair.receiver.ready = late
    with pytest.raises(SyncError, match="the trainer's weights were changed while they were sent"):
        session.run(RoundOptions(version=1), nullcontext)
    del pair.receiver.ready
    assert not pair.receiver.is_whole
    assert session.run(RoundOptions(version=1), nullcontext).version == 1
    assert pair.receiver.is_whole


# --------------------------------------------------------------------------------------- ends of processes


class Engines(NamedTuple):
    train: Any
    infer: rlcore.InferenceEngine


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, short_runtime_folder: Path) -> Iterator[Callable[[int], Engines]]:
    """``build(count)``: so many shards, and as many receivers on devices of their own. Each is built once."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        stack.enter_context(registered())
        path = write(checkpoint(SIZES), folder / "model.safetensors")

        @functools.cache
        def built(count: int) -> Engines:
            first = 0 if count == 2 else 4
            devices = [f"cpu:{first + index}" for index in range(2 * count)]
            train = stack.enter_context(rlcore.TrainEngine(Checkpoint(checkpoint(SIZES, seed=1))))
            infer = stack.enter_context(rlcore.InferenceEngine(path, executor="small"))
            train.build(data_parallel_size=count, devices=devices[:count], launcher="process")
            options = {"sizes": tuple(SIZES), "shards": count, "launcher": "process"}
            infer.build(tensor_parallel_size=count, devices=devices[count:], **options)
            return Engines(train, infer)

        yield built


def alive(engines: Engines) -> Engines:
    """All workers live, whatever became of the test before."""
    for engine in engines:
        try:
            engine.memory_report()
        except (StateError, WorkerError):
            engine.restart()
    return engines


@pytest.fixture
def engines(build: Callable[[int], Engines]) -> Engines:
    return alive(build(2))


def before(engines: Engines, method: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """``act`` once, just before the first call of ``method``."""
    real = WorkerPeers.call
    acts = iter([act])

    def call(self: WorkerPeers, called: str, calls: Sequence[Any] | None, timeout_s: float) -> list[Any]:
        if called == method:
            next(acts, lambda: None)()
        return real(self, called, calls, timeout_s)

    monkeypatch.setattr(WorkerPeers, "call", call)


def check(engines: Engines) -> None:
    fresh = expected(engines.train.state_dict(), SIZES, len(engines.infer.devices), torch.float32)
    for own, wanted in zip(ask(engines.infer, "held"), fresh, strict=True):
        assert all(torch.equal(own[name], tensor) for name, tensor in wanted.items())


class Fault(NamedTuple):
    side: str
    how: str
    method: str
    """Before which it comes."""
    route: str


BEFORE_ANY_BYTE = [
    "begin",
    "manifest",
    "prepare",
    "open_staging_buffers",
    "open_events",
    "open_events",
    "import_events",
    "take_plan",
    "pieces",
    "join",
]
BEFORE_ANY_BYTE += ["offer", "open_offers"]


def harm(engines: Engines, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """One fault in one round; afterwards both sides work again."""
    train, infer = engines
    side, how, method, route = fault
    victim = (train if side == "trainer" else infer).executors[0].workers[-1]
    train.add(0.5)
    # Only who is stopped is waited for so long: each step of the others, of some KiB, takes milliseconds.
    timeout_s = 100.0 if how == "SIGKILL" else STOPPED_S
    before(engines, method, lambda: os.kill(victim.process_id, getattr(signal, how)), monkeypatch)
    started = time.monotonic()
    with pytest.raises(RlcoreError) as caught:
        train.sync_weights(infer, route=route, staging_bytes=STAGING_BYTES, timeout_s=timeout_s)
    assert time.monotonic() - started < timeout_s + 60, "and what is given up may take some seconds more"
    monkeypatch.undo()
    told = "".join([str(caught.value), str(caught.value.__cause__), *getattr(caught.value, "__notes__", [])])
    # In a group a rank that waits names the one that it waits for, which may wait for the victim itself.
    assert ("rank " if route == "collective" else f"rank {victim.context.rank}") in told
    assert infer.sync_state in ("serving", "poisoned")
    if infer.sync_state == "serving":
        assert method in BEFORE_ANY_BYTE
    broken = train if side == "trainer" else infer
    with pytest.raises(StateError, match=r"call restart\(\)"):
        broken.memory_report()
    broken.restart()
    train.sync_weights(infer, route=route)
    assert infer.sync_state == "serving"
    check(engines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [Fault("receiver", "SIGKILL", "unpack", "packed"), Fault("trainer", "SIGSTOP", "pack", "packed")],
    ids=" ".join,
)
def test_a_process_of_several_that_ends_or_stops_midway(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    harm(engines, monkeypatch, fault)


STEPS = {
    "packed": "begin self_test pack unpack commit",
    "collective": "send receive",
    "direct": "offer pull",
}
"""The first and last steps of each state: nothing written, a mixture, committed. `rlcore chaos` meets all steps."""


@pytest.mark.slow
def test_a_trainer_that_died_is_told_also_where_its_memory_is_missed_first(
    build: Callable[[int], Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = alive(build(1))
    for engine in engines:
        engine.restart()
    kill = os.kill

    def kill_and_wait(process_id: int, number: int) -> None:
        kill(process_id, number)
        time.sleep(1.0)  # the receiver hears of the end of what it has open

    monkeypatch.setattr(os, "kill", kill_and_wait)
    harm(engines, monkeypatch, Fault("trainer", "SIGKILL", "pull", "direct"))


@pytest.mark.slow
@pytest.mark.timeout(700)  # together minutes: the file begins early
@pytest.mark.parametrize(
    "fault",
    [
        Fault(side, how, method, route)
        for side in ("trainer", "receiver")
        for how, routes in (("SIGKILL", STEPS), ("SIGSTOP", {"packed": "begin unpack commit", "direct": "pull"}))
        for route, methods in routes.items()
        for method in methods.split()
        if (side, method) != ("trainer", "commit")  # it is not asked any more
    ],
    ids=" ".join,
)
def test_a_process_that_ends_or_stops_at_a_step(
    build: Callable[[int], Engines], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """One trainer rank and one receiver."""
    engines = alive(build(1))
    for engine in engines:  # a first round has all steps
        engine.restart()
    harm(engines, monkeypatch, fault)


class Held(NamedTuple):
    """The resources that one process holds."""

    descriptors: int
    threads: int
    shared_mappings: int
    shared_kib: int
    names: int
    """Names in /dev/shm that it made."""
    private_kib: int

    @classmethod
    def now(cls, pid: int) -> Held:
        return cls(
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            len(list(Path(f"/proc/{pid}/task").iterdir())),
            Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/"),
            _status(pid, "RssShmem"),
            len(list(Path("/dev/shm").glob(f"torch_{pid}_*"))),
            _status(pid, "RssAnon"),
        )

    def more_than(self, before: Held) -> dict[str, int]:
        """Return the fields that have grown, and by how much."""
        grown = {name: now - was for name, now, was in zip(self._fields, self, before, strict=True)}
        return {name: by for name, by in grown.items() if by > (4096 if name == "private_kib" else 0)}


def _status(pid: int, field: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("route", ["packed", "direct", "collective"])
def test_nothing_is_left_after_many_rounds(engines: Engines, route: str) -> None:
    train, infer = engines
    workers = [*train.executors[0].workers, *infer.executors[0].workers]
    processes = [os.getpid(), *(worker.process_id for worker in workers)]

    def rounds(count: int) -> None:
        for _ in range(count):
            train.add(0.01)
            opened = train.sync_weights(infer, route=route, staging_bytes=STAGING_BYTES).handles_opened
        assert opened == 0

    rounds(5)  # what is kept is there
    for _ in range(3):  # what leaks grows every time; a thread of torch's or of an earlier test may come or go once
        before = [Held.now(pid) for pid in processes]
        rounds(50)
        left = [Held.now(pid).more_than(was) for pid, was in zip(processes, before, strict=True)]
        if not any(left):
            break
    assert not any(left), f"left by 50 rounds in the user's process and each worker: {left}"
    check(engines)
    if route == "direct":  # the host's weights are shared memory now
        train.restart()


@pytest.mark.slow
def test_full_memory_is_found_before_anything_is_written(engines: Engines) -> None:
    train, infer = engines
    train.add(0.5)
    version = infer.version
    with pytest.raises(
        UnsupportedError, match=r"route='packed' .* has no memory for 2 staging buffers of \d+ bytes; give a smaller"
    ):
        train.sync_weights(infer, route="packed", staging_bytes=1 << 50)
    pids = [worker.process_id for worker in train.executors[0].workers]
    limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, limits, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 15, hard))
    try:
        with pytest.raises(UnsupportedError, match=r"route='packed' .* could not be moved to shared memory"):
            train.sync_weights(infer, route="packed", staging_bytes=1 << 16)
        assert train.sync_weights(infer).route == "collective", "the next that works"
    finally:
        for pid, limit in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    assert infer.version == version + 1
    check(engines)
    train.add(0.5)
    assert train.sync_weights(infer).route == "packed"
    check(engines)
