"""Messages of other processes as values of a known type; whatever is wrong with the bytes is one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rlcore.errors import RlcoreError

T = TypeVar("T")


def decode(
    data: bytes | bytearray | memoryview,
    kind: type[T],
    what: str,
    *,
    error: type[RlcoreError],
    ext_hook: Callable[[int, memoryview], Any] | None = None,
) -> T:
    """Return the ``kind`` that the msgpack bytes hold.

    The depth of containers in containers is limited by Python's recursion limit, in what is skipped too.

    Args:
        what: names it in the error.
        ext_hook: makes a value of an extension of msgpack, by its code and bytes. Where it raises an ``error``, that is
            the error.

    Raises:
        error: the bytes are cut off, damaged, of another type, or nested too deeply.
    """
    try:
        found: T = msgspec.msgpack.decode(data, type=kind, ext_hook=ext_hook)
    except error:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError) as cause:
        raise error(f"these {len(data)} bytes are no {what}: {cause}") from cause
    except RecursionError as cause:
        raise error(f"these {len(data)} bytes are no {what}: containers are nested too deeply in them") from cause
    return found
