"""The names on the right of docs/migrating.md exist, with the arguments that it speaks of."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
_NAME = re.compile(r"`(rlcore(?:\.\w+)+)(?:\((\w+)=\))?`")
_ADAPTERS = "rlcore.integrations."
"""Modules that import a framework, which need not be installed: the names are looked up in their source."""


def found(dotted: str) -> Any:
    """What a dotted name leads to: a module, or an attribute of one."""
    if dotted.startswith(_ADAPTERS):
        module, _, name = dotted.rpartition(".")
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.origin or f"\ndef {name}(" not in Path(spec.origin).read_text("utf-8"):
            raise AttributeError(dotted)
        return None
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            value = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AttributeError(dotted)


def takes(value: Any, argument: str) -> bool:
    return argument in inspect.signature(value).parameters or argument in all_parameters(value)


def all_parameters(value: Any) -> set[str]:
    """The parameters of a method, and of those of the same name in the bases, to which it passes its options."""
    owner = inspect.getmodule(value)
    classes = [one for one in vars(owner).values() if inspect.isclass(one)]
    methods = [vars(base).get(value.__name__) for one in classes for base in one.__mro__]
    return {name for method in methods if inspect.isfunction(method) for name in inspect.signature(method).parameters}


def broken(text: str) -> list[str]:
    """The names and arguments in a text that are not there."""
    wrong = []
    for dotted, argument in _NAME.findall(text):
        try:
            value = found(dotted)
        except AttributeError:
            wrong.append(dotted)
            continue
        if argument and not takes(value, argument):
            wrong.append(f"{dotted}({argument}=)")
    return wrong


def test_every_name_of_the_page_exists() -> None:
    text = PAGE.read_text("utf-8")
    assert len(_NAME.findall(text)) > 90
    assert broken(text) == []


def test_a_name_that_is_not_there_is_found() -> None:
    text = "`rlcore.TrainEngine.build(shards=)` `rlcore.ops.ppo` `rlcore.nothing.x` `rlcore.integrations.trl.no`"
    assert broken("`rlcore.swap` `rlcore.ops.kl(coef=)`") == []
    assert broken(text) == [
        "rlcore.TrainEngine.build(shards=)",
        "rlcore.ops.ppo",
        "rlcore.nothing.x",
        "rlcore.integrations.trl.no",
    ]
