"""``rlcore.swap``: tags of some engines leave their devices while tags of others come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlcore.engines.engine import Engine, Reports
from rlcore.engines.launchers.worker import WorkerHandle
from rlcore.engines.residency import Move, State
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.types import OffloadReport

Entry = tuple[Engine, str | Sequence[str]]
"""An engine and its tags; () means all."""
Site = tuple[int, str]
"""Process and device, which is where workers can work on each other's tensors."""


class SwapReports(NamedTuple):
    """What moved, as ``offload`` and ``onload`` report it; the seconds of each count from the common start."""

    out: list[Reports]
    """One for each entry of ``out``."""
    in_: list[Reports]


@dataclass(frozen=True, slots=True)
class _Step:
    """One tag of one engine."""

    engine: Engine
    entry: int
    move: Move
    tag: str
    before: State
    after: State


def swap(*, out: Sequence[Entry], in_: Sequence[Entry]) -> SwapReports:
    """Offload ``out`` while ``in_`` is onloaded: both directions of the link work at once.

    Device memory is taken as it is freed, so that sets which do not fit together change places. Tags that are already
    where they should be are left alone.

    Args:
        out: engines and the tags that leave, such as ``[(train, ())]`` for all of them.
        in_: engines and the tags that come back, such as ``[(infer, "weights")]``.

    Raises:
        InvalidInputError: a tag that an engine does not have, or one that is to move twice.
        StateError: a move that is not allowed now; nothing is moved then.
        UnsupportedError: the engines' workers do not share processes.
        DeviceError: host or device memory does not do. Everything is where it was then.
    """
    plan = [*_steps(Move.OFFLOAD, out, 0), *_steps(Move.ONLOAD, in_, len(out))]
    _check_once(plan)
    reports: list[Reports] = [{} for _ in (*out, *in_)]
    if plan:
        found = _run(plan)
        for step, of_workers in zip(plan, found, strict=True):
            reports[step.entry][step.tag] = of_workers
            step.engine._residency.set(step.tag, step.after)
    return SwapReports(reports[: len(out)], reports[len(out) :])


def _steps(move: Move, entries: Sequence[Entry], first: int) -> list[_Step]:
    steps = []
    for number, (engine, given) in enumerate(entries, first):
        tags = (given,) if isinstance(given, str) else tuple(given)
        states = engine._planned(move, tags)
        steps += [_Step(engine, number, move, tag, engine.state[tag], after) for tag, after in states.items()]
    return steps


def _check_once(plan: Sequence[_Step]) -> None:
    seen = set()
    for step in plan:
        if (step.engine, step.tag) in seen:
            raise InvalidInputError(f"swap() moves a tag once; {step.tag!r} of {step.engine.label} is named twice")
        seen.add((step.engine, step.tag))


def _run(plan: Sequence[_Step]) -> list[list[OffloadReport]]:
    """For each step the report of each worker of its engine."""
    leader = max((step.engine for step in plan), key=lambda engine: len(_workers(engine)))
    sites = [_site(worker) for worker in _workers(leader)]
    for step in plan:
        _check_reachable(step.engine, leader, sites)
    found: list[dict[Site, OffloadReport]] = [{} for _ in plan]
    present = [[number for number, step in enumerate(plan) if site in _by_site(step.engine)] for site in sites]
    calls = [_call_at(site, [plan[number] for number in numbers]) for site, numbers in zip(sites, present, strict=True)]
    try:
        results = leader._built_group().call("swap", calls)
    except BaseException:
        _take_back(plan)
        raise
    for site, numbers, reports in zip(sites, present, results, strict=True):
        for number, report in zip(numbers, reports, strict=True):
            found[number][site] = report
    return [
        [by_site[_site(worker)] for worker in _workers(step.engine)] for step, by_site in zip(plan, found, strict=True)
    ]


def _call_at(site: Site, steps: Sequence[_Step]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``Worker.swap``."""
    workers = [_by_site(step.engine)[site] for step in steps]
    return ([(number, step.move, step.tag) for number, step in enumerate(steps)], *workers), {}


def _take_back(plan: Sequence[_Step]) -> None:
    """Some worker failed, which undid its part: bring the others back too, first out of the way what had come."""
    for step in sorted(plan, key=lambda step: step.move is Move.OFFLOAD):
        step.engine._take_back(step.tag, step.before)


def _check_reachable(engine: Engine, leader: Engine, sites: Sequence[Site]) -> None:
    for worker in _workers(engine):
        if _site(worker) not in sites:
            raise UnsupportedError(
                f"swap() between {leader.label} and {engine.label}, whose worker on {worker.context.device_name} is in "
                f"process {worker.process_id},",
                f"the other's are in (process, device) {sites}, and only workers that share both can swap; call "
                "offload() of one, then onload() of the other",
            )


def _workers(engine: Engine) -> list[WorkerHandle]:
    return engine._built_group().workers


def _site(worker: WorkerHandle) -> Site:
    return worker.process_id, worker.context.device_name


def _by_site(engine: Engine) -> dict[Site, WorkerHandle]:
    return {_site(worker): worker for worker in _workers(engine)}
