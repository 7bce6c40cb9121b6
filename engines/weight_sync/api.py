"""Weight sync for frameworks with processes of their own: a sender, a receiver, and a control channel between them.

    sender = rlcore.WeightSender(model.named_parameters, control)         # in the trainer
    sender.send(version=1)

    receiver = rlcore.WeightReceiver(model, control)                      # in the inference process
    version = receiver.receive()

In one thread, where trainer and engine take turns, the receiver is given to the sender in place of a channel:

    receiver = rlcore.WeightReceiver(model)
    sender = rlcore.WeightSender(trained.named_parameters, receiver)
    sender.send(version=1)                                                # the receiver has them then

The weights themselves take the routes of docs/weight_sync.md; the channel carries a few small messages a round. Both
ends check all that comes; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.arguments import LIST, Kind, kind_of, optional, takes
from rlcore.collectives.default_group import all_gather_bytes
from rlcore.engines._torch_private import store_of
from rlcore.engines.weight_sync.channels.control import (
    CallTypes,
    Control,
    RemoteCall,
    RemoteResult,
    StoreAsker,
    remote_peers,
    send,
)
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.engines.weight_sync.channels.peers import LocalPeers, SpmdPeers, SyncPeers
from rlcore.engines.weight_sync.channels.shared_store import SharedStore, common_stores
from rlcore.engines.weight_sync.messages import decoded
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.named_source import NamedSourceTensors, NamedTensors
from rlcore.engines.weight_sync.options import RoundOptions, staging_bytes_of
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.engines.weight_sync.target import ModuleTarget, NamedTensorsModule, Target
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.errors import InvalidInputError, StateError, SyncError
from rlcore.process.network_interface import address_in_world
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
_END = Kind(
    f"{_CONTROL.words}, or a WeightReceiver of this process",
    lambda value: _CONTROL.has(value) or isinstance(value, WeightReceiver),
)
_ENDS = Kind(
    f"{_END.words}, or a list of some,",
    lambda value: all(map(_END.has, value)) if LIST.has(value) else _END.has(value),
)
_NAMED = Kind(
    "a torch.nn.Module, names and tensors in a mapping or as pairs, or a function that gives them,",
    lambda value: callable(value) or isinstance(value, Iterable),
)


class WeightSender:
    """Gives named tensors to the receiver at the other end of a channel, or in this thread, or to several.

    Several commit together.

    Where tensors are DTensors, every rank of the default torch.distributed group makes a sender with channels to
    receivers of its own, or none, and all call ``send`` together; each receiver gets all weights, in slices from all
    ranks.

    Args:
        named_tensors: names as the receiver's model has them, and tensors; or a function that gives them, called for
            each ``send``. The first pass fixes names, shapes, dtypes and sharding. Or a module: of a transformers
            model, in peft's or under FSDP2, the weights are sent by the names and in the layout of its checkpoint,
            with adapters merged into what is sent.
        control: the channel, or one for each receiver; or a ``WeightReceiver`` without a channel, of this process, or
            a list of these. Then ``send`` does the receiver's part too, in the calling thread.
    """

    @takes("WeightSender", named_tensors=_NAMED, control=_ENDS)
    def __init__(
        self,
        named_tensors: NamedTensors | Callable[[], NamedTensors] | nn.Module,
        control: Control | WeightReceiver | Sequence[Control | WeightReceiver],
    ) -> None:
        get = _getter(named_tensors)
        first = dict(get())
        if not first:
            raise InvalidInputError("WeightSender needs at least one named tensor, got none")
        sharded = next((tensor for tensor in first.values() if isinstance(tensor, DTensor)), None)
        sample = next(iter(first.values())) if sharded is None else sharded.to_local()
        self._device = get_device(sample.device)
        num_ranks = 1 if sharded is None else dist.get_world_size()
        self._source = (
            ModuleSourceTensors(named_tensors, num_ranks)
            if isinstance(named_tensors, nn.Module)
            else NamedSourceTensors(get, num_ranks)
        )
        address = _own_address(_listed(control)) or ("" if sharded is None else address_in_world())
        self._sender = Sender(self._source, self._device, address=address)
        own: SyncPeers = LocalPeers("the sender", [self._sender])
        remote = _peers(control)
        if sharded is None and not len(remote):
            raise InvalidInputError("WeightSender needs a control channel, got an empty list")
        if sharded is not None:
            own, remote = (SpmdPeers(one, self._all_gather, dist.get_rank()) for one in (own, remote))
        self._session = SyncSession(own, remote, SharedStore if sharded is None else _stores_of_ranks(self._all_gather))
        self._receivers = [end for end in _listed(control) if isinstance(end, WeightReceiver)]
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
        delta: bool = False,
        staging_bytes: int | None = None,
        slab_bytes: int | None = None,
        timeout_s: float = 120.0,
    ) -> SyncReport:
        """Give the receiver, which is in ``receive()`` or has no channel, the tensors as they are now.

        See ``TrainEngine.sync_weights``.

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
            is_delta=delta,
            staging_bytes=staging_bytes_of(staging_bytes, slab_bytes),
            timeout_s=timeout_s,
        )
        try:
            report = self._session.run(options, nullcontext)
        except Exception as error:
            for receiver in self._receivers:
                error.add_note(f"The receiving model's weights {receiver._condition}")
            raise
        self._version = report.version
        return report

    def revoke(self) -> None:
        """Take back what is shared of the tensors, and let go of them, before their memory is freed.

        Raises:
            StateError: a receiver does not let go; the memory stays owned.
        """
        self._sender.revoke()
        self._sender.forget()

    def close(self) -> None:
        """Give back everything that receivers may have open."""
        self._sender.close()
        self._session.close()


class WeightReceiver:
    """Takes weights from the sender at the other end of a channel, or in the same thread.

    Args:
        model: a module with the sender's names; or names and tensors, which are written in place; or a ``Target`` for
            an engine that keeps its weights otherwise.
        control: the channel. None: this receiver is given to a ``WeightSender`` of this process.
    """

    @takes(
        "WeightReceiver",
        model=kind_of("a torch.nn.Module, a mapping of names to tensors, or a Target", nn.Module, Mapping, Target),
        control=optional(_CONTROL),
    )
    def __init__(self, model: nn.Module | Mapping[str, Tensor] | Target, control: Control | None = None) -> None:
        if isinstance(model, Mapping):
            model = NamedTensorsModule(model)
        if isinstance(model, nn.Module):
            model = ModuleTarget(model, get_device(_first_parameter(model).device))
        self._asker = None if control is None else StoreAsker(control)
        self._receiver = Receiver(
            model, ask=None if self._asker is None else self._asker.ask, address=_own_address([control])
        )
        self._control = control

    @property
    def version(self) -> int | None:
        """Number of the weights of the last complete round; None before it."""
        return self._receiver.version

    @property
    def is_whole(self) -> bool:
        """The model's weights are of one version. After a round that failed they may be a mixture: do not use them."""
        return self._receiver.is_whole

    @property
    def _condition(self) -> str:
        """``is_whole`` in words."""
        return "are whole" if self.is_whole else "are a mixture: do not use them before a complete receive() or send()"

    def receive(self, timeout_s: float = 120.0) -> int:
        """Wait for a round and take part in it; returns its version.

        Args:
            timeout_s: the longest wait for any message.

        Raises:
            StateError: this receiver has no channel.
            SyncError: the round failed, or the sender is gone; says whether the weights are whole.
        """
        if self._control is None or self._asker is None:
            raise StateError("this WeightReceiver has no channel: its WeightSender's send() does its part too")
        error = ""
        while True:
            request = self._request(self._asker, timeout_s, error)
            with self._asker.during(request.number):
                answer = self._answered(request)
            error = f"{request.method}() failed here: {answer.error}; then " if answer.error else ""
            try:
                send(self._control, answer, timeout_s)
            except OSError as gone:
                raise self._failed(f"{error}the sender is gone: {gone}") from gone
            if request.method == "abandon":
                raise self._failed(f"the sender gave the round up: {self._receiver.why_abandoned}")
            if request.method == "commit" and not answer.error and self.version is not None:
                return self.version

    def _request(self, asker: StoreAsker, timeout_s: float, before: str) -> RemoteCall:
        """Return the sender's next call; ``before`` is the error that it was told last, for this one's text."""
        try:
            return asker.next_call(timeout_s)
        except SyncError as error:
            raise self._failed(f"{before}{error}") from error
        except TimeoutError as error:
            raise self._failed(f"{before}nothing came from the sender within {timeout_s:g} s") from error
        except OSError as error:
            raise self._failed(f"{before}the sender is gone: {error}") from error

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
        return SyncError(f"the weight sync failed: {why}. The model's weights {self._condition}")

    def close(self) -> None:
        """Let go of what belongs to the sender."""
        self._receiver.close()


def _getter(named: NamedTensors | Callable[[], NamedTensors] | nn.Module) -> Callable[[], NamedTensors]:
    if isinstance(named, nn.Module):
        return named.named_parameters
    if callable(named):
        return named
    kept = dict(named)
    return lambda: kept


def _stores_of_ranks(all_gather: Callable[[bytes], list[bytes]]) -> Callable[[], SharedStore]:
    return common_stores(all_gather, lambda: store_of(dist.group.WORLD))


def _peers(control: Control | WeightReceiver | Sequence[Control | WeightReceiver]) -> SyncPeers:
    """Return the receivers of a sender.

    Raises:
        InvalidInputError: some are at the other end of a channel and some in this process.
    """
    ends = _listed(control)
    here = [end for end in ends if isinstance(end, WeightReceiver)]
    if not here:
        return remote_peers(cast(Control | Sequence[Control], control), _METHODS)
    if len(here) < len(ends):
        raise InvalidInputError(
            f"WeightSender takes channels or receivers of this process, got {len(ends) - len(here)} and {len(here)}; "
            "make a sender for each kind"
        )
    if any(receiver._control is not None for receiver in here):
        raise InvalidInputError("WeightSender got a WeightReceiver that has a channel; give it the channel's other end")
    return LocalPeers("the receiver", [receiver._receiver for receiver in here])


def _own_address(ends: Sequence[object]) -> str:
    """Return the address of this host by which the other ends of these channels reach it; "" if it is not known."""
    return next((end.own_address for end in ends if isinstance(end, ControlSocket) and end.own_address), "")


def _listed(control: Control | WeightReceiver | Sequence[Control | WeightReceiver]) -> list[Control | WeightReceiver]:
    return list(control) if isinstance(control, Sequence) else [control]


def _first_parameter(module: nn.Module) -> nn.Parameter:
    found = next(module.parameters(), None)
    if found is None:
        raise InvalidInputError(f"WeightReceiver takes a module with parameters; this {type(module).__name__} has none")
    return found
