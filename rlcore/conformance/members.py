"""The members of a device that the suite tests, and the support of each."""

from __future__ import annotations

from collections.abc import Iterable

from rlcore.device import Device
from rlcore.errors import InvalidInputError
from rlcore.types import Capability

IDENTITY = ("name", "properties", "count", "activate", "synchronize", "seed", "rng_state", "set_rng_state")
LAUNCH = ("visible_devices_variable", "visible_devices", "worker_environment", "ray_resource")
IPC = ("memory.export_ipc", "memory.import_ipc", "memory.revoke", "memory.ledger")
GROUPS = {"ipc": IPC, "interprocess_events": ("streams.export_event", "streams.import_event")}
"""Names of several members together, for ``--require``."""


def support_of(device: Device) -> dict[str, Capability]:
    """Return "<part>.<member>" -> support; every device must have identity, launch facts and capabilities()."""
    always = [f"identity.{member}" for member in IDENTITY] + [f"launch.{member}" for member in LAUNCH]
    native = Capability("native", device.evidence)
    found: dict[str, Capability] = device.capabilities()
    return dict.fromkeys([*always, "capabilities"], native) | found


def required_members(names: Iterable[str], known: Iterable[str]) -> frozenset[str]:
    """Return the members that ``--require`` names: "ipc", "memory.pool", or "pool" if one part only has that member.

    Raises:
        InvalidInputError: no member has that name, or several do.
    """
    known = list(known)
    found: set[str] = set()
    for name in names:
        matching = GROUPS.get(name) or [member for member in known if name in (member, member.partition(".")[2])]
        if not matching or (name not in GROUPS and len(matching) > 1):
            accepted = ", ".join([*GROUPS, *known])
            raise InvalidInputError(f"--require {name}: names {len(matching)} members; accepted are {accepted}")
        found.update(matching)
    return frozenset(found)
