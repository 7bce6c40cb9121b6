"""Exceptions of workers as plain data, and as the errors that the user's process raises."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

import rlcore.errors
from rlcore.device import Device
from rlcore.engines.launchers.answers import dump_answer, load_answer
from rlcore.engines.launchers.want_of_memory import want_of_memory
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError, RlcoreError, WorkerError, one_line

_LONGEST_TEXT = 50_000


class WorkerFailure(msgspec.Struct, array_like=True):
    """An exception of a worker on its way to the user's process."""

    kind: str
    """The name of a class in ``rlcore.errors``; "" for any other exception."""
    message: str
    in_one_line: str
    traceback: str
    attributes: dict[str, bytes]
    """The attributes of rlcore's own errors that are plain data, as ``dump_answer`` writes them."""
    memory: str = ""
    """The text of ``want_of_memory``; "" for another failure."""


def describe(error: BaseException, device: Device | None = None) -> WorkerFailure:
    """Return an exception as plain data; ``device`` is the worker's, if it has one yet."""
    is_ours = vars(rlcore.errors).get(type(error).__name__) is type(error)
    attributes = dict(_plain_attributes(error)) if is_ours else {}
    return WorkerFailure(
        kind=type(error).__name__ if is_ours else "",
        message=_bounded(_text(error)),
        in_one_line=_bounded(one_line(error)),
        traceback=_bounded("".join(traceback.format_exception(error))),
        attributes=attributes,
        memory=want_of_memory(error, device),
    )


def _plain_attributes(error: BaseException) -> Iterator[tuple[str, bytes]]:
    for name, value in vars(error).items():
        with contextlib.suppress(InvalidInputError):
            body, tensors = dump_answer(value, name)
            if not tensors:
                yield name, body


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # a user's __str__
        return f"<its text cannot be had: {failed!r}>"


def _bounded(text: str) -> str:
    """Return both ends of a text that nobody would read whole, and replace characters that UTF-8 does not have."""
    half = _LONGEST_TEXT // 2
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text.encode(errors="replace").decode()


def raised(failure: WorkerFailure, context: WorkerContext, method: str) -> Exception:
    """Return the error of the user's process: rlcore's own keep their class, all others become a WorkerError.

    The worker's traceback is a note on it, or part of the WorkerError's text.
    """
    if not failure.kind:
        failed = WorkerError(
            rank=context.rank,
            device=context.device_name,
            method=method,
            error=f"{failure.in_one_line}\n\n{failure.memory}" if failure.memory else failure.in_one_line,
            traceback=failure.traceback,
        )
        failed.is_out_of_memory = bool(failure.memory)
        return failed
    kind: type[RlcoreError] = getattr(rlcore.errors, failure.kind)
    error = kind.__new__(kind, failure.message)
    error.args = (failure.message,)  # those that are an OSError too leave it to __init__
    error.__dict__.update({name: load_answer(body, [], Any) for name, body in failure.attributes.items()})
    if failure.memory:
        error.is_out_of_memory = True
        error.add_note(failure.memory)
    error.add_note(f"raised by {method}() on {context.where}:\n{failure.traceback}")
    return error
