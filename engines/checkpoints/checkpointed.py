"""The part of a train engine that writes and reads checkpoints, waits for those that go on, and exports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal, Self, overload

from rlcore.arguments import FLAG, PATH, kind_of, optional, takes
from rlcore.engines.checkpoints.pending_save import PendingSave
from rlcore.engines.engine import Engine
from rlcore.engines.residency import State
from rlcore.errors import CheckpointError

_log = logging.getLogger(__name__)


class CheckpointedEngine(Engine):
    """An engine that comes back to its last checkpoint; whatever ends its workers waits for a save that goes on."""

    def __init__(self, executor: str) -> None:
        self._last_checkpoint: Path | None = None
        self._pending_save: PendingSave | None = None
        self._num_changes = 0
        """Calls that may have changed the weights."""
        super().__init__(executor)

    @overload
    def save(
        self, folder: str | Path, extra: dict[str, Any] | None = None, *, blocking: Literal[True] = True
    ) -> float: ...
    @overload
    def save(
        self, folder: str | Path, extra: dict[str, Any] | None = None, *, blocking: Literal[False]
    ) -> PendingSave: ...
    @takes("save()", folder=PATH, extra=optional(kind_of("a dict", dict)), blocking=FLAG)
    def save(
        self, folder: str | Path, extra: dict[str, Any] | None = None, *, blocking: bool = True
    ) -> float | PendingSave:
        """Write weights, optimizers, schedulers and random states; on failure the previous checkpoint stays.

        Args:
            extra: plain values of your own (step, data position), returned by ``load``.
            blocking: False copies the state to host memory and returns; it is written in the background. The next
                ``save``, ``load``, ``restart`` or ``close`` waits for that.

        Returns:
            Seconds taken; without ``blocking`` a handle to wait with.

        Raises:
            CheckpointError: it could not be written, or the host has no memory for the copy; or an earlier save failed
                in the background, and nothing is written now.
        """
        for tag in ("weights", "optimizer"):
            self._require(tag, "save()")
        self._settle_save()
        folder = Path(folder)
        data, seconds = self._call("save", folder, extra or {}, blocking)[0]
        if blocking:
            self._last_checkpoint = folder
            return float(seconds)
        self._pending_save = PendingSave(folder, data, self._call)
        return self._pending_save

    def _settle_save(self) -> None:
        """Wait for the save in the background; raise what it failed with, if nobody has seen that."""
        pending, self._pending_save = self._pending_save, None
        if pending is None:
            return
        pending.settle()
        if pending.has_succeeded:
            self._last_checkpoint = pending.folder
        if pending.unseen_error is not None:
            raise pending.unseen_error

    def _settle_save_quietly(self) -> None:
        try:
            self._settle_save()
        except CheckpointError as error:
            _log.warning("%s", error)

    def restart(self) -> Self:
        self._settle_save_quietly()
        return super().restart()

    restart.__doc__ = Engine.restart.__doc__

    def close(self) -> None:
        """Wait for a save in the background, end the workers and free all their memory.

        Raises:
            CheckpointError: that save failed; everything is closed nevertheless.
        """
        try:
            self._settle_save()
        finally:
            super().close()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:  # not to be hidden by an error of the save
            self._settle_save_quietly()
        super().__exit__(*raised)

    @takes("load()", folder=PATH)
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue exactly where ``save`` was called; returns its ``extra``.

        Raises:
            CheckpointError: missing, damaged, or of another model; nothing is changed then.
        """
        self._require("weights", "load()", may_be_empty=True)
        if self._residency.states["optimizer"] is State.OFFLOADED:
            self._require("optimizer", "load()")
        self._settle_save()
        self._num_changes += 1
        extra: dict[str, Any] = self._call("load", Path(folder))[0]
        for tag in ("weights", "optimizer"):
            self._residency.set(tag, State.LOADED)
        self._last_checkpoint = Path(folder)
        return extra

    @takes("export()", folder=PATH)
    def export(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write a Hugging Face model folder that ``AutoModelForCausalLM`` and inference engines load.

        The weights are gathered one at a time: the host needs memory for one, not for a file.

        Args:
            max_shard_bytes: the most weights in one file; a weight that is larger has one of its own.

        Raises:
            CheckpointError: the folder is not empty, or could not be written.
        """
        self._require("weights", "export()")
        self._call("export", Path(folder), max_shard_bytes)
