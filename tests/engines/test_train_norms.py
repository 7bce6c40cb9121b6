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
from rlcore.engines.fsdp2 import block_compiler
from rlcore.registry import OpImplementation, registry

from .train_batches import packed_batch
from .train_policy import policy_gradient, truth_of

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


def train(policy: Any, folder: Path, **options: Any) -> tuple[dict[str, float], int, set[str]]:
    """Metrics of the first of two steps, how often the operator was asked for in the other, and names of weights."""
    with rlcore.meta_device():
        module = policy.from_pretrained(folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", **options)
        found = engine.train_batch(packed_batch(), policy_gradient)
        _calls.clear()
        engine.train_batch(packed_batch(), policy_gradient)
        return found, len(_calls), set(engine.state_dict())


@pytest.mark.parametrize(
    ("compute_dtype", "recomputes"),
    [("float32", False), ("bfloat16", True), pytest.param("float32", "selective", marks=pytest.mark.slow)],
)
def test_a_step_by_it_is_that_of_plain_pytorch(
    policy: Any, qwen2_folder: Path, compute_dtype: str, recomputes: bool | str
) -> None:
    options = {"compute_dtype": compute_dtype, "activation_checkpointing": recomputes}
    _, none, names = train(policy, qwen2_folder, device_norms=False, **options)
    found, count, same = train(policy, qwen2_folder, **options)
    layers = transformers.AutoConfig.from_pretrained(qwen2_folder).num_hidden_layers
    assert (none, count) == (0, 2 * layers * (2 if recomputes else 1) + 1) and names == same
    truth = truth_of(policy, qwen2_folder, dtype=getattr(torch, compute_dtype))
    truth.assert_step(found, packed_batch(), policy_gradient)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of dynamo's own making
def test_compiled_blocks_keep_their_own(policy: Any, qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_compiler, "backend", "eager")
    assert train(policy, qwen2_folder, compile=True)[1] == 0
    torch.compiler.reset()
