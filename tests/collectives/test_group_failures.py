"""Ranks that cannot go on raise errors: they say what was wrong, on which rank, and when."""

from __future__ import annotations

import os
import subprocess
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
