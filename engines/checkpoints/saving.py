"""The saves of one worker: at once, or in the background from a copy of its state."""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rlcore.collectives.default_group import all_gather_bytes, rank_and_size
from rlcore.device import Device
from rlcore.engines.checkpoints.checkpoint import Save
from rlcore.engines.checkpoints.loading import failure_text
from rlcore.engines.checkpoints.manifest import committed
from rlcore.engines.checkpoints.saved_tensor import parts_of
from rlcore.engines.checkpoints.snapshot import Snapshot
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.engines.checkpoints.train_state import Captured
from rlcore.errors import CheckpointError, DeviceError


@dataclass(eq=False, slots=True)
class _Background:
    """A save that runs in the background."""

    save: Save
    started: float
    thread: threading.Thread
    held: ExitStack
    """Closed when all workers have ended theirs."""
    ended: float = 0.0
    error: BaseException | None = None


class Saver:
    """Saves one worker's state, at most once at a time in the background.

    All workers call each method together, except ``wait``.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._background: _Background | None = None

    def save(
        self, folder: Path, captured: Captured, *, blocking: bool, algorithm: str = "xxh3_128"
    ) -> tuple[str, float]:
        """Save; return the name of the checkpoint's data and the seconds until training can go on.

        A save in the background before it was waited for by ``end``, as the engine does.

        Args:
            algorithm: of the digests.

        Raises:
            CheckpointError: a worker could not write, or has no host memory for a copy; or the folder is not free.
        """
        assert self._background is None, "end() comes first"
        started = time.perf_counter()
        rank, size = rank_and_size()
        save = Save(
            folder,
            Stamp(self._agreed_name(), algorithm),
            rank=rank,
            size=size,
            groups=list(captured.tensors),
            state=captured.state,
        )
        with ExitStack() as undo:
            with self._together(save):
                if rank == 0:
                    undo.enter_context(save.held())
            with self._together(save):
                if rank > 0:
                    save.check_shared()
                    undo.enter_context(save.held())
                parts = {group: parts_of(named) for group, named in captured.tensors.items()}
                if blocking:
                    save.write(parts)
                else:
                    tensors = [part.tensor for named in parts.values() for part in named.values()]
                    snapshot = _snapshot(self._device, tensors)
                    undo.callback(snapshot.release)
            if not blocking:
                write = functools.partial(save.write, parts, snapshot.pieces)
                self._background = _in_background(save, started, snapshot, write, undo.pop_all())
        return save.data.name, time.perf_counter() - started

    def end(self) -> float | None:
        """Wait for the save in the background; return the seconds it took, None if there is none.

        Raises:
            CheckpointError: a worker could not write.
        """
        self.wait()
        background, self._background = self._background, None
        if background is None:
            return None
        try:
            with self._together(background.save):
                if background.error is not None:
                    raise background.error
        finally:
            background.held.close()
        return background.ended - background.started

    def is_over(self) -> bool:
        """Return True if ``end`` would not wait on any worker."""
        is_going_on = self._background is not None and self._background.thread.is_alive()
        return not self._any(is_going_on)

    def wait(self) -> None:
        """Wait until this worker has written."""
        if self._background is not None:
            self._background.thread.join()

    @contextmanager
    def _together(self, save: Save) -> Iterator[None]:
        """Make all workers raise where one fails."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # of any kind: the other workers must not wait for this one
            failure = error
        if not self._any(failure is not None):
            return
        save.discard()
        has_previous = bool(committed(save.folder))
        kept = f"the previous checkpoint in {save.folder} is intact" if has_previous else "nothing of it is left"
        raise CheckpointError(f"cannot write the checkpoint {save.folder}: {self._cause(failure)}; {kept}") from failure

    def _cause(self, failure: Exception | None) -> str:
        """Return the failure of the first rank that has one: the same text on all workers, whoever is asked."""
        if not dist.is_initialized():
            return failure_text(failure)
        own = msgspec.json.encode(failure_text(failure))
        texts = [msgspec.json.decode(sent, type=str) for sent in all_gather_bytes(own, self._device.torch_device)]
        failed = [rank for rank, text in enumerate(texts) if text]
        others = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
        return f"rank {failed[0]}: {texts[failed[0]]}{others}"

    def _any(self, flag: bool) -> bool:
        """Return True if ``flag`` is True on any worker."""
        if not dist.is_initialized():
            return flag
        count = torch.tensor(int(flag), device=self._device.torch_device)
        dist.all_reduce(count)
        return bool(count)

    def _agreed_name(self) -> str:
        """Return a name that is new, and the same on all workers."""
        chosen = torch.tensor(uuid.uuid4().int >> 80)
        if dist.is_initialized():
            chosen = chosen.to(self._device.torch_device)
            dist.broadcast(chosen, src=0)
        return f"{int(chosen):012x}"


def _snapshot(device: Device, tensors: list[torch.Tensor]) -> Snapshot:
    try:
        return Snapshot(device, tensors)
    except DeviceError as error:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        raise DeviceError(
            f"a save in the background needs a copy of this worker's {nbytes} bytes: {error}. "
            "save(blocking=True) needs none"
        ) from error


def _in_background(
    save: Save, started: float, snapshot: Snapshot, write: Callable[[], None], held: ExitStack
) -> _Background:
    def run() -> None:
        try:
            write()
        except BaseException as error:  # raised by whoever waits
            background.error = error
        finally:
            snapshot.release()
            background.ended = time.perf_counter()

    # Not a daemon: a program that ends waits for it.
    background = _Background(save, started, threading.Thread(target=run, name="rlcore-save"), held)
    background.thread.start()
    return background
