"""``APIFuture``: the result of a call that goes on, for programs with and without an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


class APIFuture(Generic[T]):
    """Wait with ``result()``, or ``await`` it."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """As ``result``: whoever stops waiting does not cancel the call."""
        async with asyncio.timeout(timeout):
            return await asyncio.shield(asyncio.wrap_future(self._future))

    def future(self) -> Future[T]:
        """Return the plain future."""
        return self._future

    async def coroutine(self) -> T:
        return await self

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class ClientFuture(APIFuture[T]):
    """The future of a client, which can also be used as the client itself, as earlier versions returned it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name)


def begins(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return a method's ``_async`` form, which earlier programs await to begin a call: it gives the same future.

    It calls the method by name, so that a subclass may have its own.
    """

    @functools.wraps(method)
    async def begun(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = getattr(self, method.__name__)(*args, **kwargs)
        return found

    return begun


def ends(method: Callable[Concatenate[S, P], APIFuture[T]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return a method's ``_async`` form that gives the result; it calls the method by name, as ``begins``."""

    @functools.wraps(method)
    async def ended(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = await getattr(self, method.__name__)(*args, **kwargs)
        return found

    return ended
