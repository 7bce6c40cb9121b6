"""Weight sync for frameworks with processes of their own: a sender, a receiver, and a control channel between them.

    sender = rlcore.WeightSender(model.named_parameters, control)         # in the trainer
    sender.send(version=1)

    receiver = rlcore.WeightReceiver(model, control)                      # in the inference process
    version = receiver.receive()

The weights themselves take the routes of docs/weight_sync.md; the channel carries a few small messages a round. Both
ends check all that comes; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import msgspec
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlcore.arguments import LIST, Kind, kind_of, takes
from rlcore.collectives.default_group import all_gather_bytes
from rlcore.engines.weight_sync.channels.control import CallTypes, Control, RemoteCall, RemoteResult, remote_peers, send
from rlcore.engines.weight_sync.channels.peers import LocalPeers, SpmdPeers, SyncPeers
from rlcore.engines.weight_sync.messages import decoded
from rlcore.engines.weight_sync.named_source import NamedSourceTensors, NamedTensors
from rlcore.engines.weight_sync.options import RoundOptions, staging_bytes_of
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.engines.weight_sync.target import ModuleTarget, Target
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import InvalidInputError, SyncError
from rlcore.registry import get_device
from rlcore.types import SyncReport

_METHODS = {
    method.__name__: CallTypes.of(method)
    for method in (
        Receiver.describe,
        Receiver.begin,
        Receiver.prepare,
        Receiver.self_test,
        Receiver.plan_load,
        Receiver.open_offers,
        Receiver.pull,
        Receiver.pieces,
        Receiver.open_staging_buffers,
        Receiver.open_events,
        Receiver.unpack,
        Receiver.join,
        Receiver.leave,
        Receiver.receive,
        Receiver.load,
        Receiver.remember,
        Receiver.compare,
        Receiver.ready,
        Receiver.commit,
        Receiver.abandon,
    )
}
"""The methods of a receiver that a sender may call."""


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
        self._source = NamedSourceTensors(get, 1 if sharded is None else dist.get_world_size())
        self._sender = Sender(self._source, self._device)
        own: SyncPeers = LocalPeers("the sender", [self._sender])
        remote = remote_peers(control, _METHODS)
        if sharded is None and not len(remote):
            raise InvalidInputError("WeightSender needs a control channel, got an empty list")
        if sharded is not None:
            own, remote = (SpmdPeers(one, self._all_gather, dist.get_rank()) for one in (own, remote))
        self._session = SyncSession(own, remote)
        self._version = 0

    def _all_gather(self, data: bytes) -> list[bytes]:
        return all_gather_bytes(data, self._device.torch_device)

    def send(
        self,
        version: int | None = None,
        *,
        route: Route | None = None,
        staged: bool = False,
        verify: bool = False,
        staging_bytes: int | None = None,
        slab_bytes: int | None = None,
        timeout_s: float = 120.0,
    ) -> SyncReport:
        """Give the receiver, which is in ``receive()``, the tensors as they are now; see ``TrainEngine.sync_weights``.

        Args:
            version: None is one more than the last.
            slab_bytes: the former name of ``staging_bytes``, deprecated.

        Raises:
            SyncError: what went wrong; the receiver raises too, and says whether its weights are whole.
        """
        self._source.refresh()
        options = RoundOptions(
            version=self._version + 1 if version is None else version,
            route=route,
            is_staged=staged,
            is_verified=verify,
            staging_bytes=staging_bytes_of(staging_bytes, slab_bytes),
            timeout_s=timeout_s,
        )
        report = self._session.run(options, nullcontext)
        self._version = report.version
        return report

    def revoke(self) -> None:
        """Take back what is shared of the tensors, and let go of them, before their memory is freed.

        Raises:
            StateError: a receiver does not let go; the memory stays owned.
        """
        self._sender.revoke()
        self._sender.forget()
        self._source.forget()

    def close(self) -> None:
        """Give back everything that receivers may have open."""
        self._sender.close()
        self._session.close()


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
        """Number of the weights of the last complete round; None before it."""

    @property
    def is_whole(self) -> bool:
        """The model's weights are of one version. After a round that failed they may be a mixture: do not use them."""
        return self._receiver.is_whole

    def receive(self, timeout_s: float = 120.0) -> int:
        """Wait for a round and take part in it; returns its version.

        Args:
            timeout_s: the longest wait for any message.

        Raises:
            SyncError: the round failed, or the sender is gone; says whether the weights are whole.
        """
        while True:
            request = self._request(timeout_s)
            answer = self._answered(request)
            try:
                send(self._control, answer, timeout_s)
            except OSError as error:
                raise self._failed(f"the sender is gone: {error}") from error
            if request.method == "abandon":
                raise self._failed(f"the sender gave the round up: {self._receiver.why_abandoned}")
            if request.method == "commit" and not answer.error:
                self.version = self._receiver.version
                return self.version

    def _request(self, timeout_s: float) -> RemoteCall:
        try:
            return decoded(self._control.recv(timeout_s), RemoteCall, "request")
        except SyncError as error:
            raise self._failed(str(error)) from error
        except TimeoutError as error:
            raise self._failed(f"nothing came from the sender within {timeout_s:g} s") from error
        except OSError as error:
            raise self._failed(f"the sender is gone: {error}") from error

    def _answered(self, request: RemoteCall) -> RemoteResult:
        try:
            if request.method not in _METHODS:
                raise SyncError(f"a receiver has no {request.method!r}")
            arguments = decoded(
                request.arguments, _METHODS[request.method].arguments, f"arguments of {request.method}()"
            )
            result = getattr(self._receiver, request.method)(*arguments)
            return RemoteResult(request.number, "", msgspec.Raw(msgspec.msgpack.encode(result)))
        except Exception as error:  # whatever a loader raises: the sender waits for an answer
            return RemoteResult(request.number, f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> SyncError:
        self._receiver.abandon()
        state = "are whole" if self.is_whole else "are a mixture: do not use them before a complete receive()"
        return SyncError(f"the weight sync failed: {why}. The model's weights {state}")

    def close(self) -> None:
        """Let go of what belongs to the sender."""
        self._receiver.close()
