"""What ``Engine.build`` takes, checked before any worker starts: its own options, and those of the executor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlcore.arguments import did_you_mean
from rlcore.errors import InvalidInputError


def check_executor_options(
    label: str, executor: str, executor_class: Any, given: Mapping[str, Any], build: Callable[..., Any]
) -> None:
    """Refuse names that the executor does not know, and values that its ``options_class`` does not take.

    Args:
        given: what ``build`` got besides its own options.

    Raises:
        InvalidInputError: says the name, the nearest one, and all that are accepted.
    """
    names = _names(executor_class)
    if names is None:
        return
    own = _keywords(build)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, [*own, *names]) or "."
            raise InvalidInputError(
                f"build() of {label} has no option {name!r}{hint} It takes {', '.join(own)}; and by the executor "
                f"{executor!r}: {', '.join(names) or 'nothing else'}"
            )
    if executor_class.options_class is not None:
        executor_class.options_class(**given)


def _names(executor_class: Any) -> list[str] | None:
    """None: any, which the executor judges itself."""
    if executor_class.options_class is not None:
        return [field.name for field in fields(executor_class.options_class)]
    kinds = [parameter.kind for parameter in inspect.signature(executor_class.build).parameters.values()]
    return None if inspect.Parameter.VAR_KEYWORD in kinds else _keywords(executor_class.build)


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
