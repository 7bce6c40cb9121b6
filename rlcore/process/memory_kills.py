"""Kills of processes for want of memory, as the kernel counts them for control groups and for the machine."""

from __future__ import annotations

import re
from pathlib import Path

from rlcore.process.control_groups import OWN, ROOT, memory_groups, memory_limit

_VMSTAT = Path("/proc/vmstat")
_COUNTERS = ("memory.events", "memory.oom_control")
"""The files of a group that hold the count, of versions 2 and 1."""
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKills:
    """Counts the kills among the control groups of a process, and on its machine, since this object was made.

    Args:
        membership: the file that names its groups, such as /proc/1234/cgroup.
        root: where the control groups are mounted.
        vmstat: the machine's counters (proc(5)).
    """

    def __init__(self, membership: Path = OWN, root: Path = ROOT, vmstat: Path = _VMSTAT) -> None:
        counters = [(group, group / name) for group in memory_groups(root, membership) for name in _COUNTERS]
        self._groups = {group: (file, count) for group, file in counters if (count := _count(file)) is not None}
        self._machine = vmstat, _count(vmstat)

    def explanation(self) -> str:
        """Say who has sent SIGKILL to the process, as far as the counts tell."""
        for group, (file, before) in self._groups.items():
            if num_kills := _since(file, before):
                limit = memory_limit(group)
                limited = "" if limit is None else f", whose limit is {limit} bytes,"
                return (
                    f"by the kernel for want of memory: the control group {group}{limited} counts {_kills(num_kills)}"
                )
        if num_kills := _since(*self._machine):
            return f"by the kernel for want of memory, perhaps: this machine counts {_kills(num_kills)}"
        if self._groups or self._machine[1] is not None:
            return "sent by somebody: the kernel has counted no kill for want of memory since the process began"
        return "sent by somebody, or by the kernel for want of memory"


def machine_kills() -> int:
    """Return how often this kernel has killed a process for want of memory; 0 if it does not count."""
    return _count(_VMSTAT) or 0


def _count(file: Path) -> int | None:
    try:
        found = _COUNT.search(file.read_text())
    except OSError:  # another version's, or the group has gone
        return None
    return int(found[1]) if found else None


def _since(file: Path, before: int | None) -> int:
    now = _count(file)
    return 0 if now is None or before is None else now - before


def _kills(number: int) -> str:
    return f"{number} such {'kill' if number == 1 else 'kills'} since the process began"
