"""Ranks that cannot go on raise errors: they say what was wrong, on which rank, and when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import FileStore

from rlcore.collectives import rendezvous
from rlcore.collectives.groups import new_group
from rlcore.collectives.rendezvous import Rendezvous, _own_info
from rlcore.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    InvalidInputError,
    PeerDiedError,
    StateError,
)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2}, r"rank of group 'g' must be 0 to 1 for a world_size of 2, got 2"),
        ({"rank": -1}, r"rank of group 'g' must be 0 to 1 .* got -1"),
        ({"world_size": 0}, r"world_size of group 'g' must be a whole number of at least 1, got 0"),
        ({"timeout_s": 0}, r"timeout_s must be more than 0 seconds, got 0"),
        ({"name": "a/b"}, r"name of a group must be letters, digits, .* got 'a/b'"),
        (
            {"rendezvous": "/proc/nowhere"},
            r"rendezvous must be a folder that this rank can write, got '/proc/nowhere'",
        ),
        ({"device": 5}, r"a device is a name such as 'cuda' or 'cuda:1', a torch.device, .* got int: 5"),
        ({"rendezvous": 5}, r"rendezvous must be a folder or a torch.distributed Store, got 5"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    given = {"device": "cpu", "rank": 0, "world_size": 2, "rendezvous": tmp_path, "timeout_s": 0.2, "name": "g"}
    with pytest.raises(InvalidInputError, match=text):
        new_group(**given | options)


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
            (lambda: group.broadcast(torch.ones(1), source="0"), r"source must be a rank of group .*, got '0'"),
            (lambda: group.broadcast(torch.ones(1), source=0.0), r"source must be a rank of group .*, got 0.0"),
            (lambda: group.broadcast(torch.ones(1), source=False), r"source must be a rank of group .*, got False"),
            (lambda: group.send(torch.ones(1), None), r"destination must be a rank of group .*, got None"),
            (lambda: group.recv(torch.ones(1), [1]), r"source must be a rank of group .*, got \[1\]"),
            (
                lambda: group.all_reduce(torch.eye(2).to_sparse()),
                r"got one of layout torch.sparse_coo; give",
            ),
            (lambda: group.all_reduce(torch.ones(1), "mean"), r"must be one of sum, avg, .* got 'mean'"),
            (
                lambda: group.all_reduce(torch.ones(1), "premul_sum", factor="2"),
                r"takes a number, or None as fac",
            ),
            (lambda: group.all_gather(torch.ones(2), sizes=2), r"takes a list of whole numbers .* as sizes, got 2"),
            (lambda: group.all_gather(torch.ones(2), sizes=[2.0]), r"takes a list of whole numbers .* got \[2.0\]"),
            (lambda: group.reduce_scatter(torch.ones(2), sizes=["2"]), r"takes a list of whole numbers .* got \['2'\]"),
            (lambda: group.reduce_scatter(torch.ones(2), sizes=[-2]), r"takes a list of whole numbers .* got \[-2\]"),
            (lambda: group.all_to_all(None), r"all_to_all takes a list or tuple as tensors, got None"),
            (lambda: group.all_to_all(torch.ones(1, 2)), r"all_to_all takes a list or tuple as tensors, got tensor"),
            (lambda: group.all_to_all([torch.ones(2)], sizes=2), r"takes a list of whole numbers .* as sizes, got 2"),
            (lambda: group.barrier(timeout_s="5"), r"barrier takes more than 0 seconds, or None as timeout_s, got '5'"),
            (lambda: group.barrier(timeout_s=float("nan")), r"barrier takes more than 0 seconds, .* got nan"),
            (lambda: group.exchange("text"), r"exchange takes bytes as data, got 'text'"),
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
    assert time.monotonic() - began < 30.0, "and not the default timeout"
    assert isinstance(error.value, TimeoutError)


def test_a_rank_given_twice_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    store.add("rlcore/g/1/joined/0", 1)  # another process
    with pytest.raises(CollectiveError, match=r"rank 0 of group 'g' has joined already .*new folder or name"):
        new_group("cpu", rank=0, world_size=1, rendezvous=store, name="g")
    # What a killed run leaves in a folder is there for the next one, which begins to count groups again.
    Rendezvous(tmp_path, "g", rank=0, world_size=1, library="gloo", timeout_s=1.0)
    monkeypatch.setattr(rendezvous, "_num_joined", Counter())
    with pytest.raises(CollectiveError, match=r"rank 0 of group 'g' has joined already"):
        new_group("cpu", rank=0, world_size=1, rendezvous=tmp_path, name="g")


def test_the_folder_of_a_group_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Rendezvous(tmp_path, "g", rank=0, world_size=1, library="gloo", timeout_s=60.0)
    finally:
        os.umask(before)
    assert (tmp_path / "g-1").stat().st_mode & 0o777 == 0o700


def publish_info(folder: Path, pid: int, started: int | None) -> None:
    """Write what rank 1 of 2, of this process, has written when it is killed while it waits for rank 0."""
    (folder / "g-1").mkdir(mode=0o700)
    (folder / "g-1" / "member-1").touch()
    store = FileStore(str(folder / "g-1" / "store"))
    store.add("joined/1", 1)
    info = msgspec.structs.replace(_own_info(2, "gloo"), pid=pid, started=started)
    store.set("info/1", msgspec.json.encode(info).decode())


@pytest.mark.parametrize("is_number_used_again", [False, True])
def test_a_rank_that_was_killed_before_the_others_came_is_named(tmp_path: Path, is_number_used_again: bool) -> None:
    with subprocess.Popen(["true"]) as killed:
        killed.wait()
    pid = os.getpid() if is_number_used_again else killed.pid
    publish_info(tmp_path, pid, started=1)
    began = time.monotonic()
    with pytest.raises(PeerDiedError, match=rf"forming group 'g' .*rank 1 \(process {pid}\) has ended; give") as error:
        new_group("cpu", rank=0, world_size=2, rendezvous=tmp_path, timeout_s=90.0, name="g")
    assert error.value.ranks == (1,)
    assert time.monotonic() - began < 60.0, "and not the timeout"
    assert not list(tmp_path.iterdir()), "the last living rank left, and what was written is still there"


def join_with(rank: Any, what: str) -> str:
    options = {"timeout_s": 60.0, "rendezvous": rank.folder, "name": f"misfit-{what}"}
    with pytest.raises(CollectiveError) as error:
        if what == "world_size":
            new_group("cpu", rank=rank.rank, world_size=2 + rank.rank, **options)
        else:
            Rendezvous(
                rank.folder, options["name"], rank=rank.rank, world_size=2, library=f"lib{rank.rank}", timeout_s=60.0
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
            return "", (), 0.0
        rank.say(f"late-{rank.rank}-comes")
        rank.hear("late-0-comes", "late-2-comes")
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as error:
            group.barrier(timeout_s=5.0)
        waited = time.monotonic() - began
        with pytest.raises(
            StateError, match=r"barrier of group 'late' .* which has failed \(barrier: barrier of group"
        ):
            group.barrier()
        return str(error.value), error.value.ranks, waited
    finally:  # none goes while another waits: that one would see the lost connection
        rank.say(f"late-{rank.rank}-goes")
        rank.hear(*(f"late-{number}-goes" for number in range(world_size)))
        group.destroy()


def test_a_barrier_names_the_rank_that_did_not_come(on_ranks: Any) -> None:
    answers = on_ranks(fail_to_arrive, 3, 3)
    for rank in (0, 2):
        text, absent, waited = answers[rank]
        assert text == (
            f"barrier of group 'late' (rank {rank} of 3, cpu:{rank}) did not end within 5 s: rank 1 did not arrive"
        )
        assert absent == (1,)
        assert waited < 25.0, "and not the timeout of the group"


def call_another(rank: Any) -> str:
    with rank.new_group("cpu", 3, "mixed") as group, pytest.raises(CollectiveError) as error:
        if rank.rank == 2:
            group.all_to_all([torch.ones(1)] * 3, sizes=[1, 1, 1])
        else:
            group.barrier(timeout_s=5.0)
    return str(error.value)


def test_a_rank_in_another_operation_is_named(on_ranks: Any) -> None:
    texts = on_ranks(call_another, 3)
    assert any("rank 2 waits in all_to_all" in text for text in texts[:2]), texts


def refuse_alone(rank: Any, how: str) -> tuple[str, tuple[int, ...], float] | None:
    group = rank.new_group("cpu", 3, f"refused-{how}", timeout_s=90.0)
    for _ in range(2):  # all alike: the group goes on
        with pytest.raises(InvalidInputError):
            group.all_reduce(torch.ones(1), "mean")
    assert group.all_reduce(torch.ones(1)).item() == 3.0
    began = time.monotonic()
    if rank.rank == 1:
        with pytest.raises((InvalidInputError, RuntimeError)):
            if how == "peer":
                group.send(torch.ones(1).to_sparse(), 0)
            elif how == "memory":
                group.all_reduce(torch.ones(1).expand(1 << 55))  # has to be copied
            else:
                group.all_reduce(torch.ones(1), factor="2")
        answer = None
    elif how == "peer" and rank.rank == 2:
        answer = None
    else:
        with pytest.raises(CollectiveError) as error:
            group.recv(torch.ones(1), 1) if how == "peer" else group.all_reduce(torch.ones(1))
        answer = str(error.value), error.value.ranks, time.monotonic() - began
    rank.say(f"refused-{how}-{rank.rank}")  # rank 1 keeps its connections until the others know
    rank.hear(*(f"refused-{how}-{number}" for number in range(3)))
    group._error = group._error or "the others have failed"
    group.destroy()
    return answer


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("argument", "InvalidInputError: all_reduce takes a number, or None as factor, got '2'"),
        ("memory", "RuntimeError: "),
        ("peer", "InvalidInputError: send of group 'refused-peer' (rank 1 of 3, cpu:1) takes plain dense tensors"),
    ],
    ids=["argument", "memory", "peer"],
)
def test_a_rank_that_refuses_alone_is_named_at_once(how: str, reason: str, on_ranks: Any) -> None:
    answers = on_ranks(refuse_alone, 3, how)
    for text, ranks, seconds in filter(None, answers):
        assert f"failed: rank 1 refused it: {reason}" in text
        assert ranks == (1,)
        assert seconds < 30.0, "and not the timeout of the group"
    assert [answer is None for answer in answers] == [False, True, how == "peer"]


def interrupt_recv(rank: Any) -> tuple[str, tuple[int, ...], float] | float:
    from unittest import mock

    from rlcore.collectives.peers import PeerMonitor

    group = rank.new_group("cpu", 2, "interrupted", timeout_s=90.0)
    if rank.rank == 1:
        rank.hear("interrupted")
        began = time.monotonic()
        with pytest.raises(CollectiveError) as error:
            group.send(torch.ones(1), 0)
        answer: Any = str(error.value), error.value.ranks, time.monotonic() - began
    else:
        wait_for, waits = PeerMonitor.wait_for, threading.Event()

        def announced(*arguments: Any) -> None:
            waits.set()
            wait_for(*arguments)

        def press_ctrl_c() -> None:
            waits.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        with mock.patch.object(PeerMonitor, "wait_for", announced), pytest.raises(KeyboardInterrupt):
            threading.Thread(target=press_ctrl_c).start()
            began = time.monotonic()
            group.recv(torch.ones(1), 1)
        answer = time.monotonic() - began
        rank.say("interrupted")
    rank.say(f"interrupted-{rank.rank}")
    rank.hear("interrupted-0", "interrupted-1")
    group.destroy()
    return answer


def test_ctrl_c_ends_a_receive_at_once_and_its_sender_is_told(on_ranks: Any) -> None:
    seconds, (text, ranks, others_seconds) = on_ranks(interrupt_recv, 2)
    assert max(seconds, others_seconds) < 30.0, "and not the timeout of the group"
    assert "rank 0 gave up: recv from rank 1: KeyboardInterrupt" in text
    assert ranks == (0,)


def call_differently(rank: Any) -> None:
    me = rank.rank
    one, two = torch.ones(1), torch.ones(2_000)
    group = rank.new_group("cpu", 2, "unlike")
    for call, told in [
        (
            lambda: group.all_reduce((one, two)[me]),
            "all_reduce of float32 (1,) on cpu, op 'sum'; rank 1 calls all_reduce",
        ),
        (lambda: group.all_reduce(one.to((torch.int32, torch.float32)[me])), "rank 0 calls all_reduce of int32 (1,)"),
        (lambda: group.all_reduce(one, ("sum", "max")[me]), "rank 1 calls all_reduce of float32 (1,) on cpu, op 'max'"),
        (lambda: group.reduce_scatter((one, two)[me]), "rank 1 calls reduce_scatter of float32 (2000,)"),
        (lambda: group.broadcast((one, two)[me], 0), "rank 1 calls broadcast of float32 (2000,) on cpu, source 0"),
        (lambda: group.broadcast(one, me), "rank 1 calls broadcast of float32 (1,) on cpu, source 1"),
        (
            lambda: group.all_gather(one, sizes=([1, 1], [2_000, 1])[me]),
            "float32 rows of () on cpu, sizes [2000, 1]",
        ),
        (
            lambda: group.all_to_all([one, one], sizes=([1, 2], [1, 1])[me]),
            "rank 1 sends 1 rows to rank 0, whose sizes",
        ),
        (lambda: group.send(one, 1) if me == 0 else group.recv(two, 0), "rank 0 has float32 (1,) on cpu; rank 1 has"),
        (lambda: group.broadcast(one, 0) if me == 0 else group.all_reduce(two), "rank 0 calls broadcast of float32"),
    ]:
        with pytest.raises(CollectiveError, match=re.escape(told)):
            call()
    assert group.all_reduce(one.clone()).item() == 2.0
    group.destroy()


def call_differently_later(rank: Any) -> None:
    from unittest import mock

    me = rank.rank
    with mock.patch.dict(os.environ, RLCORE_DEBUG="" if me else "1"):  # one rank that asks for it is enough
        group = rank.new_group("cpu", 2, "unlike-later")
    assert group.all_reduce(torch.ones(1)).item() == 2.0
    with pytest.raises(CollectiveError, match=r"^all_reduce of group .*rank 1 calls all_reduce of float32 \(2000,\)"):
        group.all_reduce(torch.ones((1, 2_000)[me]))
    with pytest.raises(
        CollectiveError, match=r"all ranks must call the same; rank 0 calls barrier; rank 1 calls all_re"
    ):
        group.barrier() if me == 0 else group.all_reduce(torch.ones(2_000))
    if me == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"^barrier of .* within 1 s: rank 1 did not arrive"):
            group.barrier(timeout_s=1.0)
        rank.say("rank-1-was-late")
    rank.hear("rank-1-was-late")
    group._error = group._error or "the other rank has failed"
    group.destroy()


def test_calls_that_differ_are_told_on_all_ranks_the_first_time(on_ranks: Any) -> None:
    on_ranks(call_differently, 2)


def test_calls_that_differ_later_are_told_where_one_rank_debugs(on_ranks: Any) -> None:
    on_ranks(call_differently_later, 2)


# ------------------------------------------------------------------------- a library that connects its devices first


def connect(rank: Any, acts: list[str], timeout_s: float) -> tuple[str, tuple[int, ...], float]:
    """Form a group whose library, as NCCL, has no deadline for it; return the error, or the name of the group.

    Args:
        acts: by rank: "waits" for good, "returns", or raises what it says.
    """
    import torch.distributed as dist

    from rlcore.devices.generic import GenericTorchDevice
    from rlcore.types import DeviceSpec

    class Eager(dist.ProcessGroupGloo):
        supports_splitting = True

        def eager_connect_single_device(self, device: torch.device) -> None:
            assert device == torch.device("meta", 0)
            if (act := acts[rank.rank]) == "waits":
                threading.Event().wait()
            if act != "returns":
                raise RuntimeError(act)

    def create(store: Any, number: int, size: int, timeout: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return Eager(store, number, size, options)

    if "eager" not in dist.Backend.backend_list:
        dist.Backend.register_backend("eager", create, devices=["cpu"])
    dist.Backend._plugins["EAGER"] = dist.Backend._BackendPlugin(create, extended_api=False)  # of this call
    spec = DeviceSpec(
        name="other", vendor="a third party", torch_type="meta", priority=1, api_version=(1, 0),
        loader="rlcore.devices.generic:GenericTorchDevice", collective_backend="eager",
    )  # fmt: skip

    class Other(GenericTorchDevice):
        @property
        def torch_device(self) -> torch.device:
            return torch.device("meta", 0)

        def synchronize(self) -> None:
            pass

    name = f"eager-{'-'.join(act.replace(' ', '.') for act in acts)}"
    started = time.monotonic()
    options: dict[str, Any] = {"rendezvous": rank.folder, "timeout_s": timeout_s, "name": name}
    try:
        with new_group(Other(spec, rank.rank), rank=rank.rank, world_size=2, **options) as group:
            return str(group.all_reduce(torch.ones(1)).tolist()), (), time.monotonic() - started
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}", error.ranks, time.monotonic() - started


def test_a_rank_that_a_library_keeps_waiting_hears_why_another_failed(on_ranks: Any) -> None:
    """NCCL's own wait has no end: another kind of memory at the other end was enough."""
    (waits, blamed, seconds), (fails, own, _) = on_ranks(connect, 2, ["waits", "invalid handle"], 60.0)
    assert re.match(r"CollectiveError: forming of group .* \(rank 1 of 2, other:1\) failed: invalid handle$", fails)
    assert re.match(r"CollectiveError: forming of group .* failed; before, rank 1 gave up: .*: invalid handle$", waits)
    assert (blamed, own) == ((1,), (1,))
    assert seconds < 30


def test_ranks_that_a_library_keeps_waiting_for_good_say_so_at_the_timeout(on_ranks: Any) -> None:
    for text, _, seconds in on_ranks(connect, 2, ["waits", "waits"], 8.0):
        assert re.match(
            r"CollectiveTimeoutError: forming of group .* did not end within 8 s: all ranks wait", text
        ) or (
            "gave up" in text  # the one that looked later hears of the other's
        )
        assert 6 < seconds < 60


def test_ranks_that_a_library_connects_form_a_group(on_ranks: Any) -> None:
    assert [text for text, *_ in on_ranks(connect, 2, ["returns", "returns"], 60.0)] == ["[2.0]", "[2.0]"]
