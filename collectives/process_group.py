"""A ``torch.distributed.ProcessGroup`` beside the default one.

Torch has tables of groups: the ranks that functions such as ``dist.broadcast(src=...)`` translate, and names for
functional collectives. A standalone group is registered in these two, with its own ranks, and in no other. So
``dist.destroy_process_group()``, which ends the groups in another table, does not end it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlcore._torch_private import Backend, PrefixStore, ProcessGroup, Store
from rlcore.collectives._torch_private import add_backend, empty_group, register_group, unregister_group
from rlcore.collectives.gloo_listener import GlooListener
from rlcore.device import Device

_numbers = itertools.count(1)
_NOBODYS_TAG = 2**31 - 1
"""The tag of no message: one that is longer than the receive that it comes to ends the process."""


class TorchGroups:
    """The torch group for device tensors and the one for host tensors: the same object if the library allows it."""

    def __init__(self, host: Device, device: Device, store: Store, options: dict[str, Any]) -> None:
        """Connect the hosts; all ranks call it together.

        Args:
            host, device: devices; the same object where the device is the host.
            options: of ``new_backend`` of their collectives.
        """
        self._rank, self._world_size = options["rank"], options["world_size"]
        self._named: dict[str, ProcessGroup] = {}
        self.connect: Callable[[], object] | None = None
        """Connects the devices, without a deadline; None where the first operation does."""
        self._listens = options["is_one_host"] and host.collectives.backend == "gloo"
        self._store = store if host is device else PrefixStore("host", store)
        name = f"{options['name']} {next(_numbers)}"
        if host is device:
            backend = device.collectives.new_backend(store, **options)
            self.for_device = self.for_host = self._registered(self._with_backend(device, store, backend), name)
            return
        host_backend: Any = host.collectives.new_backend(self._store, **options | {"is_high_priority": False})
        group = self._empty_group(device, store)
        group.bound_device_id = device.torch_device
        _add(group, host, host_backend)
        backend = device.collectives.new_backend(PrefixStore("device", store), **options)
        if isinstance(backend, dist.ProcessGroup):  # written in Python: torch takes it only as a group of its own
            self.for_device, self.for_host = self._registered(backend, name), self._registered(group, f"{name} host")
            return
        _add(group, device, backend)
        self.for_device = self.for_host = self._registered(group, name)
        if backend.supports_splitting:
            self.connect = partial(backend.eager_connect_single_device, device.torch_device)

    def gloo_listener(self) -> GlooListener | None:
        """Return the listener for host tensors; None where ranks of other hosts connect to it, or it is not gloo's."""
        return GlooListener(self._store, rank=self._rank, world_size=self._world_size) if self._listens else None

    def close(self, *, is_broken: bool) -> None:
        """End the groups and remove them from torch's tables. Broken ones do not wait for the other ranks."""
        for name, group in self._named.items():
            unregister_group(group, name)
            if is_broken:
                group.abort()
        if is_broken and self._world_size > 1:
            self.break_connections()
        for group in self._named.values():
            group.shutdown()
        self._named.clear()
        del self.for_device, self.for_host
        self.connect = None  # it has the store, too
        del self._store  # one that outlives its file, which the last rank removes, ends the process

    def break_connections(self) -> None:
        """End gloo's work, and with it the connections of all ranks.

        It takes the timeout of a receive: ``abort()`` does not end the work, and ``shutdown()`` waits for it.
        """
        other = (self._rank + 1) % self._world_size
        with contextlib.suppress(RuntimeError):
            work: Any = dist.irecv(torch.empty(1), group_src=other, group=self.for_host, tag=_NOBODYS_TAG)
            work.wait(timedelta(milliseconds=1))

    def _with_backend(self, device: Device, store: Store, backend: Backend | ProcessGroup) -> ProcessGroup:
        if isinstance(backend, dist.ProcessGroup):
            return backend
        group = self._empty_group(device, store)
        _add(group, device, backend)
        return group

    def _empty_group(self, device: Device, store: Store) -> ProcessGroup:
        return empty_group(store, self._rank, self._world_size, device.collectives.backend)

    def _registered(self, group: ProcessGroup, name: str) -> ProcessGroup:
        register_group(group, name, self._world_size)
        self._named[name] = group
        return group


def _add(group: ProcessGroup, device: Device, backend: Backend) -> None:
    add_backend(group, device.type, device.collectives.backend, backend)
