"""A control channel, and the calls that a sender makes through it to the receiver at the other end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any, NamedTuple, Protocol, get_type_hints

import msgspec

from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.engines.weight_sync.channels.peers import Call, JoinedPeers, LateError, LocalPeers, SyncPeers
from rlcore.engines.weight_sync.messages import decoded
from rlcore.errors import SyncError


class Control(Protocol):
    """A channel of messages between one sender and one receiver, in order and whole.

    The sender's end is used by one thread at a time, but not always by the same.
    """

    def send(self, data: bytes) -> None:
        """Send one message; raises OSError if the other end is gone."""

    def recv(self, timeout_s: float) -> bytes:
        """Return the next message; raises TimeoutError if none comes, OSError if the other end is gone."""


class RemoteCall(msgspec.Struct, frozen=True):
    """A call of one of the receiver's methods."""

    number: int
    method: str
    arguments: msgspec.Raw


class RemoteResult(msgspec.Struct, frozen=True):
    """The answer to the call of this number."""

    number: int
    error: str
    """The reason why the method failed; "" if it did not."""
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    """The method's result; None (msgpack's nil) if it failed."""


class CallTypes(NamedTuple):
    """The types of a method's arguments and result, by which each end checks what the other sends."""

    arguments: Any
    """A tuple of all arguments."""
    result: Any

    @classmethod
    def of(cls, method: Callable[..., Any]) -> CallTypes:
        hints = get_type_hints(method)
        result = hints.pop("return")
        return cls(GenericAlias(tuple, tuple(hints.values())), result)


class RemotePeer(SyncPeers):
    """The receiver at the other end of a channel.

    Args:
        methods: the types of each method that it has.
    """

    def __init__(self, control: Control, methods: Mapping[str, CallTypes], label: str = "the receiver") -> None:
        self.label = label
        self._methods = methods
        self._control = control
        self._numbers = itertools.count(time.monotonic_ns())  # answers to an earlier sender are not taken
        self._is_late = False

    def call(self, method: str, calls: Sequence[Call] | None, timeout_s: float) -> list[Any]:
        if self._is_late and method == "abandon":  # the round is over; it will read this when it goes on
            timeout_s = 0.0
        arguments = msgspec.Raw(msgspec.msgpack.encode(() if calls is None else calls[0]))
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        try:
            send(self._control, RemoteCall(number, method, arguments), timeout_s)
            answer = self._answer(deadline)
            while answer.number != number:
                answer = self._answer(deadline)
        except TimeoutError as error:
            self._is_late = True
            raise LateError(f"{self.label} did not answer {method}()") from error
        except OSError as error:
            raise SyncError(f"{self.label} is gone; {method}() found: {error}") from error
        self._is_late = False
        if answer.error:
            raise SyncError(f"{method}() failed at {self.label}: {answer.error}")
        return [decoded(answer.result, self._methods[method].result, f"result of {method}()")]

    def _answer(self, deadline: float) -> RemoteResult:
        return decoded(self._control.recv(max(0.0, deadline - time.monotonic())), RemoteResult, "answer")

    def __len__(self) -> int:
        return 1

    @property
    def is_here(self) -> bool:
        return False


def send(control: Control, message: RemoteCall | RemoteResult, timeout_s: float) -> None:
    """Send a message; only a ``ControlSocket`` keeps to ``timeout_s``, other channels wait as they do."""
    data = msgspec.msgpack.encode(message)
    if isinstance(control, ControlSocket):
        control.send(data, timeout_s)
    else:
        control.send(data)


def remote_peers(control: Control | Sequence[Control], methods: Mapping[str, CallTypes]) -> SyncPeers:
    """Return the receivers at the other end of one or several channels."""
    if not isinstance(control, Sequence):
        return RemotePeer(control, methods)
    if not control:
        return LocalPeers("no receiver of this rank's", [])
    return JoinedPeers([RemotePeer(one, methods, f"receiver {number}") for number, one in enumerate(control)])
