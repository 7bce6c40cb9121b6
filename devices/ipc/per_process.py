"""One object a process, such as the ledger of what it shares: a fork begins with a new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _HasSockets(Protocol):
    def close_sockets(self) -> None: ...


T = TypeVar("T", bound=_HasSockets)


class PerProcess(Generic[T]):
    """Holds this process's object in ``own``.

    That of the parent stays unused in a child, because a child cannot free or close device memory.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._inherited: list[T] = []
        self.own = make()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._inherited.append(self.own)
        self.own.close_sockets()
        self.own = self._make()
