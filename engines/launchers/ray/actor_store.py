"""A ``torch.distributed.Store`` of workers on several hosts: their agent asks the store actor for them.

Worker and agent talk through a Unix socket in a folder of the agent's user alone. No port is opened.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlcore._torch_private import Store
from rlcore.engines.launchers.ray.store_actor import ActorStoreAnswer, ActorStoreRequest, Operation
from rlcore.errors import CollectiveError, UnsupportedError
from rlcore.process.framing import read_message, write_message
from rlcore.process.socket_address import socket_address

_TIMEOUT_S = 300.0
"""How long a key is waited for where nobody says otherwise."""
STORE_SOCKET = "_RLCORE_RAY_STORE"
"""The variable of a worker process that holds the path of its agent's socket."""


class ActorStore(Store):
    """The part of the store actor whose keys begin with ``name``.

    Raises:
        UnsupportedError: this process is no worker under the launcher "ray".
    """

    def __init__(self, name: str, timeout_s: float = _TIMEOUT_S) -> None:
        super().__init__()
        if not os.environ.get(STORE_SOCKET):
            raise UnsupportedError(f"the rendezvous {name!r} in this process", "only workers of launcher='ray' can")
        self._name = name
        self._timeout_s = timeout_s
        self._of_thread = threading.local()  # a thread that waits must not make others wait

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        return self._waited("get", [key]).value

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount=amount).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask("compare_set", key, value=_bytes(desired_value), expected=_bytes(expected_value)).value

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key).number)

    def num_keys(self) -> int:
        return self._ask("count", "").number

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._waited("wait", keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> ActorStore:
        return ActorStore(self._name, self._timeout_s)

    def _waited(self, operation: Operation, keys: list[str], timeout: timedelta | None = None) -> ActorStoreAnswer:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        answer = self._ask(operation, *keys, timeout_s=timeout_s)
        if answer.missing:
            raise dist.DistStoreError(f"keys {answer.missing} did not come to the store actor within {timeout_s:g} s")
        return answer

    def _ask(self, operation: Operation, *keys: str, **fields: Any) -> ActorStoreAnswer:
        pipe = self._pipe()
        try:
            write_message(pipe, ActorStoreRequest(operation, [f"{self._name}/{key}" for key in keys], **fields))
            answer: ActorStoreAnswer | None = read_message(pipe, ActorStoreAnswer)
        except OSError:
            answer = None
        if answer is None:
            raise CollectiveError(f"the store actor cannot be asked for {', '.join(keys)}: it or the agent has ended")
        return answer

    def _pipe(self) -> Any:
        if not hasattr(self._of_thread, "pipe"):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with connection, socket_address(os.environ[STORE_SOCKET]) as address:
                connection.connect(address)
                self._of_thread.pipe = connection.makefile("rwb")
        return self._of_thread.pipe


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
