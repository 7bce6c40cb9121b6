"""A train engine on a device whose plugin offers RMSNorm: here one that is made up for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore import rms_norm
from rlcore.engines import block_compiler
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from rlcore.registry import OpImplementation, registry

from .train_batches import packed_batch

transformers = pytest.importorskip("transformers")
_calls: list[int] = []


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _calls.append(len(x))
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = OpImplementation(rms_norm.OPERATOR, "cpu", "fused", 1, f"{__name__}:fused", None, "mine")
    monkeypatch.setitem(registry().ops, rms_norm.OPERATOR, [entry])
    rms_norm.choose.cache_clear()
    yield
    rms_norm.choose.cache_clear()


def train(folder: Path, **options: Any) -> tuple[list[float], int, set[str]]:
    """Losses of two steps, how often the operator was asked for in the last, and names of the weights."""

    class Policy(HuggingFaceTrainModule, transformers.Qwen2ForCausalLM):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    with rlcore.meta_device():
        module = Policy.from_pretrained(folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", **options)
        losses = []
        for _ in range(2):
            _calls.clear()
            losses.append(engine.train_batch(packed_batch(), ppo_clip(), max_tokens_per_micro_batch=1000)["loss"])
        return losses, len(_calls), set(engine.state_dict())


@pytest.mark.parametrize(
    ("compute_dtype", "recomputes"), [("float32", False), ("float32", "selective"), ("bfloat16", True)]
)
def test_its_losses_are_those_of_the_modules_own_norms(
    qwen2_folder: Path, compute_dtype: str, recomputes: bool | str
) -> None:
    options = {"compute_dtype": compute_dtype, "activation_checkpointing": recomputes}
    expected, none, names = train(qwen2_folder, device_norms=False, **options)
    losses, count, same = train(qwen2_folder, **options)
    layers = transformers.AutoConfig.from_pretrained(qwen2_folder).num_hidden_layers
    assert (none, count) == (0, 2 * layers * (2 if recomputes else 1) + 1) and names == same
    assert losses == pytest.approx(expected, rel=1e-4 if compute_dtype == "float32" else 3e-2)


@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_compiled_blocks_keep_their_own(qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_compiler, "backend", "eager")
    assert train(qwen2_folder, compile=True)[1] == 0
    torch.compiler.reset()
