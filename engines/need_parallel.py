"""``NeedParallel(x)``: an argument to be split over data-parallel or sequence-parallel workers; others are copied."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rlcore.arguments import LIST, NUMBER
from rlcore.errors import InvalidInputError
from rlcore.kernels.packing import balance, inverse_permutation
from rlcore.packed.sequence_parallel import own_tokens

Gather = Literal["list", "cat", "first", "mean"]
"""How the results of the workers become one."""


@dataclass(frozen=True, slots=True)
class NeedParallel:
    """Split ``data``, a sequence, a tensor, a TensorDict, or a dict of them, over the workers.

    "dp" splits the first dimension over the data-parallel workers. They get contiguous parts whose sizes differ by at
    most one; with fewer rows than workers, some get none. The sequence-parallel workers of one get the same.

    "seq" splits tokens over the sequence-parallel workers, as ``hidden_states`` does: all parts have the same size but
    the last ones. The tokens are the only dimension of a packed [T], the second one of a padded [N, L, ...], and those
    of each row of a list of rows. Every data-parallel worker gets the same.
    """

    data: Any
    type: Literal["dp", "seq"] = "dp"
    balance_by: Sequence[int] | Tensor | None = None
    """A cost for each row, such as its tokens: workers get parts of about equal cost, rows in their order."""

    def __post_init__(self) -> None:
        if self.type not in ("dp", "seq"):
            raise InvalidInputError(f"NeedParallel.type must be 'dp' or 'seq', got {self.type!r}")
        rows = _num_rows(self.data)
        if self.type == "seq":
            _check_tokens(self.data)
        if self.balance_by is not None:
            if self.type == "seq":
                raise InvalidInputError("NeedParallel.balance_by deals out rows; type='seq' splits the tokens of each")
            _check_costs(self.balance_by, rows)

    def split(self, parts: int) -> list[Any]:
        """Return ``parts`` pieces; without ``balance_by`` they are contiguous and in order."""
        if self.type == "seq":
            return [_tokens(self.data, part, parts) for part in range(parts)]
        if self.balance_by is not None:
            return [_select(self.data, rows) for rows in self.rows_of(parts)]
        rows = _num_rows(self.data)
        bounds = [rows * part // parts for part in range(parts + 1)]
        return [_slice(self.data, start, stop) for start, stop in itertools.pairwise(bounds)]

    def rows_of(self, parts: int) -> list[list[int]]:
        """Return the rows of each part, where ``balance_by`` is given."""
        assert self.balance_by is not None
        return balance([int(cost) for cost in self.balance_by], num_bins=parts)


def _check_costs(costs: Any, rows: int) -> None:
    values = costs.tolist() if isinstance(costs, Tensor | np.ndarray) else costs
    if not LIST.has(values):
        raise InvalidInputError(f"NeedParallel.balance_by takes one cost a row in a list or tensor, got {costs!r}")
    if len(values) != rows:
        raise InvalidInputError(f"NeedParallel.balance_by has {len(values)} costs for {rows} rows")
    for row, cost in enumerate(values):
        if not (NUMBER.has(cost) and cost >= 0 and cost % 1 == 0):  # a NaN and infinity are not whole either
            raise InvalidInputError(f"NeedParallel.balance_by takes whole numbers from 0, got {cost!r} for row {row}")


def _num_rows(data: Any) -> int:
    if _is_tensordict(data):
        if not data.batch_dims:
            raise InvalidInputError("NeedParallel takes a TensorDict with a batch dimension; its batch_size is empty")
        return int(data.shape[0])
    if isinstance(data, Mapping):
        lengths = {name: _num_rows(value) for name, value in data.items()}
        if len(set(lengths.values())) != 1:
            raise InvalidInputError(f"NeedParallel takes a dict whose entries have one length, got {lengths}")
        return next(iter(lengths.values()))
    if isinstance(data, Tensor) and data.ndim:
        return data.shape[0]
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return len(data)
    raise InvalidInputError(f"NeedParallel takes a list, tuple, tensor or dict of them, got {type(data).__name__}")


def _is_tensordict(data: object) -> bool:
    tensordict = sys.modules.get("tensordict")  # a TensorDict exists only after this import
    return tensordict is not None and isinstance(data, tensordict.TensorDictBase)


def _slice(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, Mapping) and not _is_tensordict(data):
        return {name: _slice(value, start, stop) for name, value in data.items()}
    return data[start:stop]


def _select(data: Any, rows: list[int]) -> Any:
    if _is_tensordict(data) or isinstance(data, Tensor):
        return data[torch.tensor(rows, dtype=torch.int64)]
    if isinstance(data, Mapping):
        return {name: _select(value, rows) for name, value in data.items()}
    return [data[row] for row in rows]


def _check_tokens(data: Any) -> None:
    """Refuse data whose tokens are not in a known dimension, and rows of several lengths."""
    if isinstance(data, Mapping) and not _is_tensordict(data):
        for value in data.values():
            _check_tokens(value)
    elif isinstance(data, Sequence):
        rows = [row for row in data if isinstance(row, Sequence) or (isinstance(row, Tensor) and row.dim())]
        if rows and (len(rows) != len(data) or len({len(row) for row in rows}) > 1):
            raise InvalidInputError("NeedParallel(type='seq') takes rows of one length; pad them, or pack them to [T]")


def _tokens(data: Any, part: int, parts: int) -> Any:
    """Return one part of the tokens of a row, or of each of several rows."""
    if _is_tensordict(data):
        return data.apply(lambda value: _tokens(value, part, parts), batch_size=data.batch_size[:1])
    if isinstance(data, Mapping):
        return {name: _tokens(value, part, parts) for name, value in data.items()}
    if isinstance(data, Tensor) and data.dim() > 1:
        own = own_tokens(data.shape[1], part, parts)
        return data[:, own.start : own.stop]
    if not isinstance(data, Tensor) and len(data) and isinstance(data[0], Sequence | Tensor):
        return [_tokens(row, part, parts) for row in data]
    own = own_tokens(len(data), part, parts)
    return data[own.start : own.stop]


def has_split_sequences(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the sequence-parallel workers of one data-parallel worker get different arguments."""
    return any(isinstance(one, NeedParallel) and one.type == "seq" for one in (*args, *kwargs.values()))


def split_arguments(
    args: Sequence[object],
    kwargs: Mapping[str, object],
    parts: int,
    sequence_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the (args, kwargs) of each of ``parts`` workers.

    Args:
        sequence_parallel_size: workers that share sequences.
        tensor_parallel_size: neighbours that compute the same.
    """
    sharing = sequence_parallel_size * tensor_parallel_size

    def spread(value: object) -> list[Any]:
        if not isinstance(value, NeedParallel):
            return [value] * parts
        if value.type == "seq":
            own = value.split(sequence_parallel_size) * (parts // sharing)
            return [piece for piece in own for _ in range(tensor_parallel_size)]
        own = value.split(parts // sharing)
        return [piece for piece in own for _ in range(sharing)]

    args_by_part = [spread(value) for value in args]
    kwargs_by_part = {name: spread(value) for name, value in kwargs.items()}
    return [
        (
            [values[part] for values in args_by_part],
            {name: values[part] for name, values in kwargs_by_part.items()},
        )
        for part in range(parts)
    ]


def in_row_order(joined: object, args: Sequence[object], kwargs: Mapping[str, object], parts: int) -> Any:
    """Return the joined results of all workers, one a row, in the row order of the argument that was balanced."""
    balanced = [
        one for one in (*args, *kwargs.values()) if isinstance(one, NeedParallel) and one.balance_by is not None
    ]
    if not balanced:
        return joined
    return _reordered(joined, inverse_permutation(balanced[0].rows_of(parts)))


def _reordered(joined: Any, places: list[int]) -> Any:
    if isinstance(joined, Mapping) and not _is_tensordict(joined):
        return {name: _reordered(value, places) for name, value in joined.items()}
    if len(joined) != len(places):
        raise InvalidInputError(
            f"gather='cat' after balance_by needs one result a row: {len(joined)} results for {len(places)} rows; "
            "use gather='list'"
        )
    return _select(joined, places)


def check_gather(gather: str) -> None:
    if gather not in get_args(Gather):
        raise InvalidInputError(f"gather must be 'list', 'cat', 'first' or 'mean', got {gather!r}")


def gathered(name: str, results: list[Any], gather: Gather) -> Any:
    """Return the results of the workers' methods ``name`` as one."""
    if gather == "list":
        return results
    if gather == "first":
        return results[0]
    try:
        if gather == "mean":
            return sum(float(result) for result in results) / len(results)
        return _joined(results)
    except (RuntimeError, TypeError, ValueError) as error:
        what = f"{name}() gave, {results[0]!r:.80}"
        raise InvalidInputError(f"gather={gather!r} does not fit what {what}: {error}") from error


def _joined(results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, Tensor) or _is_tensordict(first):
        return torch.cat(results)  # type: ignore[arg-type]
    if isinstance(first, Mapping):
        if any(not isinstance(result, Mapping) or result.keys() != first.keys() for result in results):
            raise TypeError("not all workers gave a dict of these entries")
        return {name: _joined([result[name] for result in results]) for name in first}
    for result in results:
        if not isinstance(result, list | tuple):
            raise TypeError(
                f"a {type(result).__name__} has no rows; lists, tuples, tensors and dicts of them are joined"
            )
    return [item for result in results for item in result]
