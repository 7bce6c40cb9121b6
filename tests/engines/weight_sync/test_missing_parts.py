"""A trainer that lacks a part of a fused tensor is refused before anything is written; padding is no part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from fused_model import FusedModel, Share, Sizes, Vocabulary, meta, names
from torch import Tensor

from rlcore.engines.weight_sync.channels.peers import LocalPeers
from rlcore.engines.weight_sync.named_source import NamedSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.engines.weight_sync.target import Target
from rlcore.errors import SyncError
from rlcore.registry import get_device
from rlcore.types import SyncReport

SIZES = Sizes(layers=2, V=11)
PARTS = {
    "layers.1.q.weight": r"'layers.1.attention.qkv.weight'",
    "layers.1.k.weight": r"'layers.1.attention.qkv.weight'",
    "layers.1.v.weight": r"'layers.1.attention.qkv.weight'",
    "layers.0.q.bias": r"'layers.0.attention.qkv.bias'",
    "layers.0.v.bias": r"'layers.0.attention.qkv.bias'",
    "layers.1.experts.0.gate.weight": r"'layers.1.experts.w13'",
    "layers.1.experts.3.up.weight": r"'layers.1.experts.w13'",
    "layers.0.experts.2.down.weight": r"'layers.0.experts.w2'",
}


class FusedTarget(Target):
    def __init__(self, share: Share, own: Mapping[str, Tensor] | None) -> None:
        self.device = get_device("cpu")
        self.model = FusedModel(SIZES, share)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.5)
        self._share = share
        self._own = own

    def meta_model(self) -> Any:
        model = meta(SIZES, self._share)
        return model, model.load_weights

    def checkpoint(self) -> Mapping[str, Tensor] | None:
        return self._own

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(weights)

    def committed(self, version: int) -> None:
        pass


def weights(*, value: float = 1.0, without: str = "") -> dict[str, Tensor]:
    return {name: torch.full(shape, value) for name, shape in names(SIZES) if name != without}


OWN = {name: tensor.to("meta") for name, tensor in weights().items()}


@contextmanager
def rounds(given: Mapping[str, Tensor], target: FusedTarget) -> Iterator[tuple[SyncSession, Receiver]]:
    source = NamedSourceTensors(lambda: given, 1)
    source.refresh()
    sender, receiver = Sender(source, target.device), Receiver(target)
    yield SyncSession(LocalPeers("the trainer", [sender]), LocalPeers("the engine", [receiver])), receiver
    receiver.close()
    sender.close()


def sync(given: Mapping[str, Tensor], target: FusedTarget) -> SyncReport:
    with rounds(given, target) as (found, _):
        return found.run(RoundOptions(version=1), nullcontext)


@pytest.mark.parametrize("share", [Share(), Share(size=2, rank=1)], ids=["one worker", "the second of two"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_the_trainer_lacks_is_named_and_nothing_is_written(part: str, share: Share) -> None:
    target = FusedTarget(share, OWN)
    refusal = (
        rf"which still serves its old weights: no weight reaches \d+ of the \d+ elements of {PARTS[part]}; "
        rf"the engine's own checkpoint fills them by '{part}', which the trainer lacks"
    )
    with rounds(weights(without=part), target) as (found, receiver), pytest.raises(SyncError, match=refusal):
        found.run(RoundOptions(version=1), nullcontext)
    assert receiver.is_whole
    assert all(bool((tensor == 0.5).all()) for tensor in target.tensors().values())
    assert sync(weights(), target).fallback_bytes == 0
    assert bool((target.tensors()["layers.1.attention.qkv.weight"] == 1).all())


def test_several_tensors_that_lack_a_part_are_counted() -> None:
    given = {name: tensor for name, tensor in weights().items() if ".k." not in name}
    with pytest.raises(SyncError, match=r"64 of the 256 elements of 'layers.0.*' and others of 3 more tensors; "):
        sync(given, FusedTarget(Share(), OWN))


def test_it_is_padding_what_the_engines_own_checkpoint_leaves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values stay, and what is beside it comes by the engine's own loader."""
    monkeypatch.setattr(Vocabulary, "load", lambda self, weight: self.weight.data[: SIZES.V].copy_(weight))
    target = FusedTarget(Share(), OWN)
    assert sync(weights(), target).fallback_bytes == 2 * SIZES.V * SIZES.H * 4
    for name in ("embed.weight", "head.weight"):
        tensor = target.tensors()[name]
        assert bool((tensor[: SIZES.V] == 1).all()) and bool((tensor[SIZES.V :] == 0.5).all())
    with pytest.raises(SyncError, match=r"of 'layers.0.attention.qkv.bias'; .* by 'layers.0.k.bias'"):
        sync(weights(without="layers.0.k.bias"), FusedTarget(Share(), OWN))


def test_without_a_checkpoint_of_the_engine_padding_is_not_believed() -> None:
    refusal = "no weight reaches 8 of the 32 elements .*, and the engine has no checkpoint to show that none should"
    with pytest.raises(SyncError, match=refusal):
        sync(weights(without="layers.0.k.bias"), FusedTarget(Share(), None))
    assert sync(weights(), FusedTarget(Share(), None)).fallback_bytes == 0
