"""A configuration in YAML with overrides: dataclasses, whose fields are checked by name, type and range.

A ``Section`` is such a dataclass. It says of each field what is accepted, and checks itself, so that one that is made
in Python is as good as one from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rlcore.arguments import Kind, did_you_mean
from rlcore.errors import InvalidInputError, MissingDependencyError

T = TypeVar("T")


def setting(default: Any, accepts: Kind) -> Any:
    """Return a field of a ``Section``. A callable ``default`` makes the value; ``...`` means that it must be given."""
    metadata = {"accepts": accepts}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """Base of dataclasses whose fields are made by ``setting``."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            accepts = field.metadata.get("accepts")
            if accepts is not None and not accepts.has(value := getattr(self, field.name)):
                raise FieldError(field.name, f"must be {accepts.words}, got {value!r:.100}")


class FieldError(InvalidInputError):
    """A field of a configuration is wrong. ``name`` is its path, such as "rollout.max_staleness"."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name, self.what = name, what


def read_configuration(
    path: str | Path, overrides: Sequence[str], kind: type[T], *, ignored: Collection[str] = ()
) -> T:
    """Read a YAML file, and overrides such as ``rollout.max_staleness=2``, into a dataclass.

    Args:
        ignored: sections of the file that are left out.

    Raises:
        InvalidInputError: no such file, no YAML, an unknown field (names the nearest), or a value that is not accepted.
    """
    values = _yaml_of(path)
    for override in overrides:
        _set(values, override)
    config: T = _filled(kind, {name: value for name, value in values.items() if name not in ignored}, "")
    return config


def _yaml_of(path: str | Path) -> dict[Any, Any]:
    try:
        values = _parsed(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(f"{path} is no YAML: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise InvalidInputError(f"{path} must hold fields and their values, got {values!r:.100}")
    return values or {}


def _parsed(text: str) -> Any:
    """Return the value of a text in YAML. Raises ValueError, in one line."""
    yaml = _yaml()
    try:
        return yaml.load(text, _loader(yaml))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as of a date in month 13
        raise ValueError(" ".join(str(error).replace('"<unicode string>", ', "").split())) from error


def _yaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError("pyyaml", needed_for="a configuration in YAML", extra="hf") from error
    return yaml


def _loader(yaml: Any) -> Any:
    """Return a safe loader that refuses a field given twice, of which YAML's own takes the last."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            if twice := [name for at, name in enumerate(names) if name in names[:at]]:
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def _set(values: dict[Any, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, last = name.split(".")
    if not equals or not all([*sections, last]):
        raise InvalidInputError(f"an override must be key=value, got {override!r}")
    inner = values
    for section in sections:
        if inner.get(section) is None:
            inner[section] = {}
        inner = inner[section]
        if not isinstance(inner, dict):
            raise InvalidInputError(f"the override {override!r} goes into {section!r}, which is {inner!r:.100}")
    try:
        inner[last] = _parsed(text)
    except ValueError as error:
        raise InvalidInputError(f"the value of the override {override!r} is no YAML; quote it: {error}") from error


def _filled(kind: Any, values: Any, at: str) -> Any:
    """Return a dataclass of these values, which are checked by name and type."""
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{at.removesuffix('.')} must be a mapping, got {values!r:.100}")
    hints = get_type_hints(kind)
    by_name = {one.name: one for one in dataclasses.fields(kind)}
    found = {}
    for name, value in values.items():
        if name not in by_name:
            hint = did_you_mean(str(name), by_name)
            raise FieldError(f"{at}{name}", f"is no field here{hint or ';'} accepted: {', '.join(by_name)}")
        is_checked_later = "accepts" in by_name[name].metadata
        found[name] = _value(hints[name], value, f"{at}{name}", is_checked_later)
    for name, one in by_name.items():
        if name not in found and one.default is one.default_factory is dataclasses.MISSING:
            words = one.metadata["accepts"].words if "accepts" in one.metadata else hints[name]
            raise FieldError(f"{at}{name}", f"is missing; it must be {words}")
    try:
        return kind(**found)
    except FieldError as error:
        raise FieldError(f"{at}{error.name}", error.what) from error


def _value(kind: Any, value: Any, at: str, is_checked_later: bool) -> Any:
    kinds = list(get_args(kind)) if isinstance(kind, UnionType) else [kind]
    if value is None and type(None) in kinds:
        return None
    if sections := [one for one in kinds if dataclasses.is_dataclass(one)]:
        return _filled(sections[0], value, f"{at}.")
    plain = [get_origin(one) or one for one in kinds if one is not type(None)]
    if float in plain and isinstance(value, str):  # YAML reads 1e-5 as a text
        try:
            return float(value)
        except ValueError:
            pass
    if float in plain and type(value) is int:
        return float(value)
    if not is_checked_later and type(value) not in plain:
        raise FieldError(at, f"must be a {' or '.join(one.__name__ for one in plain)}, got {value!r:.100}")
    return value
