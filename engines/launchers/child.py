"""What a worker process does: it executes its parent's calls one after another, and answers each."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from rlcore.engines.launchers.wire import Channel, Envelope, dump_answer
from rlcore.engines.launchers.worker import WorkerContext, describe


class Child:
    """The workers of one device, of one or several engines. Their methods run on the main thread.

    Args:
        load_call: reads a call, as the parent wrote it.
    """

    def __init__(self, channel: Channel, load_call: Callable[..., Any]) -> None:
        self._channel = channel
        self._load_call = load_call
        self._messages: queue.SimpleQueue[tuple[Envelope, list[Any]]] = queue.SimpleQueue()
        self._workers: dict[int, Any] = {}
        self._contexts: dict[int, WorkerContext] = {}
        self._call = 0
        self._given_up: set[int] = set()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="rlcore-listen", daemon=True).start()
        while True:
            envelope, tensors = self._messages.get()
            if envelope.kind == "end":
                return
            self._call = envelope.call
            self._answer(envelope, tensors)
            del envelope, tensors  # the arguments' shared memory is free for the next call

    def _listen(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                if message[0].kind == "give up":  # of the call that runs, or of one that waits
                    self._given_up.add(message[0].call)
                else:
                    self._messages.put(message)
        except BaseException:  # such as no descriptor left for a tensor: what follows cannot be read either
            traceback.print_exc()
            sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # the parent is gone, or gave this process up

    def _answer(self, envelope: Envelope, tensors: list[Any]) -> None:
        try:
            method, args, kwargs = self._load_call(envelope.body, tensors, self._workers)
            value = self._execute(envelope, method, args, kwargs)
            body, out = dump_answer(value, f"{method}()", is_annotated="." not in method)
            self._channel.send("result", self._call, body, tensors=out)
        # SystemExit and KeyboardInterrupt too: a failed call is not the end of other engines' workers.
        except BaseException as error:
            self._channel.send("error", self._call, msgspec.msgpack.encode(describe(error)))
        finally:
            self._given_up.discard(self._call)

    def _execute(self, envelope: Envelope, method: str, args: Any, kwargs: Any) -> Any:
        if envelope.kind == "start":
            return self._start(envelope.worker, *args)
        context = self._contexts[envelope.worker]
        worker = self._workers[envelope.worker]
        try:
            with context.turn(method):
                return attrgetter(method)(worker)(*args, **kwargs)
        finally:
            if envelope.kind == "close":
                del self._workers[envelope.worker], self._contexts[envelope.worker]
                context.world.destroy()

    def _start(self, number: int, worker_class: Any, context: WorkerContext) -> None:
        context.device.activate()
        context = replace(context, emit=self._emit, is_given_up=lambda: self._call in self._given_up)
        with context.turn("start"):
            self._workers[number] = worker_class(context)
        self._contexts[number] = context

    def _emit(self, event: Any) -> None:
        body, tensors = dump_answer(event, "emit()")
        self._channel.send("event", self._call, body, tensors=tensors)
