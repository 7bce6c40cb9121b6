"""The registry of devices, operator implementations, executors, launchers and benchmark cases, by name.

It is filled once from the plugins. After that a look-up reads a dictionary: no hook is called on a hot path.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from rlcore.deadline import CallOutcome, outcome_here, outcomes_within
from rlcore.device import Device
from rlcore.errors import DeviceError, InvalidInputError, PluginError, TorchImportError, one_line
from rlcore.launch import LaunchFacts
from rlcore.plugins import BUILT_IN, DECLARED, PluginRecord, load_plugins, report_failure
from rlcore.settings import Settings, named_device
from rlcore.torch_import import import_torch
from rlcore.types import PLUGIN_API, DeviceInfo, DeviceSpec, Probe, check_import_path

if TYPE_CHECKING:
    import torch

EXECUTOR_KINDS = ("train", "inference")


@dataclass(frozen=True, slots=True)
class OpImplementation:
    """A registered implementation of an operator."""

    op: str
    device_type: str
    name: str
    priority: int
    path: str
    when: str | None
    plugin: str


@dataclass(slots=True)
class Registry:
    """All registrations, with the plugin of each."""

    devices: dict[str, tuple[DeviceSpec, str]] = field(default_factory=dict)
    declared: dict[str, tuple[DeviceSpec, str]] = field(default_factory=dict)
    """Devices that nobody has run; one of a name that a plugin has, or would have had, is not there."""
    ops: dict[str, list[OpImplementation]] = field(default_factory=dict)
    executors: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    launchers: dict[str, tuple[str, str]] = field(default_factory=dict)
    benchmarks: dict[str, str] = field(default_factory=dict)
    plugins: list[PluginRecord] = field(default_factory=list)
    refused_devices: dict[str, BaseException] = field(default_factory=dict)
    """Devices that a plugin offered before it failed, and its error."""
    failed_probes: dict[str, BaseException] = field(default_factory=dict)
    """Devices whose probe raised, hung or answered wrongly in this process; they are not probed again."""
    hung_devices: dict[tuple[str, int], TimeoutError] = field(default_factory=dict)
    """Kind and index of devices that could not be made in time; they are not waited for again."""

    def collect(self, plugin: str, hooks: pluggy.HookRelay) -> Callable[[], None]:
        """Call the hooks of one plugin; return the function that puts all that they registered in force."""
        draft = _Draft(self, plugin)
        try:
            hooks.rlcore_register_devices(register=draft.device)
            hooks.rlcore_register_ops(register=draft.op)
            hooks.rlcore_register_executors(register=draft.executor)
            hooks.rlcore_register_launchers(register=draft.launcher)
            hooks.rlcore_register_benchmarks(register=draft.benchmark)
        except BaseException as error:
            self.refused_devices |= dict.fromkeys(draft.offered_devices, error)
            raise
        return functools.partial(self._put_in_force, draft)

    def _put_in_force(self, draft: _Draft) -> None:
        if draft.plugin == DECLARED:
            self.declared |= draft.devices
        else:
            self.devices |= draft.devices
        for implementation in draft.ops:
            self.ops.setdefault(implementation.op, []).append(implementation)
        self.executors |= draft.executors
        self.launchers |= draft.launchers
        self.benchmarks |= draft.benchmarks


@dataclass(slots=True)
class _Draft:
    """Registrations of one plugin, checked against the existing ones and not yet in force."""

    registry: Registry
    plugin: str
    offered_devices: list[str] = field(default_factory=list)
    devices: dict[str, tuple[DeviceSpec, str]] = field(default_factory=dict)
    ops: list[OpImplementation] = field(default_factory=list)
    executors: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    launchers: dict[str, tuple[str, str]] = field(default_factory=dict)
    benchmarks: dict[str, str] = field(default_factory=dict)

    def device(self, spec: DeviceSpec) -> None:
        if not isinstance(spec, DeviceSpec):
            raise PluginError(f"register() takes a DeviceSpec, got {type(spec).__name__}: {spec!r}")
        self.offered_devices.append(spec.name)
        _check_api_version(spec)
        taken = self.registry.devices | self.devices
        if spec.name in taken:
            raise PluginError(f"device {spec.name!r} is already registered by plugin {taken[spec.name][1]!r}")
        self.devices[spec.name] = (spec, self.plugin)

    def op(
        self, op: str, device_type: str, path: str, *, name: str, priority: int = 0, when: str | None = None
    ) -> None:
        check_import_path(path, f"implementation {name!r} of {op}")
        if type(priority) is not int:
            raise PluginError(f"priority of implementation {name!r} of {op} must be a whole number, got {priority!r}")
        if when is not None:
            check_import_path(when, f"'when' of implementation {name!r} of {op}")
        for other in [*self.registry.ops.get(op, ()), *self.ops]:
            same_place = other.op == op and other.device_type == device_type
            if same_place and (other.name == name or other.priority == priority):
                raise PluginError(
                    f"implementation {name!r} (priority {priority}) of {op} on {device_type!r} clashes with "
                    f"{other.name!r} (priority {other.priority}) of plugin {other.plugin!r}; "
                    "name and priority must both differ"
                )
        self.ops.append(OpImplementation(op, device_type, name, priority, path, when, self.plugin))

    def executor(self, kind: str, name: str, path: str) -> None:
        if kind not in EXECUTOR_KINDS:
            raise PluginError(f"executor kind must be one of {EXECUTOR_KINDS}, got {kind!r}")
        check_import_path(path, f"{kind} executor {name!r}")
        taken = self.registry.executors | self.executors
        if (kind, name) in taken:
            raise PluginError(f"{kind} executor {name!r} is already registered by plugin {taken[kind, name][1]!r}")
        self.executors[kind, name] = (path, self.plugin)

    def launcher(self, name: str, path: str) -> None:
        check_import_path(path, f"launcher {name!r}")
        taken = self.registry.launchers | self.launchers
        if name in taken:
            raise PluginError(f"launcher {name!r} is already registered by plugin {taken[name][1]!r}")
        self.launchers[name] = (path, self.plugin)

    def benchmark(self, path: str) -> None:
        check_import_path(path, "benchmark case")
        if path in self.registry.benchmarks | self.benchmarks:
            raise PluginError(f"benchmark case {path!r} is already registered")
        self.benchmarks[path] = self.plugin


def _check_api_version(spec: DeviceSpec) -> None:
    major, minor = spec.api_version
    if major != PLUGIN_API[0] or minor > PLUGIN_API[1]:
        raise PluginError(
            f"device {spec.name!r} was written for plugin API {major}.{minor}; this rlcore has "
            f"{PLUGIN_API[0]}.{PLUGIN_API[1]}. Install a version of the plugin for it, or another rlcore."
        )


@functools.cache
def registry() -> Registry:
    """Return the registry of this process; plugins are loaded at the first call."""
    loaded = Registry()
    loaded.plugins = load_plugins(loaded.collect, Settings.from_env())
    missing = {record.name for record in loaded.plugins if record.stage != "loaded"}
    for name in loaded.devices.keys() | loaded.refused_devices.keys() | missing:
        loaded.declared.pop(name, None)
    return loaded


def resolve(path: str) -> Any:
    """Return the object at the import path "package.module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


# ------------------------------------------------------------------------------------------------ devices


def list_devices() -> list[DeviceInfo]:
    """Return every device, available ones first, then by priority. No device context is created."""
    ranked = sorted(_entries().values(), key=lambda entry: -entry[0].priority)
    probes = _probe_all([spec for spec, _ in ranked])
    found = [_info(*entry, probe) for entry, probe in zip(ranked, probes, strict=True)]
    return sorted(found, key=lambda info: not info.is_available)


def device_info(kind: str) -> DeviceInfo:
    """Return the row of ``list_devices()`` for one kind, without probing the others."""
    spec, plugin = _entries()[_spec(kind).name]
    return _info(spec, plugin, _probe(spec))


def get_device(name: str | torch.device | None = None) -> Device:
    """Return the device called ``name``, such as "cuda", "cuda:1" or a ``torch.device``; "cuda" is index 0.

    None is ``RLCORE_DEVICE``, else the accelerator of highest priority that was available when this was first asked,
    else the CPU.

    Raises:
        DeviceError: unknown or unavailable device; never another device instead of the one asked for.
    """
    if name is None:
        return _default_device(named_device())
    if isinstance(name, str):
        return _named_device(name)
    torch_type = getattr(name, "type", None)
    if not isinstance(torch_type, str):
        raise InvalidInputError(
            "a device is a name such as 'cuda' or 'cuda:1', a torch.device, or None for the default one; "
            f"got {type(name).__name__}: {name!r}"
        )
    return _device(_name_of_torch_type(torch_type), name.index or 0)


def launch(name: str) -> LaunchFacts:
    """Return the launch facts of the device called ``name``, such as "cuda" or "cuda:1", available or not.

    Raises:
        DeviceError: no such device is registered.
    """
    return LaunchFacts(_spec(_parse(name)[0]))


def specs_of(torch_type: str) -> list[DeviceSpec]:
    """Return the specs of the devices whose tensors have this type; empty if no plugin registered one."""
    return [spec for spec, _ in _entries().values() if spec.torch_type == torch_type]


@functools.cache
def _default_device(wanted: str | None) -> Device:
    """Return the default device. It is cached, so that it does not change during a program; a failure is not."""
    if wanted is None:
        return _device(_default_name(), 0)
    try:
        return _device(*_parse(wanted))
    except (DeviceError, InvalidInputError) as error:
        raise type(error)(f"RLCORE_DEVICE={wanted}: {error}") from error


@functools.cache
def _named_device(name: str) -> Device:
    return _device(*_parse(name))


@functools.cache
def _device(kind: str, index: int) -> Device:
    spec = _spec(kind)
    probe, error = _probe(spec)
    if not probe.is_available:
        raise DeviceError(f"device {kind!r} is not available here: {probe.reason}. See `rlcore devices`.") from error
    if index >= probe.count:
        raise DeviceError(f"device '{kind}:{index}' does not exist; {kind} has {probe.count}: 0 to {probe.count - 1}")
    made = _made(spec, index)
    if made.error is not None:
        raise DeviceError(f"device '{kind}:{index}' could not be made: {one_line(made.error)}") from made.error
    return made.get()


def _made(spec: DeviceSpec, index: int) -> CallOutcome[Device]:
    """Make a device, which is the code of its plugin; a third party's has a deadline."""
    hung = registry().hung_devices
    if (spec.name, index) in hung:
        return CallOutcome(error=hung[spec.name, index])

    def make() -> Device:
        device: Device = resolve(spec.loader)(spec, index)
        return device

    if _is_built_in(spec):
        return outcome_here(make)
    (made,) = outcomes_within(Settings.from_env().probe_timeout_s, [make])
    if isinstance(made.error, TimeoutError):
        hung[spec.name, index] = made.error
    return made


def _parse(wanted: str) -> tuple[str, int]:
    if not isinstance(wanted, str):
        raise InvalidInputError(f"the name of a device is a str such as 'cuda' or 'cuda:1', got {wanted!r}")
    kind, colon, index = wanted.partition(":")
    if colon and not index.isdecimal():
        raise InvalidInputError(f"a device is 'name' or 'name:index', such as 'cuda:1'; got {wanted!r}")
    return kind, int(index or 0)


@functools.cache
def _name_of_torch_type(torch_type: str) -> str:
    """Return the device of a torch type; where several share the type (ROCm's is "cuda"), the available one."""
    specs = specs_of(torch_type)
    here = specs if len(specs) < 2 else [spec for spec in specs if _probe(spec)[0].is_available]
    return next((spec.name for spec in here or specs), torch_type)


def _entries() -> dict[str, tuple[DeviceSpec, str]]:
    """Return name -> spec and plugin of every device, the declared ones last."""
    return registry().devices | registry().declared


def _spec(kind: str) -> DeviceSpec:
    known = registry().devices
    if kind in (entries := _entries()):
        return entries[kind][0]
    record = next((record for record in registry().plugins if record.name == kind), None)
    if record is not None and record.stage == "disabled":
        raise DeviceError(f"device {kind!r} is missing because RLCORE_DISABLE_PLUGINS names its plugin")
    error = registry().refused_devices.get(kind) or (record and record.error)
    if error:
        raise DeviceError(f"device {kind!r} is missing because its plugin failed: {one_line(error)}") from error
    failed = [record.name for record in registry().plugins if record.error]
    but = f" (plugins that failed: {', '.join(failed)})" if failed else ""
    raise DeviceError(f"no device {kind!r}; registered: {', '.join(sorted(known))}{but}. See `rlcore devices`.")


def _default_name() -> str:
    found = list_devices()
    if not found or not found[0].is_available:
        registered = [info for info in found if info.plugin != DECLARED]
        raise DeviceError(
            f"no device is available: {_reasons(registered) or 'none is registered'}. See `rlcore devices`."
        )
    return found[0].name


def _reasons(devices: list[DeviceInfo]) -> str:
    """Return each reason once, after the devices that have it: without torch all devices have the same."""
    named: dict[str, list[str]] = {}
    for info in devices:
        named.setdefault(info.reason, []).append(info.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())


def _info(spec: DeviceSpec, plugin: str, probed: _Probed) -> DeviceInfo:
    probe, error = probed
    return DeviceInfo(spec.name, spec.vendor, probe.count, probe.is_available, probe.reason, plugin, error is not None)


_Probed = tuple[Probe, BaseException | None]
"""A device's answer, and the error that stands for it where the probe failed."""


def _probe(spec: DeviceSpec) -> _Probed:
    return _probe_all([spec])[0]


def _probe_all(specs: Sequence[DeviceSpec]) -> list[_Probed]:
    """Probe devices; those of third parties side by side, so that several that hang cost no more than one."""
    # A probe is third-party code: its failure means "not available, because ...", not a crash.
    failed = registry().failed_probes
    asked = [spec for spec in specs if spec.name not in failed]
    answers = {}
    for spec, outcome in zip(asked, _ask_all(asked), strict=True):
        if outcome.error is None:
            answers[spec.name] = outcome.get()
        else:
            failed[spec.name] = outcome.error
            _record_failed_probe(spec, outcome.error)
    return [(answers[spec.name], None) if spec.name in answers else _failure(failed[spec.name]) for spec in specs]


def _failure(error: BaseException) -> _Probed:
    return Probe(0, f"its probe failed: {one_line(error)}"), error


def _ask_all(specs: Sequence[DeviceSpec]) -> list[CallOutcome[Probe]]:
    try:
        import_torch()  # outside the probes: its time and its failure are not the plugins'
    except TorchImportError as error:
        return [CallOutcome(Probe(0, str(error)))] * len(specs)
    calls = {spec.name: functools.partial(_checked_probe, spec) for spec in specs}
    of_others = [spec.name for spec in specs if not _is_built_in(spec)]
    outcomes = outcomes_within(Settings.from_env().probe_timeout_s, [calls[name] for name in of_others])
    answers = dict(zip(of_others, outcomes, strict=True))
    return [answers.get(name) or outcome_here(call) for name, call in calls.items()]


def _is_built_in(spec: DeviceSpec) -> bool:
    return _entries()[spec.name][1] in BUILT_IN


def _checked_probe(spec: DeviceSpec) -> Probe:
    probe = resolve(spec.loader).probe(spec)
    if not isinstance(probe, Probe):
        raise PluginError(f"probe() returned {type(probe).__name__}, not rlcore.types.Probe")
    return probe


def _record_failed_probe(spec: DeviceSpec, error: BaseException) -> None:
    plugin, records = _entries()[spec.name][1], registry().plugins
    at = next(index for index, record in enumerate(records) if record.name == plugin)
    records[at] = dataclasses.replace(records[at], stage="probe", error=error)
    report_failure(records[at], Settings.from_env())


# ----------------------------------------------------------------------------------- executors, launchers


def executor_class(kind: str, name: str) -> Any:
    """Return the worker class of executor ``name``.

    Raises:
        InvalidInputError: no such executor.
    """
    executors = registry().executors
    if (kind, name) not in executors:
        names = ", ".join(sorted(known for k, known in executors if k == kind))
        raise InvalidInputError(f"no {kind} executor {name!r}; registered: {names}")
    return resolve(executors[kind, name][0])


def launcher_names() -> list[str]:
    """Return the names of all registered launchers."""
    return list(registry().launchers)


def launcher_class(name: str) -> Any:
    """Return the class of launcher ``name``.

    Raises:
        InvalidInputError: no such launcher.
    """
    if name not in registry().launchers:
        raise InvalidInputError(f"launcher must be one of {', '.join(launcher_names())}, got {name!r}")
    return resolve(registry().launchers[name][0])
