"""``load_expr_config``: AReaLite's way to read a configuration and its overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.arguments import LIST
from rlcore.configuration_file import read_configuration
from rlcore.errors import InvalidInputError

IGNORED = ("cluster", "launcher", "sglang", "vllm", "server", "saver", "checkpointer", "evaluator", "stats_logger")
"""Sections of a configuration that say how AReaLite starts servers and writes files."""


def load_expr_config(argv: Sequence[str], config_class: type[Any]) -> tuple[Any, str]:
    """Read ``--config FILE.yaml key.key=value ...``; return the configuration and the file's name.

    Raises:
        InvalidInputError: the file cannot be read, or is no YAML; an unknown field (names the nearest); a value of
            another type.
    """
    if not LIST.has(argv) or len(argv) < 2 or argv[0] != "--config":
        raise InvalidInputError(f"load_expr_config() takes --config FILE.yaml and then key=value, got {argv!r:.200}")
    config = read_configuration(argv[1], argv[2:], config_class, ignored=IGNORED)
    rollout, actor = getattr(config, "rollout", None), getattr(config, "actor", None)
    if rollout is not None and actor is not None and not rollout.model_path:
        rollout.model_path = actor.path
    return config, argv[1]
