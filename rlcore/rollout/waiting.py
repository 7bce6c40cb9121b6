"""``Waiting``: somebody waits until the rollout has brought something, and lends the trainer's devices meanwhile."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.rollout.fleet import Fleet
    from rlcore.rollout.item_supply import ItemSupply
    from rlcore.rollout.lending import LentDevices
    from rlcore.rollout.staleness import StalenessBound

_LOOK_S = 0.5
"""How often somebody who waits looks for what nobody tells."""


class Waiting:
    """Waits on a condition, in the user's threads.

    Args:
        changed: notified when something was brought; its lock is the controller's.
        lent: lends the trainer's devices to ``fleet`` during a wait.
        bound: knows the version that lent devices are to serve: another thread may update it during a wait.
    """

    def __init__(
        self, changed: threading.Condition, fleet: Fleet, lent: LentDevices | None, bound: StalenessBound
    ) -> None:
        self._changed, self._fleet, self._lent, self._bound = changed, fleet, lent, bound

    def until(self, is_ready: Callable[[], bool], timeout_s: float | None, supply: ItemSupply | None = None) -> bool:
        """Wait until ``is_ready()``, asked with the lock held; return False after ``timeout_s``.

        The trainer's devices are lent meanwhile, and have been taken back when this returns, or raises.

        Args:
            supply: is filled meanwhile; once at least, whatever ``timeout_s``.
        """
        began, turn = time.monotonic(), self._lent.turn if self._lent else 0
        has_filled = False
        try:
            while True:
                with self._changed:
                    if is_ready():
                        return True
                    waited_s = time.monotonic() - began
                    lent_in_s = self._lent.due_in_s(self._fleet, waited_s, turn) if self._lent else math.inf
                    left_s = math.inf if timeout_s is None else timeout_s - waited_s
                    is_short = supply is not None and supply.num_short > 0
                    if left_s <= 0 and (has_filled or not is_short):
                        return False
                    if lent_in_s > 0 and not is_short:
                        self._changed.wait(min(_LOOK_S, left_s, lent_in_s))
                        continue
                if supply is not None and is_short:  # neither with the lock: both may take seconds
                    supply.fill()
                    has_filled = True
                else:
                    assert self._lent is not None
                    self._lent.lend(self._fleet, self._bound.version, turn)
        finally:
            with self.trainer_at_home():
                pass

    def trainer_at_home(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the trainer's devices are not lent."""
        return contextlib.nullcontext() if self._lent is None else self._lent.at_home(self._fleet)
