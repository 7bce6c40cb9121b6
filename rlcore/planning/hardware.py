"""The devices that can be planned for: those of ``hardware.toml`` by name, and what is here."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from rlcore.arguments import did_you_mean
from rlcore.engines.offload.host_limits import physical_bytes
from rlcore.errors import InvalidInputError, RlcoreError
from rlcore.planned import PlannedDevice, as_planned
from rlcore.registry import get_device

_CONTEXT_BYTES = 950_000_000


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, in numbers."""

    name: str
    kind: str
    """The name under which rlcore registers such devices."""
    total_bytes: int
    cores: int
    arch: int
    context_bytes: int
    """Bytes that a process takes of it besides those of torch's allocator."""
    host_bytes_per_s: float
    """The rate of copies to and from pinned host memory; 0 where nothing is copied."""

    @property
    def planned(self) -> PlannedDevice:
        return PlannedDevice(self.kind, self.cores, self.arch)

    @property
    def is_host(self) -> bool:
        return not self.arch

    @property
    def capacity(self) -> int:
        """Return the bytes that one process's allocator can have."""
        return self.total_bytes - self.context_bytes


@functools.cache
def _known() -> dict[str, Hardware]:
    table = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
    return {row["name"]: Hardware(**row) for row in table["device"]}


def hardware(name: str | None, memory_bytes: int | None = None) -> Hardware:
    """Return the device of this name in the table, or one that is here.

    Args:
        name: such as "h200"; or that of a device here, such as "cuda:0"; None is the best one here.
        memory_bytes: its memory, where that is not what the table says.

    Raises:
        InvalidInputError: no such device is in the table, nor here; names those that are.
    """
    found = _known().get((name or "").lower()) or _here(name)
    if found.is_host and not found.total_bytes:
        found = replace(found, total_bytes=physical_bytes())
    return found if memory_bytes is None else replace(found, total_bytes=memory_bytes)


def _here(name: str | None) -> Hardware:
    try:
        device = get_device(name)
        facts = device.properties()
    except RlcoreError as error:
        names = ", ".join(_known())
        raise InvalidInputError(
            f"no device {name!r} is known or here{did_you_mean(str(name), _known())}; "
            f"known without being here: {names} ({error})"
        ) from error
    if device.spec.is_host:
        return replace(_known()[device.spec.name], total_bytes=facts.total_bytes)
    arch = as_planned(device).arch
    return Hardware(facts.name, device.spec.name, facts.total_bytes, facts.cores, arch, _CONTEXT_BYTES, 0.0)
