"""Checks of the kinds of arguments: a decorator for functions, and a base class for methods that subclasses override.

A function declares only the arguments that would otherwise be ignored, or fail further down in the words of another
library. A value of the right kind that is still wrong is checked by the function itself.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from rlcore.errors import InvalidInputError

F = TypeVar("F", bound=Callable[..., Any])
_LONGEST = 200
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values, such as "a whole number": its description for messages, and the test of a value."""

    words: str
    has: Callable[[Any], bool]


def kind_of(words: str, *types: type) -> Kind:
    return Kind(words, lambda value: isinstance(value, types))


def _is_float(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)  # a Fraction times no tensor


def optional(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or None", lambda value: value is None or kind.has(value))


FLAG = kind_of("True or False", bool)
WHOLE = Kind("a whole number", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool))
WHOLE_FROM_0 = Kind("a whole number of at least 0", lambda value: WHOLE.has(value) and value >= 0)
COUNT = Kind("a whole number of at least 1", lambda value: WHOLE.has(value) and value >= 1)
NUMBER = Kind("a number", lambda value: WHOLE.has(value) or _is_float(value))
AT_LEAST_0 = Kind("a finite number of at least 0", lambda value: NUMBER.has(value) and 0 <= value < math.inf)
SECONDS = Kind("a number of seconds above 0", lambda value: NUMBER.has(value) and value > 0)
TEXT = kind_of("a str", str)
PATH = Kind("a non-empty str or Path", lambda value: isinstance(value, str | os.PathLike) and value != "")
BYTES = kind_of("bytes", bytes)
LIST = Kind("a list or tuple", lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes))
ITERABLE = Kind(
    "a list or another iterable",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping),
)
MAPPING = kind_of("a mapping", Mapping)


def takes(label: str = "", /, **kinds: Kind) -> Callable[[F], F]:
    """Decorate a function that refuses arguments of other kinds, by name.

    Raises (when it is called):
        InvalidInputError: "<label> takes <kind> as <argument>, got <value>".
    """

    def decorate(function: F) -> F:
        named = [(kinds.get(name), name) for name in inspect.signature(function).parameters]
        what = label or function.__name__

        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            for (kind, name), value in zip(named, arguments, strict=False):
                _check(what, kind, name, value)
            for name, value in options.items():
                _check(what, kinds.get(name), name, value)
            return function(*arguments, **options)

        @functools.wraps(function)
        async def checked_coroutine(*arguments: Any, **options: Any) -> Any:
            return await checked(*arguments, **options)

        # Who mocks, retries or traces a function looks whether it is a coroutine function.
        found: Any = checked_coroutine if inspect.iscoroutinefunction(function) else checked
        found.__takes__ = kinds
        return cast("F", found)

    return decorate


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'nearest'?" for an error about an unknown name, or "" where no known name is like it.

    A name that it begins comes first: "stop" means "stop_token_ids", and not "top_p".
    """
    names = list(known)
    begun = [one for one in names if name and one.startswith(name)]
    like = begun or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {like[0]!r}?" if like else ""


def plain_number(value: Any) -> Any:
    """Return the number in a NumPy scalar or a tensor without dimensions; another value as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _check(what: str, kind: Kind | None, name: str, value: Any) -> None:
    if kind is not None and not kind.has(value):
        shown = " ".join(line.strip() for line in repr(value).splitlines())  # a tensor has several
        shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}... of {type(value)}"
        raise InvalidInputError(f"{what} takes {kind.words} as {name}, got {shown}")


class Checked:
    """Base of classes whose methods, and overriding ones of subclasses, refuse other arguments than ``accepts``."""

    __slots__ = ()

    accepts: ClassVar[Mapping[str, Mapping[str, Kind]]] = {}
    """Method -> argument -> kind. A subclass with more methods adds to the table of its base."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for method, kinds in cls.accepts.items():
            function = vars(cls).get(method)
            if callable(function) and not hasattr(function, "__takes__"):  # dataclasses make a class twice
                setattr(cls, method, takes(**kinds)(function))
