"""A second process with the device under test, which runs functions by name on request.

``Peer`` sends the requests; ``serve`` answers them.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any, Self

from rlcore.process.framing import read_message, take_standard_output, write_message
from rlcore.process.message_child import MessageChild
from rlcore.process.python_command import python_command
from rlcore.registry import get_device

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


class Peer:
    """``ask("package.module:function", ...)`` calls ``function(device, ...)`` there and returns its result."""

    def __init__(self, device_name: str, environment: dict[str, str] | None = None) -> None:
        command = python_command("rlcore.conformance.peer:serve", device_name)
        self._child = MessageChild(command, environment=os.environ | (environment or {}))
        self.pid = self._child.pid

    def ask(self, function: str, *arguments: Any, timeout_s: float = _START_TIMEOUT_S) -> Any:
        self.begin(function, *arguments)
        return self.answer(timeout_s)

    def begin(self, function: str, *arguments: Any) -> None:
        """Send a request without waiting for the answer; ``answer`` returns it."""
        self._child.send([function, arguments])

    def answer(self, timeout_s: float = _START_TIMEOUT_S) -> Any:
        """Return the next answer. Raises PeerError with the error of the other process, or after ``timeout_s``."""
        watchdog = threading.Timer(timeout_s, self._child.kill)
        watchdog.start()
        found: Any = self._child.receive()
        watchdog.cancel()
        if found is None:
            raise PeerError(f"process {self.pid} ended without an answer (or did not give one within {timeout_s:g} s)")
        kind, value = found
        if kind:
            raise PeerError(f"in process {self.pid}: {kind}: {value}")
        return value

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    def kill(self) -> None:
        self._child.kill()
        self._child.close(_END_TIMEOUT_S)

    def close(self) -> None:
        """Let it end; kill it if it does not."""
        self._child.close(_END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PeerPool:
    """Processes that start when they are needed first, and that later tests reuse."""

    def __init__(self) -> None:
        self._by_device: dict[str, list[Peer]] = {}

    def of(self, device_name: str, needed: int = 1) -> list[Peer]:
        """Return at least ``needed`` running processes, in the same order at each call."""
        peers = self._by_device.setdefault(device_name, [])
        for ended in [peer for peer in peers if not peer.is_alive]:
            ended.close()
            peers.remove(ended)
        while len(peers) < needed:
            peers.append(Peer(device_name))
        return peers

    def close(self) -> None:
        for peers in self._by_device.values():
            for peer in peers:
                peer.close()


class PeerError(Exception):
    """An error in the other process, or its end."""


def serve(device_name: str) -> None:
    """Answer requests until the input ends."""
    answers, requests = take_standard_output(), sys.stdin.buffer
    device = get_device(device_name)
    while (request := read_message(requests)) is not None:
        path, arguments = request
        module, _, function = path.partition(":")
        try:
            write_message(answers, ["", getattr(importlib.import_module(module), function)(device, *arguments)])
        except Exception as error:  # the asking side raises it
            write_message(answers, [type(error).__name__, str(error)])
