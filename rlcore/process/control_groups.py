"""The control groups of a process that limit its memory, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NO_LIMIT_V1 = 1 << 62
"""Version 1 writes "no limit" as the largest multiple of a page that a signed 64-bit number holds."""


def memory_groups(root: Path = ROOT, membership: Path = OWN) -> Iterator[Path]:
    """Yield the folders of the groups and of their parents, the nearest first.

    Args:
        root: where the control groups are mounted.
        membership: the file that names the groups of a process (cgroups(7)).
    """
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        # In a container the path may be the host's, and only the top is mounted: then that is this process's own group.
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top) and folder.exists())


def memory_limit(group: Path) -> int | None:
    """Return the limit of a group in bytes, None without one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group / name).exists():
            limit = (group / name).read_text().strip()
            return None if limit == "max" or int(limit) >= _NO_LIMIT_V1 else int(limit)
    return None
