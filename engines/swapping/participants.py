"""The participants of a swap: engines whose workers share processes, with the tags of theirs that move."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlcore.engines.engine import Engine
from rlcore.engines.executors.worker import Worker
from rlcore.engines.launchers.worker import WorkerHandle
from rlcore.engines.residency import Move, State
from rlcore.errors import UnsupportedError
from rlcore.process.status import process_name
from rlcore.types import OffloadReport

R = TypeVar("R")
Site = tuple[str, str]
"""Name of the process and of the device. The workers at one site can work on each other's tensors."""
Arguments = tuple[Sequence[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TagMove:
    """One tag of one engine that moves in the swap."""

    engine: Engine
    entry: int
    """The position of the user's entry that names it."""
    move: Move
    tag: str
    before: State
    after: State


Reports = dict[TagMove, list[OffloadReport]]
"""The reports of each move, by worker of its engine."""


class SwapParticipant:
    """Engines that share processes. All are called through one of them, which has a worker at each of the sites."""

    def __init__(self, moves: Sequence[TagMove]) -> None:
        self._moves = moves
        self._leader = max((move.engine for move in moves), key=lambda engine: len(_workers(engine)))
        self.sites = [_site(worker) for worker in _workers(self._leader)]
        for move in moves:
            _check_reachable(move.engine, self._leader, self.sites)
        self._moves_at = {site: [move for move in moves if site in _by_site(move.engine)] for site in self.sites}

    @property
    def labels(self) -> str:
        return " and ".join(sorted({move.engine.label for move in self._moves}))

    @property
    def runs_here(self) -> bool:
        """The workers live in the user's own process, so that they run in the thread that calls."""
        return any(process == process_name(os.getpid()) for process, _ in self.sites)

    def call(self, method: Callable[..., R], arguments: Sequence[Arguments]) -> list[R]:
        """Call a method of ``Worker`` on one worker at each site; return the results by site."""
        return self._leader._built_group().call(method.__name__, arguments)

    def swap(self) -> Reports:
        """Move everything in one call; after an error everything is where it was."""
        try:
            return self.reports(self.call(Worker.swap, self.plans(with_workers=True)))
        except BaseException:
            self._take_back()
            raise

    def plans(self, *, with_workers: bool = False, **options: object) -> list[Arguments]:
        """Return the arguments of each site: a ``SwapPlan``, the workers that it names if wanted, and ``options``."""
        return [(self._plan(site, with_workers=with_workers), options) for site in self.sites]

    def _plan(self, site: Site, *, with_workers: bool) -> list[Any]:
        moves = self._moves_at[site]
        plan = [(number, move.move, move.tag) for number, move in enumerate(moves)]
        return [plan, *(_by_site(move.engine)[site] for move in moves if with_workers)]

    def reports(self, results: Sequence[Sequence[OffloadReport]]) -> Reports:
        """Sort the results of the sites, which have one report a move, by move."""
        found: dict[TagMove, dict[Site, OffloadReport]] = {move: {} for move in self._moves}
        for site, reports in zip(self.sites, results, strict=True):
            for move, report in zip(self._moves_at[site], reports, strict=True):
                found[move][site] = report
        return {move: [at[_site(worker)] for worker in _workers(move.engine)] for move, at in found.items()}

    def _take_back(self) -> None:
        """Bring everything back after some worker failed, which has undone its own part.

        What had come leaves first: it would be in the way of what had left.
        """
        for move in sorted(self._moves, key=lambda move: move.move is Move.OFFLOAD):
            move.engine._take_back(move.tag, move.before)


def participants_of(moves: Iterable[TagMove]) -> list[SwapParticipant]:
    """Return the participants; engines that have a site in common are one.

    Raises:
        UnsupportedError: no engine of a participant has a worker at each of its sites.
    """
    found: list[tuple[set[Site], list[TagMove]]] = []
    for move in moves:
        sites, joined = set(_by_site(move.engine)), [move]
        for other in [other for other in found if other[0] & sites]:
            found.remove(other)
            sites, joined = sites | other[0], other[1] + joined
        found.append((sites, joined))
    return [SwapParticipant(joined) for _, joined in found]


def _check_reachable(engine: Engine, leader: Engine, sites: Sequence[Site]) -> None:
    for worker in _workers(engine):
        if _site(worker) not in sites:
            raise UnsupportedError(
                f"swap() of {leader.label} and {engine.label}, which share some processes, but not that of the worker "
                f"on {worker.context.device_name},",
                f"one of them must have a worker in each (process, device); the first has {sites}. Call offload() of "
                "one, then onload() of the other",
            )


def _workers(engine: Engine) -> list[WorkerHandle]:
    return engine._built_group().workers


def _site(worker: WorkerHandle) -> Site:
    return worker.process, worker.context.device_name


def _by_site(engine: Engine) -> dict[Site, WorkerHandle]:
    return {_site(worker): worker for worker in _workers(engine)}
