"""A control channel, and the calls that a sender makes through it to the receiver at the other end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Any, NamedTuple, Protocol, get_type_hints

import msgspec

from rlcore.engines.weight_sync.channels import shared_store
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.engines.weight_sync.channels.peers import Call, JoinedPeers, LateError, LocalPeers, SyncPeers
from rlcore.engines.weight_sync.channels.shared_store import StoreAnswer, StoreQuestion
from rlcore.engines.weight_sync.messages import decoded
from rlcore.errors import SyncError

_ASK_S = 10.0
"""The longest that a receiver waits for the sender's store; the sender is waiting for the receiver meanwhile."""


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
    asks: StoreQuestion | None = None
    """The receiver needs this for the call, which is not over."""


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
            answer = self._answer(number, deadline)
        except TimeoutError as error:
            self._is_late = True
            raise LateError(f"{self.label} did not answer {method}()") from error
        except OSError as error:
            raise SyncError(f"{self.label} is gone; {method}() found: {error}") from error
        self._is_late = False
        if answer.error:
            raise SyncError(f"{method}() failed at {self.label}: {answer.error}")
        return [decoded(answer.result, self._methods[method].result, f"result of {method}()")]

    def _answer(self, number: int, deadline: float) -> RemoteResult:
        """Return the answer to the call of this number, after what the receiver asks for on the way."""
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            found = decoded(self._control.recv(left_s), RemoteResult, "answer")
            if found.number != number:  # of a call that was given up
                continue
            if found.asks is None:
                return found
            send(self._control, shared_store.answer(found.asks), left_s)

    def __len__(self) -> int:
        return 1

    @property
    def is_here(self) -> bool:
        return False


class StoreAsker:
    """The receiver's way to the sender's store, open while one of the sender's calls is carried out."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        """Threads of a collective library ask too."""
        self._number: int | None = None
        self._early: bytes | None = None
        """The message by which the sender went on to another call, instead of answering."""

    @contextlib.contextmanager
    def during(self, number: int) -> Iterator[None]:
        """Let the store be asked inside the block, which carries out the call of this number."""
        with self._lock:
            self._number = number
        try:
            yield
        finally:
            with self._lock:
                self._number = None

    def ask(self, question: StoreQuestion) -> StoreAnswer:
        """Return the sender's answer.

        Raises:
            ConnectionError: no call is under way, or the sender has given it up.
            OSError: the sender does not answer, or is gone; then it is not asked again in this call.
        """
        with self._lock:
            if self._number is None:
                raise ConnectionError("the sender does not wait for an answer now, so its store cannot be asked")
            number, self._number = self._number, None
            send(self._control, RemoteResult(number, "", asks=question), _ASK_S)
            data = self._control.recv(_ASK_S)
            try:
                found = decoded(data, StoreAnswer, "answer of the sender's store")
            except SyncError as error:
                self._early = data
                raise ConnectionError("the sender has given up the call that needs its store") from error
            self._number = number
            return found

    def next_call(self, timeout_s: float) -> RemoteCall:
        """Return the sender's next call.

        Raises:
            TimeoutError, OSError: as ``Control.recv``.
            SyncError: what came is none.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            early, self._early = self._early, None
            data = self._control.recv(max(0.0, deadline - time.monotonic())) if early is None else early
            try:
                return decoded(data, RemoteCall, "request")
            except SyncError:
                if not _is_late_answer(data):
                    raise


def _is_late_answer(data: bytes) -> bool:
    """Return True for what the store answered when nobody waited for it any more."""
    try:
        decoded(data, StoreAnswer, "answer")
    except SyncError:
        return False
    return True


def send(control: Control, message: RemoteCall | RemoteResult | StoreAnswer, timeout_s: float) -> None:
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
