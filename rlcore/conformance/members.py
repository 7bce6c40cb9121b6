"""The members of a device that the suite is about, and how each is supported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlcore.errors import InvalidInputError
from rlcore.types import Capability

IDENTITY = ("name", "properties", "count", "activate", "synchronize", "seed", "rng_state", "set_rng_state")
LAUNCH = ("visible_devices_variable", "visible_devices", "worker_environment", "ray_resource")
IPC = ("memory.export_ipc", "memory.import_ipc", "memory.revoke", "memory.ledger")
GROUPS = {"ipc": IPC, "interprocess_events": ("streams.export_event", "streams.import_event")}
"""Names of several members together, for ``--require``."""


def support_of(device: Any) -> dict[str, Capability]:
    """ "<part>.<member>" -> how; identity, launch facts and capabilities() are what every device must have."""
    always = [f"identity.{member}" for member in IDENTITY] + [f"launch.{member}" for member in LAUNCH]
    native = Capability("native", device.evidence)
    found: dict[str, Capability] = device.capabilities()
    return dict.fromkeys([*always, "capabilities"], native) | found


def required_members(names: Iterable[str], known: Iterable[str]) -> frozenset[str]:
    """The members that ``--require`` names: "ipc", "memory.pool", or "pool" where only one part has such a member.

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
