"""The answers of a worker process: plain data and tensors, decoded by the annotation of the method that was called."""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.tensor_tree import TreeEncoder, decode_tree


def dump_answer(value: object, what: str, *, is_annotated: bool = False) -> tuple[bytes, list[Tensor]]:
    """Return the bytes of plain data and tensors, and the tensors that were left out.

    Args:
        is_annotated: ``load_answer`` will be given the type, so that the value may hold whatever msgspec can rebuild,
            such as dataclasses; else only what comes back as it was.

    Raises:
        InvalidInputError: a value cannot come back; the message names its type.
    """
    encoder = _AnswerEncoder(is_annotated)
    try:
        return encoder.encode(value), encoder.tensors
    except Exception as error:  # a type, an integer or a depth that msgpack does not have, a device that failed
        raise InvalidInputError(
            f"{what} returned an object that a worker process cannot send back ({error}); "
            "return numbers, strings, lists, tuples, dicts, tensors or None"
        ) from error


class _AnswerEncoder(TreeEncoder):
    def __init__(self, is_annotated: bool) -> None:
        super().__init__()
        self._is_annotated = is_annotated

    def other(self, value: object) -> Any:
        if isinstance(value, dict):
            raise TypeError(f"a dict whose keys are {', '.join(sorted({type(key).__name__ for key in value}))}")
        return value if self._is_annotated else super().other(value)


def load_answer(body: bytes, tensors: list[Tensor], expected: object) -> Any:
    """Return the value as the type ``expected``; ``Any`` gives what was sent.

    Raises:
        msgspec.ValidationError: it is of another type.
    """
    sent = decode_tree(body, tensors)
    # In two steps, as a typed decoder takes no extension where it expects a tuple.
    return sent if expected is Any else msgspec.convert(sent, expected, dec_hook=_checked)


def _checked(kind: type, value: object) -> Any:
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
