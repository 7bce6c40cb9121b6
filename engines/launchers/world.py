"""The torch.distributed world of one worker: set up once, and the default of its process while the worker runs.

Torch has one default group a process, and workers of several engines run one after another in one process. So each
worker has a default group of its own, and a call to the worker puts that one in place: methods use torch.distributed as
if they were alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

from rlcore.device import Device

_NAMES_EACH = 1_000_000
"""Torch names groups by counting. Names must agree among ranks and differ within a process, so that each world counts
from a multiple of this."""


class Member(Protocol):
    """The worker whose world it is."""

    @property
    def number(self) -> int:
        """The number of the engine, the same on all ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def store(self) -> str:
        """A folder through which the ranks find each other; "" in a world of torchrun."""

    @property
    def device(self) -> Device: ...

    @property
    def joins_torchrun(self) -> bool: ...


class World:
    """The process groups of a worker: the default one, over all workers of its executor, and those made beside it."""

    def __init__(self) -> None:
        self._default: Any = None
        self._groups: list[Any] = []
        self._count = 0
        self._num_made = 0

    @contextlib.contextmanager
    def in_place(self, member: Member) -> Iterator[None]:
        """Make this world's default group that of the process inside the block; afterwards it is what it was."""
        import torch.distributed.distributed_c10d as c10d

        outer = c10d.GroupMember.WORLD
        if member.joins_torchrun and outer is not None:  # the user's own, over the same ranks
            yield
            return
        others, outer_count = set(c10d._world.pg_map) - set(self._groups), c10d._world.group_count
        self._put(self._default, self._count or member.number * _NAMES_EACH)
        try:
            yield
        finally:
            self._default, self._count = c10d.GroupMember.WORLD, c10d._world.group_count
            self._groups = [group for group in c10d._world.pg_map if group not in others]
            self._put(outer, outer_count)

    @staticmethod
    def _put(default: Any, count: int) -> None:
        import torch.distributed.distributed_c10d as c10d

        c10d._update_default_pg(default)
        c10d._world.group_count = count

    def default_group(self, member: Member, timeout_s: float) -> Any:
        """Return the group of all workers, who must all ask for the first time together."""
        import torch.distributed as dist

        if not dist.is_initialized():
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(
                member.device.collectives.backend,
                store=self._new_store(member, dist, timeout),
                rank=member.rank,
                world_size=member.world_size,
                timeout=timeout,
            )
        return dist.group.WORLD

    def _new_store(self, member: Member, dist: Any, timeout: timedelta) -> Any:
        if member.world_size == 1:
            return dist.HashStore()
        # Each group has its own part of the store: else it would find the addresses of an earlier one.
        self._num_made += 1
        if member.joins_torchrun:
            store, _, _ = next(dist.rendezvous("env://", member.rank, member.world_size, timeout=timeout))
            return dist.PrefixStore(f"rlcore/{member.number}/{self._num_made}", store)
        store = dist.FileStore(f"{member.store}/{self._num_made}", member.world_size)
        store.set_timeout(timeout)
        return store

    def destroy(self) -> None:
        """Destroy the groups, the newest first; another world's stay."""
        import torch.distributed as dist

        groups, self._groups, self._default = self._groups, [], None
        for group in reversed(groups):
            if group in dist.distributed_c10d._world.pg_map:  # a library may have destroyed its own
                dist.destroy_process_group(group)
