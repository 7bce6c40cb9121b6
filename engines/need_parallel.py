"""``NeedParallel(x)``: an argument to be split over the data-parallel workers; all others are copied."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError


@dataclass(frozen=True, slots=True)
class NeedParallel:
    """Split ``data`` along its first dimension: a sequence, a tensor, or a dict of them.

    Workers get contiguous parts whose sizes differ by at most one; with fewer rows than workers, some get none.
    """

    data: Any
    type: Literal["dp", "seq"] = "dp"

    def __post_init__(self) -> None:
        if self.type == "seq":
            raise UnsupportedError("NeedParallel(type='seq')", "no executor splits sequences yet; use type='dp'")
        if self.type != "dp":
            raise InvalidInputError(f"NeedParallel.type must be 'dp' or 'seq', got {self.type!r}")
        _num_rows(self.data)

    def split(self, parts: int) -> list[Any]:
        """``parts`` contiguous pieces, in order."""
        rows = _num_rows(self.data)
        bounds = [rows * part // parts for part in range(parts + 1)]
        return [_slice(self.data, start, stop) for start, stop in itertools.pairwise(bounds)]


def _num_rows(data: Any) -> int:
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


def _slice(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, Mapping):
        return {name: _slice(value, start, stop) for name, value in data.items()}
    return data[start:stop]


def split_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], parts: int
) -> list[tuple[list[Any], dict[str, Any]]]:
    """The call of each worker."""

    def spread(value: Any) -> list[Any]:
        return value.split(parts) if isinstance(value, NeedParallel) else [value] * parts

    args_by_part = [spread(value) for value in args]
    kwargs_by_part = {name: spread(value) for name, value in kwargs.items()}
    return [
        (
            [values[part] for values in args_by_part],
            {name: values[part] for name, values in kwargs_by_part.items()},
        )
        for part in range(parts)
    ]
