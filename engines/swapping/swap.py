"""``rlcore.swap``: tags of some engines leave their devices while tags of others come back.

Engines whose workers share processes are one party, which moves all it has in one call; several parties take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlcore.arguments import LIST, Kind, takes
from rlcore.engines.engine import Engine, Reports
from rlcore.engines.residency import Move
from rlcore.engines.swapping.participants import Step, parties_of
from rlcore.engines.swapping.round_robin import take_turns
from rlcore.errors import InvalidInputError

Entry = tuple[Engine, str | Sequence[str]]
"""An engine and its tags; () means all."""
_ENTRIES = Kind("a list of pairs of an engine and its tags, such as [(train, ())],", LIST.has)


class SwapReports(NamedTuple):
    """What moved, as ``offload`` and ``onload`` report it; the seconds of each count from the common start."""

    out: list[Reports]
    """One for each entry of ``out``."""
    in_: list[Reports]


@takes("swap()", out=_ENTRIES, in_=_ENTRIES)
def swap(*, out: Sequence[Entry], in_: Sequence[Entry]) -> SwapReports:
    """Offload ``out`` while ``in_`` is onloaded: both directions of the link work at once.

    Device memory is taken as it is freed, so that sets which do not fit together change places, between processes too.
    Tags that are already where they should be are left alone.

    Args:
        out: engines and the tags that leave, such as ``[(train, ())]`` for all of them.
        in_: engines and the tags that come back, such as ``[(infer, "weights")]``.

    Raises:
        InvalidInputError: an entry that is no such pair, or a tag that its engine does not have or that is named twice.
        StateError: a move that is not allowed now; nothing is moved then.
        UnsupportedError: engines share some of their workers' processes, and neither has a worker in all of them.
        DeviceError: host or device memory does not do. Everything is where it was then.
    """
    leaving, coming = [_named(entry) for entry in out], [_named(entry) for entry in in_]
    _check_once([*leaving, *coming])
    plan = [*_steps(Move.OFFLOAD, leaving, 0), *_steps(Move.ONLOAD, coming, len(out))]
    reports: list[Reports] = [{} for _ in (*out, *in_)]
    parties = parties_of(plan)
    found = take_turns(parties) if len(parties) > 1 else parties[0].swap() if parties else {}
    for step, of_workers in found.items():
        reports[step.entry][step.tag] = of_workers
        step.engine._residency.set(step.tag, step.after)
    return SwapReports(reports[: len(out)], reports[len(out) :])


def _named(entry: Any) -> tuple[Engine, tuple[str, ...]]:
    match entry:
        case (Engine() as engine, str(tag)):
            return engine, (tag,)
        case (Engine() as engine, [*tags]):
            return engine, tuple(tags)
    raise InvalidInputError(
        f"swap() takes pairs of an engine and its tags, such as (train, 'weights') or (train, ()), all; got {entry!r}"
    )


def _steps(move: Move, entries: Sequence[tuple[Engine, tuple[str, ...]]], first: int) -> list[Step]:
    steps = []
    for number, (engine, tags) in enumerate(entries, first):
        states = engine._planned(move, tags)
        steps += [Step(engine, number, move, tag, engine.state[tag], after) for tag, after in states.items()]
    return steps


def _check_once(entries: Sequence[tuple[Engine, tuple[str, ...]]]) -> None:
    seen = set()
    for engine, tags in entries:
        for tag in tags or engine.tags:
            if (engine, tag) in seen:
                raise InvalidInputError(f"swap() moves a tag once; {tag!r} of {engine.label} is named twice")
            seen.add((engine, tag))
