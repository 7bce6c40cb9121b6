"""Private names of Ray, with the reason. Tried with Ray 2.60."""

from __future__ import annotations

import importlib
from typing import Any

from rlcore.errors import StateError

_RAW = b"RAW"
"""The metadata of an object that is plain bytes (``ray_constants.OBJECT_METADATA_TYPE_RAW``)."""
_WHAT_TO_DO = {
    "OUT_OF_MEMORY": "Ray ended it as the host's memory was nearly full; RAY_memory_monitor_refresh_ms=0 in the "
    "environment of `ray start` keeps Ray from that"
}
"""The words that errors get beside Ray's name for them."""


def plain_bytes(ref: Any, timeout_s: float | None) -> bytes | memoryview:
    """Return the bytes that a method returned, without a copy. ``ray.get`` would unpickle what a host sends instead.

    Raises:
        StateError: it sent something else, or Ray says why there is no answer: "ACTOR_DIED", "ACTOR_UNAVAILABLE", ...
        TimeoutError: there is none within ``timeout_s``.
    """
    from ray._private.worker import global_worker
    from ray.exceptions import GetTimeoutError

    timeout_ms = -1 if timeout_s is None else int(timeout_s * 1000)
    try:
        ((data, metadata, *_),) = global_worker.core_worker.get_objects([ref], timeout_ms)
    except GetTimeoutError as error:
        raise TimeoutError from error
    kind = (metadata or b"").split(b",")[0]
    if kind != _RAW:
        raise StateError(_error_name(kind))
    return b"" if data is None else memoryview(data).cast("B")


def has_token() -> bool:
    """Return True if this process, and so the cluster that it is in, uses Ray's tokens."""
    raylet: Any = importlib.import_module("ray._raylet")  # a type checker cannot see into it
    return bool(raylet.get_authentication_mode() != raylet.AuthenticationMode.DISABLED)


def _error_name(kind: bytes) -> str:
    from ray.core.generated.common_pb2 import ErrorType

    if kind.isdigit() and int(kind) in ErrorType.values():
        name = str(ErrorType.Name(int(kind)))
        return f"{name}: {_WHAT_TO_DO[name]}" if name in _WHAT_TO_DO else name
    return f"an object of kind {kind!r} instead of plain bytes"
