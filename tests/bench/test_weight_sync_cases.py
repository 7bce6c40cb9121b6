"""The cases of whole weight syncs, with a model of a few kilobytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcore.bench.cases import weight_sync
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.registry import get_device

TINY = ModelShape("tiny", hidden=8, inner=6, layers=1, heads=2, kv_heads=1, vocabulary=24, head_size=4, experts=2)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, short_runtime_folder: Path) -> None:
    monkeypatch.setattr(weight_sync, "_HOST_SHRINK", 1)
    monkeypatch.setattr(weight_sync, "_ROUNDS", 1)
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
def test_each_way_brings_the_new_values_to_the_other_process() -> None:
    work = weight_sync._prepare(replace(TINY, experts=0), get_device("cpu"))
    ways = {contender.implementation: contender for contender in work.contenders}
    assert list(ways) == ["plain_copy", "packed", "direct", "per_tensor"]
    for name in ("plain_copy", "packed", "per_tensor"):
        found = ways[name].run()
        ways[name].check(found)
        assert ("nothing_new" in ways[name].quantities(found)) == (name == "packed")
    with pytest.raises(AssertionError, match="the engine holds"):
        done = ways["packed"].run()
        ways["packed"].check(done._replace(result=(done.result[0], 0.5)))


def test_experts_are_named_one_by_one_and_planned_as_one() -> None:
    trainer = weight_sync._Trainer(TINY)
    names = [name for name, _ in trainer.named_weights()]
    assert len(names) == len(set(names)) == 2 + 5 + 3 * 2
    for number, parameter in enumerate(trainer.parameters()):
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number)
    engine = weight_sync._FusedModel(TINY)
    engine.load_weights(trainer.named_weights())
    for one, other in zip(trainer.parameters(), engine.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("sizes", "names", "gigabytes"),
    [(QWEN_7B, 226, 15.2), pytest.param(QWEN_30B_A3B, 18674, 61.0, marks=pytest.mark.slow)],
)
def test_the_shapes_are_those_of_the_models(sizes: ModelShape, names: int, gigabytes: float) -> None:
    with torch.device("meta"):
        trainer = weight_sync._Trainer(sizes)
    assert sum(1 for _ in trainer.weight_views()) == names
    nbytes = sum(parameter.nbytes for parameter in trainer.parameters())
    assert nbytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
