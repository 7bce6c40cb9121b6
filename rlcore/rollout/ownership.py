"""Which inference engines have a controller: what one of two controllers asks, the other would be answered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from rlcore.errors import StateError

_lock = threading.Lock()
_owned: dict[int, Any] = {}
"""The engines by their ids: an engine need not be hashable. Each is kept, so that no other object gets its id."""


@contextlib.contextmanager
def owned(engines: Iterable[Any]) -> Iterator[None]:
    """Inside, no other controller can have one of these engines.

    Raises:
        StateError: another one has.
    """
    claimed = {id(one): one for one in engines}
    with _lock:
        if claimed.keys() & _owned.keys():
            raise StateError("another RolloutController has this inference engine; close() it first")
        _owned.update(claimed)
    try:
        yield
    finally:
        with _lock:
            for number in claimed:
                del _owned[number]
