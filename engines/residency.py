"""The state of each part of an engine: on its device, on the host, or nowhere. One table decides every move.

loaded     on the device, with its values
offloaded  values in host memory, nothing on the device
released   nowhere
empty      on the device without values (weights taken back after a release): only a sync or a load fills it
"""

from __future__ import annotations

from enum import StrEnum

from rlcore.errors import InvalidInputError, StateError


class State(StrEnum):
    LOADED = "loaded"
    OFFLOADED = "offloaded"
    RELEASED = "released"
    EMPTY = "empty"


class Move(StrEnum):
    ONLOAD = "onload"
    OFFLOAD = "offload"
    META = "meta"


L, O, R, E = State.LOADED, State.OFFLOADED, State.RELEASED, State.EMPTY  # noqa: E741

_COMMON: dict[tuple[Move, State], State] = {
    (Move.ONLOAD, L): L,
    (Move.ONLOAD, O): L,
    (Move.ONLOAD, E): E,
    (Move.OFFLOAD, L): O,
    (Move.OFFLOAD, O): O,
    (Move.META, L): R,
    (Move.META, O): R,
    (Move.META, R): R,
    (Move.META, E): R,
}
# A pair that is absent is a call in the wrong order.
_TABLES: dict[str, dict[tuple[Move, State], State]] = {
    "weights": _COMMON | {(Move.ONLOAD, R): E},
    "optimizer": _COMMON,
    "grads": _COMMON | {(Move.ONLOAD, R): L, (Move.OFFLOAD, R): R},
    "kv_cache": _COMMON | {(Move.ONLOAD, R): L, (Move.OFFLOAD, L): R, (Move.OFFLOAD, R): R},
}
MOVE_TO = {L: Move.ONLOAD, E: Move.ONLOAD, O: Move.OFFLOAD, R: Move.META}
"""State -> the move by which a worker returns to it, after a move that other workers could not make."""
_REMEDY = {
    (Move.ONLOAD, R): "{owner} released its {tag}; call load(path), or restart(), which begins again at the last "
    "checkpoint, else at the model folder",
    (
        Move.OFFLOAD,
        R,
    ): "the {tag} of {owner} are released: there is nothing to offload. Call onload({tag!r}) and fill them",
    (
        Move.OFFLOAD,
        E,
    ): "the {tag} of {owner} have no values yet; call {refill} first, or meta({tag!r})",
}


class Residency:
    """The state of each tag of one engine, and the moves it allows.

    Args:
        refill: the calls that give empty weights values, in words for errors.
    """

    def __init__(self, owner: str, tags: tuple[str, ...], refill: str) -> None:
        self._owner = owner
        self._refill = refill
        self._states = dict.fromkeys(tags, State.LOADED)
        self._absent: set[str] = set()

    @property
    def states(self) -> dict[str, State]:
        return dict(self._states)

    def plan(self, move: Move, tags: tuple[str, ...]) -> dict[str, State]:
        """Return the new state of each tag that has to move (all tags when none is named). Changes nothing.

        Raises:
            InvalidInputError: a tag this engine does not have.
            StateError: a wrong order, for any of them.
        """
        for tag in tags:
            if tag not in list(self._states):  # a list, as a wrong tag may have no hash
                raise InvalidInputError(f"{self._owner} has the tags {', '.join(self._states)}; got {tag!r}")
        planned = {tag: self._next(move, tag) for tag in tags or self._states}
        return {tag: state for tag, state in planned.items() if state is not self._states[tag]}

    def _next(self, move: Move, tag: str) -> State:
        state = self._states[tag]
        if (move, state) not in _TABLES[tag]:
            if tag in self._absent:
                return State.LOADED if move is Move.ONLOAD else state
            raise StateError(_REMEDY[move, state].format(owner=self._owner, tag=tag, refill=self._refill))
        return _TABLES[tag][move, state]

    def declare_absent(self, tag: str) -> None:
        """Note that the engine holds nothing under ``tag``: an onload after a release needs no values."""
        self._absent.add(tag)

    def is_absent(self, tag: str) -> bool:
        return tag in self._absent

    def declare_present(self, tag: str) -> None:
        """Note that the engine has come to hold something under ``tag``."""
        self._absent.discard(tag)

    def set(self, tag: str, state: State) -> None:
        self._states[tag] = state

    def require(self, tag: str, purpose: str) -> None:
        """Raise StateError unless ``tag`` is loaded."""
        state = self._states[tag]
        if state is State.LOADED:
            return
        remedy = {
            State.OFFLOADED: f"call onload({tag!r})",
            State.RELEASED: f"call onload({tag!r})" + (f", then {self._refill}" if tag == "weights" else ""),
            State.EMPTY: f"call {self._refill}",
        }[state]
        raise StateError(f"{purpose} needs the {tag} of {self._owner}, which are {state}; {remedy}")
