"""The options of ``Engine.build``, its own and those of the executor, checked before any worker starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlcore.arguments import did_you_mean
from rlcore.errors import InvalidInputError

BUILD_OPTIONS = (
    "devices",
    "launcher",
    "colocate_with",
    "not_colocate_with",
    "acceptable_node_ips",
    "num_hosts",
    "strategy",
    "host_labels",
    "python",
    "tensor_parallel_size",
    "data_parallel_size",
    "onload",
    "host_memory_bytes",
    "reserve_host_bytes",
    "timeout_s",
)
"""Names of the options of ``Engine.build`` itself, for hints in errors: an executor cannot import the engine. A test
holds them against its signature."""


def check_executor_options(label: str, executor: str, executor_class: Any, given: Mapping[str, Any]) -> None:
    """Refuse names that the executor does not know, and values that its ``options_class`` does not take.

    Args:
        given: the keyword arguments of ``build`` besides ``BUILD_OPTIONS``.

    Raises:
        InvalidInputError: says the name, the nearest one, and all that are accepted.
    """
    names = _names(executor_class)
    if names is None:
        return
    for name in given:
        if name not in names:
            hint = did_you_mean(name, [*BUILD_OPTIONS, *names]) or "."
            raise InvalidInputError(
                f"build() of {label} has no option {name!r}{hint} It takes {', '.join(BUILD_OPTIONS)}; and by the "
                f"executor {executor!r}: {', '.join(names) or 'nothing else'}"
            )
    if executor_class.options_class is not None:
        executor_class.options_class(**given)


def _names(executor_class: Any) -> list[str] | None:
    """Return the names that the executor takes; None means that it checks them itself."""
    if executor_class.options_class is not None:
        return [field.name for field in fields(executor_class.options_class)]
    kinds = [parameter.kind for parameter in inspect.signature(executor_class.build).parameters.values()]
    return None if inspect.Parameter.VAR_KEYWORD in kinds else _keywords(executor_class.build)


def _keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
