"""A tensor in the memory of another process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, final

import torch

from rlcore.errors import StateError
from rlcore.types import IpcHandle

_log = logging.getLogger(__name__)


@final
class Mapping:
    """An imported tensor of ``device.memory.import_ipc``, open until ``close()``.

    The garbage collector does not close it: with ``close()`` the user states that no work uses the memory any more.
    """

    def __init__(
        self,
        handle: IpcHandle,
        tensor: torch.Tensor,
        *,
        release: Callable[[Mapping], None],
        on_revoke: Callable[[Mapping], None] | None,
    ) -> None:
        self.handle = handle
        self.is_revoked = False
        """The exporter wants its memory back, or has ended: call ``close()`` soon."""
        self._tensor: torch.Tensor | None = tensor
        self._release = release
        self._on_revoke = on_revoke
        self._closing = threading.Lock()

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor on the importing device, without gradient; use neither it nor a view after ``close()``.

        Raises:
            StateError: the mapping is closed.
        """
        if self._tensor is None:
            end = "was revoked by its exporter and is closed" if self.is_revoked else "is closed"
            raise StateError(
                f"the mapping of export {self.handle.export_id} {end}; open another with import_ipc(handle)"
            )
        return self._tensor

    @property
    def is_closed(self) -> bool:
        return self._tensor is None

    def close(self) -> None:
        """End the use of the memory; queued work that uses it must be done. A second call does nothing."""
        with self._closing:
            if self._tensor is None:
                return
            self._tensor = None
        self._release(self)

    def revoke(self) -> None:
        """Handle a revocation by the exporter: call ``on_revoke`` once, in the thread that received it first."""
        with self._closing:
            on_revoke, self._on_revoke = self._on_revoke, None
        self.is_revoked = True
        if on_revoke is None:
            return
        try:
            on_revoke(self)
        except Exception:  # the thread that receives from the exporter must continue
            _log.exception("on_revoke of %r failed", self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "revoked" if self.is_revoked else "open"
        return f"<{state} mapping of export {self.handle.export_id}: {self.handle.dtype} {list(self.handle.shape)}>"
