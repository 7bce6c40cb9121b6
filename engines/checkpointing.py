"""The checkpoints of a train engine: save, load, export, and the wait for a save in the background."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, overload

from rlcore.arguments import FLAG, PATH, Kind, kind_of, optional, takes
from rlcore.engines.checkpoints.digest import ALGORITHMS, Algorithm
from rlcore.engines.checkpoints.pending_save import PendingSave
from rlcore.engines.checkpoints.plain_values import plain_copy
from rlcore.engines.engine import Engine
from rlcore.engines.executors.base import TrainExecutor
from rlcore.engines.residency import State
from rlcore.errors import CheckpointError

_log = logging.getLogger(__name__)
_DIGEST = Kind("'xxh3_128' or 'sha256'", lambda value: isinstance(value, str) and value in ALGORITHMS)


class CheckpointedEngine(Engine):
    """An engine with checkpoints. A restart goes back to the last one. Whatever ends its workers waits for a save."""

    def __init__(self, executor: str) -> None:
        self._last_checkpoint: Path | None = None
        self._pending_save: PendingSave | None = None
        self._num_changes = 0
        """The number of calls that may have changed the weights."""
        super().__init__(executor)

    @overload
    def save(
        self,
        folder: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        blocking: Literal[True] = True,
        digest: Algorithm = "xxh3_128",
    ) -> float: ...
    @overload
    def save(
        self,
        folder: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        blocking: Literal[False],
        digest: Algorithm = "xxh3_128",
    ) -> PendingSave: ...
    @takes("save()", folder=PATH, extra=optional(kind_of("a dict", dict)), blocking=FLAG, digest=_DIGEST)
    def save(
        self,
        folder: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        blocking: bool = True,
        digest: Algorithm = "xxh3_128",
    ) -> float | PendingSave:
        """Write weights, optimizers, schedulers and random states; on failure the previous checkpoint stays.

        Args:
            extra: plain values of your own (step, data position), which ``load`` returns as they are: None, bool, int,
                finite float, str, and lists and dicts of these with keys of str.
            blocking: False copies the state to host memory and returns; it is written in the background. The next
                ``save``, ``load``, ``restart`` or ``close`` waits for that.
            digest: by which ``load`` finds damage, in every file: "xxh3_128", which costs next to nothing, or "sha256".

        Returns:
            Seconds taken; without ``blocking`` a handle to wait with.

        Raises:
            InvalidInputError: a value in ``extra`` would not come back equal.
            CheckpointError: it could not be written, or the host has no memory for the copy; the folder has a
                ``manifest.json`` of somebody else's; or an earlier save failed in the background, and nothing is
                written now.
        """
        for tag in ("weights", "optimizer"):
            self._require(tag, "save()")
        kept = plain_copy(extra or {}, "extra")
        self._settle_save()
        folder = Path(folder)
        data, seconds = self._call(TrainExecutor.save, folder, kept, blocking, digest)[0]
        if blocking:
            self._last_checkpoint = folder
            return float(seconds)
        self._pending_save = PendingSave(
            folder,
            data,
            partial(self._call, TrainExecutor.is_save_over),
            self._end_save,
        )
        return self._pending_save

    def _end_save(self, ends_stopped: bool) -> list[float | None]:
        group = self._built_group()
        calls: list[Any] = [((), {})] * len(group.workers)
        return group.call(TrainExecutor.end_save.__name__, calls, ends_stopped=ends_stopped)

    def _settle_save(self, *, ends_stopped: bool = False) -> None:
        """Wait for the save in the background; raise its error if nobody has seen it. See ``PendingSave.settle``."""
        pending, self._pending_save = self._pending_save, None
        if pending is None:
            return
        pending.settle(ends_stopped=ends_stopped)
        if pending.has_succeeded:
            self._last_checkpoint = pending.folder
        if pending.unseen_error is not None:
            raise pending.unseen_error

    def _settle_last_save(self) -> None:
        """Wait for the save in the background before the workers are ended; log its error."""
        try:
            self._settle_save(ends_stopped=True)
        except CheckpointError as error:
            _log.warning("%s", error)

    def restart(self) -> Self:
        self._settle_last_save()
        return super().restart()

    restart.__doc__ = Engine.restart.__doc__

    def close(self) -> None:
        """Wait for a save in the background, end the workers and free all their memory.

        A worker that is stopped (SIGSTOP) gets five seconds to go on, whatever it was doing.

        Raises:
            CheckpointError: that save failed; everything is closed nevertheless.
        """
        try:
            self._settle_save(ends_stopped=True)
        finally:
            super().close()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:  # an error of the save must not hide it
            self._settle_last_save()
        super().__exit__(*raised)

    @takes("load()", folder=PATH)
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue exactly where ``save`` was called; returns its ``extra``.

        The workers first compare the whole checkpoint with its digests, each worker some of the files.

        Raises:
            CheckpointError: it is missing, damaged, or of another model. It names the file; nothing has changed.
        """
        self._require("weights", "load()", may_be_empty=True)
        if self._residency.states["optimizer"] is State.OFFLOADED:
            self._require("optimizer", "load()")
        self._settle_save()
        self._num_changes += 1
        extra: dict[str, Any] = self._call(TrainExecutor.load, Path(folder))[0]
        for tag in ("weights", "optimizer"):
            self._residency.set(tag, State.LOADED)
        self._last_checkpoint = Path(folder)
        return extra

    @takes("export()", folder=PATH, digest=_DIGEST)
    def export(
        self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000, digest: Algorithm = "xxh3_128"
    ) -> None:
        """Write a Hugging Face model folder that ``AutoModelForCausalLM`` and inference engines load.

        The weights are gathered one at a time: the host needs memory for one, not for a file.

        Args:
            max_shard_bytes: the most weights in one file; a weight that is larger has one of its own.
            digest: of every file, for ``rlcore checkpoint verify``: "xxh3_128" or "sha256".

        Raises:
            CheckpointError: the folder could not be written; or it has files that no export wrote, or those that the
                module's weights are read from, and is as it was.
        """
        self._require("weights", "export()")
        self._call(TrainExecutor.export, Path(folder), max_shard_bytes, digest)
