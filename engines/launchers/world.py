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

from rlcore.collectives.gloo_listener import GlooListener
from rlcore.device import Device
from rlcore.engines.launchers.ray.store_names import is_ray_store

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
        """A folder, or a part of Ray's store actor, through which ranks find each other; "" in a world of torchrun."""

    @property
    def device(self) -> Device: ...

    @property
    def joins_torchrun(self) -> bool: ...


class World:
    """The process groups of a worker: the default one, over all workers of its executor, and those made beside it."""

    def __init__(self) -> None:
        self._default: Any = None
        self._groups: list[Any] = []
        self._others: set[Any] = set()
        """The groups of other worlds in this process, while this one is in place."""
        self._closed: list[Any] = []
        """The groups of this world whose listeners are closed."""
        self._count = 0
        self._num_made = 0
        self._stores: list[Any] = []
        """Stores that are written in Python: torch keeps but the part of them that is in C++."""

    @contextlib.contextmanager
    def in_place(self, member: Member) -> Iterator[None]:
        """Make this world's default group that of the process inside the block; afterwards it is what it was."""
        import torch.distributed as dist

        from rlcore.engines._torch_private import num_named_groups, process_groups, set_default_group

        outer = dist.group.WORLD
        if member.joins_torchrun and outer is not None:  # the user's own, over the same ranks
            yield
            return
        self._others, outer_count = set(process_groups()) - set(self._groups), num_named_groups()
        set_default_group(self._default, self._count or member.number * _NAMES_EACH)
        try:
            yield
        finally:
            self._default, self._count = dist.group.WORLD, num_named_groups()
            self._groups = [group for group in process_groups() if group not in self._others]
            self._others = set()
            set_default_group(outer, outer_count)

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
            self.close_listeners(member, timeout_s)
        return dist.group.WORLD

    def close_listeners(self, member: Member, timeout_s: float) -> None:
        """Have gloo's groups that are new in this world take no connection any more; all ranks call it together.

        Those of torchrun stay open, as its ranks may be on several hosts.
        """
        import torch.distributed as dist

        from rlcore._torch_private import PrefixStore
        from rlcore.engines._torch_private import process_groups, store_of

        if member.joins_torchrun:
            return
        new = [group for group in process_groups() if group not in self._others and group not in self._closed]
        for group in new:
            if dist.get_backend(group) == "gloo":
                store = PrefixStore("cpu/", store_of(group))
                listener = GlooListener(store, rank=dist.get_rank(group), world_size=dist.get_world_size(group))
                listener.wait_until_connected(timeout_s)
                dist.barrier(group)
                listener.close()
        self._closed = [*self._closed, *new]

    def _new_store(self, member: Member, dist: Any, timeout: timedelta) -> Any:
        if member.world_size == 1:
            return dist.HashStore()
        # Each group has its own part of the store: else it would find the addresses of an earlier one.
        self._num_made += 1
        if member.joins_torchrun:
            store, _, _ = next(dist.rendezvous("env://", member.rank, member.world_size, timeout=timeout))
            return dist.PrefixStore(f"rlcore/{member.number}/{self._num_made}", store)
        if is_ray_store(member.store):
            from rlcore.engines.launchers.ray.actor_store import ActorStore

            self._stores.append(ActorStore(f"{member.store}/{self._num_made}", timeout.total_seconds()))
            return self._stores[-1]
        store = dist.FileStore(f"{member.store}/{self._num_made}", member.world_size)
        store.set_timeout(timeout)
        return store

    def destroy(self) -> None:
        """Destroy the groups, the newest first; another world's stay."""
        import torch.distributed as dist

        from rlcore.engines._torch_private import process_groups

        groups, self._groups, self._closed, self._default = self._groups, [], [], None
        for group in reversed(groups):
            if group in process_groups():  # a library may have destroyed its own
                dist.destroy_process_group(group)
        self._stores = []
