"""The stores through which the workers of one engine, or of a weight sync, find each other."""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from rlcore.engines.launchers.ray.store_actor import ActorStoreRequest
from rlcore.engines.launchers.ray.store_names import RAY_STORE
from rlcore.engines.launchers.ray.wire import encoded

if TYPE_CHECKING:
    from rlcore.engines.launchers.ray.link import HostLink


class FolderRendezvous:
    """A folder on one host, which goes with this object. Its agent's end lets the next process there remove it."""

    def __init__(self, link: HostLink) -> None:
        self.path = link.new_store()
        weakref.finalize(self, _remove, link, self.path, os.getpid()).atexit = False


class StoreRendezvous:
    """A part of the store actor, whose keys go with this object.

    Args:
        actor: Ray's handle of the store actor.
    """

    def __init__(self, actor: Any) -> None:
        self.path = f"{RAY_STORE}{uuid.uuid4().hex}"
        self.remove = weakref.finalize(self, _forget, actor, self.path, os.getpid())
        self.remove.atexit = False


def _remove(link: HostLink, path: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork cannot use Ray, and does not end the group
        link.remove_store(path)


def _forget(actor: Any, path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(Exception):  # Ray may have been shut down
            actor.ask.remote(encoded(ActorStoreRequest("forget", [path])))
