"""``rlcore.swap``: tags of some engines leave their devices while tags of others come back.

Engines whose workers share processes are one party, which moves all it has in one call; several parties take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlcore.engines.engine import Engine, Reports
from rlcore.engines.residency import Move
from rlcore.engines.swapping.party import Step, parties_of
from rlcore.engines.swapping.turns import take_turns
from rlcore.errors import InvalidInputError

Entry = tuple[Engine, str | Sequence[str]]
"""An engine and its tags; () means all."""


class SwapReports(NamedTuple):
    """What moved, as ``offload`` and ``onload`` report it; the seconds of each count from the common start."""

    out: list[Reports]
    """One for each entry of ``out``."""
    in_: list[Reports]


def swap(*, out: Sequence[Entry], in_: Sequence[Entry]) -> SwapReports:
    """Offload ``out`` while ``in_`` is onloaded: both directions of the link work at once.

    Device memory is taken as it is freed, so that sets which do not fit together change places, between processes too.
    Tags that are already where they should be are left alone.

    Args:
        out: engines and the tags that leave, such as ``[(train, ())]`` for all of them.
        in_: engines and the tags that come back, such as ``[(infer, "weights")]``.

    Raises:
        InvalidInputError: a tag that an engine does not have, or one that is to move twice.
        StateError: a move that is not allowed now; nothing is moved then.
        UnsupportedError: engines share some of their workers' processes, and neither has a worker in all of them.
        DeviceError: host or device memory does not do. Everything is where it was then.
    """
    plan = [*_steps(Move.OFFLOAD, out, 0), *_steps(Move.ONLOAD, in_, len(out))]
    _check_once(plan)
    reports: list[Reports] = [{} for _ in (*out, *in_)]
    parties = parties_of(plan)
    found = take_turns(parties) if len(parties) > 1 else parties[0].swap() if parties else {}
    for step, of_workers in found.items():
        reports[step.entry][step.tag] = of_workers
        step.engine._residency.set(step.tag, step.after)
    return SwapReports(reports[: len(out)], reports[len(out) :])


def _steps(move: Move, entries: Sequence[Entry], first: int) -> list[Step]:
    steps = []
    for number, (engine, given) in enumerate(entries, first):
        tags = (given,) if isinstance(given, str) else tuple(given)
        states = engine._planned(move, tags)
        steps += [Step(engine, number, move, tag, engine.state[tag], after) for tag, after in states.items()]
    return steps


def _check_once(plan: Sequence[Step]) -> None:
    seen = set()
    for step in plan:
        if (step.engine, step.tag) in seen:
            raise InvalidInputError(f"swap() moves a tag once; {step.tag!r} of {step.engine.label} is named twice")
        seen.add((step.engine, step.tag))
