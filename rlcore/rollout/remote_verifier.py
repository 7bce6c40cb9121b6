"""``RemoteVerifier``: rewards from a server over HTTP, many in a request, while other episodes generate."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import socket
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from rlcore.arguments import COUNT, SECONDS, Kind, takes
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError

_URL = Kind(
    "an address that begins with http:// or https://",
    lambda value: isinstance(value, str) and value.startswith(("http://", "https://")),
)
_MOST_BYTES = 1 << 24
"""The most bytes of an answer: what is longer is none of rewards."""


class _Opener:
    """Opens one request, whose connections ``end`` shuts down in whichever part of the answer they are."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._is_over = False
        plain, encrypted = _KeptHTTP(), _KeptHTTPS()
        plain.keep = encrypted.keep = self._keep
        self._opener = urllib.request.build_opener(plain, encrypted)

    def open(self, request: urllib.request.Request, timeout_s: float) -> Any:
        return self._opener.open(request, timeout=timeout_s)

    def _keep(self, connected: socket.socket) -> None:
        self._sockets.append(connected)
        if self._is_over:
            self.end()

    def end(self) -> None:
        self._is_over = True
        for one in self._sockets:
            with contextlib.suppress(OSError):  # it has ended
                socket.socket.shutdown(one, socket.SHUT_RDWR)  # that of SSLSocket is not for two threads


class _Kept(urllib.request.AbstractHTTPHandler):
    """Mixed into urllib's handlers: gives the sockets of their connections to ``keep``."""

    keep: Callable[[socket.socket], None]

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        def connection(*args: Any, **others: Any) -> Any:
            found = http_class(*args, **others)
            connect = found.connect

            def connect_and_keep() -> None:
                connect()
                self.keep(found.sock)

            found.connect = connect_and_keep
            return found

        return super().do_open(connection, req, **options)


class _KeptHTTP(_Kept, urllib.request.HTTPHandler): ...


class _KeptHTTPS(_Kept, urllib.request.HTTPSHandler): ...


class RemoteVerifier:
    """A reward function that asks a server: ``SingleTurn(RemoteVerifier("http://host:8000/verify"))``.

    What waits while ``max_requests`` are under way goes together in the next one: ``POST {"items": [{"data": ...,
    "text": ...}, ...]}``, answered by ``{"rewards": [...]}`` with a number for each item. It belongs to one event loop,
    that of a ``RolloutController``.

    Args:
        timeout_s: the longest that one request may take, whatever the server sends meanwhile.
        max_items: the most items of a request.
        max_requests: the most requests at a time.
        headers: further headers, such as ``{"Authorization": ...}``.
    """

    @takes("RemoteVerifier", url=_URL, timeout_s=SECONDS, max_items=COUNT, max_requests=COUNT)
    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 15.0,
        max_items: int = 64,
        max_requests: int = 4,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url, self._timeout_s, self._max_items, self._max_requests = url, timeout_s, max_items, max_requests
        self._headers = {"Content-Type": "application/json"} | dict(headers or {})
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="rlcore-verifier")
        self._waiting: deque[tuple[str, asyncio.Future[float]]] = deque()
        self._will_send = False
        """``_send`` is to be called, after whatever else is ready."""
        self._requests: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def __call__(self, data: Any, text: str) -> float:
        """Return the reward of one answer.

        Raises:
            RolloutTimeoutError: the server did not answer in time.
            RolloutError: it cannot be reached, answered with an error, or with something else than a reward an item.
            InvalidInputError: ``data`` is no plain data.
        """
        if self._is_closed:
            raise StateError("the RemoteVerifier is closed; make another")
        try:
            item = json.dumps({"data": data, "text": text})
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"an item for {self._url} must be plain data: {error}") from error
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if not self._will_send:  # one for all that are ready now
            self._will_send = True
            asyncio.get_running_loop().call_soon(self._send)
        return await answer

    def close(self) -> None:
        """Let no request begin any more; those under way end by their deadline."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self) -> None:
        self._will_send = False
        while len(self._requests) < self._max_requests and (together := self._next()):
            request = asyncio.ensure_future(self._ask(together))
            self._requests.add(request)
            request.add_done_callback(self._ended)

    def _next(self) -> list[tuple[str, asyncio.Future[float]]]:
        """Take what has waited longest, without what cancelled episodes asked."""
        together: list[tuple[str, asyncio.Future[float]]] = []
        while self._waiting and len(together) < self._max_items:
            item, answer = self._waiting.popleft()
            if not answer.done():
                together.append((item, answer))
        return together

    def _ended(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._send()

    async def _ask(self, together: list[tuple[str, asyncio.Future[float]]]) -> None:
        body = f'{{"items": [{", ".join(item for item, _ in together)}]}}'.encode()
        try:
            rewards = await self._in_time(body, len(together))
        except BaseException as error:
            for _, answer in together:
                if not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else RolloutError(f"{error!r}"))
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), reward in zip(together, rewards, strict=True):
            if not answer.done():
                answer.set_result(reward)

    async def _in_time(self, body: bytes, count: int) -> list[float]:
        """Return the rewards; the time counts here, because that of a socket begins anew with each byte."""
        opener = _Opener()
        try:
            async with asyncio.timeout(self._timeout_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._rewards, opener, body, count)
        except TimeoutError as error:
            opener.end()  # its thread is needed for other requests
            raise RolloutTimeoutError(f"{self._url} did not answer within {self._timeout_s:g} s") from error

    def _rewards(self, opener: _Opener, body: bytes, count: int) -> list[float]:
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with opener.open(request, self._timeout_s) as response:
                text = self._read(response)
        except urllib.error.HTTPError as error:
            raise RolloutError(f"{self._url} answered {error.code}: {_text_of(error)}") from None
        except OSError as error:
            if isinstance(cause := getattr(error, "reason", error), TimeoutError):
                raise cause from None
            raise RolloutError(f"{self._url} cannot be asked: {error}") from error
        except http.client.HTTPException as error:  # which is no OSError
            raise RolloutError(f"{self._url} answered something else than HTTP: {error!r:.200}") from error
        return self._checked(text, count)

    def _read(self, response: Any) -> bytes:
        found: bytes = response.read(_MOST_BYTES + 1)
        if len(found) > _MOST_BYTES:
            raise RolloutError(f"{self._url} answered more than {_MOST_BYTES} bytes, which are no rewards")
        return found

    def _checked(self, text: bytes, count: int) -> list[float]:
        try:
            rewards = json.loads(text)["rewards"]
            if not isinstance(rewards, list) or not all(type(one) in (int, float) for one in rewards):
                raise TypeError("a text or a mapping would be read as numbers as well")
            found = [float(one) for one in rewards]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            told = f'{self._url} must answer {{"rewards": [numbers]}}, got {text[:200]!r}'
            raise RolloutError(told) from error
        if len(found) != count or not all(map(math.isfinite, found)):
            raise RolloutError(f"{self._url} must answer {count} finite rewards, got {len(found)}: {found[:8]}")
        return found


def _text_of(error: urllib.error.HTTPError) -> str:
    """Return the beginning of what came with an error, as far as it came."""
    try:
        return error.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
