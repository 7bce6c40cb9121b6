"""Messages over a pipe between a process and its child: msgpack, each with its length in front."""

from __future__ import annotations

import os
from typing import IO, Any, TypeVar

import msgspec

_LENGTH_BYTES = 8
T = TypeVar("T")


def write_message(pipe: IO[bytes], message: object) -> None:
    """Write a message that msgspec encodes, and flush it.

    Raises:
        BrokenPipeError: nobody reads the pipe any more.
    """
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def read_message(pipe: IO[bytes], kind: type[T] | Any = Any) -> T | None:
    """Wait for the next message and return it as a ``kind``; None when the writer has ended, or ends within it."""
    length = pipe.read(_LENGTH_BYTES)
    data = pipe.read(int.from_bytes(length, "little"))
    if len(length) < _LENGTH_BYTES or len(data) < int.from_bytes(length, "little"):
        return None
    message: T = msgspec.msgpack.decode(data, type=kind)
    return message


def take_standard_output() -> IO[bytes]:
    """Return a pipe to whoever reads the standard output; what is printed from now on goes to standard error."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe
