"""Trees of tensors over ranks: what arrives, in how many messages, and what ranks with different trees are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcore.collectives import containers
from rlcore.errors import CollectiveError, InvalidInputError, UnsupportedError


def tree_of(owner: int, place: Any, extra_rows: int = 0) -> Any:
    """Uneven, of mixed dtypes, nested, with empty parts and a host tensor."""
    rows = owner + extra_rows
    return {
        "ids": torch.arange(rows * 3, device=place).view(rows, 3) + owner,
        "nested": [
            {"half": torch.full((rows + 1,), owner + 0.5, dtype=torch.bfloat16, device=place)},
            (
                torch.tensor([owner % 2 == 0] * (2 * rows), dtype=torch.bool, device=place),
                torch.tensor(float(owner), device=place),
            ),
        ],
        7: torch.full((rows, 2, 2), owner, dtype=torch.uint8, device=place)[:, :, 0],  # not contiguous
        "host": torch.full((rows,), owner, dtype=torch.int16),
        "none": {},
    }


def assert_same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key, value in want.items():
            assert_same(got[key], value)
    else:
        assert len(got) == len(want)
        for pair in zip(got, want, strict=True):
            assert_same(*pair)


class Counting:
    """A group that counts the messages."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.num_messages: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        if name in ("all_reduce", "all_gather", "all_to_all", "broadcast", "exchange"):
            self.num_messages[name] = self.num_messages.get(name, 0) + 1
        return value


def move_trees(rank: Any, device: str, world_size: int) -> None:
    group = Counting(rank.group(device, world_size))
    place, me = group.device.torch_device, rank.rank
    num_places = len({place, torch.device("cpu")})  # the host tensor goes by itself beside an accelerator's

    gathered = containers.all_gather(tree_of(me, place), group)
    assert len(gathered) == world_size
    for owner, got in enumerate(gathered):
        assert_same(got, tree_of(owner, place))
    assert group.num_messages == {"exchange": 1, "all_gather": num_places}

    group.num_messages.clear()
    swapped = containers.all_to_all([tree_of(me, place, peer) for peer in range(world_size)], group)
    for owner, got in enumerate(swapped):
        assert_same(got, tree_of(owner, place, me))
    assert group.num_messages == {"exchange": 1, "all_to_all": num_places}

    group.num_messages.clear()
    source = world_size - 1
    assert_same(
        containers.broadcast(tree_of(me, place) if me == source else None, group, source), tree_of(source, place)
    )
    assert group.num_messages == {"exchange": 1, "broadcast": num_places}
    mine = {"a": torch.full((3,), me, device=place)}
    assert_same(containers.broadcast(mine, group, 0), {"a": torch.full((3,), 0, device=place)})
    assert mine["a"].tolist() == [me] * 3

    group.num_messages.clear()
    tree = {
        "loss": torch.tensor(float(me), device=place),
        "counts": [torch.full((rows, 2), me, device=place) for rows in (0, 1, 4)],
        "ratio": torch.full((3,), me + 0.5, device=place),
    }
    total = sum(range(world_size))
    assert_same(
        containers.all_reduce(tree, group),
        {
            "loss": torch.tensor(float(total), device=place),
            "counts": [torch.full((rows, 2), total, device=place) for rows in (0, 1, 4)],
            "ratio": torch.full((3,), total + world_size / 2, device=place),
        },
    )
    assert tree["loss"].item() == me  # what was given stays
    assert group.num_messages == {"exchange": 1, "all_reduce": 2}  # one for each dtype
    assert containers.all_reduce({"a": torch.tensor([me], device=place)}, group, "max")["a"].tolist() == [source]
    assert containers.all_gather({}, group) == [{}] * world_size


def test_trees_are_moved_and_reduced_in_few_messages(world: tuple[str, int], on_ranks: Any) -> None:
    on_ranks(move_trees, world[1], *world)


def order_keys_otherwise(rank: Any) -> None:
    tree = {"a": torch.ones(1), "b": torch.zeros(2)}
    mine = tree if rank.rank == 0 else dict(reversed(tree.items()))
    for got in containers.all_gather(mine, rank.group("cpu", 2)):
        assert list(got) == list(mine)
        assert_same(dict(sorted(got.items())), tree)
    total = containers.all_reduce(mine, rank.group("cpu", 2))
    assert list(total) == list(mine)
    assert_same(dict(sorted(total.items())), {"a": torch.full((1,), 2.0), "b": torch.zeros(2)})


def test_dicts_in_another_order_are_the_same_tree(on_ranks: Any) -> None:
    on_ranks(order_keys_otherwise, 2)


class Masked(torch.Tensor):
    """Some subclass."""


def endless() -> list[Any]:
    tree: list[Any] = []
    tree.append(tree)
    return tree


ONE = {"a": torch.ones(2), "b": [torch.ones(2, 3), torch.ones(1)]}
MISFITS = {
    "absent": (
        {"a": torch.ones(2), "b": [torch.ones(2, 3)]},
        r"\['b'\]\[1\] is float32 \[.\] .* on rank 0, and absent",
    ),
    "extra": ({**ONE, "c": torch.ones(1)}, r"\['c'\] is absent on rank 0, and float32 \[.\] on the device on rank 1"),
    "dtype": (
        {**ONE, "a": torch.ones(2).int()},
        r"\['a'\] is float32 \[.\] on .* 0, and int32 \[.\] on the device on r",
    ),
    "shape": ({**ONE, "b": [torch.ones(2, 4), torch.ones(1)]}, r"\['b'\]\[0\] is float32 \[., 3\] .* float32 \[., 4\]"),
    "number": ({**ONE, "a": 5}, r"on rank 1, \['a'\] must be a tensor, dict, list or tuple, got int"),
    "key": ({**ONE, 2.5: torch.ones(1)}, r"on rank 1, the keys of the tree must be str or int, got 2.5"),
    "meta": (
        {**ONE, "a": torch.ones(2, device="meta")},
        r"on rank 1, \['a'\] is on meta; give it on cpu or on the host",
    ),
    "sparse": (
        {**ONE, "a": torch.eye(2).to_sparse()},
        r"on rank 1, \['a'\] must be a plain dense tensor, got one of layout torch.sparse_coo; give its to_dense\(\)",
    ),
    "subclass": (
        {**ONE, "a": Masked(torch.ones(2))},
        r"on rank 1, \['a'\] must be a plain dense tensor, got Masked; of a DTensor give its to_local\(\)",
    ),
    "large key": (
        {**ONE, 2**70: torch.ones(1)},
        r"on rank 1, the keys of the tree must be str or int, got 118059",
    ),
    "no text": ({**ONE, "\ud800": torch.ones(1)}, r"on rank 1, the keys of the tree must be str or int, got '\\ud800'"),
    "endless": (endless(), r"on rank 1, the tree is more than 100 containers deep, or contains itself"),
    "none": ({**ONE, "a": None}, r"on rank 1, \['a'\] must be a tensor, dict, list or tuple, got NoneType"),
    "bare": (torch.ones(2), r"the tensor is absent on rank 0|\['a'\] is .* and absent|the tensor is absent"),
}


def give_misfits(rank: Any, misfits: dict[str, Any]) -> list[str]:
    group = rank.group("cpu", 3)
    texts = []
    for misfit, _ in misfits.values():
        tree = misfit if rank.rank == 1 else ONE
        for call in (
            lambda tree: containers.all_reduce(tree, group),
            lambda tree: containers.all_gather(tree, group),
            lambda tree: containers.broadcast(tree, group, 2),
            lambda tree: containers.all_to_all([ONE, ONE, tree], group),
        ):
            with pytest.raises(CollectiveError) as error:
                call(tree)
            texts.append(str(error.value))
    with pytest.raises(CollectiveError, match=r"\['a'\] is float32 \[2\] on .* rank 0, and float32 \[3\]"):
        containers.all_reduce({"a": torch.ones(2 + (rank.rank == 1))}, group)
    group.barrier()  # nothing was sent that nobody took
    return texts


def test_a_tree_that_does_not_fit_is_named_on_every_rank(on_ranks: Any) -> None:
    texts = on_ranks(give_misfits, 3, MISFITS)
    assert texts[0] == texts[1] == texts[2]
    patterns = [text for _, text in MISFITS.values()]
    for number, text in enumerate(texts[0]):
        with pytest.raises(CollectiveError, match=patterns[number // 4]):
            raise CollectiveError(text)
        assert text.startswith(("all_reduce", "all_gather", "broadcast", "all_to_all")[number % 4] + " of a tree: ")


def call_differently(rank: Any) -> list[str]:
    """Rank 1 calls otherwise than the others."""
    group, tree = rank.group("cpu", 3), {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int32)}
    is_odd = rank.rank == 1
    texts = []
    for usual, odd in (
        (lambda: containers.all_gather(tree, group), lambda: containers.broadcast(tree, group, 0)),
        (lambda: containers.all_reduce(tree, group), lambda: containers.all_reduce(tree, group, "max")),
        (lambda: containers.broadcast(tree, group, 0), lambda: containers.broadcast(tree, group, 2)),
        (lambda: containers.broadcast(tree, group, 0), lambda: containers.broadcast(tree, group, "0")),
        (lambda: containers.broadcast(tree, group, 0), lambda: containers.broadcast(tree, group, 3)),
        (lambda: containers.all_to_all([tree] * 3, group), lambda: containers.all_to_all([tree] * 2, group)),
        (lambda: containers.all_to_all([tree] * 3, group), lambda: containers.all_to_all(None, group)),
    ):
        with pytest.raises(CollectiveError) as error:
            (odd if is_odd else usual)()
        assert error.value.ranks in ((0, 1), (1,))
        texts.append(str(error.value))
    for op, kind, text in (
        ("band", UnsupportedError, "band of float32 over .* bits are of integers and bool"),
        ("mean", InvalidInputError, "must be one of sum, avg, .*; got 'mean'"),
        ("premul_sum", InvalidInputError, "takes no 'premul_sum', which has a factor; multiply before"),
    ):
        with pytest.raises(kind, match=text):
            containers.all_reduce({"an int": tree["b"], "then": tree["a"]}, group, op)
    group.barrier()  # nothing was sent that nobody took
    assert tree["b"].tolist() == [1, 1]
    return texts


def test_calls_that_do_not_match_are_refused_on_every_rank(on_ranks: Any) -> None:
    texts = on_ranks(call_differently, 3)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0] == [
        "all_gather of a tree: rank 0 calls all_gather, and rank 1 broadcast source 0; all must call the same",
        "all_reduce of a tree: rank 0 calls all_reduce op 'sum', and rank 1 all_reduce op 'max'; all must call "
        "the same",
        "broadcast of a tree: rank 0 calls broadcast source 0, and rank 1 broadcast source 2; all must call the same",
        "broadcast of a tree: on rank 1, source must be a rank, 0 to 2, got '0'",
        "broadcast of a tree: on rank 1, source must be a rank, 0 to 2, got 3",
        "all_to_all of a tree: on rank 1, trees must be a list of one for each of 3 ranks, got 2",
        "all_to_all of a tree: on rank 1, trees must be a list of one for each of 3 ranks, got NoneType",
    ]


def test_what_is_no_group_is_refused() -> None:
    for call in (containers.all_reduce, containers.all_gather, containers.all_to_all):
        with pytest.raises(InvalidInputError, match=r"takes a group of rlcore.collectives.groups.new_group as group"):
            call(ONE, None)
    with pytest.raises(InvalidInputError, match=r"^broadcast of a tree takes a group of .* got 'world'$"):
        containers.broadcast(ONE, "world", source=0)
