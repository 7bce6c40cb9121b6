"""Load plugins one by one: a broken one never takes down the others, and is never silent.

Each plugin is imported, its hooks are validated, and its registrations are collected. A failure is rolled back and
recorded with stage, distribution and exception; ``rlcore devices`` shows it. A third party's plugin has a deadline, and
may raise anything. Devices are probed later (``rlcore/registry.py``); a failed probe is recorded in the same place.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import pluggy

from rlcore.deadline import outcome_here, outcomes_within
from rlcore.errors import PluginError, one_line
from rlcore.hookspecs import PROJECT, Hooks
from rlcore.settings import Settings

logger = logging.getLogger(__name__)

BUILT_IN = {
    "cpu": "rlcore.devices.cpu.plugin",
    "cuda": "rlcore.devices.cuda.plugin",
    "npu": "rlcore.devices.ascend.plugin",
    "declared": "rlcore.devices.declared.plugin",
    "kernels": "rlcore.kernels.plugin",
    "engines": "rlcore.engines.plugin",
    "bench": "rlcore.bench.plugin",
}
"""Registered by name before any entry point; a third-party entry point of the same name is refused."""
DECLARED = "declared"
"""The built-in plugin whose devices give way to those of other plugins."""

Stage = Literal["disabled", "import", "validate", "register", "probe", "loaded"]


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """The outcome of loading one plugin, or of a later probe of its devices that failed."""

    name: str
    distribution: str
    version: str
    stage: Stage
    """"loaded", "disabled", or the stage that failed."""
    error: BaseException | None = None
    """Whatever it raised, such as the SystemExit of code that tried to end the process."""

    @property
    def reason(self) -> str:
        """The error in one line; empty when there is none."""
        return "" if self.error is None else one_line(self.error)


@dataclass(frozen=True, slots=True)
class _PluginSource:
    name: str
    distribution: str
    version: str
    load: Callable[[], object]


Collect = Callable[[str, pluggy.HookRelay], Callable[[], None]]
"""A function that calls the hooks of the plugin of that name, and returns the one that puts all of it in force."""


def load_plugins(collect: Collect, settings: Settings) -> list[PluginRecord]:
    """Load every plugin. One that hangs is given up after ``RLCORE_PROBE_TIMEOUT_S``, others that hang after a tenth.

    Raises:
        PluginError: with ``RLCORE_STRICT_PLUGINS=1``, at the first plugin that fails.
    """
    records: list[PluginRecord] = []
    timeout_s = settings.probe_timeout_s
    for source in _sources():
        owner = next((record.distribution for record in records if record.name == source.name), None)
        record = _load(source, owner, collect, settings, timeout_s)
        records.append(record)
        if isinstance(record.error, TimeoutError):
            timeout_s = settings.probe_timeout_s / 10
        if record.error is not None:
            report_failure(record, settings)
    unknown = set(settings.disable_plugins) - {record.name for record in records} - {"all"}
    if unknown:
        names = ", ".join(record.name for record in records)
        logger.warning("RLCORE_DISABLE_PLUGINS names no plugin: %s; there are %s", ", ".join(sorted(unknown)), names)
    return records


def _sources() -> Iterator[_PluginSource]:
    for name, module in BUILT_IN.items():
        yield _PluginSource(name, "rlcore", "", lambda module=module: importlib.import_module(module))  # type: ignore[misc]
    for entry_point in importlib.metadata.entry_points(group=PROJECT):
        dist = entry_point.dist
        yield _PluginSource(
            entry_point.name, dist.name if dist else "unknown", dist.version if dist else "", entry_point.load
        )


def _load(
    source: _PluginSource,
    owner: str | None,
    collect: Collect,
    settings: Settings,
    timeout_s: float,
) -> PluginRecord:
    """Load one plugin; ``owner`` is the distribution that already has a plugin of this name, or None."""

    def ended(stage: Stage, error: BaseException | None = None) -> PluginRecord:
        return PluginRecord(source.name, source.distribution, source.version, stage, error)

    is_third_party = source.distribution != "rlcore"
    disabled = settings.disable_plugins
    if source.name in disabled or (is_third_party and "all" in disabled):
        return ended("disabled")
    if owner is not None:
        return ended("validate", PluginError(f"the plugin name {source.name!r} belongs to {owner}; choose another"))
    stages: list[Stage] = ["import"]

    def load() -> Callable[[], None]:
        module = source.load()
        stages.append("validate")
        hooks = _validated_hooks(source.name, module)
        stages.append("register")
        return collect(source.name, hooks)

    (outcome,) = outcomes_within(timeout_s, [load]) if is_third_party else [outcome_here(load)]
    if outcome.error is not None:
        return ended(stages[-1], outcome.error)
    outcome.get()()  # here, so that a plugin that comes too late changes nothing any more
    return ended("loaded")


def _validated_hooks(name: str, module: object) -> pluggy.HookRelay:
    """Return the hooks of a plugin. Each plugin has its own manager, so that a failed one leaves nothing behind."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(module, name)
    manager.check_pending()
    if not manager.get_hookcallers(module):
        what = module.__name__ if isinstance(module, ModuleType) else repr(module)
        hooks = ", ".join(hook for hook in vars(Hooks) if hook.startswith(f"{PROJECT}_"))
        raise PluginError(f"{what} implements no hook; mark functions named {hooks} with rlcore.hookimpl")
    return manager.hook


def report_failure(record: PluginRecord, settings: Settings) -> None:
    """Log a failure.

    Raises:
        PluginError: with ``RLCORE_STRICT_PLUGINS=1``.
    """
    distribution = f"{record.distribution} {record.version}".rstrip()
    what = f"plugin {record.name!r} of {distribution} failed at stage {record.stage}: {record.reason}"
    if settings.strict_plugins:
        raise PluginError(f"{what} (RLCORE_STRICT_PLUGINS=1 makes this fatal)") from record.error
    logger.warning("%s; it is left out. See `rlcore devices`.", what)
