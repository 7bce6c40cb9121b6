"""Plain values in a manifest: they come back equal, or are refused before anything is written.

JSON has no tuples, no NaN, and only text as keys. Such values are refused from the user. In the states of optimizers
and schedulers (milestones by step, an infinite best) each stands as a dict with one key: "!tuple", "!float", "!dict" or
"!Counter".
"""

from __future__ import annotations

import math
import numbers
import os
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from rlcore.errors import InvalidInputError

_ACCEPTED = (
    "None, True and False, whole numbers, finite floats, str, and lists and dicts of these, the dicts with keys of str"
)
_MOST_LEVELS = 100
"""The reader of a manifest has a limit too."""
_LONGEST = 80
"""The number of characters of a value in a message."""
_TAG = "!"


def plain_copy(value: object, path: str) -> Any:
    """Return the value in JSON, which comes back equal.

    Args:
        path: the value's name in errors, such as "extra"; what is inside has a longer one: extra['data'][3].

    Raises:
        InvalidInputError: something in it would come back as something else.
    """
    return _encoded(value, path, _MOST_LEVELS, has_tags=False)


def tagged(value: object, path: str) -> Any:
    """Return the value in JSON with tags, for ``untagged``; otherwise as ``plain_copy`` does."""
    return _encoded(value, path, _MOST_LEVELS, has_tags=True)


def untagged(value: object) -> Any:
    """Return what ``tagged`` was given."""
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("!float", str(text)):
            return float(text)
        case ("!tuple", list(items)):
            return tuple(map(untagged, items))
        case (("!dict" | "!Counter") as tag, list(items)):
            found = {untagged(key): untagged(item) for key, item in items}
            return Counter(found) if tag == "!Counter" else found
    return {key: untagged(item) for key, item in value.items()}


def _encoded(value: object, path: str, levels: int, *, has_tags: bool) -> Any:
    if not levels:
        raise InvalidInputError(
            f"save() cannot keep {path[:_LONGEST]}...: it is more than {_MOST_LEVELS} lists and dicts deep, or holds "
            "itself; give what is inside beside each other"
        )
    if isinstance(value, list):
        return [_encoded(item, f"{path}[{at}]", levels - 1, has_tags=has_tags) for at, item in enumerate(value)]
    if isinstance(value, dict) and _has_plain_keys(value) and not (has_tags and _needs_tag(value)):
        return {
            _simple(key, f"a key of {path}"): _encoded(item, f"{path}[{key!r}]", levels - 1, has_tags=has_tags)
            for key, item in value.items()
        }
    if has_tags and (split := _split(value)) is not None:
        tag, content = split
        return {_TAG + tag: _encoded(content, path, levels - 1, has_tags=True)}
    return _simple(value, path)


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _needs_tag(value: dict[Any, Any]) -> bool:
    return isinstance(value, Counter) or any(key.startswith(_TAG) for key in value)


def _split(value: object) -> tuple[str, Any] | None:
    """Return the tag of a value that JSON has not, and the JSON value that stands for it; None for other values."""
    if isinstance(value, float) and not math.isfinite(value):
        return "float", str(float(value))
    if isinstance(value, tuple):
        return "tuple", list(value)
    if isinstance(value, dict):
        return "Counter" if isinstance(value, Counter) else "dict", [[key, item] for key, item in value.items()]
    return None


def _simple(value: object, path: str) -> Any:
    """Return a value that is no list or dict; for one of a derived class, such as an enum, its plain equal."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and _is_text(value):
        return str.__str__(value)
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}... of {type(value).__name__}"
    raise InvalidInputError(
        f"save() cannot keep {path} = {shown}, which would not come back equal. Accepted are {_ACCEPTED}; "
        f"{_advice(value)}"
    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _advice(value: object) -> str:
    """Say what to save instead."""
    ways: list[tuple[bool, str]] = [
        (isinstance(value, float), "leave it out, or give it as text: str(value)"),
        (isinstance(value, str), "give text that UTF-8 can hold"),
        (isinstance(value, tuple), "give list(value)"),
        (isinstance(value, Set), "give sorted(value)"),
        (isinstance(value, bytes | bytearray), "give value.hex()"),
        (isinstance(value, os.PathLike), "give str(value)"),
        (isinstance(value, Mapping), "give {str(key): item for key, item in value.items()}"),
        (hasattr(value, "tolist"), "give value.tolist()"),
        (isinstance(value, numbers.Number), "give float(value) or int(value)"),
    ]
    return next((how for holds, how in ways if holds), "give what it is made of, or leave it out")
