"""SyncSession between senders and receivers of one process: routes, computed weights, staging, random shapes."""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from small_engine import Checkpoint, Sizes, SmallModel, SmallTarget, checkpoint, expected
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rlcore
from rlcore.engines.weight_sync import endpoint, target
from rlcore.engines.weight_sync.channels.peers import LocalPeers
from rlcore.engines.weight_sync.channels.shared_store import SharedStore
from rlcore.engines.weight_sync.engines import WeightSync
from rlcore.engines.weight_sync.messages import Offer, decoded
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.named_source import NamedSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions, staging_bytes_of
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession, _Round
from rlcore.engines.weight_sync.transports.base import PATIENCE, Route, Surroundings
from rlcore.engines.weight_sync.transports.collective import CollectiveTransport
from rlcore.engines.weight_sync.transports.ipc_memory import ImportedTensors
from rlcore.engines.weight_sync.transports.reach import Sample
from rlcore.errors import InvalidInputError, StateError, SyncError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import IpcHandle, SyncReport
from rlcore.weights.view import WeightView

ROUTES: list[Route] = ["local", "direct", "packed"]


class Worker:
    """Holds the model that ``SmallTarget`` writes into."""

    def __init__(self, sizes: Sizes, shard: int, shards: int, dtype: torch.dtype) -> None:
        self.device = get_device("cpu")
        self.new_model = lambda: SmallModel(sizes, shard, shards, dtype)
        self.model = self.new_model()
        self.versions: list[int] = []


class World(NamedTuple):
    module: Any
    session: SyncSession
    workers: list[Worker]
    receivers: list[Receiver]

    def sync(self, **options: Any) -> SyncReport:
        return self.session.run(RoundOptions(**({"version": 1, "staging_bytes": 4096} | options)), nullcontext)


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    """``make(sizes, shards=1, dtype=..., kind=Checkpoint)``: a whole trainer and one replica of an engine."""
    ends: list[Callable[[], None]] = []

    def build(sizes: Sizes, shards: int = 1, dtype: torch.dtype = torch.bfloat16, kind: Any = Checkpoint) -> World:
        weights = checkpoint(sizes, seed=1)
        module = kind(weights)
        for name, parameter in module.named_parameters():
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(weights[name].clone()))
        sender = Sender(ModuleSourceTensors(module, 1), get_device("cpu"))
        workers = [Worker(sizes, shard, shards, dtype) for shard in range(shards)]
        receivers = [Receiver(SmallTarget(worker)) for worker in workers]  # type: ignore[arg-type]
        session = SyncSession(LocalPeers("the trainer", [sender]), LocalPeers("the engine", receivers))
        ends.extend([*(receiver.close for receiver in receivers), sender.close])
        return World(module, session, workers, receivers)

    yield build
    for end in ends:
        end()


def check(world: World, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> None:
    weights = {name: tensor.detach() for name, tensor in world.module.named_weights()}
    fresh = expected(weights, sizes, len(world.workers), dtype)
    for worker, wanted in zip(world.workers, fresh, strict=True):
        held = dict(worker.model.named_parameters())
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shards", [1, 2])
def test_every_byte_by_every_route(make: Make, route: Route, shards: int) -> None:
    sizes = Sizes(experts=2, is_tied=True, has_state=True)
    world = make(sizes, shards)
    for number in range(2):
        world.module.add(0.5)
        report = world.sync(route=route, version=number, is_verified=number == 1, checksums="always")
        assert report.route == route
        assert report.calls_s.keys() >= {"begin", "unpack" if route == "packed" else "pull", "ready", "end", "commit"}
        assert 0 < max(report.calls_s.values()) < report.seconds
        assert (report.handles_opened == 0) == (number == 1 or route != "packed"), "in one process"
        check(world, sizes)
    assert [worker.versions for worker in world.workers] == [[0, 1]] * shards


def test_weights_changed_in_place_are_sent_though_nobody_says_so(make: Make) -> None:
    """``is_same`` says that no step of the engines has changed them; a user's own code may have."""
    world = make(Sizes(layers=1))
    assert world.sync(is_same=True).moved_bytes > 0, "the first round"
    world.module.add(0.5)
    assert world.sync(is_same=True).moved_bytes > 0
    check(world, Sizes(layers=1))
    assert world.sync(is_same=True).moved_bytes == 0


def _verify(world: World) -> dict[str, Any]:
    return {"is_verified": True}


def _write_another(world: World) -> dict[str, Any]:
    world.module.head.weight.detach().add_(1)
    return {}


def _lose_the_plan(world: World) -> dict[str, Any]:
    world.receivers[0].abandon()
    return {}


@pytest.mark.parametrize("move", [_verify, _write_another, _lose_the_plan])
@pytest.mark.parametrize("route", ROUTES)
def test_a_round_that_moves_looks_at_the_module_whatever_it_was_told(
    make: Make, route: Route, move: Callable[[World], dict[str, Any]]
) -> None:
    world = make(Sizes(layers=1))
    world.sync(route=route)
    world.module.embed.weight = nn.Parameter(world.module.embed.weight.detach() + 1)
    report = world.sync(route=route, is_same=True, **move(world))
    assert report.moved_bytes > 0
    check(world, Sizes(layers=1))


@pytest.mark.parametrize("route", ROUTES)
def test_trainers_that_take_turns_are_not_mixed_up(make: Make, route: Route) -> None:
    first, second, other = make(Sizes(), 2), make(Sizes(), 2), make(Sizes(hidden=5))
    shared = first.session.receivers
    second = second._replace(session=SyncSession(second.session.senders, shared), workers=first.workers)
    other = other._replace(session=SyncSession(other.session.senders, shared))
    second.module.add(1.0)
    for number, world in enumerate([first, second, first, second, second]):
        report = world.sync(route=route, version=number)
        assert (report.handles_opened == 0) == (number == 4 or route != "packed")
        check(world, Sizes())
    second.module.add(1.0)
    second.sync(route=route, is_staged=True)  # what one trainer's first round has proven holds for the other's
    check(second, Sizes())
    with pytest.raises(SyncError, match="is not the engine's, which still serves its old weights"):
        other.sync(route=route)
    second.module.add(1.0)
    second.sync(route=route)
    check(second, Sizes())


def test_random_models_grids_and_staging_buffers(make: Make) -> None:
    generator = random.Random(0)
    for _ in range(12):
        shards = generator.choice([1, 2])
        heads = shards * generator.randint(1, 3) * 2
        sizes = Sizes(
            vocab=generator.randint(3, 70),
            hidden=generator.randint(1, 20),
            inner=shards * generator.randint(1, 9),
            heads=heads,
            kv_heads=generator.choice([1, 2, heads]),
            head_dim=generator.randint(1, 5),
            layers=1,
            experts=generator.choice([0, 3]),
            is_tied=generator.random() < 0.5,
        )
        dtype = generator.choice([torch.float32, torch.bfloat16])
        world = make(sizes, shards, dtype)
        report = world.sync(route="packed", staging_bytes=generator.choice([1024, 1536, 1 << 20]))
        assert report.fallback_bytes == 0, sizes
        check(world, sizes, dtype)


class Scaled(Checkpoint):
    """Gives one weight that is no view of a parameter, as a merged adapter is."""

    def weight_views(self, adapters: Any = "merged") -> Iterator[WeightView]:
        for view in super().weight_views():
            if view.name == "layers.0.q_proj.weight":
                yield view._replace(parameter=None, compute=self.scaled)
            else:
                yield view

    def scaled(self) -> Tensor:
        return self.layers.get_submodule("0").q_proj.weight.detach() * 2


@pytest.mark.parametrize("route", ROUTES)
def test_weights_that_the_trainer_computes(make: Make, route: Route) -> None:
    world = make(Sizes(), 2, kind=Scaled)
    for _ in range(2):
        world.module.add(0.25)
        assert world.sync(route=route).fallback_bytes > 0
        check(world, Sizes())


class Merged(Checkpoint):
    """No weight is a view of a parameter."""

    def weight_views(self, adapters: Any = "merged") -> Iterator[WeightView]:
        for view in super().weight_views():
            assert view.parameter is not None
            yield view._replace(parameter=None, compute=partial(torch.mul, view.parameter.detach(), 2))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", [Checkpoint, Merged])
def test_no_copy_of_a_weight_outlives_its_load(
    make: Make, route: Route, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies together would be a second model, which a device has no room for."""
    copies: dict[int, tuple[StorageWeakRef, int]] = {}

    def living() -> int:
        return sum(nbytes for copy, nbytes in copies.values() if not copy.expired())

    load, compute = SmallTarget.reload, ModuleSourceTensors.compute
    peaks: list[int] = []

    def copied(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        copies[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        peaks.append(living())
        return tensor

    monkeypatch.setattr(
        SmallTarget, "reload", lambda self, weights: load(self, ((name, copied(weight)) for name, weight in weights))
    )
    monkeypatch.setattr(ModuleSourceTensors, "compute", lambda self, weights: list(map(copied, compute(self, weights))))
    world = make(Sizes(layers=4), kind=kind)
    for _ in range(2):
        world.module.add(0.25)
        world.sync(route=route, is_verified=True, staging_bytes=4096)
        check(world, Sizes(layers=4))
    assert len(peaks) > 50
    assert sum(weight.nbytes for weight in world.module.parameters()) > 10 * 4096
    assert max(peaks) <= 2 * 4096


def test_a_staged_round_that_fails_leaves_the_old_weights_whole(make: Make) -> None:
    world = make(Sizes())
    with pytest.raises(UnsupportedError, match="its plan is tested by loading into the weights that are served"):
        world.sync(is_staged=True)
    world.sync()
    before = {name: parameter.clone() for name, parameter in world.workers[0].model.named_parameters()}
    world.module.add(1.0)
    receiver: Any = world.receivers[0]

    def fails(round_id: int) -> int:
        raise SyncError("no vote")

    receiver.ready = fails
    with pytest.raises(SyncError, match="no vote"):
        world.sync(is_staged=True)
    assert receiver.is_whole
    for name, parameter in world.workers[0].model.named_parameters():
        assert torch.equal(parameter, before[name])
    del receiver.ready
    world.sync()
    world.module.add(1.0)
    with pytest.raises(UnsupportedError, match=r"route='collective' .* it takes a process for each"):
        world.sync(route="collective")
    world.sync(is_staged=True, version=3)  # what was refused before it began has not undone the proof
    check(world, Sizes())


@pytest.mark.parametrize("route", ["local", "packed"])
def test_the_second_copy_of_a_staged_round_is_freed_with_it(make: Make, route: Route) -> None:
    world = make(Sizes())
    world.sync(route=route)
    receiver: Any = world.receivers[0]
    copies: list[StorageWeakRef] = []

    def stage(tensors: dict[str, Tensor], real: Any = receiver._stage) -> dict[str, Tensor]:
        staged: dict[str, Tensor] = real(tensors)
        copies.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in staged.values())
        return staged

    receiver._stage = stage
    for version in (2, 3):
        world.module.add(1.0)
        world.sync(route=route, is_staged=True, version=version)
        check(world, Sizes())
        assert copies and all(copy.expired() for copy in copies)


def test_staging_that_does_not_fit_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(Sizes())
    world.sync()
    world.module.add(1.0)
    info = get_device("cpu").memory.info()
    monkeypatch.setattr(type(get_device("cpu").memory), "info", lambda self: type(info)(100, info.total_bytes))
    with pytest.raises(UnsupportedError, match=r"a second copy takes \d+ bytes, and 100 are free"):
        world.sync(is_staged=True)
    assert world.receivers[0].is_whole


def test_verify_finds_what_the_plan_got_wrong(make: Make) -> None:
    world = make(Sizes())
    world.sync()
    receiver: Any = world.receivers[0]
    real = receiver.pull

    def wrong(round_id: int, digest: str, is_last: bool) -> Any:
        moved = real(round_id, digest, is_last)
        if ":" not in digest:  # not of the golden load
            world.workers[0].model.layer0.norm[3] += 1
        return moved

    receiver.pull = wrong
    with pytest.raises(SyncError, match=r"verify=True: 1 tensors on cpu:0 are not what .* such as 'layer0.norm'"):
        world.sync(is_verified=True)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers are taken for those of another process, which may open the trainer's memory on a host."""
    monkeypatch.setattr("rlcore.engines.weight_sync.session.is_unwise", lambda route, senders: "")
    monkeypatch.setattr(
        "rlcore.engines.weight_sync.session.refusal", lambda route, *_, **__: "it is elsewhere" * (route == "local")
    )


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("layers", "later"), [(1, "direct"), (4, "packed"), (4, "direct")], ids=["few", "many", "large"]
)
def test_weights_in_many_small_blocks_of_memory_are_opened_once_and_not_again(
    make: Make, layers: int, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host each tensor is a block of its own: 13 of one layer, and 43 of four."""
    if (layers, later) == (4, "direct"):
        monkeypatch.setattr("rlcore.engines.weight_sync.transports.in_place.MANY_BYTES", 16)
    world = make(Sizes(layers=layers))
    sender = world.session.senders._peers[0]  # type: ignore[attr-defined]
    routes = []
    for number in range(6):
        world.module.add(0.5)
        routes.append(world.sync(version=number).route)
        check(world, Sizes(layers=layers))
        if number % 2:
            sender.revoke()  # as before an offload
    assert routes == ["direct", "direct", later, later, later, later]
    for _ in range(2):
        world.module.add(0.5)
        assert world.sync(route="direct").route == "direct", "where it is asked for"
        sender.revoke()
        check(world, Sizes(layers=layers))


def _replace(parameter: Tensor, owner: nn.Module, name: str) -> None:
    setattr(owner, name, nn.Parameter(parameter.detach() + 1))


def _give_other_data(parameter: Tensor, owner: nn.Module, name: str) -> None:
    parameter.data = parameter.detach() + 1


def _swap(parameter: Tensor, owner: nn.Module, name: str) -> None:
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() + 1))  # type: ignore[no-untyped-call]


def _convert(parameter: Tensor, owner: nn.Module, name: str) -> None:
    owner.to(torch.bfloat16)


def _write(parameter: Tensor, owner: nn.Module, name: str) -> None:
    parameter.detach().add_(1)


@pytest.mark.parametrize("move", [_replace, _give_other_data, _swap, _convert])
@pytest.mark.parametrize("route", ROUTES)
def test_a_parameter_that_got_other_memory_is_sent_from_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, route: Route, move: Callable[[Tensor, nn.Module, str], None]
) -> None:
    """By "direct" the receivers copied the old memory for ever, as versions that were called new."""
    monkeypatch.setattr("rlcore.engines.weight_sync.transports.ipc_memory.sender_here", lambda epoch: None)
    world = make(Sizes(layers=1))
    if route == "local":
        monkeypatch.undo()
    embedding = world.module.embed
    opened = []
    for version, change in enumerate([_write, _write, move, _write, move]):
        change(embedding.weight, embedding, "weight")
        opened.append(world.sync(route=route, version=version).handles_opened)
        check(world, Sizes(layers=1))
    has_new_plan = move is _convert  # a trainer of another dtype is planned for anew, the first time
    assert [count > 0 for count in opened] == {
        "local": [False] * 5,
        "direct": [True, False, True, False, not has_new_plan],
        "packed": [True, False, has_new_plan, False, False],
    }[route], "none where nothing has moved"


def test_memory_that_has_moved_is_not_sent_while_a_receiver_holds_what_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round fails, and the next one takes the memory back again."""
    monkeypatch.setattr("rlcore.engines.weight_sync.transports.ipc_memory.sender_here", lambda epoch: None)
    world = make(Sizes(layers=1))
    world.sync(route="direct")
    _give_other_data(world.module.embed.weight, world.module.embed, "weight")
    revoke, failing = type(get_device("cpu").memory).revoke, [True]

    def refused(*arguments: Any, **options: Any) -> None:
        if failing:
            raise StateError("a receiver does not let go")
        revoke(*arguments, **options)

    monkeypatch.setattr(type(get_device("cpu").memory), "revoke", refused)
    for _ in range(2):
        with pytest.raises(StateError, match="a receiver does not let go"):
            world.sync(route="direct")
    failing.clear()
    assert world.sync(route="direct").handles_opened > 0
    check(world, Sizes(layers=1))


def _forgets_by_revoke(sender: rlcore.WeightSender, given: dict[str, Tensor]) -> None:
    sender.revoke()
    given.clear()


def _forgets_by_close(sender: rlcore.WeightSender, given: dict[str, Tensor]) -> None:
    sender.close()
    given.clear()


def _forgets_by_another_route(sender: rlcore.WeightSender, given: dict[str, Tensor]) -> None:
    given["weight"] = torch.full((3, 3), 2.0)
    sender.send(route="local")


@pytest.mark.parametrize("forget", [_forgets_by_revoke, _forgets_by_close, _forgets_by_another_route])
@pytest.mark.parametrize("route", ROUTES)
def test_nobody_in_the_process_holds_the_memory_of_tensors_that_are_gone(
    route: Route, forget: Callable[[rlcore.WeightSender, dict[str, Tensor]], None]
) -> None:
    model = nn.Linear(3, 3, bias=False)
    given = {"weight": torch.ones(3, 3)}
    receiver = rlcore.WeightReceiver(model)
    sender = rlcore.WeightSender(lambda: given, receiver)
    for _ in range(2):
        sender.send(route=route)
    storage = StorageWeakRef(given["weight"].untyped_storage())
    forget(sender, given)
    assert storage.expired()
    given["weight"] = torch.full((3, 3), 5.0)
    sender.send(route=route)
    assert bool((model.weight == 5).all())
    sender.close()


def test_a_receiver_keeps_no_trainer_of_its_process_alive() -> None:
    receiver = rlcore.WeightReceiver(nn.Linear(3, 3, bias=False))
    sender = rlcore.WeightSender(nn.Linear(3, 3, bias=False), receiver)
    sender.send(route="local")
    inner = weakref.ref(sender._sender)
    sender.close()
    del sender
    gc.collect()
    assert inner() is None
    with pytest.raises(SyncError, match="the trainer whose tensors were read here is gone; sync again"):
        receiver._receiver._imported.sources()


@pytest.mark.parametrize("what", ["weights", "staging buffers", "sample"])
def test_what_a_receiver_did_not_let_go_can_be_taken_back_again(what: str) -> None:
    cpu = get_device("cpu")
    before = {export.export_id for export in cpu.memory.ledger()}
    sender = Sender(ModuleSourceTensors(nn.Linear(3, 3, bias=False), 1), cpu)
    for _ in range(2):
        sender.begin(False)
        if what == "weights":
            (handle,) = decoded(sender.offer(True)[0], Offer, "offer").handles or []
        elif what == "staging buffers":
            handle = IpcHandle.from_bytes(sender.open_staging_buffers(4096))
        else:
            handle = decoded(sender.show_sample(), Sample, "sample").handle
        mapping = cpu.memory.import_ipc(handle)  # a handle of today, though the last could not be taken back
        with pytest.raises(StateError, match="is still open in process"):
            sender.close(timeout_s=0)
        mapping.close()
    sender.close()
    assert {export.export_id for export in cpu.memory.ledger()} == before


def test_thousands_of_weights_of_one_block_are_one_handle() -> None:
    cpu = get_device("cpu")
    flat = torch.arange(4000 * 64, dtype=torch.float32)
    module = torch.nn.ParameterList(flat.split(64))  # type: ignore[no-untyped-call]
    source: Any = NamedSourceTensors(module.named_parameters, 1)
    source.refresh()
    sender = Sender(source, cpu)
    sender.begin(False)
    data, num_handles, nbytes = sender.offer(True)
    offer = decoded(data, Offer, "offer")
    assert num_handles == len(offer.handles or ()) == 1
    assert nbytes == flat.nbytes
    opened = ImportedTensors(offer, cpu.memory.import_ipc_together)
    tensors = opened.tensors()
    assert len(tensors) == 4000
    assert all(torch.equal(tensors[number], parameter.view(-1)) for number, parameter in enumerate(module))
    opened.close()
    sender.close()


@pytest.mark.parametrize(
    ("timeout_s", "is_formed_anew"), [(60.0, False), (50.0, False), (100.0, False), (130.0, True), (40.0, True)]
)
def test_a_group_serves_rounds_of_about_its_own_time(timeout_s: float, is_formed_anew: bool) -> None:
    """One of less time would end before the group's wait does, and one of much more has to be more patient."""
    peers = LocalPeers("nobody", [])
    transport = CollectiveTransport(peers, peers, SharedStore, Surroundings([], set(), []))
    joins: list[float] = []
    transport._join = lambda calls, left: joins.append(left())  # type: ignore[method-assign]
    transport._form_group(lambda: 60.0, is_on_host=False)
    assert transport._timeout_s == PATIENCE * 60
    transport._form_group(lambda: timeout_s, is_on_host=False)
    assert joins == [60.0, timeout_s][: 1 + is_formed_anew]
    transport.close(lambda: 1.0)


def test_weights_are_grouped_for_the_loader_by_looking_at_each_once() -> None:
    """A model has 18,867: to add up a group again for each of them took minutes."""
    looked: list[int] = []

    def nbytes(weights: list[int]) -> int:
        looked.extend(weights)
        return sum(30 if number == 5 else 4 for number in weights)

    round_: Any = types.SimpleNamespace(_agreed=types.SimpleNamespace(nbytes=nbytes), _staging_bytes=12)
    assert list(_Round._groups(round_, range(8))) == [[0, 1, 2], [3, 4], [5], [6, 7]]
    assert looked == list(range(8))


def test_a_module_is_described_once_for_all_parts_of_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[torch.nn.Module] = []
    monkeypatch.setattr(target, "stored_tensors", lambda module: described.append(module) or {})
    module = torch.nn.Linear(2, 2)
    engine = target.ModuleTarget(module, get_device("cpu"))
    with engine.reloading():
        engine.reload([("weight", torch.ones(2, 2))])
        engine.reload([("bias", torch.ones(2))])
    assert described == [module] and all(bool((tensor == 1).all()) for tensor in module.parameters())
    module.weight = torch.nn.Parameter(torch.zeros(2, 2))
    engine.reload([("weight", torch.full((2, 2), 3.0))])
    assert bool((module.weight == 3).all()), "the tensors are those of today"


def test_ends_with_two_versions_of_rlcore_are_refused_and_serve_what_they_had(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(Sizes())
    info = msgspec.structs.replace(endpoint.endpoint_info(get_device("cpu")), rlcore="0.1.7")
    monkeypatch.setattr(world.receivers[0], "_info", info)
    served = [parameter.data.fill_(3) for parameter in world.workers[0].model.parameters()]
    with pytest.raises(SyncError, match=r"have rlcore 0\.1\.7 and 0\.2\.0; install one version in all"):
        world.sync()
    assert served and all(bool((tensor == 3).all()) for tensor in served)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"route": "ipc"}, "route must be one of local, direct, packed, collective, relayed, or None, got 'ipc'"),
        ({"checksums": "some"}, "checksums must be one of off, sample, always, got 'some'"),
        ({"staging_bytes": 1000}, "a staging buffer must be a multiple of 512 bytes and at least 1024, got 1000"),
        ({"version": -1}, "version must be a whole number of at least 0, or None, got -1"),
        ({"timeout_s": 0}, "timeout_s must be a positive number of seconds, got 0"),
        ({"is_staged": True, "is_verified": True}, "staged=True and verify=True cannot be had in one round: verif"),
    ],
)
def test_options_outside_of_what_is_accepted(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        RoundOptions(**({"version": 1} | options))


@pytest.mark.parametrize(("checksums", "steps"), [("off", []), ("sample", [0, 16, 32]), ("always", list(range(40)))])
def test_of_sampled_checksums_one_bucket_in_16_has_one_and_always_the_first(checksums: Any, steps: list[int]) -> None:
    options = RoundOptions(version=1, checksums=checksums)
    assert [step for step in range(40) if options.is_checked(step)] == steps


def test_a_trainer_does_one_sync_at_a_time() -> None:
    syncs = WeightSync()

    class Target:
        def _receiving_group(self) -> None:
            with ThreadPoolExecutor(1) as other_thread:
                other = other_thread.submit(syncs.run, None, [self], 0, None)  # type: ignore[arg-type]
            with pytest.raises(StateError, match=r"another thread is syncing this trainer's weights: give all engines"):
                other.result()
            raise SyncError("the first goes on")

    for _ in ("in turn", "after an error"):
        with pytest.raises(SyncError, match="the first goes on"):
            syncs.run(None, [Target()], 0, None)  # type: ignore[arg-type, list-item]


def test_the_former_name_of_a_field_of_the_report_is_read_with_a_warning() -> None:
    numbers: dict[str, Any] = dict.fromkeys(("version", "moved_bytes", "needed_bytes", "fallback_bytes"), 1)
    report = SyncReport(**numbers, route="packed", handles_opened=1, seconds=1.0, calls_s={}, staging_waits_by="event")
    with pytest.warns(DeprecationWarning, match=r"^SyncReport\.slabs_wait_by is called staging_waits_by now") as caught:
        assert report.slabs_wait_by == "event"
    assert caught[0].filename == __file__


def test_the_former_name_of_staging_bytes_is_taken_with_a_warning_at_the_callers_line() -> None:
    def sync_weights(*, staging_bytes: int | None = None, slab_bytes: int | None = None) -> int | None:
        return staging_bytes_of(staging_bytes, slab_bytes)

    assert sync_weights() is None
    assert sync_weights(staging_bytes=4096) == 4096
    with pytest.warns(DeprecationWarning, match="^slab_bytes is called staging_bytes now") as caught:
        assert sync_weights(slab_bytes=4096) == 4096
    assert caught[0].filename == __file__
    with pytest.raises(InvalidInputError, match="staging_bytes and slab_bytes, its former name, were both given"):
        sync_weights(staging_bytes=4096, slab_bytes=4096)
