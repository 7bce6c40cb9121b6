"""AReaLite's GRPO program runs, and its names mean here what they mean there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rlcore import InferenceEngine
from rlcore.compat import areal
from rlcore.compat.areal.batches import padded, trajectories_of
from rlcore.errors import InvalidInputError, RolloutError, RolloutTimeoutError, StateError, UnsupportedError
from rlcore.examples import areal_grpo
from rlcore.ops import ppo_clip
from rlcore.quickstart.model import quickstart_model
from rlcore.rollout import RolloutController, Trajectory
from tests.accuracy import assert_within_rounding

CONFIG = """
experiment_name: test
trial_name: cpu
allocation_mode: sglang.d1p1t1+d1p1t1
async_training: true
total_train_steps: {steps}
total_train_epochs: 1
seed: 1
tokenizer_path: {path}
cluster: {{n_nodes: 1}}
train_dataset: {{batch_size: 4, shuffle: true}}
gconfig: {{n_samples: 8, max_new_tokens: 3, temperature: 1.0}}
rollout: {{consumer_batch_size: 4, max_head_offpolicyness: 2, options: {{devices: cpu, dtype: float32}}}}
actor:
  path: {path}
  group_size: 8
  group_reward_norm: true
  use_decoupled_loss: true
  kl_ctl: 0.01
  ppo_n_minibatches: 2
  behav_imp_weight_cap: 5
  optimizer: {{lr: 1e-3, weight_decay: 0}}
  options: {{devices: cpu}}
ref: {{path: {path}, options: {{devices: cpu}}}}
sglang: {{model_path: ignored}}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def config(path: Path, tmp_path: Path) -> str:
    file = tmp_path / "grpo.yaml"
    file.write_text(CONFIG.format(path=path, steps=12))
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True, False])
def test_the_grpo_program_learns(
    is_async: bool, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that an untrained model finds at once: the share of sevens."""
    monkeypatch.setattr(areal_grpo, "reward_fn", lambda completions, **others: completions.count("7") / 3)
    rewards = areal_grpo.main_grpo(["--config", config, f"async_training={str(is_async).lower()}"])
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.2
    assert re.search(r"evaluation [01]\.\d+", capsys.readouterr().out)
    assert areal.RemoteInfEngine._servers == {}


def test_a_configuration_is_checked_by_name_type_and_value(config: str) -> None:
    found, _ = areal.load_expr_config(["--config", config, "actor.eps_clip=0.3", "gconfig.top_k=5"], areal.GRPOConfig)
    assert (found.actor.eps_clip, found.actor.optimizer.lr, found.actor.behav_imp_weight_cap) == (0.3, 1e-3, 5.0)
    assert found.rollout.model_path == found.actor.path and found.gconfig.sampling_params.top_k == 5
    assert found.gconfig.new(stop_token_ids=None).sampling_params.stop_token_ids == ()
    assert found.gconfig.new(greedy=True, n_samples=1).sampling_params.temperature == 0
    for override, told in (
        ("actor.epsclip=1", "actor.epsclip is no field here; did you mean 'eps_clip'"),
        ("actor.ppo_n_minibatches=0", "must be whole numbers of at least 1, got 0 and 8"),
        ("async_training=3", "async_training must be a bool, got 3"),
        ("actor=3", "actor must be a mapping, got 3"),
        ("x", "an override must be key=value, got 'x'"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            areal.load_expr_config(["--config", config, override], areal.GRPOConfig)
    with pytest.raises(UnsupportedError, match=r"optimizer\.lr_scheduler_type='cosine' is not supported"):
        areal.load_expr_config(["--config", config, "actor.optimizer.lr_scheduler_type=cosine"], areal.GRPOConfig)
    with pytest.raises(InvalidInputError, match="takes --config"):
        areal.load_expr_config([], areal.GRPOConfig)


def test_advantages_are_those_of_arealites_loops() -> None:
    """Its ``compute_advantages`` token by token: KL rewards, the score at the last token, GAE without values."""
    generator = torch.Generator().manual_seed(0)
    config = areal.PPOActorConfig(
        group_size=2, group_reward_norm=True, discount=0.9, gae_lambda=0.8, adv_norm=False, reward_scaling=2.0
    )
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0]])
    batch = {
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.25]),
        "loss_mask": mask,
        "logprobs": torch.randn(4, 5, generator=generator) * mask,
        "ref_logp": torch.randn(4, 5, generator=generator) * mask,
    }
    areal.FSDPPPOActor(config).compute_advantages(batch)
    scores = 2 * batch["rewards"].double().view(2, 2)
    scores = ((scores - scores.mean(1, True)) / (scores.std(1, keepdim=True) + 1e-9)).flatten()
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for row in range(4):
        advantage, tokens = 0.0, mask[row].nonzero().flatten().tolist()
        for at in reversed(tokens):
            reward = -config.kl_ctl * float(batch["logprobs"][row, at].double() - batch["ref_logp"][row, at].double())
            reward += float(scores[row]) if at == tokens[-1] else 0.0
            advantage = reward + 0.9 * 0.8 * advantage
            expected[row, at] = advantage
    assert_within_rounding(batch["advantages"], expected, terms=40, magnitude=torch.full_like(expected, 2.0))


def test_what_a_batch_lacks_is_named() -> None:
    ones = torch.ones(2, 3)
    batch = {"rewards": ones[:, 0], "loss_mask": ones, "logprobs": ones}
    for options, changes, told in (
        ({}, {"rewards": ones[:, :1]}, r"rewards must be \[N\] = \[2\], one a row; got \[2, 1\]"),
        (
            {"recompute_logprob": True},
            {},
            "the batch needs rewards, logprobs, loss_mask, prox_logp; prox_logp is missing",
        ),
    ):
        with pytest.raises(InvalidInputError, match=told):
            areal.FSDPPPOActor(areal.PPOActorConfig(**options)).compute_advantages(batch | changes)
    decoupled = areal.FSDPPPOActor(areal.PPOActorConfig(use_decoupled_loss=True))
    with pytest.raises(
        InvalidInputError, match="the batch needs logprobs, advantages, prox_logp; prox_logp is missing"
    ):
        decoupled.ppo_update(batch | {"advantages": ones})


def test_a_reference_model_needs_no_optimizer(path: Path, config: str) -> None:
    found, _ = areal.load_expr_config(["--config", config, "ref.optimizer=null"], areal.GRPOConfig)
    assert found.ref.optimizer is None
    actor = areal.FSDPPPOActor(found.ref)
    actor.initialize(None)
    engine = actor.engine
    actor.initialize(None)
    assert actor.engine is engine
    ones = torch.ones(1, 3)
    with pytest.raises(StateError, match="train_batch needs an optimizer, and ArealActor has none"):
        actor.train_batch({"input_ids": ones.long()}, ppo_clip())
    actor.destroy()
    with pytest.raises(StateError, match="the actor is not initialized"):
        actor.compute_logp(dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), ones))
    assert not engine.is_built


def test_advantages_are_normalised_as_by_arealite() -> None:
    """Its ``masked_normalization``: biased variance, and 1e-5 beside its root; here both show."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])
    score = torch.tensor([3e-5, 1e-5])
    logprobs = torch.where(mask.bool(), 0.0, torch.nan)
    batch = {"rewards": score, "loss_mask": mask, "logprobs": logprobs}
    areal.FSDPPPOActor(areal.PPOActorConfig()).compute_advantages(batch)
    values = [float(score[0].double())] * 2 + [float(score[1].double())]
    mean = sum(values) / 3
    deviation = (sum(one * one for one in values) / 3 - mean**2) ** 0.5
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[mask.bool()] = torch.tensor([(one - mean) / (deviation + 1e-5) for one in values], dtype=torch.float64)
    # float32 sums of a token's rewards, then the difference of values up to five times as large
    assert_within_rounding(batch["advantages"], expected, terms=8, magnitude=torch.full_like(expected, 5.0))


def test_without_a_reference_its_log_probs_are_0_as_in_arealite() -> None:
    mask, logprobs = torch.tensor([[0, 1, 1]]), torch.tensor([[-9.0, -2.0, -4.0]])
    batch = {"rewards": torch.ones(1), "loss_mask": mask, "logprobs": logprobs}
    areal.FSDPPPOActor(areal.PPOActorConfig(adv_norm=False, kl_ctl=0.5)).compute_advantages(batch)
    assert batch["kl_rewards"].tolist() == [[0, 1, 2]] and batch["advantages"].tolist() == [[0, 4, 3]]


@pytest.mark.parametrize(("size", "rows"), [(1, 4), (2, 3)])
def test_rewards_are_not_normed_in_groups_of_one_or_in_parts_of_groups(size: int, rows: int) -> None:
    actor = areal.FSDPPPOActor(areal.PPOActorConfig(group_size=size, group_reward_norm=True))
    ones = torch.ones(rows, 2)
    with pytest.raises(InvalidInputError, match=rf"at least 2; got {rows} rows and group_size={size}"):
        actor.compute_advantages({"rewards": ones[:, 0], "loss_mask": ones, "logprobs": ones})


@pytest.mark.parametrize(("rows", "expected"), [(6, [2, 2, 1, 1]), (5, [2, 1, 1, 1]), (3, [1, 1, 1])])
def test_an_update_takes_as_many_steps_as_there_are_rows_for(
    rows: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(
        areal.FSDPPPOActor, "train_batch", lambda self, batch, loss_fn: steps.append(len(batch["input_ids"])) or {}
    )
    names = ("input_ids", "attention_mask", "loss_mask", "logprobs", "prox_logp", "advantages")
    actor = areal.FSDPPPOActor(areal.PPOActorConfig(ppo_n_minibatches=4))
    actor.ppo_update(dict.fromkeys(names, torch.ones(rows, 2)))
    assert steps == expected


class Answers(areal.RolloutWorkflow):
    async def arun_episode(self, engine: areal.EpisodeEngine, data: Any) -> Any:
        if data is None:
            return {"input_ids": torch.zeros(1, 1)}
        found = await engine.agenerate(
            areal.ModelRequest([1, 2, data], areal.GenerationHyperparameters(max_new_tokens=3))
        )
        assert (found.input_len, len(found.output_versions)) == (3, found.output_len)
        assert found.stop_reason in ("stop", "length")
        length = found.input_len + found.output_len
        return {
            "input_ids": torch.tensor([found.input_tokens + found.output_tokens]),
            "loss_mask": torch.tensor([[0, 0, 0] + [1] * found.output_len]),
            "logprobs": torch.tensor([[0.0] * 3 + found.output_logprobs]),
            "versions": torch.tensor([[-1] * 3 + found.output_versions]),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
            "rewards": torch.tensor([float(data)]),
        }


class TwoRewards(Answers):
    async def arun_episode(self, engine: areal.EpisodeEngine, data: Any) -> Any:
        return await super().arun_episode(engine, data) | {"rewards": torch.ones(2)}


def test_clients_share_an_engine_and_what_is_refused_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"devices": "cpu", "dtype": "float32"}
    config = areal.InferenceEngineConfig(model_path=str(path), consumer_batch_size=2, options=options)
    one, other = areal.RemotevLLMEngine(config), areal.RemoteInfEngine(config)
    with pytest.raises(StateError, match="the rollout engine is not initialized; call initialize"):
        one.get_version()
    with pytest.raises(UnsupportedError, match="there is no server"):
        one.initialize("host:1")
    one.initialize(None)
    one.initialize(None)
    other.initialize(None)
    other.set_version(10**12)
    assert one.controller is other.controller and (one.get_version(), other.get_version()) == (0, 10**12)
    for item in (3, 4):
        one.submit(item, Answers())
        other.submit(item + 2, Answers())
    assert one.wait(2, timeout=60)["rewards"].tolist() == [3, 4]
    with pytest.raises(StateError, match=r"wait\(3\) would wait for ever: only 2 episodes were submitted; submit\(\)"):
        other.wait(3)
    with pytest.raises(RolloutTimeoutError, match="0 of 2 episodes ended"):
        other.wait(2, timeout=0)
    assert other.wait(2)["rewards"].tolist() == [5, 6] and one.controller.stats.given == 2
    assert one.rollout_batch([7], Answers()).to("cpu").batch_size == (1,)
    with pytest.raises(Exception, match=r"none of 1 episodes ended well: .*loss_mask, logprobs, versions, rewards is"):
        one.rollout_batch([None], Answers())
    actor = areal.FSDPPPOActor(areal.PPOActorConfig(path=str(path)))
    actor.initialize()
    meta = areal.WeightUpdateMeta.from_disk()
    futures = [client.update_weights(meta) for client in (one, other)]
    actor.upload_weights(meta)
    assert all(future.done() for future in futures) and one.get_version() == 1
    actor.destroy()
    one.destroy()
    other.destroy()
    assert areal.RemoteInfEngine._servers == {}
    closed: list[InferenceEngine] = []
    close = InferenceEngine.close
    monkeypatch.setattr(InferenceEngine, "close", lambda self: (close(self), closed.append(self)))
    with pytest.raises(InvalidInputError, match="at least 1 as batch_size, got 0"):
        areal.RemoteInfEngine(replace(config, consumer_batch_size=0)).initialize()
    assert not closed[0].is_built
    with pytest.raises(UnsupportedError, match=r"WeightUpdateMeta\(type='awex'\) is not supported"):
        areal.WeightUpdateMeta("awex")
    with pytest.raises(StateError, match=r"finds nobody who waits; call rollout\.update_weights"):
        areal.FSDPPPOActor(areal.PPOActorConfig()).upload_weights(areal.WeightUpdateMeta.from_fsdp_nccl())
    with pytest.raises(StateError, match="the actor is not initialized"):
        areal.FSDPPPOActor(areal.PPOActorConfig()).train()
    with pytest.raises(UnsupportedError, match="dump_dir"):
        areal.RLVRWorkflow(len, areal.GenerationHyperparameters(), None, dump_dir="x")
    assert areal.WeightUpdateMeta.from_fsdp_xccl().type == "xccl"


@pytest.fixture
def clients(path: Path) -> Iterator[list[areal.RemoteInfEngine]]:
    """Two clients of one engine; the second is one for evaluation."""
    config = areal.InferenceEngineConfig(
        model_path=str(path), consumer_batch_size=2, options={"devices": "cpu", "dtype": "float32"}
    )
    found = [areal.RemoteInfEngine(config) for _ in range(2)]
    for one in found:
        one.initialize(None)
    found[1].set_version(10**12)
    yield found
    for one in found:
        one.destroy()


def test_what_is_no_workflow_or_item_is_named_where_it_is_given(clients: list[areal.RemoteInfEngine]) -> None:
    one, other = clients
    with pytest.raises(
        RolloutError, match=r"must return rewards \[N\] and all else \[N, L\]; rewards is \[2\], and .*\[1, "
    ):
        one.rollout_batch([3], TwoRewards())
    for call, message in (
        (lambda: one.submit(3, Answers), r"submit\(\) takes a RolloutWorkflow .* as workflow, got <class"),
        (lambda: one.rollout_batch([3], None), r"rollout_batch\(\) takes a RolloutWorkflow"),
        (lambda: one.rollout_batch({"a": 3}, Answers()), r"rollout_batch\(\) takes a list or another iterable as data"),
        (
            lambda: one.prepare_batch([{"a": 3}], Answers()),
            "must give lists of items, got {'a': 3}; give it collate_fn=l",
        ),
        (lambda: one.update_weights("disk"), r"update_weights\(\) takes a WeightUpdateMeta as meta, got 'disk'"),
        (lambda: one.set_version("1"), r"set_version\(\) takes a whole number as version, got '1'"),
        (lambda: other.wait(-1), r"wait\(\) takes a whole number of at least 1 as count, got -1"),
        (lambda: asyncio.run(areal.EpisodeEngine(None).agenerate([1])), r"agenerate\(\) takes a ModelRequest as req"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call()


def test_a_client_with_another_configuration_cannot_share_an_engine(clients: list[areal.RemoteInfEngine]) -> None:
    config = clients[0].config
    for change in (
        {"max_head_offpolicyness": 4},
        {"options": {"devices": "cpu"}},
        {"consumer_batch_size": 3},
        {"request_timeout": 1.0},
        {"max_concurrent_rollouts": 2},
        {"executor": "vllm"},
    ):
        ((name, value),) = change.items()
        client = areal.RemoteInfEngine(replace(config, **change))
        message = rf"^this client of .* has {name}={re.escape(repr(value))}, and the client .*; give both the same, or"
        with pytest.raises(InvalidInputError, match=message):
            client.initialize(None)
        client.destroy()
        with pytest.raises(StateError, match="the rollout engine is not initialized"):
            client.get_version()
    evaluates = areal.RemoteInfEngine(replace(config, max_head_offpolicyness=10**12))
    evaluates.initialize(None)
    assert evaluates.get_version() == 10**12, "as after set_version(10**12)"
    evaluates.destroy()
    config.consumer_batch_size = 5  # of a program, after initialize()
    with pytest.raises(InvalidInputError, match="has consumer_batch_size=5, and"):
        areal.RemoteInfEngine(config).initialize(None)
    config.consumer_batch_size = 2
    config.options["dtype"] = "bfloat16"
    with pytest.raises(InvalidInputError, match=r"has options=.*bfloat16.*, and"):
        areal.RemoteInfEngine(config).initialize(None)


def test_an_engine_may_be_among_the_options_of_a_client(path: Path) -> None:
    actor = areal.FSDPPPOActor(areal.PPOActorConfig(path=str(path), options={"devices": "cpu"}))
    actor.initialize(None)
    options = {"colocate_with": actor.engine, "dtype": "float32"}
    client = areal.RemoteInfEngine(areal.InferenceEngineConfig(model_path=str(path), options=options))
    client.initialize(None)
    assert client.rollout_batch([3], Answers())["rewards"].tolist() == [3]
    client.destroy()
    actor.destroy()


def test_an_evaluation_that_failed_is_not_in_the_way_of_the_next(
    clients: list[areal.RemoteInfEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = clients
    client.submit(None, Answers())
    with pytest.raises(RolloutError, match="none of 1 episodes ended well"):
        client.wait(1)
    client.submit(3, Answers())
    with monkeypatch.context() as patch:  # the last engine has failed, which is no fault of the episode
        patch.setattr(RolloutController, "num_healthy", 0)
        patch.setattr(RolloutController, "evaluate", _raise)
        with pytest.raises(RolloutError, match="planted"):
            client.wait(1)
    assert client.wait(1)["rewards"].tolist() == [3]


def test_all_futures_of_a_weight_update_end_with_the_error_of_the_first(
    clients: list[areal.RemoteInfEngine], path: Path
) -> None:
    meta = areal.WeightUpdateMeta.from_disk()
    futures = [client.update_weights(meta) for client in clients]
    with pytest.raises(StateError, match="the actor is not initialized"):
        areal.FSDPPPOActor(areal.PPOActorConfig(path=str(path))).upload_weights(meta)
    assert [str(future.exception(timeout=0)).partition(";")[0] for future in futures] == [
        "the actor is not initialized"
    ] * 2


def test_the_last_client_closes_the_engine_also_where_an_episode_does_not_end(
    clients: list[areal.RemoteInfEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, close = clients[0]._server, RolloutController.close
    monkeypatch.setattr(RolloutController, "close", lambda self: (close(self), _raise()))
    clients[0].destroy()
    with pytest.raises(RolloutError, match="planted"):
        clients[1].destroy()
    assert server is not None and not server.engine.is_built


def _raise(*_: Any, **__: Any) -> None:
    raise RolloutError("planted")


def test_when_an_answer_of_an_episode_fails_the_others_are_not_sampled_on() -> None:
    under_way: set[int] = set()

    class Engine:
        async def agenerate(self, request: areal.ModelRequest) -> areal.ModelResponse:
            number = len(under_way)
            under_way.add(number)
            try:
                await asyncio.sleep(600 if number else 0.01)
            finally:
                under_way.remove(number)
            raise RolloutError("planted")

    async def episode() -> set[int]:
        with pytest.raises(RolloutError, match="planted"):
            await workflow.arun_episode(Engine(), {"messages": []})  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return {*under_way}

    tokenizer = mock.Mock(return_value=mock.Mock(input_ids=[1]))
    workflow = areal.RLVRWorkflow(lambda **_: 1.0, areal.GenerationHyperparameters(n_samples=4), tokenizer)
    assert asyncio.run(episode()) == set()


def test_the_padding_of_a_workflows_tensors_is_no_part_of_its_trajectories() -> None:
    rows = [
        Trajectory([5, 6, 7], [False, True, True], [0.0, -0.5, -0.25], [-1, 0, 1], reward=1.0),
        Trajectory([8, 9], [False, True], [0.0, -0.125], [-1, 1], reward=0.5),
    ]
    assert trajectories_of(padded(rows)) == rows
