"""``Runs``: a sequence in which a value stands many times in a row, such as the version of each token.

It takes the place of a list with an entry a token: what is asked of it takes time by its runs, of which there are few.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Runs(Sequence[T], Generic[T]):
    """Equal to a list with the same entries, and never changed.

    Args:
        runs: each value with the number of times that it stands there.
    """

    __slots__ = ("_length", "runs")

    def __init__(self, runs: Iterable[tuple[T, int]]) -> None:
        self.runs = [run for run in runs if run[1]]
        """Each value with its length, which is at least 1."""
        self._length = sum(length for _, length in self.runs)

    @classmethod
    def of(cls, values: Sequence[T]) -> Runs[T]:
        """Return the same entries as runs."""
        if isinstance(values, Runs):
            return values
        return cls((value, sum(1 for _ in same)) for value, same in itertools.groupby(values))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(itertools.repeat(value, length) for value, length in self.runs)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(self._length)[index]
        for value, length in self.runs:
            if place < length:
                return value
            place -= length
        raise AssertionError("the runs are shorter than their length")

    def __add__(self, other: Sequence[T]) -> Runs[T]:
        return Runs([*self.runs, *Runs.of(other).runs])

    def __radd__(self, other: Sequence[T]) -> Runs[T]:
        return Runs.of(other) + self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return f"Runs({self.runs})"


def joined(parts: Sequence[Runs[Any]], dtype: type) -> NDArray[Any]:
    """Return the entries of all of them, one after the other."""
    runs = [run for part in parts for run in part.runs]
    return np.repeat(np.array([value for value, _ in runs], dtype), [length for _, length in runs])
