"""``rlcore_ipc`` on the trainer's side of vLLM's own weight transfer. Importing this registers it.

from rlcore.engines.sampling.vllm.trainer import RlcoreTrainerInitInfo

info = RlcoreTrainerInitInfo("/run/user/1000/weights", num_workers=2)            # of vLLM, all replicas together
engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleWeights(policy))
engine.send_weights()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import SyncClient
from rlcore.engines.weight_sync.api import WeightSender
from rlcore.engines.weight_sync.channels.unix_socket import ControlSocket, accept_controls
from rlcore.errors import InvalidInputError
from rlcore.types import SyncReport

T = TypeVar("T")
_Engine, _InitInfo = versions.weight_transfer_trainer_bases()


@dataclass
class RlcoreTrainerInitInfo(_InitInfo):  # type: ignore[misc, valid-type]
    """Where this trainer listens, and for how many vLLM workers; the same on all of the trainer's ranks."""

    backend: ClassVar[str] = "rlcore_ipc"

    address: str
    num_workers: int = 1
    timeout_s: float = 120.0
    """For each wait: for the workers to connect, and for a whole send."""
    rank: int = field(default=0, kw_only=True)

    @property
    def is_sender(self) -> bool:
        """The rank that speaks with vLLM; shards of the others go directly to its workers."""
        return self.rank == 0


@runtime_checkable
class WeightsInPlace(Protocol):
    """A source whose tensors are sent from where they are."""

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Names as in checkpoints, the same in each round; a DTensor is read in this rank's shard alone."""


class ModuleWeights:
    """The parameters of a module, sharded or not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.module.named_parameters()


class RlcoreTrainerWeightTransferEngine(_Engine):  # type: ignore[misc, valid-type]
    """Of one trainer rank; the base class has its methods' meanings.

    ``WeightsInPlace``, such as ``ModuleWeights``, are sent from where they are. A ``WeightSource`` of vLLM's gives
    whole tensors: what is sharded it gathers first.
    """

    init_info_cls = RlcoreTrainerInitInfo

    def __init__(self, info: RlcoreTrainerInitInfo, client: SyncClient, source: Any) -> None:
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
        client: SyncClient,
        source: Any = None,
    ) -> Self:
        """Connect to vLLM's workers, on all ranks.

        Args:
            config: of vLLM 0.26, which has nothing to say here; later versions have ``init_info`` in its place.

        Raises:
            InvalidInputError: no source, or another backend's information.
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

    def send_weights(self) -> SyncReport | None:
        """All ranks together; None where this rank has nothing to send."""
        if not isinstance(self.source, WeightsInPlace):
            self._drop_copies()
        self._given = self._read()
        if not self._given:
            return None
        if self._sender is None:
            self._sender = WeightSender(lambda: self._given, self._controls)
        if not self.is_sender:
            return self._send(self._sender)
        self.client.start_weight_update()
        update = {"timeout_s": self._info.timeout_s}
        sender = self._sender
        report = _beside(lambda: self.client.update_weights(update), lambda _: self._send(sender))
        self.client.finish_weight_update()
        return report

    def _drop_copies(self) -> None:
        """Those of the last round, before the next are gathered: there may be no memory for two models."""
        self._given = []
        if self._sender is not None:
            self._sender.revoke()

    def _send(self, sender: WeightSender) -> SyncReport:
        return sender.send(timeout_s=self._info.timeout_s)

    def _read(self) -> list[tuple[str, Tensor]]:
        """What this rank sends. Once a round: a source may gather, which all ranks do together."""
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
        """Give back what vLLM's workers have open, and hang up."""
        if self._sender is not None:
            self._sender.close()
        for control in self._controls:
            control.close()
        self._sender, self._controls, self._given = None, [], []


def _full(source: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights, whole; up to vLLM 0.30 a source is iterated over."""
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)


def _beside(ask: Callable[[], Any], act: Callable[[Future[Any]], T]) -> T:
    """What ``act`` returns, while vLLM is asked for its part; an error of its is what the other's was caused by."""
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
