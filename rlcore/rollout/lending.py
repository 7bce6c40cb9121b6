"""``LentDevices``: the trainer's devices generate while the trainer has to wait for episodes.

What the trainer holds there leaves by `swap`, where the engine can, and an inference engine on the same devices comes
in, gets the trainer's weights and answers requests beside the others. Before the trainer goes on, everything is taken
back. Requests that the engine has not finished stay with it, and go on when the devices are lent again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlcore.arguments import AT_LEAST_0, Kind, takes
from rlcore.engines.residency import State
from rlcore.engines.swapping.swap import swap
from rlcore.errors import InvalidInputError, RlcoreError, StateError, first_line

if TYPE_CHECKING:
    from rlcore.engines.engine import Engine
    from rlcore.engines.inference import InferenceEngine
    from rlcore.engines.train import TrainEngine
    from rlcore.rollout.fleet import Fleet

_log = logging.getLogger(__name__)
LANE = "lent sampler"
"""The lane of the timeline."""
TRAIN_ENGINE = Kind("a TrainEngine", lambda value: hasattr(value, "sync_weights"))
_INFERENCE_ENGINE = Kind("an InferenceEngine", lambda value: hasattr(value, "submit") and hasattr(value, "collect"))


class LentDevices:
    """Lends the devices of a trainer while ``RolloutController.wait`` waits.

    Where several threads wait, the end of each call brings the trainer back, and calls that were waiting then lend no
    more: the program may train. One lock protects that state. It is held while engines move, so nobody who holds the
    controller's lock may wait for it.

    Args:
        train: the trainer, which is on its devices whenever the controller does not wait.
        infer: an inference engine that was built on the same devices (``colocate_with=train``). It leaves them now.
        after_s: how long a wait lasts before the devices are lent: to move everything there and back takes time, too.

    Raises:
        InvalidInputError: the engine has devices that the trainer has not.
        StateError: one of the engines is not built.
    """

    @takes("LentDevices", train=TRAIN_ENGINE, infer=_INFERENCE_ENGINE, after_s=AT_LEAST_0)
    def __init__(self, train: TrainEngine, infer: InferenceEngine, *, after_s: float = 1.0) -> None:
        if not train.is_built or not infer.is_built:
            raise StateError("LentDevices takes engines that are built; call build() first")
        if foreign := set(infer.devices) - set(train.devices):
            raise InvalidInputError(
                f"LentDevices lends the trainer's devices, {', '.join(train.devices)}, and the inference engine is on "
                f"{', '.join(sorted(foreign))} too; build it with colocate_with=train"
            )
        self.train, self.infer, self.after_s = train, infer, after_s
        self.num_lent = 0
        """How often they were lent."""
        self._synced: int | None = None
        """The trainer's ``num_changes`` when the samplers got its weights."""
        self._lock = threading.Lock()
        self._tags: list[str] | None = None
        """The trainer's tags that have left its devices, and come back there; None while nothing is lent."""
        self._num_held = 0
        """How many ``at_home`` blocks are under way."""
        self.turn = 0
        """Counts these blocks: a wait lends only before the next one."""
        if infer.state["weights"] is State.LOADED:
            infer.offload()

    def note_synced(self, train: Any) -> None:
        """Note that the samplers have this trainer's present weights."""
        self._synced = train.num_changes if train is self.train else None

    def due_in_s(self, fleet: Fleet, waited_s: float, turn: int) -> float:
        """Return after how many seconds they are lent to somebody who has waited so long; infinite for never.

        Args:
            turn: the one in which the wait has begun.
        """
        return max(0.0, self.after_s - waited_s) if self._is_possible(fleet, turn) else math.inf

    def lend(self, fleet: Fleet, version: int, turn: int) -> None:
        """Move the trainer out and the engine in, and let it generate. Where that fails, nothing is lent any more."""
        with self._lock:
            if not self._is_possible(fleet, turn):
                return  # another thread was first
            self._tags = [tag for tag, state in self.train.state.items() if state is State.LOADED]
            try:
                self._move_sampler_in(version)
            except RlcoreError as error:
                self._bring_back(fleet)
                _give_up(fleet, error)
                return
            self.num_lent += 1
            fleet.open_guest()

    @contextlib.contextmanager
    def at_home(self, fleet: Fleet) -> Iterator[None]:
        """Inside, the trainer is on its devices: the engine stands still, and nothing is lent.

        Raises:
            RlcoreError: the trainer could not come back.
        """
        with self._lock:
            self.turn += 1
            self._num_held += 1
        try:
            with self._lock:
                if self._tags is not None:
                    self._bring_back(fleet)
            yield
        finally:
            with self._lock:
                self._num_held -= 1

    def _is_possible(self, fleet: Fleet, turn: int) -> bool:
        """The trainer is there, with the weights that the samplers serve, and nobody but who waits needs it."""
        if self._tags is not None or self._num_held or turn != self.turn or not fleet.guest_is_alive:
            return False
        return self.train.state["weights"] is State.LOADED and self._synced == self.train.num_changes

    def _bring_back(self, fleet: Fleet) -> None:
        """Move the trainer in. An engine that has ended, or does not leave, is closed: that gives its memory back."""
        try:
            fleet.hold_guest()
            self._move_trainer_in()
        except RlcoreError as error:
            _give_up(fleet, error)
            self.infer.close()
            self.train.onload(*(self._tags or ()))
        self._tags = None

    def _move_sampler_in(self, version: int) -> None:
        others = [tag for tag in self._tags or () if tag != "weights"]
        self._exchange(self.train, others, self.infer, ["weights"])
        if self.infer.version != version or self.infer.sync_state != "serving":
            self.train.sync_weights(self.infer, version=version)
        self._exchange(self.train, ["weights"], self.infer, ["kv_cache"])

    def _move_trainer_in(self) -> None:
        leaving = [tag for tag, state in self.infer.state.items() if state is State.LOADED]
        self._exchange(self.infer, leaving, self.train, self._tags or [])

    def _exchange(self, leaves: Engine, out: list[str], comes: Engine, in_: list[str]) -> None:
        """Let tags of one engine leave while tags of the other come; one after the other where it cannot be at once."""
        if self.infer.can_swap:
            swap(out=[(leaves, out)] if out else [], in_=[(comes, in_)])
            return
        if out:
            leaves.offload(*out)
        comes.onload(*in_)


def _give_up(fleet: Fleet, error: RlcoreError) -> None:
    """Lend nothing any more; what the engine had under way goes to the others."""
    _log.warning("the trainer's devices are not lent any more: %s", first_line(error))
    fleet.end_guest(error)
