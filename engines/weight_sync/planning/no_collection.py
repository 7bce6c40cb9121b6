"""A time without Python's garbage collection, for work that makes many objects and keeps them.

The collector would look at all objects of the process again and again, and free none: an engine has millions.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, or in a function that it decorates, Python's garbage collector does not run by itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
