"""The check of the operators' implementations that are from plugins of third parties."""

from __future__ import annotations

from rlcore.arguments import did_you_mean
from rlcore.doctor.check import CheckVerdict, fail, ok, warn
from rlcore.errors import PluginError
from rlcore.kernels.dispatch import check_implementation, outranked
from rlcore.plugins import BUILT_IN
from rlcore.registry import OpImplementation, registry


def operators() -> CheckVerdict:
    """Check that each can be called, is of an operator that exists, and does not replace built-in ones unnoticed."""
    ops = registry().ops
    entries = [one for found in ops.values() for one in found if one.plugin not in BUILT_IN]
    built_in = [op for op, found in ops.items() if any(one.plugin in BUILT_IN for one in found)]
    broken, doubtful = [], []
    for one in entries:
        try:
            check_implementation(one)
        except PluginError as error:
            broken.append(str(error))
        doubtful += [text for text in (_misspelt(one, built_in), _in_front(one)) if text]
    advice = f"update or leave out: RLCORE_DISABLE_PLUGINS={','.join(sorted({one.plugin for one in entries}))}"
    if broken:
        return fail("; ".join([*broken, *doubtful]), advice)
    if doubtful:
        return warn("; ".join(doubtful), f"if that is not meant, {advice}")
    text = ", ".join(f"{one.name!r} of {one.op} (plugin {one.plugin})" for one in entries)
    return ok(text or "no plugin of a third party has an implementation")


def _misspelt(one: OpImplementation, built_in: list[str]) -> str:
    hint = "" if one.op in built_in else did_you_mean(one.op, built_in)
    return f"plugin {one.plugin!r} implements {one.op!r}, which nothing built in calls{hint}" if hint else ""


def _in_front(one: OpImplementation) -> str:
    """Say which built-in ones one for every device goes before; one for its own device is there to do so."""
    names = [other.name for other in outranked(one)] if one.device_type == "*" else []
    before = f"goes before the built-in {', '.join(names)} of {one.op} on every device"
    return f"{one.name!r} of plugin {one.plugin!r} {before}" if names else ""
