"""Checks that run code of torch, of plugins and of devices. They have their own process, because that code may crash.

The process writes lines of JSON to a descriptor: the name of a check when it begins, its result when it ends, and null
at the end.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from rlcore.cli.inventory import capabilities_of, summary
from rlcore.deadline import call_within
from rlcore.doctor.check import CHECK_TIMEOUT_S, CheckResult, CheckVerdict, fail, ok, run_check, warn
from rlcore.doctor.ipc import ImportingProcess, share
from rlcore.doctor.operators import operators
from rlcore.doctor.packages import torch_back_ends
from rlcore.errors import DeviceError, PluginError, one_line
from rlcore.launch import LaunchFacts
from rlcore.plugins import PluginRecord
from rlcore.registry import device_info, get_device, launch, list_devices, registry
from rlcore.settings import Settings


def main(text: str) -> None:
    descriptor = int(text)
    os.set_inheritable(descriptor, False)
    importer = ImportingProcess()
    with os.fdopen(descriptor, "w", buffering=1) as out:
        _check_all(_Reporter(out), importer)
        print("null", file=out)
    importer.close()


class _Reporter:
    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def begin(self, check: str) -> None:
        """Report the check that runs next, in case it ends this process."""
        print(json.dumps(check), file=self._out)

    def tell(self, finding: CheckResult) -> None:
        print(json.dumps(asdict(finding)), file=self._out)

    def run(
        self, name: str, check: Callable[..., CheckVerdict], *arguments: Any, timeout_s: float = CHECK_TIMEOUT_S
    ) -> None:
        self.begin(name)
        self.tell(run_check(name, check, *arguments, timeout_s=timeout_s))


def _check_all(report: _Reporter, importer: ImportingProcess) -> None:
    report.begin("import torch")
    report.tell(CheckResult("import torch", "OK", _import_torch()))
    report.run("flash-attn", flash_attn)
    report.begin("plugins")
    try:
        # Those that hang have deadlines, so that they are named one by one.
        timeout_s = 2 * Settings.from_env().probe_timeout_s + CHECK_TIMEOUT_S
        records = list(call_within(timeout_s, lambda: registry().plugins))
    except Exception as error:
        report.tell(CheckResult("plugins", "FAIL", f"loading them failed: {type(error).__name__}: {error}", _DISABLE))
        return
    for record in records:
        if record.error:
            report.tell(_plugin(record))
    report.tell(CheckResult("plugins", "OK", "; ".join(_name(record) for record in records if not record.error)))
    report.run("operators", operators)
    kinds = [*registry().devices, *(kind for kind in registry().declared if device_info(kind).is_available)]
    for kind in kinds:
        report.run(f"device {kind}", device, kind, timeout_s=Settings.from_env().probe_timeout_s + CHECK_TIMEOUT_S)
    report.run("default device", default_device)
    for kind in kinds:
        if (facts := launch(kind)).visible_devices_variable:
            report.run(f"visible {kind}", visible_devices, facts)
    for info in list_devices():
        if info.is_available:
            report.run(f"ipc {info.name}", share, info.name, importer, timeout_s=2 * CHECK_TIMEOUT_S)


_DISABLE = "RLCORE_DISABLE_PLUGINS=all, then without one after the other"


def _import_torch() -> str:
    """Import torch without a deadline of its own: all later checks need it, and its traceback tells the reason."""
    start = time.perf_counter()
    importlib.import_module("torch")
    loaded = ", ".join(torch_back_ends()) or "none"
    return f"{time.perf_counter() - start:.1f} s; back ends that it loads: {loaded}"


_FLASH_ATTN = {
    "flash-attn": (
        "flash_attn",
        "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps flash-attn",
    ),
    "flash-attn-4": ("flash_attn.cute", "pip install --force-reinstall flash-attn-4"),
}
"""Package -> what is imported of it, and the way to have it again. Both lie in one folder."""


def flash_attn() -> CheckVerdict:
    """Check flash-attn by importing it: 2 is compiled against one torch, which its metadata does not name."""
    found = []
    for package, (module, again) in _FLASH_ATTN.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            return fail(f"{package} {version} cannot be imported: {type(error).__name__}: {error}", again)
        found.append(f"{package} {version}")
    return ok(", ".join(found) or "not installed")


def device(kind: str) -> CheckVerdict:
    """Check the probe of a device, and if it is available, its construction and capabilities."""
    info = device_info(kind)
    if info.is_broken:
        return fail(info.reason, _leave_out(info.plugin))
    if not info.is_available:
        return ok(f"not available: {info.reason}")
    try:
        found = capabilities_of(get_device(kind))
    except PluginError as error:
        return fail(str(error), _leave_out(info.plugin))
    except DeviceError as error:
        return fail(str(error), _leave_out(info.plugin))
    except BaseException as error:  # a plugin's; this is a thread of its own, which gets no Ctrl-C
        return fail(f"capabilities() failed: {one_line(error)}", _leave_out(info.plugin))
    evidence = " and ".join(sorted({how.evidence for how in found.values()}))
    return ok(f"{info.count} of {info.vendor}; members: {summary(found)}; evidence: {evidence or 'none'}")


def default_device() -> CheckVerdict:
    try:
        return ok(get_device().name)
    except Exception as error:
        return fail(str(error), "unset RLCORE_DEVICE, or name a device of `rlcore devices`")


def visible_devices(facts: LaunchFacts) -> CheckVerdict:
    variable = facts.visible_devices_variable or ""
    visible = facts.visible_devices()
    if visible is None:
        return ok(f"{variable} is not set: all")
    value = os.environ[variable]
    found = f"{variable}={value!r}"
    if not visible:
        return warn(f"{found} hides every {facts.spec.name} device", f"unset {variable}, if that is not meant")
    if len(visible) < len(value.split(",")):
        ignored = value.split(",")[len(visible)]
        return warn(f"{found} ends at {ignored!r}, which is no device", f"export {variable}={','.join(visible)}")
    return ok(found)


def _plugin(record: PluginRecord) -> CheckResult:
    found = f"{_name(record)} failed at stage {record.stage}: {record.reason}"
    return CheckResult(f"plugin {record.name}", "FAIL", found, _leave_out(record.name))


def _leave_out(plugin: str) -> str:
    record: Any = next((record for record in registry().plugins if record.name == plugin), None)
    return f"pip install --upgrade {record.distribution}, or RLCORE_DISABLE_PLUGINS={plugin}"


def _name(record: PluginRecord) -> str:
    disabled = " (disabled)" if record.stage == "disabled" else ""
    if record.distribution == "rlcore":
        return f"{record.name}{disabled}"
    return f"{record.name} of {record.distribution} {record.version}{disabled}"
