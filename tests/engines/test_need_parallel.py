"""Arguments that are split over workers: every row goes to one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlcore.engines.need_parallel import NeedParallel, gathered, in_row_order, split_arguments
from rlcore.errors import InvalidInputError


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 5, 6])
def test_parts_are_contiguous_and_about_equal(parts: int, rows: int) -> None:
    split = NeedParallel({"a": list(range(rows)), "b": torch.arange(rows * 2).view(rows, 2)}).split(parts)
    assert [row for part in split for row in part["a"]] == list(range(rows))
    assert torch.equal(torch.cat([part["b"] for part in split]), torch.arange(rows * 2).view(rows, 2))
    sizes = [len(part["a"]) for part in split]
    assert max(sizes) - min(sizes) <= 1 and sizes == [len(part["b"]) for part in split]


def test_rows_are_dealt_out_by_cost_and_come_back_in_order() -> None:
    costs = torch.tensor([100, 1, 1, 98, 3, 50, 47])
    split = NeedParallel({"cost": costs, "name": list("abcdefg")}, balance_by=costs).split(3)
    assert sorted(int(part["cost"].sum()) for part in split) == [100, 100, 100]
    rows = NeedParallel(tuple("abcdefg"), balance_by=costs)
    calls = split_arguments([rows], {"other": 1}, 3)
    assert all(kwargs == {"other": 1} for _, kwargs in calls)
    joined = [name for args, _ in calls for name in args[0]]
    assert joined != list("abcdefg")
    assert in_row_order(joined, [rows], {}, 3) == list("abcdefg")
    assert in_row_order(torch.tensor(list(map(ord, joined))), [], {"x": rows}, 3).tolist() == list(b"abcdefg")


def test_costs_may_be_any_whole_numbers() -> None:
    for costs in (torch.tensor([3.0, 1.0, 2.0]), np.array([3, 1, 2]), (3, np.int64(1), 2)):
        assert sorted(NeedParallel(list("abc"), balance_by=costs).split(2)) == [["a"], ["b", "c"]]  # type: ignore[arg-type]


def test_results_that_are_dicts_are_joined_by_entry() -> None:
    results = [{"sum": torch.tensor([1, 2]), "name": ["a", "b"]}, {"sum": torch.tensor([3]), "name": ("c",)}]
    joined = gathered("scores", results, "cat")
    assert joined["sum"].tolist() == [1, 2, 3] and joined["name"] == ["a", "b", "c"]
    rows = NeedParallel([1, 2, 3], balance_by=[1, 1, 9])
    assert rows.rows_of(2) == [[2], [0, 1]]
    assert in_row_order(joined, [rows], {}, 2)["name"] == ["b", "c", "a"]
    with pytest.raises(InvalidInputError, match="needs one result a row: 1 results for 3 rows"):
        in_row_order(joined | {"name": ["a"]}, [rows], {}, 2)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            ["abc", "de"],
            r"does not fit what scores\(\) gave, 'abc': a str has no rows; lists, tuples, tensors and dicts",
        ),
        ([["a"], "bc"], "a str has no rows"),
        ([{"loss": 1.0}, {"loss": 2.0}], "a float has no rows"),
        ([{"a": [1]}, {"b": [1]}], "not all workers gave a dict of these entries"),
        ([{"a": [1]}, None], "not all workers gave a dict of these entries"),
    ],
)
def test_results_that_have_no_rows_are_not_joined(results: list[Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        gathered("scores", results, "cat")


def test_fewer_rows_than_workers_leave_some_without() -> None:
    assert sorted(map(len, NeedParallel([1, 2], balance_by=[5, 6]).split(4))) == [0, 0, 1, 1]


def test_what_cannot_be_split_is_named() -> None:
    with pytest.raises(InvalidInputError, match="takes a list, tuple, tensor or dict of them, got int"):
        NeedParallel(3)
    with pytest.raises(InvalidInputError, match=r"entries have one length, got {'a': 1, 'b': 2}"):
        NeedParallel({"a": [1], "b": [1, 2]})
    with pytest.raises(InvalidInputError, match="balance_by has 2 costs for 3 rows"):
        NeedParallel([1, 2, 3], balance_by=[1, 2])
    for costs, cost in (([5, float("nan"), 2], "nan"), (torch.tensor([5, 0.5, 2]), "0.5"), ([5, -1, 2], "-1")):
        with pytest.raises(InvalidInputError, match=f"balance_by takes whole numbers from 0, got {cost} for row 1"):
            NeedParallel([1, 2, 3], balance_by=costs)
    with pytest.raises(InvalidInputError, match="balance_by takes one cost a row in a list or tensor, got 3"):
        NeedParallel([1, 2, 3], balance_by=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="type must be 'dp' or 'seq', got 'tp'"):
        NeedParallel([1], type="tp")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="balance_by deals out rows; type='seq' splits the tokens of each"):
        NeedParallel([1, 2], type="seq", balance_by=[1, 1])
    with pytest.raises(InvalidInputError, match=r"takes rows of one length; pad them, or pack them to \[T\]"):
        NeedParallel([[1, 2], [3]], type="seq")


def test_tokens_are_split_as_hidden_states_are() -> None:
    def parts(data: Any) -> list[Any]:
        return NeedParallel(data, type="seq").split(4)

    assert [part.tolist() for part in parts(torch.arange(7))] == [[0, 1], [2, 3], [4, 5], [6]], "packed"
    assert [part.tolist() for part in parts(torch.arange(10).view(2, 5))] == [
        [[0, 1], [5, 6]],
        [[2, 3], [7, 8]],
        [[4], [9]],
        [[], []],
    ]
    assert parts({"ids": [[1, 2, 3], [4, 5, 6]], "flat": [7, 8]}) == [
        {"ids": [[1], [4]], "flat": [7]},
        {"ids": [[2], [5]], "flat": [8]},
        {"ids": [[3], [6]], "flat": []},
        {"ids": [[], []], "flat": []},
    ]
    calls = split_arguments([NeedParallel([1, 2]), NeedParallel([3, 4], type="seq")], {}, 4, 2)
    assert [args for args, _ in calls] == [[[1], [3]], [[1], [4]], [[2], [3]], [[2], [4]]]


def test_a_tensordict_is_split_as_one() -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs the package tensordict")
    data = tensordict.TensorDict({"a": torch.arange(5), "b": {"c": torch.arange(10).view(5, 2)}}, batch_size=5)
    split = NeedParallel(data).split(3)
    assert [part.batch_size for part in split] == [torch.Size([1]), torch.Size([2]), torch.Size([2])]
    assert torch.cat([part["b", "c"] for part in split]).tolist() == data["b", "c"].tolist()
    assert gathered("parts", split, "cat")["b", "c"].tolist() == data["b", "c"].tolist()
    dealt = NeedParallel({"batch": data, "cost": [5, 1, 1, 1, 1]}, balance_by=[5, 1, 1, 1, 1]).split(2)
    assert sorted(part["batch"]["a"].tolist() for part in dealt) == [[0], [1, 2, 3, 4]]
    with pytest.raises(InvalidInputError, match="its batch_size is empty"):
        NeedParallel(tensordict.TensorDict({"a": torch.arange(5)}, batch_size=[]))
