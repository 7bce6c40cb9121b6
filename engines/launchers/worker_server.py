"""The serving side of a worker process: it runs its parent's calls one after another, and answers each."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec
from torch import Tensor

from rlcore.engines.launchers.answers import dump_answer
from rlcore.engines.launchers.failures import describe
from rlcore.engines.launchers.messages import MessageHead
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.process.endings import CONNECTION_LOST
from rlcore.process.tensor_channel import TensorChannel


class WorkerServer:
    """The workers of one device, of one or several engines. Their methods run on the main thread.

    Args:
        load_call: reads a call as the parent wrote it.
    """

    def __init__(self, connection: socket.socket, load_call: Callable[..., Any]) -> None:
        self._channel = TensorChannel(connection, MessageHead)
        self._load_call = load_call
        self._messages: queue.SimpleQueue[tuple[MessageHead, bytes, list[Tensor]]] = queue.SimpleQueue()
        self._workers: dict[int, Any] = {}
        self._contexts: dict[int, WorkerContext] = {}
        self._call = 0
        self._cancelled: set[int] = set()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="rlcore-listen", daemon=True).start()
        while True:
            head, body, tensors = self._messages.get()
            if head.kind == "end":
                return
            self._call = head.call
            self._answer(head, body, tensors)
            del head, body, tensors  # the arguments' shared memory is free for the next call

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                if message[0].kind == "cancel":  # the call that runs, or one that waits
                    self._cancelled.add(message[0].call)
                else:
                    self._messages.put(message)
        except BaseException:  # such as no descriptor left for a tensor: what follows cannot be read either
            _report()
        os._exit(CONNECTION_LOST)  # the parent has ended, or has shut the channel down

    def _answer(self, head: MessageHead, body: bytes, tensors: list[Tensor]) -> None:
        try:
            method, args, kwargs = self._load_call(body, tensors, self._workers)
            value = self._execute(head, method, args, kwargs)
            answer, left_out = dump_answer(value, f"{method}()", is_annotated="." not in method)
            self._channel.send(MessageHead("result", head.call), answer, left_out)
        # SystemExit and KeyboardInterrupt too: a failed call is not the end of other engines' workers.
        except BaseException as error:
            self._send_error(head.call, error)
        finally:
            # calls have rising numbers; what an earlier one was told came too late
            self._cancelled.difference_update([call for call in tuple(self._cancelled) if call <= head.call])

    def _send_error(self, call: int, error: BaseException) -> None:
        device = next((context.device for context in self._contexts.values()), None)  # all have the same
        try:
            self._channel.send(MessageHead("error", call), msgspec.msgpack.encode(describe(error, device)))
        except OSError:  # the parent has ended, or something in this process has closed the socket
            _report()
            os._exit(CONNECTION_LOST)

    def _execute(self, head: MessageHead, method: str, args: Any, kwargs: Any) -> Any:
        if head.kind == "start":
            return self._start(head.worker, *args)
        context = self._contexts[head.worker]
        worker = self._workers[head.worker]
        try:
            with context.running(method):
                return attrgetter(method)(worker)(*args, **kwargs)
        finally:
            if head.kind == "close":
                del self._workers[head.worker], self._contexts[head.worker]
                context.world.destroy()

    def _start(self, number: int, worker_class: Any, context: WorkerContext) -> None:
        context.device.activate()
        context = replace(context, emit=self._emit, is_cancelled=lambda: self._call in self._cancelled)
        with context.running("start"):
            self._workers[number] = worker_class(context)
        self._contexts[number] = context

    def _emit(self, event: object) -> None:
        body, tensors = dump_answer(event, "emit()")
        self._channel.send(MessageHead("event", self._call), body, tensors)


def _report() -> None:
    """Print the present exception, where standard error has not been closed as well."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()
        sys.stderr.flush()
