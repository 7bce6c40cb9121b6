"""The memory that parts of rlcore hold in this process, for errors that say what holds the rest.

A part reports itself when it is made. It is asked only when an allocation has failed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_parts: weakref.WeakKeyDictionary[Any, Callable[[Any], Mapping[str, int]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


def report(part: T, held_by: Callable[[T], Mapping[str, int]]) -> None:
    """Have ``held_by(part)`` asked as long as ``part`` lives; it returns bytes by what they are, in words."""
    with _lock:
        _parts[part] = held_by


def held() -> dict[str, int]:
    """Return the bytes by what they are, the most first; parts that hold nothing are absent."""
    with _lock:
        parts = list(_parts.items())
    total: Counter[str] = Counter()
    for part, held_by in parts:
        with contextlib.suppress(Exception):  # it is being made or changed, or its device has failed
            total.update(held_by(part))
    return {what: nbytes for what, nbytes in total.most_common() if nbytes}
