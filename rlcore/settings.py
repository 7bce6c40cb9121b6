"""All environment variables of rlcore, typed and checked in one place.

They are read when they are needed (``Settings.from_env()``), so that a program may set them after importing rlcore.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from rlcore.errors import InvalidInputError

_PREFIX = "RLCORE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_DEBUG_MODES = ("", "1", "pdb")
TRACE_FILES = "spans-*.jsonl"
"""The files in the folder of ``Settings.trace``, one of each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Field ``x`` is the variable ``RLCORE_X``."""

    device: str | None = None
    """Device that ``get_device()`` returns when none is named, such as "cuda:1"."""
    debug: str = ""
    """"1": check operators' inputs synchronously, and that ranks call the same collective operations; "pdb": also run
    workers in this process, for breakpoints."""
    log_level: str = "WARNING"
    """DEBUG, INFO, WARNING or ERROR."""
    strict_plugins: bool = False
    """Any plugin failure is fatal."""
    disable_plugins: tuple[str, ...] = ()
    """Entry-point names of plugins not to load, separated by commas; "all" means every third-party plugin."""
    probe_timeout_s: float = 10.0
    """Seconds that a third party's plugin may take to load, and its device to say that it is there and what it can."""
    simulated: bool = False
    """Allows the vllm executor to start on a simulated device."""
    cache: Path = Path()
    """Folder for generated files such as the quickstart model; default $XDG_CACHE_HOME/rlcore or ~/.cache/rlcore, and
    <temporary folder>/rlcore-cache-<user id> for a user without a home folder."""
    runtime: Path = Path()
    """For sockets and records of processes; default $XDG_RUNTIME_DIR/rlcore or <temporary folder>/rlcore-<user id>."""

    trace: Path | None = None
    """Folder into which every process writes what it does and when; ``rlcore trace`` sets it."""
    trace_kernels: bool = False
    """The third call of each method of a worker is recorded by torch's profiler, too."""
    vllm_plain_weights: bool = False
    """Makes a vLLM of your own on a host keep weights as they were loaded, so that ``rlcore_ipc`` can write them."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read all variables. Raises InvalidInputError that names the variable, its value and the accepted ones."""
        _refuse_unknown(env)
        temporary = Path(tempfile.gettempdir(), f"rlcore-{os.getuid()}")
        runtime_home = env.get("XDG_RUNTIME_DIR")
        disabled = env.get("RLCORE_DISABLE_PLUGINS", "")
        trace, trace_kernels = traced(env)
        return cls(
            device=named_device(env),
            debug=_one_of(env, "RLCORE_DEBUG", "", _DEBUG_MODES),
            log_level=_one_of(env, "RLCORE_LOG_LEVEL", "WARNING", _LOG_LEVELS),
            strict_plugins=_flag(env, "RLCORE_STRICT_PLUGINS"),
            disable_plugins=tuple(name.strip() for name in disabled.split(",") if name.strip()),
            probe_timeout_s=_seconds(env, "RLCORE_PROBE_TIMEOUT_S", 10.0),
            simulated=_flag(env, "RLCORE_SIMULATED"),
            cache=Path(env.get("RLCORE_CACHE") or _default_cache(env)),
            runtime=Path(env.get("RLCORE_RUNTIME") or (Path(runtime_home, "rlcore") if runtime_home else temporary)),
            trace=trace,
            trace_kernels=trace_kernels,
            vllm_plain_weights=_flag(env, "RLCORE_VLLM_PLAIN_WEIGHTS"),
        )


def _default_cache(env: Mapping[str, str]) -> Path:
    if cache_home := env.get("XDG_CACHE_HOME"):
        return Path(cache_home, "rlcore")
    try:
        return Path.home() / ".cache" / "rlcore"
    except RuntimeError:  # no HOME, and a user id that the system has no name for, as containers give
        return Path(tempfile.gettempdir(), f"rlcore-cache-{os.getuid()}")


VARIABLES = tuple(_PREFIX + field.name.upper() for field in fields(Settings))


def _refuse_unknown(env: Mapping[str, str]) -> None:
    for name in env:
        if name.startswith(_PREFIX) and name not in VARIABLES:
            raise InvalidInputError(f"unknown environment variable {name}; rlcore reads {', '.join(VARIABLES)}")


def _one_of(env: Mapping[str, str], name: str, default: str, accepted: tuple[str, ...]) -> str:
    value = env.get(name, default)
    if value not in accepted:
        choices = ", ".join(repr(choice) for choice in accepted)
        raise InvalidInputError(f"{name} must be one of {choices}, got {value!r}")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").lower()
    if value not in _TRUE + _FALSE:
        raise InvalidInputError(f"{name} must be 1 or 0, got {env[name]!r}")
    return value in _TRUE


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    value = env.get(name, default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidInputError(f"{name} must be a number of seconds above 0, got {value!r}")
    return seconds


def named_device(env: Mapping[str, str] = os.environ) -> str | None:
    """Return ``Settings.device`` alone, without the cost of reading and checking all variables."""
    return env.get("RLCORE_DEVICE") or None


def traced(env: Mapping[str, str] = os.environ) -> tuple[Path | None, bool]:
    """Return ``Settings.trace`` and ``Settings.trace_kernels`` alone: a process asks before anything else is known."""
    folder = env.get("RLCORE_TRACE")
    return Path(folder) if folder else None, _flag(env, "RLCORE_TRACE_KERNELS")


def is_debugging() -> bool:
    """Return True if RLCORE_DEBUG is set."""
    return _debugs(os.environ.get("RLCORE_DEBUG", ""))


@functools.cache
def _debugs(value: str) -> bool:
    """Return the answer for a value of the variable; it is cached, as reading all settings takes 70 microseconds."""
    return Settings.from_env({"RLCORE_DEBUG": value}).debug != ""
