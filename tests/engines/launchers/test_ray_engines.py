"""Engines on the hosts of a Ray cluster train, generate and exchange weights as they do in child processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.errors import InvalidInputError
from tests.engines.train_batches import assert_same_weights, packed_batch

pytestmark = pytest.mark.ray
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file


def loss(logprob: torch.Tensor, entropy: Any, per_token: Any) -> Any:
    return -logprob * per_token["advantages"], {"logprob_mean": logprob}


def logprobs(outputs: list[Any]) -> list[list[float]]:
    return [output.outputs[0].logprobs for output in outputs]


@pytest.fixture(scope="module")
def steps_of(policy: Any, qwen2_folder: Path) -> Any:
    """``steps_of(engine)``: the metrics of three steps, and the weights after them."""

    def steps(engine: rlcore.TrainEngine) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        metrics = [engine.train_batch(packed_batch(seed=seed), loss) for seed in (5, 6, 7)]
        return metrics, engine.state_dict()

    return steps


@pytest.fixture
def new_trainer(policy: Any, qwen2_folder: Path) -> Any:
    def new() -> rlcore.TrainEngine:
        with rlcore.meta_device():
            return rlcore.TrainEngine(policy.from_pretrained(qwen2_folder))

    return new


@pytest.fixture
def host(ray_host: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield ray_host
    rlcore.init()


def test_two_workers_train_generate_and_sync_as_child_processes_do(
    host: str, new_trainer: Any, steps_of: Any, qwen2_folder: Path
) -> None:
    with new_trainer() as engine:
        expected = steps_of(engine.build(data_parallel_size=2, devices=["cpu:0", "cpu:1"], launcher="process"))
    rlcore.init(launcher="ray")
    prompts, greedy = [[1, 2, 3], [4, 5]], {"max_tokens": 8, "temperature": 0.0}
    with new_trainer() as train, rlcore.InferenceEngine(qwen2_folder) as infer:
        train.build(data_parallel_size=2)
        assert train.devices == [f"{host}/cpu:0", f"{host}/cpu:1"]
        metrics, weights = steps_of(train)
        assert metrics == expected[0]
        assert_same_weights(weights, expected[1])
        infer.build(colocate_with=train)
        before = infer.generate(prompts, greedy)
        assert train.sync_weights(infer).route == "packed", "one of the trainers is in another process"
        after = infer.generate(prompts, greedy)
        assert logprobs(before) != logprobs(after)
        with rlcore.InferenceEngine(qwen2_folder) as alone:
            alone.build(devices=f"{host}/cpu:3")
            assert train.sync_weights(alone, route="collective").route == "collective"
            assert logprobs(alone.generate(prompts, greedy)) == logprobs(after)
        rlcore.swap(out=[(train, ["optimizer"])], in_=[])
        assert train.state["optimizer"] == "offloaded"


def test_a_name_that_the_cluster_has_not_is_refused_before_anything_starts(host: str, new_trainer: Any) -> None:
    with new_trainer() as train, pytest.raises(InvalidInputError, match=f"the hosts of the cluster are {host}"):
        train.build(devices="elsewhere/cpu:0", launcher="ray")
    with new_trainer() as train, pytest.raises(InvalidInputError, match=r"has no device 'cpu:100'"):
        train.build(devices="cpu:100", launcher="ray")
