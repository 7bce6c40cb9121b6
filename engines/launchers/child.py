"""The main program of a worker process. It ends, whatever it is doing, when its parent does."""

from __future__ import annotations

import ctypes
import faulthandler
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

_PR_SET_PDEATHSIG = 1


class Child:
    """Executes the parent's calls one after another, on the main thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[tuple[Envelope, list[Any]]] = queue.SimpleQueue()
        self._call = 0
        self._worker: Any = None

    def run(self) -> None:
        threading.Thread(target=self._listen, name="rlcore-listen", daemon=True).start()
        while True:
            envelope, tensors = self._messages.get()
            if envelope.kind == "stop":
                break
            self._call = envelope.call
            self._answer(envelope, tensors)
            del envelope, tensors  # the arguments' shared memory is free for the next call
        if self._worker is not None:
            self._worker.close()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._messages.put(message)
        _end_with_descendants()  # the parent is gone

    def _answer(self, envelope: Envelope, tensors: list[Any]) -> None:
        try:
            with real_device():
                method, args, kwargs = load_call(envelope.body, tensors)
                if envelope.kind == "start":
                    value = self._start(*args)
                else:
                    value = attrgetter(method)(self._worker)(*args, **kwargs)
                body, out = dump_answer(value, f"{method}()")
        except Exception as error:  # everything goes to the parent, which raises it
            body, out = msgspec.msgpack.encode(describe(error)), []
            self._channel.send("error", self._call, body, out)
            return
        self._channel.send("result", self._call, body, out)

    def _start(self, worker_class: Any, context: WorkerContext) -> Any:
        self._worker = worker_class(replace(context, emit=self._emit))

    def _emit(self, event: Any) -> None:
        body, tensors = dump_answer(event, "emit()")
        self._channel.send("event", self._call, body, tensors)


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
    Child(Channel(socket.socket(fileno=descriptor))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown can hang in a library's exit handlers; everything of ours is closed.
    os._exit(0)
