"""A second process with the device under test, which runs functions by name on request.

``Peer`` sends the requests; ``python -m rlcore.conformance.peer NAME`` answers them. Requests and answers are msgpack.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from rlcore.registry import get_device

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


class Peer:
    """``ask("package.module:function", ...)`` calls ``function(device, ...)`` there and returns its result."""

    def __init__(self, device_name: str, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlcore.conformance.peer", device_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | (environment or {}),
        )
        self.pid = self._process.pid

    def ask(self, function: str, *arguments: Any, timeout_s: float = _START_TIMEOUT_S) -> Any:
        self.begin(function, *arguments)
        return self.answer(timeout_s)

    def begin(self, function: str, *arguments: Any) -> None:
        """Send a request without waiting for the answer; ``answer`` returns it."""
        _send(self._process.stdin, [function, arguments])

    def answer(self, timeout_s: float = _START_TIMEOUT_S) -> Any:
        """Return the next answer. Raises PeerError with the error of the other process, or after ``timeout_s``."""
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        found = _receive(self._process.stdout)
        watchdog.cancel()
        if found is None:
            raise PeerError(f"process {self.pid} ended without an answer (or did not give one within {timeout_s:g} s)")
        kind, value = found
        if kind:
            raise PeerError(f"in process {self.pid}: {kind}: {value}")
        return value

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


class PeerPool:
    """Processes that start when they are needed first, and that later tests reuse."""

    def __init__(self) -> None:
        self._by_device: dict[str, list[Peer]] = {}

    def of(self, device_name: str, needed: int = 1) -> list[Peer]:
        """Return at least ``needed`` running processes, in the same order at each call."""
        peers = self._by_device.setdefault(device_name, [])
        for ended in [peer for peer in peers if not peer.is_alive]:
            ended.__exit__(None, None, None)  # closes its pipes
            peers.remove(ended)
        while len(peers) < needed:
            peers.append(Peer(device_name))
        return peers

    def close(self) -> None:
        for peers in self._by_device.values():
            for peer in peers:
                peer.__exit__(None, None, None)


class PeerError(Exception):
    """An error in the other process, or its end."""


def _send(pipe: IO[bytes] | None, message: Any) -> None:
    assert pipe is not None
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    """Return the next message; None at the end of the stream."""
    assert pipe is not None
    head = pipe.read(8)
    data = pipe.read(int.from_bytes(head, "little"))
    return msgspec.msgpack.decode(data) if data else None


def _serve(device_name: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to standard error; only answers go to the pipe
    requests = os.fdopen(0, "rb", closefd=False)
    device = get_device(device_name)
    while (request := _receive(requests)) is not None:
        (path, arguments) = request
        module, _, function = path.partition(":")
        try:
            _send(answers, ["", getattr(importlib.import_module(module), function)(device, *arguments)])
        except Exception as error:  # the asking side raises it
            _send(answers, [type(error).__name__, str(error)])


if __name__ == "__main__":
    _serve(sys.argv[1])
