"""The order of a round's messages at a receiver, and whether its weights are of one version. Nothing here does I/O.

        idle -- begin --> begun -- prepare --> prepared -- ready, all has come --> complete -- commit --> idle

``begin`` of a receiver that is prepared for this trainer and manifest goes to prepared at once. Every other message
leaves the step as it is, but each belongs to some steps alone, and is refused in the others: the channel may lose,
repeat or reorder messages, and a sender may be faulty. So a receiver never has to believe that all has come.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from rlcore.errors import SyncError

_REMEMBERED = 4096
"""So many rounds are known again: a repeated message does not begin one of them once more."""


class RoundStep(Enum):
    """How far the round is, in words for errors."""

    IDLE = "has not begun"
    BEGUN = "has begun, and has no plan yet"
    PREPARED = "is under way"
    COMPLETE = "is complete, and waits for its commit"


class RoundState:
    """The state machine of one receiver's rounds."""

    def __init__(self) -> None:
        self.is_whole = True
        """The weights are of one version: they may be used."""
        self._from = ""
        """The trainer whose commit they are of; "" where they came from elsewhere, or are a mixture."""
        self.held_round = 0
        """The round whose commit they are of, while they are of ``_from``; 0: none."""
        self._begun: deque[int] = deque(maxlen=_REMEMBERED)
        self.end()

    def end(self) -> None:
        """End the round: what came of it, and was not committed, counts no more."""
        self.step = RoundStep.IDLE
        self.round_id, self._trainer = 0, ""
        self.base = 0
        """The round whose weights were here when this one began, if they were its trainer's; 0: none were."""
        self.is_staged = False
        """The new weights are written beside those in use until the commit."""
        self._is_untouched = True
        """Nothing was planned, tested, moved or loaded since the round began."""

    def begin(self, round_id: int, trainer: str, *, is_staged: bool, is_prepared: bool) -> None:
        """Begin a round, and end an earlier one.

        Raises:
            SyncError: it has begun before. What its trainer's memory held then may be gone.
        """
        if round_id in self._begun:
            raise SyncError(f"begin() of weight sync {round_id} came again: it has begun before")
        self.end()
        self._begun.append(round_id)
        self.round_id, self._trainer, self.is_staged = round_id, trainer, is_staged
        self.base = self.held_round if self._from == trainer else 0
        self.step = RoundStep.PREPARED if is_prepared else RoundStep.BEGUN

    def check_id(self, round_id: int) -> None:
        """Raise SyncError for a message of another round."""
        if round_id != self.round_id:
            raise SyncError(f"a message of weight sync {round_id} came within {self.round_id or 'none'}")

    def check(self, what: str, *steps: RoundStep) -> None:
        """Raise SyncError unless the round is at one of these steps, where ``what`` may come."""
        if self.step not in steps:
            raise SyncError(f"{what} came out of order: this receiver's round {self.step.value}")

    def check_base(self, base: int) -> None:
        """Raise SyncError unless the weights here are those since which a change is told; 0: it is told whole."""
        if base and base != self.base:
            raise SyncError(
                f"changes since the weights of round {base} came to a receiver that does not have them: it holds "
                f"{f'those of round {self.base}' if self.base else self._held()}"
            )

    def prepare(self) -> None:
        """Take a plan, again if there is one: nothing of it has come."""
        self.check("prepare()", RoundStep.BEGUN, RoundStep.PREPARED)
        self.step, self._is_untouched = RoundStep.PREPARED, False

    def moves(self, what: str, *, writes_weights: bool = False) -> None:
        """Note what plans, moves or loads weights. From the first write to the weights in use they are not whole."""
        self.check(what, RoundStep.PREPARED)
        self._is_untouched = False
        if writes_weights:
            self.spoil()

    def spoil(self) -> None:
        """Note that the weights in use are about to be written."""
        self.is_whole, self._from, self.held_round = False, "", 0

    def complete(self) -> None:
        """Note that all has come; after that nothing is taken but the commit."""
        self.check("ready()", RoundStep.PREPARED)
        self.step = RoundStep.COMPLETE

    def check_commit(self, *, has_moved: bool) -> None:
        """Raise SyncError where the new version is not here.

        Args:
            has_moved: False: the sender says that the weights here are the ones it has, and has moved nothing.
        """
        if has_moved:
            self.check("commit()", RoundStep.COMPLETE)
        elif not (self.step is RoundStep.PREPARED and self._is_untouched and self._from == self._trainer):
            raise SyncError(
                "commit() of weights that have not changed came to a receiver that does not have them: its round "
                f"{self.step.value}, and it holds {self._held()}"
            )

    def _held(self) -> str:
        if not self.is_whole:
            return "a mixture"
        return "what this trainer committed" if self._from == self._trainer else "weights from elsewhere"

    def commit(self, *, has_moved: bool) -> None:
        """End the round: the weights are those of its trainer, and of an earlier round where none were moved."""
        self.is_whole, self._from = True, self._trainer
        self.held_round = self.round_id if has_moved else self.held_round
        self.end()

    def lose(self) -> None:
        """Note that the values of the weights are gone: no change can be told against them."""
        self._from, self.held_round = "", 0

    def reloaded(self) -> None:
        """End the round: the weights were loaded from elsewhere, such as from disk."""
        self.is_whole, self._from, self.held_round = True, "", 0
        self.end()
