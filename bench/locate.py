"""The line of a value in a JSON text, for people who have to mend it."""

from __future__ import annotations

import json
import re

_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


def line_of(text: str, path: str) -> int:
    """The line, from 1, on which the value at ``path`` ("$.cases[0].name") begins.

    Where the path leads to nothing it is the line of the last value on the way; ``text`` must be JSON.
    """
    at = _skip(text, 0)
    for name, index in _STEP.findall(path):
        found = _member(text, at, name) if name else _item(text, at, int(index))
        if found is None:
            break
        at = found
    return text.count("\n", 0, at) + 1


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _member(text: str, at: int, wanted: str) -> int | None:
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, at = _decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # past the colon
        if name == wanted:
            return at
        at = _next(text, at)
    return None


def _item(text: str, at: int, wanted: int) -> int | None:
    at = _skip(text, at + 1)
    for _ in range(wanted):
        if text[at] == "]":
            return None
        at = _next(text, at)
    return at


def _next(text: str, at: int) -> int:
    """Past the value at ``at`` and its comma."""
    at = _skip(text, _decoder.raw_decode(text, at)[1])
    return _skip(text, at + 1) if text[at] == "," else at
