"""Groups that stand alone: forming, moving, ending, forming again, and what a failure says on the ranks that live."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.collectives.groups import new_group
from rlcore.collectives.rendezvous import Meeting
from rlcore.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InvalidInputError,
    PeerDiedError,
    StateError,
    UnsupportedError,
)
from rlcore.registry import get_device

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64)


def listening_addresses() -> set[str]:
    """Addresses on which this process accepts connections, as /proc/net/tcp writes them."""
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


LOOPBACK = "0100007F"


# ---------------------------------------------------------------------------------------------- movements


def move_everything(rank: Any, device: str, world_size: int) -> None:
    group = rank.group(device, world_size)
    place, me = group.device.torch_device, rank.rank
    for dtype in DTYPES:

        def rows(owner: int, count: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return (torch.arange(count * 2).view(count, 2) % 3 + owner).to(dtype).to(place)

        gathered = group.all_gather(rows(me, 2 * me))  # rank 0 has nothing
        wanted = [rows(owner, 2 * owner) for owner in range(world_size)]
        assert [part.cpu().view(torch.uint8).tolist() for part in gathered] == [
            part.cpu().view(torch.uint8).tolist() for part in wanted
        ]
        assert all(part.dtype == dtype and part.device == place for part in gathered)
        assert [part.shape for part in group.all_gather(rows(me, 3))] == [(3, 2)] * world_size

        swapped = group.all_to_all([rows(me, peer + me) for peer in range(world_size)])
        wanted = [rows(owner, owner + me) for owner in range(world_size)]
        assert [part.cpu().view(torch.uint8).tolist() for part in swapped] == [
            part.cpu().view(torch.uint8).tolist() for part in wanted
        ]
        last = world_size - 1
        sent = group.broadcast(rows(me, 3), last)
        assert sent.cpu().view(torch.uint8).tolist() == rows(last, 3).cpu().view(torch.uint8).tolist()
        if me == 0:
            group.send(rows(5, 2), last)
        elif me == last:
            got = group.recv(rows(me, 2), 0)
            assert got.cpu().view(torch.uint8).tolist() == rows(5, 2).cpu().view(torch.uint8).tolist()
    group.barrier()


def test_tensors_of_any_dtype_and_uneven_rows_are_moved(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(move_everything, world[1], *world)


def reduce_views(rank: Any, device: str, world_size: int) -> None:
    group = rank.group(device, world_size)
    place = group.device.torch_device
    matrix = torch.ones(3, 4, device=place)
    group.all_reduce(matrix[:, 1])  # not contiguous
    group.all_reduce(matrix.t()[2], "max")
    assert matrix.tolist() == [[1.0, float(world_size), 1.0, 1.0]] * 3
    scalar = torch.tensor(2.0, device=place)
    assert group.all_reduce(scalar) is scalar
    assert scalar.item() == 2.0 * world_size
    assert group.all_reduce(torch.ones(0, device=place)).numel() == 0
    assert group.all_reduce(torch.ones(1, dtype=torch.int16, device=place)).tolist() == [world_size]
    weight = torch.nn.Parameter(torch.ones(2, device=place))
    group.all_reduce(weight)
    assert weight.tolist() == [world_size] * 2
    assert weight.grad_fn is None
    conjugate = torch.full((2,), 1 + 2j, device=place).conj()
    assert group.all_reduce(conjugate).cpu().resolve_conj().tolist() == [world_size * (1 - 2j)] * 2
    assert group.reduce_scatter(torch.ones(4, device=place), sizes=[4] + [0] * (world_size - 1)).tolist() == (
        [world_size] * 4 if rank.rank == 0 else []
    )
    host = torch.ones(2)  # through gloo, beside the device's library
    assert group.all_reduce(host).tolist() == [world_size] * 2
    big = bytes(range(256)) * 20 * (rank.rank + 1)
    assert group.exchange(big) == [bytes(range(256)) * 20 * (r + 1) for r in range(world_size)]
    assert group.exchange(b"") == [b""] * world_size


def test_views_scalars_parameters_and_host_tensors_are_reduced_in_place(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(reduce_views, world[1], *world)


def disagree(rank: Any) -> None:
    group = rank.group("cpu", 2)
    with pytest.raises(CollectiveError) as error:
        group.all_gather(torch.ones(2, 3 + rank.rank))
    assert str(error.value) == (
        "all_gather of group 'shared-cpu-2': all ranks must have rows of one kind; "
        "rank 0 has float32 rows of (3,) on cpu; rank 1 has float32 rows of (4,) on cpu"
    )
    with pytest.raises(CollectiveError, match=r"all_to_all .*rank 1 has int32 rows of \(\) on cpu"):
        group.all_to_all([torch.ones(2, dtype=(torch.int64, torch.int32)[rank.rank])] * 2)
    group.barrier()  # and it goes on working


def test_ranks_that_gather_different_rows_are_told_so_and_go_on(on_ranks: Any) -> None:
    on_ranks(disagree, 2)


# ------------------------------------------------------------------------------------------- beside torch's


def stand_alone(rank: Any, device: str, world_size: int) -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    assert not dist.is_initialized()
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"  # it is not asked: all ranks are on this host
    before = dict(dist.distributed_c10d._world.pg_map)
    with (
        rank.new_group(device, world_size, f"a{world_size}") as first,
        rank.new_group(device, world_size, f"b{world_size}") as second,
    ):
        assert not dist.is_initialized()
        ones = torch.ones(2, device=first.device.torch_device)
        dist.all_reduce(ones, group=first.process_group)
        source = world_size - 1
        mine = torch.full((2,), rank.rank, device=first.device.torch_device)
        dist.broadcast(mine, src=source, group=second.process_group)
        total = functional.all_reduce(torch.ones(1, device=first.device.torch_device), "sum", first.process_group)
        assert (ones.tolist(), mine.tolist(), total.tolist()) == ([world_size] * 2, [source] * 2, [world_size])
        assert dist.get_world_size(first.process_group) == world_size
        if device == "cpu":
            assert listening_addresses() == {LOOPBACK}
    del os.environ["GLOO_SOCKET_IFNAME"]
    assert dist.distributed_c10d._world.pg_map == before
    assert not dist.is_initialized()


def test_two_groups_stand_alone_and_serve_torch_functions(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(stand_alone, world[1], *world)


def stand_beside(rank: Any, device: str, world_size: int) -> None:
    import torch.distributed as dist

    ours = get_device(f"{device}:{rank.rank}")
    kwargs = ours.collectives.init_kwargs(timeout_s=30.0)
    store = dist.FileStore(str(rank.folder / f"default-{device}-{world_size}"), world_size)
    dist.init_process_group(store=store, rank=rank.rank, world_size=world_size, **kwargs)
    try:
        default = dist.group.WORLD
        # Numbered the other way round: its ranks are its own.
        options = {"rendezvous": rank.folder, "timeout_s": 30.0, "name": f"turned-{world_size}"}
        turned = new_group(ours, rank=world_size - 1 - rank.rank, world_size=world_size, **options)
        for place in {torch.device("cpu"), ours.torch_device}:
            numbers = turned.all_gather(torch.tensor([rank.rank], device=place))
            assert [part.item() for part in numbers] == list(range(world_size))[::-1]
            ones = torch.ones(1, device=place)
            dist.all_reduce(ones)
            assert ones.item() == world_size
        assert dist.group.WORLD is default
    finally:
        dist.destroy_process_group()
    assert turned.all_reduce(torch.ones(1, device=ours.torch_device)).item() == world_size
    turned.destroy()


def test_a_group_beside_the_default_one_outlives_it(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(stand_beside, world[1], *world)


def meet_in_store(rank: Any) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(rank.folder / "a-store"), 2)
    for _ in range(2):  # one name again: the second group must not read the addresses of the first
        with rank.new_group("cpu", 2, "in-store", rendezvous=store) as group:
            assert group.all_reduce(torch.ones(1)).item() == 2.0


def test_ranks_meet_in_a_store_of_the_user(on_ranks: Any) -> None:
    on_ranks(meet_in_store, 2)


def join_as_many_hosts(rank: Any) -> None:
    from unittest import mock

    from rlcore.collectives import rendezvous

    card = rendezvous._own_card
    elsewhere = lambda *args: rendezvous.msgspec.structs.replace(card(*args), network=f"host {rank.rank}")  # noqa: E731
    with mock.patch.object(rendezvous, "_own_card", elsewhere):
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"), rank.new_group("cpu", 2, "hosts") as group:
            assert group.all_reduce(torch.ones(1)).item() == 2.0
            assert listening_addresses() == {LOOPBACK}
        with (
            mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="no-such-interface"),
            pytest.raises(CollectiveError, match=r"forming of group 'hosts' .* failed: .*no-such-interface"),
        ):
            rank.new_group("cpu", 2, "hosts")


def test_ranks_of_several_hosts_listen_where_gloo_is_told(on_ranks: Any) -> None:
    on_ranks(join_as_many_hosts, 2)


# ------------------------------------------------------------------------------------------------ libraries


def use_plugin(rank: Any, form: str) -> list[float]:
    import torch.distributed as dist

    from rlcore.devices.generic import GenericTorchDevice
    from rlcore.types import DeviceSpec

    def create(store: Any, number: int, size: int, timeout: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, number, size, options)

    def create_extended(request: Any, options: Any) -> Any:
        assert (options, request.global_ranks_in_group) == (None, [0, 1])
        return create(request.store, request.group_rank, request.group_size, request.timeout)

    class InPython(dist.ProcessGroup):
        def __init__(self, store: Any, number: int, size: int, timeout: Any) -> None:
            super().__init__(number, size)
            self.inner = create(store, number, size, timeout)

        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            return self.inner.allreduce(tensors, options)

        def getBackendName(self) -> str:  # noqa: N802
            return "other_python"

        def shutdown(self) -> None:
            self.inner = None

    creators = {"plain": create, "extended": create_extended, "python": InPython}
    name = f"other_{form}"
    dist.Backend.register_backend(name, creators[form], extended_api=form == "extended", devices=["cpu"])
    spec = DeviceSpec(
        name="other", vendor="a third party", torch_type="cpu", priority=1, api_version=(1, 0),
        loader="rlcore.devices.generic:GenericTorchDevice", collective_backend=name,
    )  # fmt: skip

    class Other(GenericTorchDevice):
        @property
        def torch_device(self) -> torch.device:
            return torch.device("cpu")

        def synchronize(self) -> None:
            pass

    device = Other(spec, rank.rank)
    with pytest.raises(UnsupportedError, match=r"high-priority stream .* no such option is known of other_"):
        new_group(device, rank=rank.rank, world_size=2, rendezvous=rank.folder, is_high_priority=True)
    with new_group(device, rank=rank.rank, world_size=2, rendezvous=rank.folder, timeout_s=30.0, name=name) as group:
        backend = group.process_group._get_backend_name() if form == "python" else group.process_group.name()
        total: list[float] = group.all_reduce(torch.ones(2)).tolist()
    return [*total, backend]


@pytest.mark.parametrize("form", ["plain", "extended", "python"])
def test_a_library_registered_with_torch_works_by_name(form: str, on_ranks: Any) -> None:
    for first, second, name in on_ranks(use_plugin, 2, form):
        assert (first, second) == (2.0, 2.0)
        assert name


def test_a_library_that_torch_has_not_is_named() -> None:
    from rlcore.devices.generic import GenericTorchDevice
    from rlcore.types import DeviceSpec

    spec = DeviceSpec(
        name="other", vendor="a third party", torch_type="cpu", priority=1, api_version=(1, 0),
        loader="rlcore.devices.generic:GenericTorchDevice", collective_backend="absent",
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"back end 'absent' of other:0 is not supported: torch .* without it"):
        GenericTorchDevice(spec, 0).collectives.init_kwargs()


def test_arguments_for_the_default_group_of_the_host() -> None:
    from datetime import timedelta

    collectives = get_device("cpu").collectives
    assert collectives.init_kwargs(timeout_s=7.5) == {"backend": "gloo", "timeout": timedelta(seconds=7.5)}
    with pytest.raises(UnsupportedError, match=r"^a high-priority stream of collectives on cpu:0 is not supported"):
        collectives.init_kwargs(is_high_priority=True)
    with pytest.raises(InvalidInputError, match=r"timeout_s must be more than 0 seconds, got -1"):
        collectives.init_kwargs(timeout_s=-1)


# ------------------------------------------------------------------------------------------------------ life


def live_twice(rank: Any, device: str, world_size: int) -> None:
    name = f"phoenix-{world_size}"
    group = rank.new_group(device, world_size, name)
    ones = torch.ones(1, device=group.device.torch_device)
    for _ in range(2):
        assert group.is_alive
        with pytest.raises(StateError, match=r"is alive; destroy\(\) it before rebuild\(\)"):
            group.rebuild()
        assert group.all_reduce(ones.clone()).item() == world_size
        group.destroy()
        assert not group.is_alive
        with pytest.raises(
            StateError, match=rf"^group '{name}' \(rank {rank.rank} of .* was destroyed already; rebuild"
        ):
            group.destroy()
        for use in (lambda: group.all_reduce(ones), group.barrier, lambda: group.process_group):
            with pytest.raises(StateError, match=r"which was destroyed; call rebuild\(\) on all ranks first"):
                use()
        group.rebuild()
    with group:
        pass
    assert not group.is_alive
    with pytest.raises(KeyError), rank.new_group(device, world_size, name) as group:
        rank.group(device, world_size).barrier()  # all are in
        raise KeyError
    assert not group.is_alive
    rank.group(device, world_size).barrier()
    assert not list(rank.folder.glob("phoenix*"))


def test_a_group_is_destroyed_once_and_formed_again(world: tuple[str, int], on_ranks: Any, tmp_path: Path) -> None:
    on_ranks(live_twice, world[1], *world)


def holdings(folder: Path) -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "files": len(os.listdir(folder)),
        "shared memory": len(os.listdir("/dev/shm")),
        "resident KiB": int(status["VmRSS"].split()[0]),
    }


def cycle(rank: Any, device: str, num_cycles: int) -> tuple[dict[str, int], dict[str, int]]:
    keep = rank.group(device, 2)  # holds what is set up once

    def one(number: int) -> None:
        with rank.new_group(device, 2, "cycle") as group:
            assert group.all_reduce(torch.ones(4, device=group.device.torch_device)).tolist() == [2.0] * 4

    for number in range(5):
        one(number)
    keep.barrier()
    before = holdings(rank.folder)
    keep.barrier()
    for number in range(num_cycles):
        one(number)
    keep.barrier()
    time.sleep(0.2)  # a thread may still be ending
    after = holdings(rank.folder)
    keep.barrier()
    return before, after


@pytest.mark.parametrize(
    ("device", "num_cycles"),
    [
        ("cpu", 20),
        pytest.param("cpu", 200, marks=pytest.mark.slow),
        pytest.param("cuda", 30, marks=pytest.mark.multigpu),
    ],
)
def test_making_and_destroying_groups_leaves_nothing(device: str, num_cycles: int, on_ranks: Any) -> None:
    for before, after in on_ranks(cycle, 2, device, num_cycles):
        grown = after.pop("resident KiB") - before.pop("resident KiB")
        assert after == before
        assert grown < 100 * num_cycles, f"{grown} KiB in {num_cycles} cycles"


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2}, r"rank of group 'g' must be 0 to 1 for a world_size of 2, got 2"),
        ({"rank": -1}, r"rank of group 'g' must be 0 to 1 .* got -1"),
        ({"world_size": 0}, r"world_size of group 'g' must be a whole number of at least 1, got 0"),
        ({"timeout_s": 0}, r"timeout_s must be more than 0 seconds, got 0"),
        ({"name": "a/b"}, r"name of a group must be letters, digits, .* got 'a/b'"),
        ({"rendezvous": 5}, r"rendezvous must be a folder or a torch.distributed Store, got 5"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    given = {"rank": 0, "world_size": 2, "rendezvous": tmp_path, "timeout_s": 0.2, "name": "g"} | options
    with pytest.raises(InvalidInputError, match=text):
        new_group("cpu", **given)


def test_a_tensor_that_cannot_be_moved_is_named(tmp_path: Path) -> None:
    with new_group("cpu", rank=0, world_size=1, rendezvous=tmp_path) as group:
        for call, text in [
            (lambda: group.all_gather(torch.tensor(1.0)), r"takes tensors of at least one dimension; give x.reshape"),
            (lambda: group.all_reduce([1.0]), r"takes plain dense tensors, got list"),
            (lambda: group.all_reduce(torch.ones(2, device="meta")), r"on cpu or on the host, got meta"),
            (lambda: group.all_to_all([]), r"takes a tensor for each rank, got 0"),
            (lambda: group.broadcast(torch.ones(1), 1), r"source must be a rank of group .*, got 1"),
            (lambda: group.send(torch.ones(1), 0), r"destination must be a rank of group .* and not its own, got 0"),
            (lambda: group.all_gather(torch.ones(2), sizes=[3]), r"sizes of all_gather must be .* 2 on this rank 0"),
            (lambda: group.all_to_all([torch.ones(2)], sizes=[3]), r"sizes of all_to_all must be .* 2 of its own"),
            (lambda: group.reduce_scatter(torch.ones(2), sizes=[3]), r"sizes of reduce_scatter must be .* 2 in all"),
            (lambda: group.all_reduce(torch.ones(1), "premul_sum"), r"'premul_sum' takes a factor, and no other does"),
            (lambda: group.all_reduce(torch.ones(1), factor=2.0), r"'premul_sum' takes a factor, and no other does"),
        ]:
            with pytest.raises(InvalidInputError, match=text):
                call()
        assert group.all_reduce(torch.ones(1)).item() == 1.0  # none of them broke it


def test_ranks_that_do_not_join_are_named(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 1 of group 'g' waited 0.3 s for rank\(s\) 0, 2 of 3"
    ) as error:
        new_group("cpu", rank=1, world_size=3, rendezvous=tmp_path, timeout_s=0.3, name="g")
    assert error.value.ranks == (0, 2)
    assert time.monotonic() - began < 5.0
    assert isinstance(error.value, TimeoutError)


def test_a_rank_given_twice_is_told_so(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    store.add("rlcore/g/1/joined/0", 1)  # another process
    with pytest.raises(CollectiveError, match=r"rank 0 of group 'g' has joined already .*new folder or name"):
        new_group("cpu", rank=0, world_size=1, rendezvous=store, name="g")
    # What a killed run leaves in a folder.
    Meeting(tmp_path, "g", rank=0, world_size=1, library="gloo", timeout_s=1.0)
    leftover = run_python_with_group(tmp_path)
    assert "rank 0 of group 'g' has joined already" in leftover


def run_python_with_group(folder: Path) -> str:
    """Standard error of a new process that joins, as its first, the group of this name."""
    code = (
        "from rlcore.collectives.groups import new_group\n"
        f"new_group('cpu', rank=0, world_size=1, rendezvous={str(folder)!r}, name='g')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


def join_with(rank: Any, what: str) -> str:
    options = {"timeout_s": 20.0, "rendezvous": rank.folder, "name": f"misfit-{what}"}
    with pytest.raises(CollectiveError) as error:
        if what == "world_size":
            new_group("cpu", rank=rank.rank, world_size=2 + rank.rank, **options)
        else:
            Meeting(
                rank.folder, options["name"], rank=rank.rank, world_size=2, library=f"lib{rank.rank}", timeout_s=20.0
            )
    return str(error.value)


@pytest.mark.parametrize(("what", "values"), [("world_size", ("2", "3")), ("library", ("'lib0'", "'lib1'"))])
def test_ranks_told_different_things_all_say_so(what: str, values: tuple[str, str], on_ranks: Any) -> None:
    texts = on_ranks(join_with, 2, what)
    for me, text in enumerate(texts):
        assert text == (
            f"group 'misfit-{what}': rank {1 - me} was given {what} {values[1 - me]}, and rank {me} {values[me]}; "
            "all ranks must be given the same"
        )


def fail_to_arrive(rank: Any, world_size: int) -> tuple[str, tuple[int, ...], float]:
    group = rank.new_group("cpu", world_size, "late")
    try:
        if rank.rank == 1:
            time.sleep(4.0)
            return "", (), 0.0
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as error:
            group.barrier(timeout_s=1.5)
        waited = time.monotonic() - began
        with pytest.raises(
            StateError, match=r"barrier of group 'late' .* which has failed \(barrier: barrier of group"
        ):
            group.barrier()
        return str(error.value), error.value.ranks, waited
    finally:
        group.destroy()


def test_a_barrier_names_the_rank_that_did_not_come(on_ranks: Any) -> None:
    answers = on_ranks(fail_to_arrive, 3, 3)
    for rank in (0, 2):
        text, absent, waited = answers[rank]
        assert text == (
            f"barrier of group 'late' (rank {rank} of 3, cpu:{rank}) did not end within 1.5 s: rank 1 did not arrive"
        )
        assert absent == (1,)
        assert waited < 4.0


def call_another(rank: Any) -> str:
    group = rank.new_group("cpu", 3, "mixed", timeout_s=1.5)
    with pytest.raises(CollectiveError) as error:
        if rank.rank == 2:
            group.all_to_all([torch.ones(1)] * 3, sizes=[1, 1, 1])
        else:
            group.barrier()
    group.destroy()
    return str(error.value)


def test_a_rank_in_another_operation_is_named(on_ranks: Any) -> None:
    texts = on_ranks(call_another, 3)
    assert any("rank 2 waits in all_to_all" in text for text in texts[:2]), texts


def die_in(rank: Any, operation: str) -> tuple[str, tuple[int, ...], float] | None:
    group = rank.new_group("cpu", 3, f"mortal-{operation}", timeout_s=30.0)
    group.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerDiedError) as error:
        if operation == "recv" and rank.rank == 0:
            group.recv(torch.ones(1), 1)
        else:
            group.all_reduce(torch.ones(1_000_000))
    group.destroy()
    return str(error.value), error.value.ranks, time.monotonic() - began


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_a_rank_whose_process_was_killed_is_named_at_once(operation: str, on_ranks: Any) -> None:
    answers = on_ranks(die_in, 3, operation, may_end=(1,))
    assert answers[1] is None
    for rank in (0, 2):
        text, dead, seconds = answers[rank]
        assert "of group 'mortal" in text
        assert "rank 1 (process " in text
        assert text.endswith("has ended; destroy() the group and make one without it")
        assert dead == (1,)
        assert seconds < 10.0


# ------------------------------------------------------------------------------------------------ on 2 GPUs


def sleep_and_wake(rank: Any) -> tuple[int, int]:
    place = get_device(f"cuda:{rank.rank}")
    keep = rank.group("cuda", 2)
    values = torch.ones(1 << 20, device=place.torch_device)
    keep.all_reduce(values)
    keep.barrier()
    free = lambda: torch.cuda.mem_get_info(place.torch_device)[0]  # noqa: E731
    group = rank.new_group("cuda", 2, "sleeper")
    group.all_reduce(values)
    group.barrier()
    awake = free()
    keep.barrier()
    group.destroy()
    keep.barrier()
    asleep = free()
    keep.barrier()
    group.rebuild()
    values.fill_(1.0)
    assert group.all_reduce(values)[0].item() == 2.0
    group.destroy()
    return awake, asleep


@pytest.mark.multigpu
def test_a_destroyed_group_gives_device_memory_back(on_ranks: Any) -> None:
    for awake, asleep in on_ranks(sleep_and_wake, 2):
        print(f"freed by destroy: {asleep - awake} bytes")
        assert asleep > awake


def form_with_priority(rank: Any) -> tuple[bool, float]:
    with rank.new_group("cuda", 2, "urgent", is_high_priority=True, timeout_s=45.0) as group:
        ones = torch.ones(4, device=group.device.torch_device)
        group.all_reduce(ones)
        options = group.process_group._get_backend(group.device.torch_device).options
        assert ones.tolist() == [2.0] * 4
        return options.is_high_priority_stream, options._timeout.total_seconds()


@pytest.mark.multigpu
def test_a_group_on_a_high_priority_stream(on_ranks: Any) -> None:
    assert on_ranks(form_with_priority, 2) == [(True, 45.0)] * 2


def fail_to_arrive_on_gpu(rank: Any) -> str:
    group = rank.new_group("cuda", 2, "late-gpu")
    if rank.rank == 1:
        time.sleep(4.0)
        text = ""
    else:
        with pytest.raises(CollectiveTimeoutError) as error:
            group.barrier(timeout_s=1.5)
        text = str(error.value)
    group._error = group._error or "the other rank gave up"
    group.destroy()
    return text


@pytest.mark.multigpu
def test_a_barrier_of_gpus_names_the_rank_that_did_not_come(on_ranks: Any) -> None:
    assert "did not end within 1.5 s: rank 1 did not arrive" in on_ranks(fail_to_arrive_on_gpu, 2)[0]
