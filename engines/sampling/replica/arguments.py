"""The arguments of another project's engine, checked by name without importing it.

An import takes seconds, and may leave a context on a device.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from rlcore.arguments import did_you_mean
from rlcore.engines.executors.options import BUILD_OPTIONS
from rlcore.errors import InvalidInputError, MissingDependencyError

RETURN_EXPERTS = "enable_return_routed_experts"
"""The argument, of vLLM and of SGLang, with which completions have the experts of their tokens."""


def package_folder(name: str, python: str | os.PathLike[str] | None, executor: str) -> Path | None:
    """Return the folder of a package in an environment; None if it is not in the usual place.

    Args:
        python: the interpreter that has it; None is this one.
        executor: the name of the executor that needs it, and of its extra.

    Raises:
        MissingDependencyError: this interpreter does not have it.
    """
    if python is None:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of this name is no package
            raise MissingDependencyError(name, needed_for=f"the {executor} executor", extra=executor)
        return Path(found.origin).parent
    program = os.path.expanduser(os.fspath(python))
    environment = Path(shutil.which(program) or program).parents[1]
    return next(environment.glob(f"lib/python3*/site-packages/{name}"), None)


def fields_of(source: Path, class_name: str | None = None) -> list[str]:
    """Return the annotated fields of a class in a file, or of all its classes; none if there is no such file."""
    if not source.is_file():
        return []
    return [
        ast.unparse(item.target)
        for node in ast.parse(source.read_bytes()).body
        if isinstance(node, ast.ClassDef) and class_name in (node.name, None)
        for item in node.body
        if isinstance(item, ast.AnnAssign)
    ]


def refuse_own(given: Iterable[str], own: Mapping[str, str], executor: str) -> None:
    """Refuse arguments that only rlcore sets; ``own`` has their names, and why.

    Raises:
        InvalidInputError: one is given.
    """
    for name in given:
        if name in own:
            raise InvalidInputError(f"build() takes no {name!r} for the {executor} executor: {own[name]}")


def refuse_unknown(given: Iterable[str], names: Collection[str], engine: str) -> None:
    """Refuse arguments that the engine does not know; without ``names`` it checks them itself.

    Raises:
        InvalidInputError: one is given; says the nearest name.
    """
    for name in given:
        if names and name not in names:
            hint = did_you_mean(name, [*BUILD_OPTIONS, *names]) or f", and build() takes {', '.join(BUILD_OPTIONS)}"
            raise InvalidInputError(f"{engine} has no engine argument {name!r}{hint}")
