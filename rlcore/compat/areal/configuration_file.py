"""``load_expr_config``: a configuration from a YAML file and overrides, checked by name and type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlcore.arguments import LIST, did_you_mean
from rlcore.errors import InvalidInputError, MissingDependencyError, one_line

IGNORED = ("cluster", "launcher", "sglang", "vllm", "server", "saver", "checkpointer", "evaluator", "stats_logger")
"""Sections of a configuration that say how AReaLite starts servers and writes files."""


def load_expr_config(argv: Sequence[str], config_class: type[Any]) -> tuple[Any, str]:
    """Read ``--config FILE.yaml key.key=value ...``; return the configuration and the file's name.

    Raises:
        InvalidInputError: the file cannot be read, or is no YAML; an unknown field (names the nearest); a value of
            another type.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError("pyyaml", needed_for="a configuration in YAML", extra="hf") from error
    if not LIST.has(argv) or len(argv) < 2 or argv[0] != "--config":
        raise InvalidInputError(f"load_expr_config() takes --config FILE.yaml and then key=value, got {argv!r:.200}")
    try:
        values = yaml.safe_load(Path(argv[1]).read_text("utf-8")) or {}
        overrides = [(override, yaml.safe_load(override.partition("=")[2])) for override in argv[2:]]
    except OSError as error:
        raise InvalidInputError(f"cannot read the configuration {argv[1]}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{argv[1]}, or an override of it, is no YAML: {one_line(error)}") from error
    for override, value in overrides:
        name, equals, _ = override.partition("=")
        if not (name and equals):
            raise InvalidInputError(f"an override must be key=value, got {override!r}")
        _put(values, name, value)
    config = _filled(config_class, values, "")
    rollout, actor = getattr(config, "rollout", None), getattr(config, "actor", None)
    if rollout is not None and actor is not None and not rollout.model_path:
        rollout.model_path = actor.path
    return config, argv[1]


def _put(values: Any, name: str, value: Any) -> None:
    """Set the field ``name``, such as "actor.path"; sections that are not there are made."""
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise InvalidInputError(f"an override must be of a field; {name} has no section above it")
    values[last] = value


def _filled(kind: Any, values: Any, at: str) -> Any:
    """Return a dataclass of these values, which are checked by name and type."""
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{at.rstrip('.') or 'a configuration'} must be a mapping, got {values!r:.100}")
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind)]
    found = {}
    for name, value in values.items():
        if not at and name in IGNORED:
            continue
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise InvalidInputError(f"{at}{name} is no field here{hint or ';'} accepted: {', '.join(names)}")
        found[name] = _value(hints[name], value, f"{at}{name}")
    return kind(**found)


def _value(kind: Any, value: Any, at: str) -> Any:
    kinds = list(get_args(kind)) if isinstance(kind, UnionType) else [kind]
    if value is None and type(None) in kinds:
        return None
    (kind,) = [one for one in kinds if one is not type(None)]
    if is_dataclass(kind):
        return _filled(kind, value, f"{at}.")
    plain = get_origin(kind) or kind
    if plain is float and isinstance(value, str):  # YAML reads 1e-5 as a text
        try:
            return float(value)
        except ValueError:
            pass
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        raise InvalidInputError(f"{at} must be a {plain.__name__}, got {value!r:.100}")
    return value
