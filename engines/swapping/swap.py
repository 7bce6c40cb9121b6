"""``rlcore.swap``: tags of some engines leave their devices while tags of others come back.

Engines whose workers share processes are one participant, which moves everything in one call. Several participants
move in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlcore.arguments import LIST, Kind, takes
from rlcore.engines.engine import Engine, Reports
from rlcore.engines.residency import Move
from rlcore.engines.swapping.participants import TagMove, participants_of
from rlcore.engines.swapping.round_robin import swap_in_rounds
from rlcore.errors import InvalidInputError, UnsupportedError

Entry = tuple[Engine, str | Sequence[str]]
"""An engine and its tags; () means all tags."""
_ENTRIES = Kind("a list of pairs of an engine and its tags, such as [(train, ())],", LIST.has)


class SwapReports(NamedTuple):
    """The reports of a swap, as ``offload`` and ``onload`` give them; all seconds count from the common start."""

    out: list[Reports]
    """The reports of each entry of ``out``."""
    in_: list[Reports]
    """The reports of each entry of ``in_``."""


@takes("swap()", out=_ENTRIES, in_=_ENTRIES)
def swap(*, out: Sequence[Entry], in_: Sequence[Entry]) -> SwapReports:
    """Offload ``out`` while ``in_`` is onloaded: both directions of the link work at once.

    Device memory is taken as it is freed: sets that do not fit together on the device change places, between processes
    too. Tags that are already where they should be are left alone.

    Args:
        out: engines and the tags that leave, such as ``[(train, ())]`` for all of them.
        in_: engines and the tags that come back, such as ``[(infer, "weights")]``.

    Raises:
        InvalidInputError: an entry is no such pair; its engine does not have the tag; a tag is named twice.
        StateError: a move is not allowed now; nothing has moved.
        UnsupportedError: an engine keeps its memory by itself, as vLLM's does; or engines share some of their workers'
            processes, and neither has a worker in all of them.
        DeviceError: there is too little host or device memory; everything is where it was.
    """
    leaving, coming = [_named(entry) for entry in out], [_named(entry) for entry in in_]
    _check_once([*leaving, *coming])
    _check_movable([*leaving, *coming])
    moves = [*_moves(Move.OFFLOAD, leaving, 0), *_moves(Move.ONLOAD, coming, len(out))]
    reports: list[Reports] = [{} for _ in (*out, *in_)]
    participants = participants_of(moves)
    found = swap_in_rounds(participants) if len(participants) > 1 else participants[0].swap() if participants else {}
    for move, of_workers in found.items():
        reports[move.entry][move.tag] = of_workers
        move.engine._residency.set(move.tag, move.after)
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


def _moves(move: Move, entries: Sequence[tuple[Engine, tuple[str, ...]]], first: int) -> list[TagMove]:
    moves = []
    for number, (engine, tags) in enumerate(entries, first):
        states = engine._planned(move, tags)
        moves += [TagMove(engine, number, move, tag, engine.state[tag], after) for tag, after in states.items()]
    return moves


def _check_movable(entries: Sequence[tuple[Engine, tuple[str, ...]]]) -> None:
    for engine, _ in entries:
        if not engine.can_swap:
            raise UnsupportedError(
                f"swap() of {engine.label} with this executor",
                "the engine in it keeps its memory by itself; call offload() of one engine, then onload() of the other",
            )


def _check_once(entries: Sequence[tuple[Engine, tuple[str, ...]]]) -> None:
    seen = set()
    for engine, tags in entries:
        for tag in tags or engine.tags:
            if (engine, tag) in seen:
                raise InvalidInputError(f"swap() moves a tag once; {tag!r} of {engine.label} is named twice")
            seen.add((engine, tag))
