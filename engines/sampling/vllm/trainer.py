"""``rlcore_ipc`` on the trainer's side of vLLM's own weight transfer. Importing this registers it.

from rlcore.engines.sampling.vllm.trainer import RlcoreTrainerInitInfo

info = RlcoreTrainerInitInfo("/run/user/1000/weights", num_workers=2)            # vLLM workers of all replicas
engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleWeights(policy))
engine.send_weights()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmSyncClient
from rlcore.engines.weight_sync.api import WeightSender
from rlcore.engines.weight_sync.channels.connections import accept_controls
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.errors import InvalidInputError
from rlcore.types import SyncReport

T = TypeVar("T")
_TransferEngine, _InitInfo = versions.weight_transfer_trainer_bases()


@dataclass
class RlcoreTrainerInitInfo(_InitInfo):  # type: ignore[misc, valid-type]
    """The address at which this trainer listens, and for how many vLLM workers; the same on all trainer ranks."""

    backend: ClassVar[str] = "rlcore_ipc"

    address: str
    num_workers: int = 1
    timeout_s: float = 120.0
    """The longest wait for the workers to connect, and the longest that a send may take."""
    rank: int = field(default=0, kw_only=True)

    @property
    def is_sender(self) -> bool:
        """True on the rank that calls vLLM; shards of other ranks go directly to its workers."""
        return self.rank == 0


@runtime_checkable
class WeightsInPlace(Protocol):
    """A source whose tensors are sent from where they are."""

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return tensors by their names in checkpoints, the same each time; of a DTensor this rank's shard is read."""


class ModuleWeights:
    """The parameters of a module, sharded or not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.module.named_parameters()


class RlcoreTrainerWeightTransferEngine(_TransferEngine):  # type: ignore[misc, valid-type]
    """The weight transfer of one trainer rank; vLLM's base class describes its methods.

    ``WeightsInPlace``, such as ``ModuleWeights``, are sent from where they are. A ``WeightSource`` of vLLM gives whole
    tensors: it gathers sharded ones first.
    """

    init_info_cls = RlcoreTrainerInitInfo

    def __init__(self, info: RlcoreTrainerInitInfo, client: VllmSyncClient, source: Any) -> None:
        self.is_sender, self.rank, self.client, self.source = info.is_sender, info.rank, client, source
        self._info = info
        self._controls: list[ControlSocket] = []
        self._given: list[tuple[str, Tensor]] = []
        self._sender: WeightSender | None = None

    @classmethod
    def trainer_init(
        cls,
        config: Any = None,
        init_info: RlcoreTrainerInitInfo | None = None,
        *,
        client: VllmSyncClient,
        source: Any = None,
    ) -> Self:
        """Connect to vLLM's workers, on all ranks.

        Args:
            config: given by vLLM 0.26 and not used; later versions give ``init_info`` in its place.

        Raises:
            InvalidInputError: no source, or the information of another backend.
            SyncError: fewer workers than ``num_workers`` have connected.
        """
        info = config if init_info is None else init_info
        if not isinstance(info, RlcoreTrainerInitInfo) or source is None:
            raise InvalidInputError(
                "rlcore_ipc takes an RlcoreTrainerInitInfo and a source of weights, "
                f"got {type(info).__name__} and {type(source).__name__}"
            )
        engine = cls(info, client, source)
        if info.is_sender:
            engine._connect()
        return engine

    def _connect(self) -> None:
        told = {"address": self._info.address, "timeout_s": self._info.timeout_s}
        try:
            _beside(lambda: self.client.init_weight_transfer_engine(told), self._accept)
        except BaseException:
            self.shutdown()
            raise

    def _accept(self, asked: Future[Any]) -> None:
        def are_coming() -> bool:
            return not asked.done() or asked.exception() is None

        info = self._info
        self._controls = accept_controls(info.address, info.num_workers, info.timeout_s, are_coming=are_coming)

    def send_weights(self, version: int | None = None) -> SyncReport | None:
        """Send the weights; all ranks call it together. Return None on a rank that has nothing to send.

        Args:
            version: their number, which a vLLM that numbers weights is told; None is one more than the last.
        """
        if not isinstance(self.source, WeightsInPlace):
            self._drop_copies()
        self._given = self._read()
        if not self._given:
            return None
        if self._sender is None:
            self._sender = WeightSender(lambda: self._given, self._controls)
        if not self.is_sender:
            return self._send(self._sender, version)
        self.client.start_weight_update()
        update = {"timeout_s": self._info.timeout_s}
        sender = self._sender
        report = _beside(lambda: self.client.update_weights(update), lambda _: self._send(sender, version))
        self._finish(report.version)
        return report

    def _finish(self, version: int) -> None:
        finish = self.client.finish_weight_update
        if "weight_version" in inspect.signature(finish).parameters:
            finish(weight_version=str(version))
        else:  # older versions of vLLM number no weights
            finish()

    def _drop_copies(self) -> None:
        """Drop the last round's tensors before the next are gathered: memory may not suffice for two models."""
        self._given = []
        if self._sender is not None:
            self._sender.revoke()

    def _send(self, sender: WeightSender, version: int | None) -> SyncReport:
        return sender.send(version, timeout_s=self._info.timeout_s)

    def _read(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that this rank sends. Called once a round: a source may gather, all ranks together."""
        if isinstance(self.source, WeightsInPlace):
            found = list(self.source.named_tensors())
            return found if self.is_sender or any(isinstance(tensor, DTensor) for _, tensor in found) else []
        weights = _full(self.source)
        if self.is_sender:
            return list(weights)
        for _ in weights:
            pass
        return []

    def shutdown(self) -> None:
        """Revoke the memory that vLLM's workers have open, and close the connections."""
        if self._sender is not None:
            self._sender.close()
        for control in self._controls:
            control.close()
        self._sender, self._controls, self._given = None, [], []


def _full(source: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all weights, whole; up to vLLM 0.30 the source itself is the iterable."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def _beside(ask: Callable[[], Any], act: Callable[[Future[Any]], T]) -> T:
    """Return the result of ``act``, which runs while vLLM is asked for its part; vLLM's error becomes the cause."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            found = act(asked)
        except Exception as error:
            refused = asked.exception()
            raise error from refused
        asked.result()
    return found


versions.register_weight_transfer_trainer("rlcore_ipc", __name__, RlcoreTrainerWeightTransferEngine.__name__)
