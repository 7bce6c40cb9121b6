"""The torch.distributed world of one worker: set up once, and the default of its process whenever it has its turn.

Torch has one default group a process, and workers of several engines take turns in one process. So each worker has a
default group of its own, and a call to the worker puts that one in place: methods use torch.distributed as if alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.engines.launchers.worker import WorkerContext

_NAMES_EACH = 1_000_000
"""Torch names groups by counting. Names must agree among ranks and differ within a process, so that each world counts
from a multiple of this."""


class World:
    """The process groups of a worker: the default one, over all workers of its executor, and those made beside it."""

    def __init__(self) -> None:
        self._default: Any = None
        self._groups: list[Any] = []
        self._count = 0
        self._num_made = 0

    @contextlib.contextmanager
    def in_place(self, context: WorkerContext) -> Iterator[None]:
        """Within, the default group of the process is this world's; afterwards it is what it was."""
        import torch.distributed.distributed_c10d as c10d

        outer = c10d.GroupMember.WORLD
        if context.joins_torchrun and outer is not None:  # the user's own, over the same ranks
            yield
            return
        others, outer_count = set(c10d._world.pg_map) - set(self._groups), c10d._world.group_count
        self._put(self._default, self._count or context.number * _NAMES_EACH)
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

    def default_group(self, context: WorkerContext, timeout_s: float) -> Any:
        """The group of all workers, who must all ask for the first time together."""
        import torch.distributed as dist

        if not dist.is_initialized():
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(
                context.device.collectives.backend,
                store=self._new_store(context, dist, timeout),
                rank=context.rank,
                world_size=context.world_size,
                timeout=timeout,
            )
        return dist.group.WORLD

    def _new_store(self, context: WorkerContext, dist: Any, timeout: timedelta) -> Any:
        if context.world_size == 1:
            return dist.HashStore()
        # A part of its own for each group: the addresses of an earlier one would be taken for this one's.
        self._num_made += 1
        if context.joins_torchrun:
            store, _, _ = next(dist.rendezvous("env://", context.rank, context.world_size, timeout=timeout))
            return dist.PrefixStore(f"rlcore/{context.number}/{self._num_made}", store)
        store = dist.FileStore(f"{context.store}/{self._num_made}", context.world_size)
        store.set_timeout(timeout)
        return store

    def destroy(self) -> None:
        """Destroy the groups, the newest first; another world's stay."""
        import torch.distributed as dist

        groups, self._groups, self._default = self._groups, [], None
        for group in reversed(groups):
            if group in dist.distributed_c10d._world.pg_map:  # a library may have destroyed its own
                dist.destroy_process_group(group)
