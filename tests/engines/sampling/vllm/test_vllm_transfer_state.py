"""``rlcore_ipc`` says of weights that are a mixture that they are; nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import rlcore
from rlcore.engines.sampling.vllm.transfer import RlcoreWeightTransferEngine, UpdateInfo
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.engines.weight_sync.sender import Sender
from rlcore.errors import StateError, SyncError


def test_a_mixture_is_refused_at_the_end_of_an_update(
    ends: tuple[ControlSocket, ControlSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    engine: Any = object.__new__(RlcoreWeightTransferEngine)  # vLLM's base class wants a whole configuration
    with pytest.raises(StateError, match="call init_weight_transfer_engine"):
        engine.finish_weight_update()
    weight = torch.ones(300, 300)
    model = nn.Linear(300, 300, bias=False)
    engine._control, engine._receiver = there, rlcore.WeightReceiver(model, there)
    sender = rlcore.WeightSender({"weight": weight}, here)
    options: dict[str, Any] = {"route": "packed", "staging_bytes": 1 << 16, "timeout_s": 60.0}
    real: Callable[..., Any] = Sender.pack
    packed: list[Any] = []

    def fails_at_the_third(self: Sender, order: Any) -> Any:
        packed.append(order)
        if len(packed) == 3:
            raise RuntimeError("out of memory")
        return real(self, order)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Sender, "pack", fails_at_the_third)
        update = pool.submit(engine.receive_weights, UpdateInfo(60.0))
        with pytest.raises(RuntimeError, match="out of memory"):
            sender.send(**options)
        with pytest.raises(SyncError, match="are a mixture: do not use them"):
            update.result()
        with pytest.raises(SyncError, match="stopped midway and the model's weights are a mixture: do not generate"):
            engine.finish_weight_update()

        monkeypatch.setattr(Sender, "pack", real)
        update = pool.submit(engine.receive_weights, UpdateInfo(60.0))
        sender.send(**options)
        update.result()
    engine.finish_weight_update()
    assert torch.equal(model.weight, weight)
    sender.close()
    engine.shutdown()
    here.close()
