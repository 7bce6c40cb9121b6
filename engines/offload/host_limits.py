"""The limits on the host memory of this process, and how much of each is used.

They say more than the machine's total: a virtual machine may grow its memory, and a container is killed at its own
limit long before the machine is full.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from rlcore.process.control_groups import OWN, ROOT, memory_groups, memory_limit


@dataclass(frozen=True, slots=True)
class HostLimit:
    """One limit on the memory of this process."""

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"{self.name} is {self.limit_bytes} bytes, of which {self.used_bytes} are used"


def cgroup_limits(root: Path = ROOT, membership: Path = OWN) -> list[HostLimit]:
    """Return the limits of this process's control groups, versions 1 and 2, and of their parents.

    Groups without a limit are absent.
    """
    found = (_limit_of(folder) for folder in memory_groups(root, membership))
    return [limit for limit in found if limit is not None]


def physical_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lock_limit_bytes() -> int | None:
    """Return ``ulimit -l`` of this process, in bytes; None is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _limit_of(folder: Path) -> HostLimit | None:
    limit = memory_limit(folder)
    if limit is None:
        return None
    for used_file, cache_field in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (folder / used_file).exists():
            used = int((folder / used_file).read_text()) - _field(folder / "memory.stat", cache_field)
            return HostLimit(f"the memory limit of the control group {folder}", limit, max(0, used))
    return None


def _field(stat: Path, name: str) -> int:
    """Return the bytes of cached files, which the kernel drops when memory is needed."""
    lines = stat.read_text().splitlines() if stat.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
