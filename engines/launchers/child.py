"""The main program of a worker process. It ends, whatever it is doing, when its parent does."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from rlcore.engines.launchers.wire import Channel, Envelope, dump_answer, load_call
from rlcore.engines.launchers.worker import WorkerContext, describe
from rlcore.nn import real_device
from rlcore.settings import Settings

_PR_SET_PDEATHSIG = 1


class Child:
    """The workers of one device, of one or several engines; executes calls one after another on the main thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[tuple[Envelope, list[Any]]] = queue.SimpleQueue()
        self._workers: dict[int, Any] = {}
        self._call = 0

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
        while (message := self._channel.receive()) is not None:
            self._messages.put(message)
        _end_with_descendants()  # the parent is gone

    def _answer(self, envelope: Envelope, tensors: list[Any]) -> None:
        try:
            with real_device():
                method, args, kwargs = load_call(envelope.body, tensors, self._workers)
                if envelope.kind == "start":
                    value = self._start(envelope.worker, *args)
                else:
                    value = attrgetter(method)(self._workers[envelope.worker])(*args, **kwargs)
                if method == "close":
                    del self._workers[envelope.worker]
                body, out = dump_answer(value, f"{method}()")
        # SystemExit too: a user's sys.exit() is a failed call, not the end of other engines' workers.
        except (Exception, SystemExit) as error:
            self._channel.send("error", self._call, msgspec.msgpack.encode(describe(error)))
            return
        self._channel.send("result", self._call, body, tensors=out)

    def _start(self, number: int, worker_class: Any, context: WorkerContext) -> Any:
        context.device.activate()
        self._workers[number] = worker_class(replace(context, emit=self._emit))

    def _emit(self, event: Any) -> None:
        body, tensors = dump_answer(event, "emit()")
        self._channel.send("event", self._call, body, tensors=tensors)


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent dies, stopped or stuck in C code as it may be."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _end_with_descendants() -> None:
    os.killpg(0, signal.SIGKILL)  # the parent made this process the leader of its own group


def main(descriptor: int, stack_descriptor: int, parent: int) -> None:
    """Serve the parent at the other end of the socket ``descriptor``."""
    _die_with(parent)
    faulthandler.register(signal.SIGUSR1, file=stack_descriptor, all_threads=True)
    logging.basicConfig(level=Settings.from_env().log_level, format="%(name)s %(levelname)s %(message)s")
    Child(Channel(socket.socket(fileno=descriptor))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown can hang in a library's exit handlers; everything of ours is closed.
    os._exit(0)
