"""The store by which the members of a process group find each other when they share a control channel and no folder.

The sender's process has the store. A receiver asks for its values through its channel, while the sender waits for the
answer to a call. So nothing listens for it, on any host, and nobody reaches it who does not have the channel.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec

from rlcore._torch_private import HashStore, PrefixStore, Store
from rlcore.engines.launchers.ray.actor_store import ActorStore
from rlcore.engines.launchers.ray.store_names import is_ray_store

_POLL_S = 0.005
_MOST_BYTES = 1 << 20
"""The longest value: an address of a collective library takes some hundred bytes for each rank."""

_here: dict[str, Store] = {}
"""The stores of this process, by name."""


class StoreQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on a store, which a receiver asks the sender to carry out."""

    store: str
    operation: Literal["set", "get", "add", "check"]
    keys: list[str]
    value: bytes = b""
    amount: int = 0


class StoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a ``StoreQuestion``. Its fields are no other message's."""

    store_value: bytes = b""
    store_count: int
    """The sum after "add"; of the others 1 if all keys are there, else 0."""
    store_error: str = ""


Ask = Callable[[StoreQuestion], StoreAnswer]


class SharedStore:
    """A store of this process, until ``remove``, for one process group.

    Args:
        name: of no other group. All trainer ranks give the same.
        common: the store that all trainer ranks reach; None if there is one.
    """

    def __init__(self, name: str | None = None, common: Store | None = None) -> None:
        self.path = f"store:{uuid.uuid4().hex if name is None else name}"
        _here[self.path] = HashStore() if common is None else PrefixStore(self.path, common)

    def remove(self) -> None:
        _here.pop(self.path, None)


def common_stores(all_gather: Callable[[bytes], list[bytes]], common: Callable[[], Store]) -> Callable[[], SharedStore]:
    """Return what makes the store of each process group of all trainer ranks, who call it in one order.

    Args:
        all_gather: returns the bytes of all ranks.
        common: returns a store that all of them reach.
    """
    name = all_gather(uuid.uuid4().bytes)[0].hex()
    numbers = itertools.count()
    return lambda: SharedStore(f"{name}/{next(numbers)}", common())


def store_of(path: str, ask: Ask | None) -> str | Store:
    """Return what a member of a group is given as its rendezvous: a folder's path as it is, or a store.

    The sender's own is a clone: it waits in it for what receivers write, and a connection to the store of all trainer
    ranks does nothing else while it waits for a key.

    Args:
        ask: of a receiver, to which the store of a path is the sender's.
    """
    if is_ray_store(path):
        return ActorStore(path)
    if not path.startswith("store:"):
        return path
    if ask is not None:
        return AskedStore(path, ask)
    clone: Store = _here[path].clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    return clone


def answer(question: StoreQuestion) -> StoreAnswer:
    """Carry out an operation on a store of this process; waits for nothing."""
    store = _here.get(question.store)
    if store is None or not question.keys or len(question.value) > _MOST_BYTES:
        return StoreAnswer(store_count=0, store_error=f"no such operation, or no store {question.store!r}, is here")
    key = question.keys[0]
    try:
        match question.operation:
            case "set":
                store.set(key, question.value)  # type: ignore[arg-type]  # torch's stub is wrong
                return StoreAnswer(store_count=1)
            case "add":
                return StoreAnswer(store_count=store.add(key, question.amount))
            case "check":
                return StoreAnswer(store_count=int(store.check(question.keys)))
        is_there = store.check([key])
        return StoreAnswer(store_count=int(is_there), store_value=store.get(key) if is_there else b"")
    except RuntimeError as error:  # of a store that the trainer's ranks share, and that has gone
        return StoreAnswer(store_count=0, store_error=str(error))


class AskedStore(Store):
    """The sender's store, as a receiver has it."""

    def __init__(self, path: str, ask: Ask) -> None:
        super().__init__()
        self._path = path
        self._ask = ask
        self._timeout = timedelta(seconds=300)

    def _answer(self, operation: Any, keys: Sequence[str], **more: Any) -> StoreAnswer:
        found = self._ask(StoreQuestion(store=self._path, operation=operation, keys=list(keys), **more))
        if found.store_error:
            raise RuntimeError(found.store_error)
        return found

    def set(self, key: str, value: str | bytes) -> None:
        self._answer("set", [key], value=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._answer("get", [key]).store_value

    def add(self, key: str, value: int) -> int:
        return self._answer("add", [key], amount=value).store_count

    def check(self, keys: list[str]) -> bool:
        return self._answer("check", keys).store_count == 1

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody has written {keys} to the sender's store in time")
            time.sleep(_POLL_S)
