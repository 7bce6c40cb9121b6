"""Groups that stand alone: forming, moving, ending, forming again."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.collectives import containers
from rlcore.collectives.groups import new_group
from rlcore.errors import (
    CollectiveError,
    InvalidInputError,
    StateError,
    UnsupportedError,
)
from rlcore.process.tcp_sockets import (
    LISTEN,
    SYN_SENT,
    SocketAddress,
    foreign_connections,
    own_sockets,
    tcp_sockets,
)
from rlcore.registry import get_device
from tests.strangers import filters_sockets

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64)


def open_files() -> Iterator[str]:
    """Return what the descriptors of this process are; those that close meanwhile are left out."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def listening_addresses() -> set[str]:
    """Addresses on which this process accepts connections, as /proc/net/tcp writes them."""
    inodes = {link[8:-1] for link in open_files() if link.startswith("socket:[")}
    rows = [
        row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


LOOPBACK = "0100007F"


def test_a_backend_of_a_device_is_made_on_a_store_of_the_callers_own() -> None:
    """As for those who have ranks and a store, and want no group of rlcore's."""
    collectives = get_device("cpu").collectives
    store = torch.distributed.HashStore()
    backend = collectives.new_backend(store, rank=0, world_size=1, timeout_s=60.0, is_one_host=True)
    values = torch.arange(3.0)
    backend.allreduce([values]).wait()
    assert (backend.rank(), backend.size(), values.tolist()) == (0, 1, [0.0, 1.0, 2.0])
    with pytest.raises(UnsupportedError, match=r"a high-priority stream of collectives on cpu:0.*known of gloo"):
        collectives.new_backend(store, rank=0, world_size=1, timeout_s=60.0, is_high_priority=True)


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


def move_one_element(rank: Any, device: str, world_size: int) -> None:
    group = rank.group(device, world_size)
    me, last = rank.rank, world_size - 1

    def first_of_a_row(owner: int, rows: int = 1) -> torch.Tensor:
        """[rows] with a stride of 5, as ``logits[:, 0]`` of a batch of one row has, or of an empty one."""
        return torch.full((rows, 5), float(owner), device=group.device.torch_device)[:, 0]

    assert torch.cat(group.all_gather(first_of_a_row(me))).tolist() == list(range(world_size))
    assert torch.cat(group.all_gather(first_of_a_row(me, rows=0))).tolist() == []
    swapped = group.all_to_all([first_of_a_row(me) for _ in range(world_size)])
    assert torch.cat(swapped).tolist() == list(range(world_size))
    assert group.broadcast(first_of_a_row(me), last).tolist() == [last]
    assert group.all_reduce(first_of_a_row(1)).tolist() == [world_size]
    assert group.reduce_scatter(first_of_a_row(1), sizes=[1] + [0] * last).tolist() == [world_size] * (me == 0)
    if me == 0:
        group.send(first_of_a_row(7), last)
    elif me == last:
        assert group.recv(first_of_a_row(me), 0).tolist() == [7]
    for got in containers.all_gather({"values": first_of_a_row(3), "none": first_of_a_row(3, rows=0)}, group):
        assert got["values"].tolist() == [3]


def test_one_element_with_any_stride_is_moved(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(move_one_element, world[1], *world)


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
        "all_gather of group 'shared-cpu-2': all ranks must call the same; "
        "rank 0 calls all_gather of float32 rows of (3,) on cpu; rank 1 calls all_gather of float32 rows of (4,) on cpu"
    )
    with pytest.raises(CollectiveError, match=r"all_to_all .*rank 1 calls all_to_all of int32 rows of \(\) on cpu"):
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
    from unittest import mock

    import torch.distributed as dist

    ours = get_device(f"{device}:{rank.rank}")
    kwargs = ours.collectives.init_kwargs(timeout_s=30.0)
    store = dist.FileStore(str(rank.folder / f"default-{device}-{world_size}"), world_size)
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):  # torch's own group asks for the host's name otherwise
        dist.init_process_group(store=store, rank=rank.rank, world_size=world_size, **kwargs)
    try:
        default = dist.group.WORLD
        # Numbered the other way round: its ranks are its own.
        options = {"rendezvous": rank.folder, "timeout_s": 30.0, "name": f"turned-{world_size}"}
        turned = new_group(ours, rank=world_size - 1 - rank.rank, world_size=world_size, **options)
        for place in dict.fromkeys([torch.device("cpu"), ours.torch_device]):  # on all ranks in this order
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

    info = rendezvous._own_info
    elsewhere = lambda *args: rendezvous.msgspec.structs.replace(info(*args), network=f"host {rank.rank}")  # noqa: E731
    with mock.patch.object(rendezvous, "_own_info", elsewhere):
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


def listeners() -> set[SocketAddress]:
    own = own_sockets()
    return {one.local for one in tcp_sockets() if one.state == LISTEN and one.inode in own}


def knock(rank: Any) -> None:
    before = listeners()
    with rank.new_group("cpu", 2, "closed") as group, socket.socket() as stranger:
        (listener,) = listeners() - before
        stranger.setblocking(False)
        stranger.connect_ex(listener)
        assert [one.state for one in tcp_sockets() if one.local == stranger.getsockname()] == [SYN_SENT]
        assert group.all_reduce(torch.ones(1)).item() == 2.0


@filters_sockets
def test_a_group_takes_no_connection_once_its_ranks_are_connected(on_ranks: Any) -> None:
    on_ranks(knock, 2)


def knock_early_as_another_user(rank: Any) -> None:
    from unittest import mock

    from rlcore.collectives.gloo_listener import GlooListener

    wait, before, strangers = GlooListener.wait_until_connected, listeners(), []

    def knock(listener: GlooListener, timeout_s: float) -> None:
        (address,) = listeners() - before
        os.seteuid(54321)
        try:
            strangers.append(socket.socket())
        finally:
            os.seteuid(0)
        strangers[0].connect(address)
        while not foreign_connections():  # gloo's thread has not taken it yet
            time.sleep(0.002)
        wait(listener, timeout_s)

    with mock.patch.object(GlooListener, "wait_until_connected", knock), rank.new_group("cpu", 2, "early") as group:
        strangers[0].settimeout(60)
        assert strangers[0].recv(1) == b""
        assert group.all_reduce(torch.ones(1)).item() == 2.0
    strangers[0].close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
def test_a_connection_of_another_user_is_ended_when_a_group_is_formed(on_ranks: Any) -> None:
    on_ranks(knock_early_as_another_user, 2)


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
    for wrong in (-1, float("nan"), float("inf"), "30", None):
        with pytest.raises(InvalidInputError, match=rf"timeout_s must be more than 0 seconds, got {wrong!r}"):
            collectives.init_kwargs(timeout_s=wrong)


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^a dtype is one of torch's, such as torch.bfloat16; got 'float32'$"):
        get_device("cpu").collectives.reduction("sum", "float32")


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
