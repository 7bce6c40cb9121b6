"""Contenders that did the same work: which are ours, which are others', and which only say what none can do without."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple, Self

from rlcore.bench.limits import times
from rlcore.bench.result import CaseResult, Record
from rlcore.registry import registry

_MACHINE = ("attention", "collectives", "copies", "memory", "product")
"""Folders of cases that measure the machine: their contenders are ways to ask it, and no rivals."""
_FLOORS = ("bare products", "copy", "device_copy", "no offload", "one_copy", "plain_copy")
"""Contenders that do only what none can do without, and compute no result."""
_OURS = ("arena", "arena_reserved", "copy_batch", "engine", "host_alloc", "per_sequence", "plain", "swap", "turn")
"""Beside the registered implementations of operators."""


class Side(NamedTuple):
    """The best of one kind."""

    seconds: float
    implementation: str

    @classmethod
    def of(cls, results: Iterable[CaseResult]) -> Self | None:
        return min((cls(statistics.median(times(one)), one.implementation) for one in results), default=None)


class Race(NamedTuple):
    """One work, done by two contenders or more; all passed."""

    case: str
    results: list[CaseResult]

    @property
    def ours(self) -> Side | None:
        return Side.of(filter(is_ours, self.results))

    @property
    def theirs(self) -> Side | None:
        return Side.of(one for one in self.results if not is_ours(one) and not is_floor(one))

    @property
    def floor(self) -> Side | None:
        return Side.of(filter(is_floor, self.results))


def races(record: Record) -> list[Race]:
    """By case; those of ours alone, of which nothing could be said, are left out."""
    works: dict[tuple[object, ...], list[CaseResult]] = {}
    for result in record.cases:
        if result.status == "pass" and not is_of_machine(result):
            works.setdefault((result.name, *sorted(result.params.items())), []).append(result)
    found = [Race(results[0].name, results) for results in works.values()]
    return sorted((race for race in found if race.ours and (race.theirs or race.floor)), key=lambda race: race.case)


def advantages(record: Record) -> list[float]:
    """Of each race with others: the time of the best of them, in times of ours."""
    return [race.theirs.seconds / race.ours.seconds for race in races(record) if race.ours and race.theirs]


def is_of_machine(result: CaseResult) -> bool:
    return result.name.partition("/")[0] in _MACHINE


def is_floor(result: CaseResult) -> bool:
    return result.implementation in _FLOORS and not is_of_machine(result)


def is_ours(result: CaseResult) -> bool:
    name = result.implementation.partition(",")[0]
    return name in _OURS or any(name == one.name for entries in registry().ops.values() for one in entries)
