"""``RewardPool``: reward functions in processes of their own, each call with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import cloudpickle  # type: ignore[import-untyped]

from rlcore.arguments import COUNT, SECONDS, Kind, takes
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command


class RewardPool:
    """Calls reward functions in processes, so that a slow one does not stop the program and a hanging one is ended.

    A process starts when it is first needed. One whose call takes longer than ``timeout_s`` is killed, with what it has
    started in its process group, and the next call starts another. A function of a script travels by value
    (cloudpickle).

    Args:
        num_processes: the most calls that run together.
        timeout_s: the longest that one call may take; the time for which it waits for a process does not count.
    """

    @takes("RewardPool", num_processes=COUNT, timeout_s=SECONDS)
    def __init__(self, num_processes: int = 2, *, timeout_s: float = 15.0) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="rlcore-reward")
        self._idle: queue.SimpleQueue[MessageChild] = queue.SimpleQueue()
        self._children: set[MessageChild] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_timeouts = 0
        """Calls whose process was ended because they took too long."""

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> float | list[float]:
        """Await ``function(*args, **kwargs)``, a number or a list of numbers.

        Raises:
            RolloutTimeoutError: it took longer than ``timeout_s``, and its process was ended.
            RolloutError: it raised (the error's text), or its process ended.
            InvalidInputError: the function or an argument cannot be pickled.
        """
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    @takes("RewardPool.submit()", function=Kind("a function", callable))
    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[float | list[float]]:
        """Begin the call; the future raises as ``__call__`` does."""
        if self._is_closed:
            raise StateError("the RewardPool is closed; make another")
        try:
            body = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise InvalidInputError(f"{_name(function)} or an argument cannot be sent to a process: {error}") from error
        return self._threads.submit(self._run, _name(function), body)

    def close(self) -> None:
        """End the processes; calls that run fail with RolloutError."""
        with self._lock:
            self._is_closed = True
            for child in self._children:
                child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()
        self._children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, name: str, body: bytes) -> float | list[float]:
        child = self._child()
        ended = threading.Lock()  # taken by what comes first, the deadline or the end of the call

        def end_late_call() -> None:
            if ended.acquire(blocking=False):
                child.kill()

        timer = threading.Timer(self._timeout_s, end_late_call)
        timer.start()
        try:
            child.send(body)
            answer = child.receive(dict[str, Any])
        except BrokenPipeError:
            answer = None
        finally:
            timer.cancel()
        is_late = not ended.acquire(blocking=False)
        if answer is None or is_late:
            self._remove(child)
            if is_late:
                self.num_timeouts += 1
                raise RolloutTimeoutError(f"{name} took longer than {self._timeout_s:g} s; its process was ended")
            raise RolloutError(f"the process of {name} ended while it ran")
        self._idle.put(child)
        if "error" in answer:
            raise RolloutError(f"{name} raised {answer['error']}")
        value: float | list[float] = answer["value"]
        return value

    def _child(self) -> MessageChild:
        with contextlib.suppress(queue.Empty):
            while not (child := self._idle.get_nowait()).is_alive:
                self._remove(child)  # somebody ended it while it had nothing to do
            return child
        with self._lock:
            if self._is_closed:
                raise RolloutError("the RewardPool was closed")
            environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
            command = python_command("rlcore.rollout.reward_process:main")
            child = MessageChild(command, environment=environment, has_own_session=True)
            self._children.add(child)
        return child

    def _remove(self, child: MessageChild) -> None:
        child.kill()
        child.close()
        with self._lock:
            self._children.discard(child)


def _name(function: Callable[..., Any]) -> str:
    return f"the reward function {getattr(function, '__name__', repr(function))}"
