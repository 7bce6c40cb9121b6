"""Messages over a pipe between a process and its child: msgpack, each with its length in front."""

from __future__ import annotations

import os
from typing import IO, Any, TypeVar

import msgspec

from rlcore.decoding import decode
from rlcore.errors import InvalidInputError

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
    """Wait for the next message and return it as a ``kind``; None when the writer has ended, or ends within it.

    Raises:
        InvalidInputError: what comes is no such message.
    """
    announced = pipe.read(_LENGTH_BYTES)
    nbytes = int.from_bytes(announced, "little")
    try:
        data = pipe.read(nbytes)
    except (MemoryError, OverflowError) as error:
        raise InvalidInputError(f"a message of {nbytes} bytes is announced, for which there is no memory") from error
    if len(announced) < _LENGTH_BYTES or len(data) < nbytes:
        return None
    message: T = decode(data, kind, "message", error=InvalidInputError)
    return message


def take_standard_output() -> IO[bytes]:
    """Return a pipe to whoever reads the standard output; what is printed from now on goes to standard error."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def take_standard_input() -> IO[bytes]:
    """Return a pipe from whoever writes to the standard input, in which others find nothing from now on."""
    pipe = os.fdopen(os.dup(0), "rb")
    put_nothing_at(0)
    return pipe


def put_nothing_at(descriptor: int) -> None:
    """Put /dev/null in the place of an open descriptor, whose number no other file then gets."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable=descriptor <= 2)
    os.close(nothing)
