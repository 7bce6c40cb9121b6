"""``rlcore_ipc``: rlcore's weight sync as a back end of vLLM's own weight transfer.

llm = LLM(model, weight_transfer_config={"backend": "rlcore_ipc"})
llm.init_weight_transfer_engine({"init_info": {"address": "/run/user/1000/weights"}})
llm.start_weight_update()
llm.update_weights({"update_info": {}})                      # while the trainer is in sender.send()
llm.finish_weight_update()

controls = rlcore.accept_controls("/run/user/1000/weights", number=1)  # in the trainer, one for each vLLM worker
sender = rlcore.WeightSender(policy.named_weights, controls)
sender.send()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmConfig
from rlcore.engines.sampling.vllm.reload_check import check_reload
from rlcore.engines.sampling.vllm.target import VllmTarget
from rlcore.engines.weight_sync.api import WeightReceiver
from rlcore.engines.weight_sync.channels.connections import connect_control
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.errors import StateError, SyncError, UnsupportedError
from rlcore.registry import get_device


@dataclass(frozen=True)
class InitInfo:
    """The address at which the trainer listens, and how long to wait for it."""

    address: str
    timeout_s: float = 60.0


@dataclass(frozen=True)
class UpdateInfo:
    """The longest wait for a message of the trainer."""

    timeout_s: float = 120.0


class RlcoreWeightTransferEngine(versions.weight_transfer_base()):  # type: ignore[misc]
    """The weight transfer of one vLLM worker; vLLM's base class describes its methods."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    vllm_config: VllmConfig

    _control: ControlSocket | None = None
    _receiver: WeightReceiver | None = None
    _is_checked = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer.

        Raises:
            SyncError: nobody listens there.
            UnsupportedError: this vLLM holds weights that a reload would not change.
        """
        self.shutdown()
        target = VllmTarget(self.model, self.vllm_config, get_device(str(self.device)))
        if target.device.spec.is_host and not self._is_checked:
            check_reload(target)
            self._is_checked = True
        control = connect_control(init_info.address, timeout_s=init_info.timeout_s)
        self._control, self._receiver = control, WeightReceiver(target, control)

    def start_weight_update(self) -> None:
        """Prepare nothing: a round begins when the trainer begins it."""
        self._connected()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one round. The base class would also wait for a device, which a host does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take part in one round.

        Raises:
            SyncError: it failed; says whether the model's weights are whole.
        """
        self._connected().receive(update_info.timeout_s)

    def finish_weight_update(self) -> None:
        """Raise SyncError if the last round left a mixture of versions."""
        if not self._connected().is_whole:
            raise SyncError(
                "the last weight update stopped midway and the model's weights are a mixture: do not generate before a "
                "complete update_weights()"
            )

    def shutdown(self) -> None:
        """Close the trainer's memory and the connection."""
        if self._receiver is not None and self._control is not None:
            self._receiver.close()
            self._control.close()
        self._control = self._receiver = None

    def _connected(self) -> WeightReceiver:
        if self._receiver is None:
            raise StateError('call init_weight_transfer_engine({"init_info": {"address": ...}}) first')
        return self._receiver

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse to be the trainer's side, which vLLM 0.26 looks for here.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "trainer_send_weights() of rlcore_ipc",
            "the trainer gives weights by rlcore.WeightSender(named_tensors, controls).send()",
        )
