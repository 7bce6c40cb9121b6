"""The board: an actor with keys and values, through which workers on several hosts find each other.

It takes the place of torch's TCPStore, which listens on every interface and asks nobody for a password.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec

Operation = Literal["set", "get", "add", "compare_set", "wait", "check", "delete", "count", "forget"]


class BoardRequest(msgspec.Struct, array_like=True, frozen=True):
    """A question to the board."""

    operation: Operation
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0


class BoardAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The answer. ``missing`` are the keys that did not come in time."""

    value: bytes = b""
    number: int = 0
    missing: list[str] = []


class Board:
    """The actor. Its methods wait without a thread, so that any number of ranks can wait."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def ask(self, data: bytes) -> bytes:
        """Take a ``BoardRequest``, return a ``BoardAnswer``."""
        request = msgspec.msgpack.decode(data, type=BoardRequest)
        return msgspec.msgpack.encode(await self._answer(request))

    async def _answer(self, request: BoardRequest) -> BoardAnswer:
        if request.operation in ("get", "wait"):
            return await self._wait(request)
        async with self._changed:
            answer = self._at_once(request)
            self._changed.notify_all()
        return answer

    async def _wait(self, request: BoardRequest) -> BoardAnswer:
        deadline = time.monotonic() + request.timeout_s
        async with self._changed:
            while missing := [key for key in request.keys if key not in self._values]:
                try:
                    await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
                except TimeoutError:
                    return BoardAnswer(missing=missing)
            return BoardAnswer(self._values[request.keys[0]])

    def _at_once(self, request: BoardRequest) -> BoardAnswer:
        values, keys = self._values, request.keys
        match request.operation:
            case "set":
                values[keys[0]] = request.value
            case "add":
                total = int(values.get(keys[0], b"0")) + request.amount
                values[keys[0]] = str(total).encode()
                return BoardAnswer(number=total)
            case "compare_set":
                # As torch's TCPStore: an absent key is made where nothing is expected, else that comes back.
                present = values.get(keys[0])
                if present == request.expected or (present is None and not request.expected):
                    values[keys[0]] = request.value
                return BoardAnswer(values.get(keys[0], request.expected))
            case "check":
                return BoardAnswer(number=int(all(key in values for key in keys)))
            case "delete":
                return BoardAnswer(number=int(values.pop(keys[0], None) is not None))
            case "count":
                return BoardAnswer(number=sum(key.startswith(keys[0]) for key in values))
            case "forget":  # all that begins so
                for key in [key for key in values if key.startswith(keys[0])]:
                    del values[key]
        return BoardAnswer()
