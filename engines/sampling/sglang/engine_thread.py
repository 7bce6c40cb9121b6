"""A thread in which an SGLang engine is made, and in which its event loop runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rlcore.engines.sampling.sglang.interfaces import SglangEngine

T = TypeVar("T")
_CANCELLED_S = 2.0


class EngineThread:
    """Runs coroutines of an engine, which all need the loop that was current when it was made.

    Args:
        make: makes the engine; its errors are raised here.
    """

    def __init__(self, make: Callable[[], SglangEngine]) -> None:
        made: Future[Any] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="rlcore-sglang", daemon=True)
        self._thread.start()
        self.engine: SglangEngine = made.result()

    def _run(self, make: Callable[[], SglangEngine], made: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)
        else:
            self._loop.run_forever()
            self._cancel_all()
        self._loop.close()

    def _cancel_all(self) -> None:
        """End what was begun, and the engine's own coroutines."""
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCELLED_S))

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine of the engine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function of the engine in its thread, soon."""
        self._loop.call_soon_threadsafe(function, *args)

    def end(self) -> None:
        """Run nothing any more; what was begun and has not ended is cancelled."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
