"""The controller over real engines, in the process of the test and in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.examples import reward_model
from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class
from rlcore.rollout import RolloutController, SingleTurn
from tests.model_rounding import logprob_rounding

ITEMS = [{"prompt": f"{a:02d}+{b:02d}="} for a in range(8) for b in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def train(model: Path) -> Iterator[rlcore.TrainEngine]:
    with rlcore.meta_device():
        module = policy_class(model).from_pretrained(model)
    with rlcore.TrainEngine(module) as engine:
        yield engine


def sevens(data: Any, text: str) -> float:
    return text.count("7") / 8


def learn(train: rlcore.TrainEngine, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    advantages = group_advantage(batch["rewards"], group=batch["group"])
    batch |= {"advantages": advantages, "old_logprobs": train.forward_logprobs(batch)}
    return train.train_batch(batch, decoupled_ppo())


@pytest.mark.parametrize("steps", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_program_learns_asynchronously_resumes_and_keeps_its_bound(
    steps: int, model: Path, train: rlcore.TrainEngine, tmp_path: Path
) -> None:
    """Twice two steps are too few to learn from; all else is the same."""
    train.build(devices="cpu")
    train.set_rate(1e-3)
    workflow = SingleTurn(sevens, {"n": 8, "max_tokens": 8})
    rewards = []
    for half in range(2):
        with rlcore.InferenceEngine(model) as infer:
            infer.build(devices="cpu", dtype="float32")
            assert infer.path == model
            with RolloutController(infer, workflow, batch_size=4, max_staleness=1) as rollout:
                if half:
                    rollout.load_state_dict(train.load(tmp_path / "saved")["rollout"])
                rollout.update_weights(train, version=rollout.version)
                for step in range(steps):
                    batch = rollout.prepare_batch(ITEMS, timeout_s=120)
                    lag = rollout.version - batch["versions"][batch["loss_mask"]]
                    assert int(lag.min()) >= 0 and int(lag.max()) <= 1
                    if step == 0 and half == 0:  # the sampler's log-probs are the trainer's
                        difference = (train.forward_logprobs(batch) - batch["rollout_logprobs"]).abs().max()
                        assert difference < logprob_rounding(model, num_tokens=16)
                    rewards.append(float(batch["rewards"].mean()))
                    assert learn(train, batch)["num_tokens"] == int(batch["loss_mask"].sum())
                    rollout.update_weights(train)
                train.save(tmp_path / "saved", {"rollout": rollout.state_dict()})
                assert rollout.version == steps * (half + 1) == infer.version
                assert rollout.stats.given == 4 * rollout.version and rollout.stats.tokens_discarded == 0
                rollout.timeline.save(tmp_path / "timeline.json")
    assert steps == 2 or sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sampler_that_is_killed_or_stopped_is_replaced_and_no_episode_is_lost(
    model: Path, train: rlcore.TrainEngine, number: signal.Signals
) -> None:
    """Two samplers in processes of their own; what one had under way goes to the other, and it comes back."""
    train.build(devices="cpu:0", launcher="inline")
    samplers = [rlcore.InferenceEngine(model) for _ in range(2)]
    workflow = SingleTurn(sevens, {"n": 2, "max_tokens": 100, "ignore_eos": True})
    try:
        for index, infer in enumerate(samplers):
            infer.build(devices=f"cpu:{index + 1}", launcher="process", dtype="float32")
        with RolloutController(samplers, workflow, batch_size=8, max_staleness=1, unhealthy_after_s=10) as rollout:
            rollout.update_weights(train, version=0)
            numbers = [rollout.submit(item) for item in ITEMS[:16]]
            while not all(driver._under_way for driver in rollout._fleet._drivers):
                time.sleep(0.002)
            os.kill(samplers[0].executors[0].workers[0].process_id, number)
            found = rollout.wait(8, timeout_s=120)
            while not rollout.stats.engine_failures:
                time.sleep(0.05)
            rollout.update_weights(train)
            assert [infer.version for infer in samplers] == [1, 1]
            found += rollout.wait(8, timeout_s=120)
            assert sorted(one.number for one in found) == numbers
            stats = rollout.stats
            assert (stats.given, stats.engine_failures, stats.failed, stats.too_stale) == (16, 1, 0, 0)
            more = rollout.rollout_episodes(ITEMS[:6])
            assert [one.oldest_version for one in more] == [1] * 6
            os.kill(samplers[1].executors[0].workers[0].process_id, number)  # it has nothing to do
            rollout.update_weights(train)
            assert [infer.version for infer in samplers] == [2, 2] and rollout.stats.engine_failures == 2
    finally:
        for infer in samplers:
            infer.close()


@pytest.mark.slow
def test_the_last_sampler_that_is_killed_inside_a_sync_is_started_again(
    model: Path, train: rlcore.TrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.build(devices="cpu:0", launcher="inline")
    workflow = SingleTurn(sevens, {"n": 2, "max_tokens": 8})
    with rlcore.InferenceEngine(model) as infer:
        infer.build(devices="cpu:1", launcher="process", dtype="float32")
        with RolloutController(infer, workflow, batch_size=4, max_staleness=1) as rollout:
            rollout.update_weights(train, version=0)
            numbers = [rollout.submit(item) for item in ITEMS[:8]]
            found = rollout.wait(timeout_s=120)
            begun, sync = infer.executors[0].workers[0].process_id, train.sync_weights

            def kill_and_sync(engines: Any, **options: Any) -> Any:
                if infer.executors[0].workers[0].process_id == begun:
                    os.kill(begun, signal.SIGKILL)
                return sync(engines, **options)

            monkeypatch.setattr(train, "sync_weights", kill_and_sync)
            rollout.update_weights(train)
            assert infer.version == 1 and infer.executors[0].workers[0].process_id != begun
            found += rollout.wait(timeout_s=120)
            assert sorted(one.number for one in found) == numbers and rollout.stats.engine_failures == 1


@pytest.mark.slow
def test_a_reward_model_learns_preferences_and_teaches_a_policy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    improve, resident = reward_model.improve, []

    def watched(policy: rlcore.TrainEngine, judge: rlcore.TrainEngine, batch: Any) -> None:
        improve(policy, judge, batch)
        tags = [report["tags"].values() for report in judge.memory_report()]
        resident.append(sum(tag["device_bytes"] for one in tags for tag in one))

    monkeypatch.setattr(reward_model, "quickstart_model", lambda seed: model)
    monkeypatch.setattr(reward_model, "improve", watched)
    agreement, first, last = reward_model.main(num_steps=4)
    assert agreement > 0.7 and last > first + 1
    assert resident == [0] * 4, "it is away while the policy samples"
