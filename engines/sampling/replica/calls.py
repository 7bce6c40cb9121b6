"""Calls of a shard's methods as plain bytes: an executor makes them, and the process of the shard answers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from rlcore.engines.launchers.failures import WorkerFailure, describe, raised
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import RlcoreError


class ShardAnswer(msgspec.Struct, array_like=True):
    """The outcome of a call."""

    result: Any
    """The result of the method; None after an error."""
    failure: WorkerFailure | None
    """The error of the method, where it is one that a caller can be told as it was."""


def answer(shard: Any, method: str, arguments: Any, catches: type[Exception] = RlcoreError) -> bytes:
    """Call a method of a shard, or of an attribute of it, such as "receiver.begin"; return a ``ShardAnswer``.

    Args:
        catches: errors that are sent; others go on from here.
    """
    try:
        result, failure = attrgetter(method)(shard)(*arguments), None
    except catches as error:
        result, failure = None, describe(error)
    return msgspec.msgpack.encode((result, failure))


def results_of(answers: list[bytes], context: WorkerContext, method: str) -> list[Any]:
    """Return the results of all shards; raises the first error."""
    found = [msgspec.msgpack.decode(data, type=ShardAnswer) for data in answers]
    for one in found:
        if one.failure is not None:
            raise raised(one.failure, context, method)
    return [one.result for one in found]
