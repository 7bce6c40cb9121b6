"""Weight sync for frameworks with processes of their own: a sender, a receiver, and what carries bytes between them.

    sender = rlcore.WeightSender(model.named_parameters, control)         # in the trainer
    sender.send(version=1)

    receiver = rlcore.WeightReceiver(model, control)                      # in the inference process
    version = receiver.receive()

The weights themselves go by the routes of docs/weight_sync.md; the channel carries a few small messages a round. Both
ends check all that comes; nothing is unpickled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlcore.arguments import LIST, Kind, kind_of, takes
from rlcore.collectives.all_gather_bytes import all_gather_bytes
from rlcore.engines.weight_sync.channels.peers import Call, JoinedParties, LateError, LocalParties, Parties, SpmdParties
from rlcore.engines.weight_sync.channels.unix_socket import ControlSocket
from rlcore.engines.weight_sync.endpoint import Route, decoded
from rlcore.engines.weight_sync.named_source import NamedHolding, NamedTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import Rounds
from rlcore.engines.weight_sync.target import ModuleTarget, Target
from rlcore.errors import InvalidInputError, SyncError
from rlcore.registry import get_device
from rlcore.types import SyncReport

_VERBS = frozenset(
    (
        "describe",
        "begin",
        "prepare",
        "prove",
        "plan_load",
        "open_offers",
        "pull",
        "pieces",
        "open_slabs",
        "open_marks",
        "unpack",
        "join",
        "leave",
        "receive",
        "load",
        "remember",
        "compare",
        "ready",
        "commit",
        "abandon",
    )
)
"""What a sender may ask of a receiver."""


class Control(Protocol):
    """A channel of messages between one sender and one receiver, in order and whole.

    The sender's end is used by one thread at a time, but not always by the same.
    """

    def send(self, data: bytes) -> None:
        """Raises OSError if the other end is gone."""

    def recv(self, timeout_s: float) -> bytes:
        """The next message; raises TimeoutError if none comes, OSError if the other end is gone."""


class _Request(msgspec.Struct, frozen=True):
    number: int
    method: str
    arguments: msgspec.Raw


class _Answer(msgspec.Struct, frozen=True):
    number: int
    error: str
    result: Any = None


class _RemoteParty(Parties):
    """The receiver at the other end."""

    def __init__(self, control: Control, label: str = "the receiver") -> None:
        self.label = label
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
            _send(self._control, _Request(number, method, arguments), timeout_s)
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
        return [answer.result]

    def _answer(self, deadline: float) -> _Answer:
        return decoded(self._control.recv(max(0.0, deadline - time.monotonic())), _Answer, "answer")

    def __len__(self) -> int:
        return 1

    @property
    def is_here(self) -> bool:
        return False


def _send(control: Control, message: _Request | _Answer, timeout_s: float) -> None:
    data = msgspec.msgpack.encode(message)
    if isinstance(control, ControlSocket):
        control.send(data, timeout_s)
    else:  # how long it may wait is its own business
        control.send(data)


def _remote(control: Control | Sequence[Control]) -> Parties:
    if not isinstance(control, Sequence):
        return _RemoteParty(control)
    if not control:
        return LocalParties("no receiver of this rank's", [])
    return JoinedParties([_RemoteParty(one, f"receiver {number}") for number, one in enumerate(control)])


_CONTROL = Kind("a channel with send() and recv()", lambda value: hasattr(value, "send") and hasattr(value, "recv"))
_CONTROLS = Kind(
    f"{_CONTROL.words}, or a list of some,",
    lambda value: all(map(_CONTROL.has, value)) if LIST.has(value) else _CONTROL.has(value),
)
_NAMED = Kind(
    "names and tensors, in a mapping or as pairs, or a function that gives them,",
    lambda value: callable(value) or isinstance(value, Iterable),
)


class WeightSender:
    """Gives named tensors to the receiver at the other end of a channel, or to several, who commit together.

    Where tensors are DTensors, every rank of the default torch.distributed group makes a sender with channels to
    receivers of its own, or none, and all call ``send`` together; each receiver gets all weights, in slices from all
    ranks.

    Args:
        named_tensors: names as the receiver's model has them, and tensors; or a function that gives them, called for
            each ``send``. The first pass fixes names, shapes, dtypes and sharding.
        control: the channel, or one for each receiver.
    """

    @takes("WeightSender", named_tensors=_NAMED, control=_CONTROLS)
    def __init__(
        self, named_tensors: NamedTensors | Callable[[], NamedTensors], control: Control | Sequence[Control]
    ) -> None:
        if callable(named_tensors):
            get = named_tensors
        else:
            kept = dict(named_tensors)
            get = lambda: kept  # noqa: E731
        first = dict(get())
        if not first:
            raise InvalidInputError("WeightSender needs at least one named tensor, got none")
        sharded = next((tensor for tensor in first.values() if isinstance(tensor, DTensor)), None)
        sample = next(iter(first.values())) if sharded is None else sharded.to_local()
        self._device = get_device(sample.device)
        self._holding = NamedHolding(get, 1 if sharded is None else dist.get_world_size())
        self._sender = Sender(self._holding, self._device)
        own: Parties = LocalParties("the sender", [self._sender])
        remote = _remote(control)
        if sharded is None and not len(remote):
            raise InvalidInputError("WeightSender needs a control channel, got an empty list")
        if sharded is not None:
            own, remote = (SpmdParties(one, self._exchange, dist.get_rank()) for one in (own, remote))
        self._rounds = Rounds(own, remote)
        self._version = 0

    def _exchange(self, data: bytes) -> list[bytes]:
        return all_gather_bytes(data, self._device.torch_device)

    def send(
        self,
        version: int | None = None,
        *,
        route: Route | None = None,
        staged: bool = False,
        verify: bool = False,
        slab_bytes: int | None = None,
        timeout_s: float = 120.0,
    ) -> SyncReport:
        """Give the receiver, which is in ``receive()``, the tensors as they are now; see ``TrainEngine.sync_weights``.

        Args:
            version: None is one more than the last.

        Raises:
            SyncError: what went wrong; the receiver raises too, and says whether its weights are whole.
        """
        self._holding.refresh()
        options = RoundOptions(
            version=self._version + 1 if version is None else version,
            route=route,
            is_staged=staged,
            is_verified=verify,
            slab_bytes=slab_bytes,
            timeout_s=timeout_s,
        )
        report = self._rounds.run(options, nullcontext)
        self._version = report.version
        return report

    def revoke(self) -> None:
        """Take back what is shared of the tensors, and let go of them, before their memory is freed.

        Raises:
            StateError: a receiver does not let go; the memory stays owned.
        """
        self._sender.revoke()
        self._sender.forget()
        self._holding.forget()

    def close(self) -> None:
        """Give back everything that receivers may have open."""
        self._sender.close()


class WeightReceiver:
    """Takes weights from the sender at the other end of a channel.

    Args:
        model: a module with the sender's names, or a ``Target`` for one that keeps its weights otherwise.
        control: the channel.
    """

    @takes("WeightReceiver", model=kind_of("a torch.nn.Module or a Target", nn.Module, Target), control=_CONTROL)
    def __init__(self, model: nn.Module | Target, control: Control) -> None:
        if isinstance(model, nn.Module):
            model = ModuleTarget(model, get_device(next(model.parameters()).device))
        self._receiver = Receiver(model)
        self._control = control
        self.version: int | None = None
        """Of the last complete round."""

    @property
    def is_whole(self) -> bool:
        """The model's weights are of one version. After a round that failed they may be a mixture: do not use them."""
        return self._receiver.is_whole

    def receive(self, timeout_s: float = 120.0) -> int:
        """Wait for a round and take part in it; its version.

        Args:
            timeout_s: the longest wait for any message.

        Raises:
            SyncError: the round failed, or the sender is gone; says whether the weights are whole.
        """
        while True:
            request = self._request(timeout_s)
            answer = self._answered(request)
            try:
                _send(self._control, answer, timeout_s)
            except OSError as error:
                raise self._failed(f"the sender is gone: {error}") from error
            if request.method == "abandon":
                raise self._failed(f"the sender gave the round up: {self._receiver.why_abandoned}")
            if request.method == "commit" and not answer.error:
                self.version = msgspec.msgpack.decode(request.arguments, type=tuple[int, int])[1]
                return self.version

    def _request(self, timeout_s: float) -> _Request:
        try:
            return decoded(self._control.recv(timeout_s), _Request, "request")
        except TimeoutError as error:
            raise self._failed(f"nothing came from the sender within {timeout_s:g} s") from error
        except OSError as error:
            raise self._failed(f"the sender is gone: {error}") from error

    def _answered(self, request: _Request) -> _Answer:
        try:
            if request.method not in _VERBS:
                raise SyncError(f"a receiver has no {request.method!r}")
            arguments = msgspec.msgpack.decode(request.arguments, type=list[Any])
            return _Answer(request.number, "", getattr(self._receiver, request.method)(*arguments))
        except Exception as error:  # whatever a loader raises: the sender waits for an answer
            return _Answer(request.number, f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> SyncError:
        self._receiver.abandon()
        state = "are whole" if self.is_whole else "are a mixture: do not use them before a complete receive()"
        return SyncError(f"the weight sync failed: {why}. The model's weights {state}")

    def close(self) -> None:
        """Let go of what belongs to the sender."""
        self._receiver.close()
