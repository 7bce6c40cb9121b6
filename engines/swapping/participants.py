"""Engines whose workers share processes, and what of them moves in a swap."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.engines.engine import Engine
from rlcore.engines.launchers.worker import WorkerHandle
from rlcore.engines.residency import Move, State
from rlcore.errors import UnsupportedError
from rlcore.types import OffloadReport

Site = tuple[int, str]
"""Process and device, which is where workers can work on each other's tensors."""
Arguments = tuple[Sequence[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Step:
    """One tag of one engine."""

    engine: Engine
    entry: int
    move: Move
    tag: str
    before: State
    after: State


Reports = dict[Step, list[OffloadReport]]
"""By worker of the step's engine."""


class Party:
    """It is called through the engine that has a worker at each of its sites."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._leader = max((step.engine for step in steps), key=lambda engine: len(_workers(engine)))
        self.sites = [_site(worker) for worker in _workers(self._leader)]
        for step in steps:
            _check_reachable(step.engine, self._leader, self.sites)
        self._steps_at = {site: [step for step in steps if site in _by_site(step.engine)] for site in self.sites}

    @property
    def labels(self) -> str:
        return " and ".join(sorted({step.engine.label for step in self._steps}))

    @property
    def runs_here(self) -> bool:
        """In the user's own process, and so in the thread that calls."""
        return any(process == os.getpid() for process, _ in self.sites)

    def call(self, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Call a method of one worker at each site; results by site."""
        return self._leader._built_group().call(method, arguments)

    def swap(self) -> Reports:
        """All steps in one call; after an error everything is where it was."""
        try:
            return self.reports(self.call("swap", self.plans(with_workers=True)))
        except BaseException:
            self._take_back()
            raise

    def plans(self, *, with_workers: bool = False, **options: Any) -> list[Arguments]:
        """For each site ``executors.worker.Plan``, and the workers that it speaks of."""
        return [(self._plan(site, with_workers=with_workers), options) for site in self.sites]

    def _plan(self, site: Site, *, with_workers: bool) -> list[Any]:
        steps = self._steps_at[site]
        plan = [(number, step.move, step.tag) for number, step in enumerate(steps)]
        return [plan, *(_by_site(step.engine)[site] for step in steps if with_workers)]

    def reports(self, results: Sequence[Sequence[OffloadReport]]) -> Reports:
        """Of the results of each site, one a step."""
        found: dict[Step, dict[Site, OffloadReport]] = {step: {} for step in self._steps}
        for site, reports in zip(self.sites, results, strict=True):
            for step, report in zip(self._steps_at[site], reports, strict=True):
                found[step][site] = report
        return {step: [at[_site(worker)] for worker in _workers(step.engine)] for step, at in found.items()}

    def _take_back(self) -> None:
        """Some worker failed, which undid its part: bring the others back too, first out of the way what had come."""
        for step in sorted(self._steps, key=lambda step: step.move is Move.OFFLOAD):
            step.engine._take_back(step.tag, step.before)


def parties_of(steps: Iterable[Step]) -> list[Party]:
    """Those that have a site in common are one.

    Raises:
        UnsupportedError: no engine of a party has a worker at each of its sites.
    """
    found: list[tuple[set[Site], list[Step]]] = []
    for step in steps:
        sites, joined = set(_by_site(step.engine)), [step]
        for other in [other for other in found if other[0] & sites]:
            found.remove(other)
            sites, joined = sites | other[0], other[1] + joined
        found.append((sites, joined))
    return [Party(joined) for _, joined in found]


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
    return worker.process_id, worker.context.device_name


def _by_site(engine: Engine) -> dict[Site, WorkerHandle]:
    return {_site(worker): worker for worker in _workers(engine)}
