"""The store actor: keys and values in one process, through which workers on several hosts find each other.

It takes the place of torch's TCPStore, which listens on every interface and asks nobody for a password.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

Operation = Literal["set", "get", "add", "compare_set", "wait", "check", "delete", "count", "forget"]


class ActorStoreRequest(msgspec.Struct, array_like=True, frozen=True):
    """A question to the store actor."""

    operation: Operation
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


class ActorStoreAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The answer. ``missing`` are the keys that did not come in time."""

    value: bytes = b""
    number: int = 0
    missing: list[str] = []


class StoreActor:
    """The actor. Its methods wait without a thread, so that any number of ranks can wait.

    A rank waits for the event of one key: with one event for all keys each new key would wake every rank.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, asyncio.Event] = {}

    async def ask(self, data: bytes) -> bytes:
        """Take a ``ActorStoreRequest``, return a ``ActorStoreAnswer``."""
        request = msgspec.msgpack.decode(data, type=ActorStoreRequest)
        answer = await self._wait(request) if request.operation in ("get", "wait") else self._at_once(request)
        return msgspec.msgpack.encode(answer)

    async def _wait(self, request: ActorStoreRequest) -> ActorStoreAnswer:
        try:
            async with asyncio.timeout(request.timeout_s):
                for key in request.keys:
                    while key not in self._values:
                        await self._awaited.setdefault(key, asyncio.Event()).wait()
        except TimeoutError:
            return ActorStoreAnswer(missing=[key for key in request.keys if key not in self._values])
        return ActorStoreAnswer(self._values.get(request.keys[0], b""))

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if (event := self._awaited.pop(key, None)) is not None:
            event.set()

    def _at_once(self, request: ActorStoreRequest) -> ActorStoreAnswer:
        values, keys = self._values, request.keys
        match request.operation:
            case "set":
                self._put(keys[0], request.value)
            case "add":
                total = int(values.get(keys[0], b"0")) + request.amount
                self._put(keys[0], str(total).encode())
                return ActorStoreAnswer(number=total)
            case "compare_set":
                # As torch's TCPStore: an absent key is made where nothing is expected, else that comes back.
                present = values.get(keys[0])
                if present == request.expected or (present is None and not request.expected):
                    self._put(keys[0], request.value)
                return ActorStoreAnswer(values.get(keys[0], request.expected))
            case "check":
                return ActorStoreAnswer(number=int(all(key in values for key in keys)))
            case "delete":
                return ActorStoreAnswer(number=int(values.pop(keys[0], None) is not None))
            case "count":
                return ActorStoreAnswer(number=sum(key.startswith(keys[0]) for key in values))
            case "forget":  # all that begins so
                for key in [key for key in values if key.startswith(keys[0])]:
                    del values[key]
        return ActorStoreAnswer()
