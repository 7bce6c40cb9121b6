"""LightRFT's GRPO program runs on two ranks, and its names mean here what they mean there."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from rlcore.compat import lightrft
from rlcore.compat.lightrft import strategy_base
from rlcore.compat.lightrft.configuration import StrategyConfig
from rlcore.compat.lightrft.generation import prompts_of, sampling_params_of
from rlcore.compat.lightrft.schedule import CosineSchedule
from rlcore.engines.sampling.params import SamplingParams
from rlcore.errors import CheckpointError, InvalidInputError, StateError, UnsupportedError
from rlcore.examples import lightrft_grpo
from rlcore.quickstart.model import quickstart_model
from tests.accuracy import assert_same_bits, assert_within_rounding
from tests.model_rounding import logprob_rounding
from tests.warm import ENGINES, LIMIT_S, warm, without_settings

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = Path(sys.prefix) / "deepspeed"
"""Where `make test-slow` installs it."""
CONTRACT = {
    "__init__": "seed max_norm micro_train_batch_size train_batch_size args",
    "set_seed": "seed",
    "setup_distributed": "timeout num_gpu_per_node",
    "create_optimizer": "model",
    "prepare": "is_rlhf",
    "prepare_model": "model is_training shard_size reshard_after_forward",
    "backward": "loss model optimizer",
    "optimizer_step": "optimizer model scheduler name",
    "setup_dataloader": "replay_buffer batch_size pin_memory shuffle collate_fn drop_last sampler consumed_samples",
    "save_ckpt": "model save_dir tag max_num max_mem client_state save_latest optimizer scheduler",
    "load_ckpt": "model load_dir tag optimizer scheduler load_module_strict load_optimizer_states"
    " load_lr_scheduler_states load_module_only",
    "save_model": "model tokenizer output_dir",
    "all_reduce": "data op",
    "all_gather": "data",
    "print": "",
    "is_rank_0": "",
    "get_rank": "",
    "unwrap_model": "model",
    "prepare_models_and_optimizers": "actor critic reward_models initial_model args max_steps",
    "report_memory": "prefix",
    "setup_inference_engine": "args engine_type actor",
    "maybe_sleep_inference_engine": "",
    "wakeup_inference_engine": "",
    "engine_generate_local": "sampling_params prompt_token_ids multi_modal_inputs",
    "gather_and_generate": "sampling_params all_prompt_token_ids all_prompts all_images sleep_engine images_num"
    " all_videos videos_num",
    "update_engine_weights": "actor",
    "sync_and_clear_cache": "",
    "init_model_context": "meta_init",
    "maybe_offload_optimizer": "optimizer",
    "maybe_load_optimizer": "optimizer device",
    "offload_model": "models empty_cache",
    "reload_model": "models",
}
"""The methods of LightRFT's strategies and their arguments (commit 49e62cb, lightrft/strategy/strategy_base.py,
fsdp/fsdpv2.py and deepspeed/deepspeed.py), in their order."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("kind", [lightrft.FSDPV2Strategy, lightrft.DeepspeedStrategy, lightrft.FakeStrategy])
def test_the_methods_are_lightrfts(kind: Any) -> None:
    for name, arguments in CONTRACT.items():
        taken = inspect.signature(getattr(kind, name)).parameters.values()
        named = [one.name for one in taken if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        assert [one for one in named if one not in ("self", "cls")] == arguments.split(), name


def args(path: Path, **changes: Any) -> SimpleNamespace:
    common = {"pretrain": str(path), "fsdp": True, "bf16": False, "engine_type": "hf", "actor_learning_rate": 1e-2}
    sizes = {"micro_train_batch_size": 2, "train_batch_size": 4, "lr_warmup_ratio": 0.0}
    return SimpleNamespace(**common | sizes | {"adam_offload": True, "enable_engine_sleep": True} | changes)


@pytest.fixture
def strategy(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lightrft.StrategyBase]:
    monkeypatch.setenv("RLCORE_DEVICE", "cpu")
    strategy = lightrft.get_strategy(args(path, max_norm=100.0))
    yield strategy
    strategy.close()


SEQUENCES = torch.tensor([[18, 18, 1, 2, 3, 4], [5, 6, 7, 8, 18, 18]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def plain_logprobs(model: Any) -> torch.Tensor:
    """Return the log-probs of the last three columns as transformers computes them."""
    places = (MASK.cumsum(1) - 1).clamp(min=0)
    logprobs = model(SEQUENCES, MASK, places).logits.log_softmax(-1)[:, :-1]
    chosen = logprobs.gather(2, SEQUENCES[:, 1:, None]).squeeze(2)
    return (chosen * MASK[:, 1:] * (MASK.cumsum(1) > 1)[:, 1:])[:, -3:]


def test_an_actor_scores_and_trains_as_plain_torch(strategy: lightrft.StrategyBase, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    truth = AutoModelForCausalLM.from_pretrained(path)
    actor = lightrft.ActorLanguage(path, high_entropy_token_ratio=0.2)
    with pytest.raises(StateError, match=r"not prepared; call strategy\.prepare_model"):
        actor(torch.ones(1, 2, dtype=torch.int64), 1)
    (actor, optimizer, scheduler), *_ = strategy.prepare_models_and_optimizers(
        actor, None, [], None, strategy.args, max_steps=10
    )
    assert strategy.create_optimizer(actor, eps=1e-3) is optimizer
    with pytest.raises(
        InvalidInputError, match=r"create_optimizer\(\) has no setting 'learning_rate'; it takes lr, be"
    ):
        strategy.create_optimizer(actor, learning_rate=1e-3)
    for arguments, told in (
        ((SEQUENCES, 0, MASK), "num_actions counts the last columns of sequences, 1 to 6; got 0"),
        ((SEQUENCES, 7, MASK), "of sequences, 1 to 6; got 7"),
        ((SEQUENCES, 3, MASK[:, :4]), r"takes tensors \[N, L\] as .* got sequences \[2, 6\], attention_mask \[2, 4\]"),
        ((SEQUENCES[0], 3), r"takes tensors \[N, L\] as .* got sequences \[6\]"),
        ((SEQUENCES, 3, MASK * 0), "attention_mask is 0 everywhere"),
        ((SEQUENCES + 20, 3, MASK), "must hold token ids, 0 to 20, where .* got torch.int64 21 to 28"),
        ((SEQUENCES.float(), 3, MASK), "must hold token ids, 0 to 20, where .* got torch.float32"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            actor(*arguments)
    beside = torch.where(MASK.bool(), SEQUENCES, -100)  # what stands beside the mask is not read
    assert_same_bits(actor(beside, torch.tensor(3), MASK), actor(SEQUENCES, 3, MASK))
    tolerance = logprob_rounding(path, num_tokens=8)
    found, output = actor(SEQUENCES, 3, attention_mask=MASK, return_output=True)
    assert (found - plain_logprobs(truth)).abs().max() < tolerance
    assert output["action_entropy"].shape == (2, 3) and (output["action_entropy"] >= 0).all()

    groups = [[one for one in truth.parameters() if (one.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    plain = torch.optim.AdamW(
        [{"params": one} for one in groups if one], lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0
    )
    weight = torch.tensor([[1.0, -1.0, 0.5], [0.5, 1.0, 0.0]])
    for number in range(2):  # two micro-batches make a step, of their mean
        strategy.backward((actor(SEQUENCES, 3, attention_mask=MASK) * weight).sum(), actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
        assert (scheduler.get_last_lr()[0] < 1e-2) == (number == 1)
    (plain_logprobs(truth) * weight).sum().backward()
    torch.nn.utils.clip_grad_norm_(truth.parameters(), 100.0)
    plain.step()
    moments = [
        settled.state[model.get_input_embeddings().weight]["exp_avg"]
        for settled, model in ((optimizer, actor.model), (plain, truth))
    ]
    assert round(float((moments[0] * moments[1]).sum() / moments[1].square().sum()), 3) == 1
    with torch.no_grad():
        after = actor(SEQUENCES, 3, attention_mask=MASK)
        assert (after - plain_logprobs(truth)).abs().max() < 10 * tolerance < (after - found).abs().max()


def test_engines_sleep_generate_and_resume(
    strategy: lightrft.StrategyBase, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (actor, optimizer, _), _, _, reference = strategy.prepare_models_and_optimizers(
        lightrft.ActorLanguage(path), None, [], lightrft.ActorLanguage(path), strategy.args, max_steps=10
    )
    with torch.no_grad():
        before = actor(SEQUENCES, 3, attention_mask=MASK)
        assert_same_bits(reference(SEQUENCES, 3, MASK), before)
    actor.engine.load_state_dict({name: one * 1.1 for name, one in reference.engine.state_dict().items()})
    engine = strategy.setup_inference_engine(strategy.args, "hf", actor)
    with pytest.raises(StateError, match=r"there is an inference engine already; a strategy has one until close\(\)"):
        strategy.setup_inference_engine(strategy.args, "hf", actor)
    assert lightrft.is_engine(engine) and strategy.inference_engine_status is lightrft.EngineStatus.SLEEPED
    assert engine.version == 1 and set(engine.state.values()) == {"offloaded", "released"}
    strategy.maybe_offload_optimizer(optimizer)
    strategy.offload_model([reference])
    assert (actor.engine.state["optimizer"], reference.engine.state["weights"]) == ("offloaded", "offloaded")
    prompts = [[1, 10, 2], [3]]
    arrays = [np.array(prompts[0]), torch.tensor(prompts[1])]
    outputs = strategy.gather_and_generate({"max_new_tokens": 2, "temperature": 1.0}, arrays)
    assert [one.prompt_token_ids for one in outputs] == prompts
    for one in outputs:  # by the actor's weights
        row = torch.tensor([one.prompt_token_ids + one.output_token_ids])
        scored = actor(row, len(one.output_token_ids)).detach()[0]
        assert (scored - torch.tensor(one.logprobs)).abs().max() < logprob_rounding(path, num_tokens=8)
    strategy.config.engine_tp_size = (
        2  # the prompts of both ranks go to their one engine, and this one has the second's
    )
    monkeypatch.setattr(strategy_base, "all_gather_bytes", lambda own, device: [b"[[4], [5, 6]]", own])
    monkeypatch.setattr(strategy, "get_rank", lambda: 1)
    assert [one.prompt_token_ids for one in strategy.gather_and_generate({"max_new_tokens": 1}, prompts)] == prompts
    strategy.maybe_load_optimizer(optimizer)
    strategy.reload_model([reference, None])

    folder = tmp_path / "_actor"
    (folder / "notes").mkdir(parents=True)  # older than any checkpoint, and the user's own
    after = actor(SEQUENCES, 3, attention_mask=MASK).detach()
    for step in range(3):
        strategy.save_ckpt(actor.model, str(folder), f"step{step}", 2, client_state={"consumed": step})
    assert sorted(one.name for one in folder.iterdir()) == ["notes", "step1", "step2"]
    (folder / "plots").mkdir()  # newer than any
    actor.engine.load_state_dict(reference.engine.state_dict())
    assert strategy.load_ckpt(actor.model, str(folder)) == (str(folder / "step2"), {"consumed": 2})
    assert_same_bits(actor(SEQUENCES, 3, attention_mask=MASK).detach(), after)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* has the name 'step0'"):
        strategy.load_ckpt(actor.model, str(folder), "step0")


class AttributeDict(dict[str, Any]):
    """As EasyDict and OmegaConf have them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def test_numbers_of_one_rank_are_their_own_mean(
    strategy: lightrft.StrategyBase, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy.report_memory("now")
    assert re.search(r"MEMORY STATUS: now, USED=\d+\.\d\d GB", capsys.readouterr().out)
    assert strategy.all_reduce({"a": 2.0, "b": torch.tensor([3.0])}) == {"a": 2.0, "b": torch.tensor([3.0])}
    assert strategy.all_gather(torch.tensor(2.0)) == torch.tensor([2.0])
    strategy.set_seed(3)
    drawn = np.random.rand()
    strategy.set_seed(3)
    assert np.random.rand() == drawn
    assert strategy.all_gather({"a": 2}) == {"a": torch.tensor([2.0])} and strategy.is_rank_0()
    loader = strategy.setup_dataloader(list(range(8)), 2, shuffle=False, consumed_samples=4)
    assert len(loader) == 2 and [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]
    assert len(list(loader)) == len(loader) == 4  # the next pass has all
    loader.sampler.set_epoch(1, consumed_samples=6)  # as LightRFT's trainers resume
    assert len(loader) == 1 and [batch.tolist() for batch in loader] == [[6, 7]]
    with pytest.raises(InvalidInputError, match="takes op='mean', 'max' or 'sum', got 'min'"):
        strategy.all_reduce(1, "min")


def test_what_is_not_supported_says_why(path: Path, strategy: lightrft.StrategyBase) -> None:
    for changes, told in (
        ({"train_batch_size": 5}, "a multiple of micro_train_batch_size x ranks, got 5 for 2 x 1"),
        ({"fsdp_cpu_offload": True}, r"--fsdp_cpu_offload is not supported"),
        ({"seed": "x"}, "--seed must be a whole number, got 'x'"),
        ({"micro_train_batch_size": "2"}, "--micro_train_batch_size must be a whole number, got '2'"),
        ({"max_norm": -1}, "--max_norm must be a finite number of at least 0, got -1"),
        ({"engine_tp_size": 0}, "--engine_tp_size must be a whole number of at least 1, got 0"),
        ({"train_options": "x"}, "--train_options must be a mapping, got 'x'"),
        ({"engine_type": None}, "--engine_type must be a str, got None"),
        ({"bf16": "false"}, "--bf16 must be True or False, got 'false'"),
        ({"adam_betas": 0.9}, "--adam_betas must be a list or tuple of two numbers, got 0.9"),
        ({"engine_mem_util": "0.5"}, "--engine_mem_util must be a finite number of at least 0, or None, got '0.5'"),
        ({"sp_size": 2}, "sp_size=2 is not supported"),
        ({"engine_tp_size": 2}, "engine_tp_size=2 of 1 ranks is not supported"),
    ):
        with pytest.raises((InvalidInputError, UnsupportedError), match=told):
            lightrft.get_strategy(args(path, **changes))
    assert StrategyConfig.from_args(AttributeDict(fsdp=True)).fsdp
    for call, told in (
        (lambda: lightrft.get_strategy(None), "takes an argparse.Namespace or alike as args, got None"),
        (lambda: lightrft.get_strategy({"fsdp": True}), "takes an argparse.Namespace or alike as args, got {'fsdp'"),
        (lambda: lightrft.ActorLanguage(path, lora_rank=8), r"ActorLanguage\(lora_rank=8\)"),
        (lambda: lightrft.ActorLanguage(path, rank=8), "no argument 'rank'"),
        (lambda: lightrft.ActorLanguage(path)(torch.ones(1, 2)), "give padded rows and the number of actions"),
        (lambda: strategy.prepare_model(torch.nn.Linear(1, 1), is_training=True), "to train a Linear by this strategy"),
        (lambda: strategy.prepare_models_and_optimizers(None, 1, None, None, None, 1), "a critic"),
        (lambda: strategy.gather_and_generate({}, [[1]], all_images=["x"]), "generation from images or videos"),
        (lambda: strategy.gather_and_generate({}, all_prompts=["1+1="]), "generation from texts alone"),
        (lambda: strategy.gather_and_generate({}, [1, 2]), r"takes a list of token ids for each prompt, got \[1, 2\]"),
        (lambda: strategy.gather_and_generate({}, ["1"]), r"takes a list of token ids for each prompt, got \['1'\]"),
        (
            lambda: prompts_of({"truncate_prompt_tokens": "2"}, [[1]]),
            "truncate_prompt_tokens must be a whole number, or",
        ),
        (
            lambda: sampling_params_of({"max_tokens": 1, "max_new_tokens": 2}),
            "have 'max_tokens' by two names; give one",
        ),
        (lambda: strategy.engine_generate_local({}, [[1]]), "there is no inference engine"),
        (lambda: strategy.backward(torch.ones(()), torch.nn.Linear(1, 1), None), "this Linear is not prepared"),  # type: ignore[arg-type]
        (lambda: strategy.load_ckpt(None, "x", load_module_only=True), r"load_ckpt\(\) of a part"),
        (lambda: lightrft.PolicyLoss(use_dapo=True), "LightRFT ignores it"),
        (lambda: lightrft.PolicyLoss(use_gspo=True), r"PolicyLoss\(use_gspo=True\)"),
        (lambda: sampling_params_of({"min_p": 0.5}), "the sampling parameter min_p=0.5"),
        (lambda: sampling_params_of({"beams": 2}), "'beams' is no sampling parameter here; accepted: ignore_eos, max_"),
        (lambda: sampling_params_of({"n": 2}), "n must be 1, got 2; repeat a prompt"),
    ):
        with pytest.raises((InvalidInputError, UnsupportedError, StateError), match=told):
            call()


def test_the_learning_rate_rises_and_falls_as_transformers_says() -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    expected = get_scheduler("cosine_with_min_lr", optimizer, 3, 10, scheduler_specific_kwargs={"min_lr": 0.1})
    schedule = CosineSchedule(3, 10)
    for step in range(12):
        if step <= 10:  # beyond its end that of transformers rises again
            assert schedule(step) == pytest.approx(expected.get_last_lr()[0])
        optimizer.step()
        expected.step()
    assert schedule(12) == pytest.approx(0.1) and CosineSchedule()(5) == 1


def test_sampling_params_of_both_engines_are_understood() -> None:
    of_sglang = {
        "n": 1,
        "temperature": 0.5,
        "max_new_tokens": 7,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
    }
    of_vllm = SimpleNamespace(n=1, temperature=0.5, max_tokens=7, min_tokens=1, stop_token_ids=None, detokenize=True)
    assert sampling_params_of(of_sglang) == sampling_params_of(of_vllm)
    assert sampling_params_of(of_vllm).max_tokens == 7 and sampling_params_of(of_vllm).temperature == 0.5


class VllmParams(msgspec.Struct, dict=True):
    """Some fields of vLLM 0.13's ``SamplingParams``, which is such a struct, too."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] = msgspec.field(default_factory=list)
    bad_words: list[str] = msgspec.field(default_factory=list)
    logprobs: int | None = None
    output_kind: str = "cumulative"
    truncate_prompt_tokens: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)


class SglangParams:
    def __init__(self, max_new_tokens: int) -> None:
        self.max_new_tokens, self.stop_token_ids = max_new_tokens, {7}


class OfClass:
    max_tokens = 7


class OfSlots:
    __slots__ = ("max_tokens",)

    def __init__(self) -> None:
        self.max_tokens = 7


class OfTuple(NamedTuple):
    max_tokens: int = 7


def test_what_an_object_of_sampling_params_asks_for_is_done_or_refused() -> None:
    of_lightrft = VllmParams(max_tokens=7, min_tokens=1, truncate_prompt_tokens=2, logprobs=1)
    of_lightrft._all_stop_token_ids.add(3)
    assert sampling_params_of(of_lightrft) == SamplingParams(max_tokens=7)
    assert prompts_of(of_lightrft, [[1, 2, 3], [4]]) == [[2, 3], [4]]
    for whole in (VllmParams(), VllmParams(truncate_prompt_tokens=-1), {}, None, SamplingParams()):
        assert prompts_of(whole, [[1, 2, 3]]) == [[1, 2, 3]]
        assert sampling_params_of(whole) == SamplingParams()
    assert sampling_params_of(SglangParams(9)) == SamplingParams(max_tokens=9, stop_token_ids=(7,))
    assert sampling_params_of({"stop": [], "stop_token_ids": None}) == SamplingParams()
    for other in (OfClass(), OfSlots(), OfTuple()):
        assert sampling_params_of(other) == SamplingParams(max_tokens=7)
    for given, told in (
        (VllmParams(stop="x"), r"the sampling parameter stop='x' is not supported: only None is"),
        (VllmParams(stop=["x"]), r"the sampling parameter stop=\['x'\]"),
        ({"stop": "x"}, r"the sampling parameter stop='x'"),
        (VllmParams(bad_words=["x"]), "^'bad_words' is no sampling parameter here; accepted: ignore_eos, max_tokens"),
        (VllmParams(output_kind="delta"), "^'output_kind' is no"),
        (SimpleNamespace(temprature=1.0), "^'temprature' is no"),
        (3, "^sampling_params must be a dict or an object such as vLLM's, got 3"),
        (SamplingParams(n=2), "n must be 1, got 2; repeat a prompt"),
    ):
        with pytest.raises((InvalidInputError, UnsupportedError), match=told):
            sampling_params_of(given)


def test_numbers_in_a_mask_are_weights_as_in_lightrft() -> None:
    values = torch.tensor([[1.0, 3.0, math.nan], [2.0, 6.0, 4.0], [5.0, 5.0, 5.0]])
    weights = torch.tensor([[1.0, 3.0, 0.0], [0.5, 1.5, 2.0], [0.0, 0.0, 0.0]])
    assert lightrft.masked_mean(values, weights, dim=-1).tolist() == [2.5, 4.5, 0.0]
    assert lightrft.masked_mean(values, weights) == 3.5
    assert lightrft.masked_mean(values, weights > 0, dim=-1).tolist() == [2.0, 4.0, 0.0]
    assert lightrft.masked_mean(values[1], None) == 4
    kl = lightrft.compute_approx_kl(values, torch.zeros(3, 3), weights, "k2")  # its masks weigh the ratio's logarithm
    assert kl.tolist() == [[0.5, 40.5, 0], [0.5, 40.5, 32], [0, 0, 0]]


@pytest.mark.parametrize("is_cpgd", [False, True])
def test_the_loss_is_lightrfts_formula(is_cpgd: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(3, 4, generator=generator) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    rows = []
    for row in range(3):
        values = []
        for at in mask[row].nonzero().flatten().tolist():
            a, d = float(advantages[row, at]), float(new[row, at].double() - old[row, at].double())
            if is_cpgd:
                bound = math.log(1.2) if a > 0 else math.log(0.8)
                values.append(-a * (float(old[row, at]) + (min(d, bound) if a > 0 else max(d, bound))))
            else:
                values.append(-min(math.exp(d) * a, min(max(math.exp(d), 0.8), 1.2) * a))
        rows.append(sum(values) / max(len(values), 1))
    found = lightrft.PolicyLoss(0.2, use_cpg_loss=is_cpgd)(new, old, advantages, mask)
    assert_within_rounding(found, torch.tensor(sum(rows) / 3, dtype=torch.float64), terms=60, magnitude=4.0)
    by_order = lightrft.PolicyLoss(0.2, False, is_cpgd, 0.2)
    assert_same_bits(found, by_order(new, old, advantages, None, mask))
    assert lightrft.compute_approx_kl(new, new, mask, "k3").abs().max() == 0
    assert lightrft.compute_approx_kl(new.bfloat16(), old.bfloat16()).dtype == torch.float32  # as LightRFT's
    unknown, leaf = old.masked_fill(mask == 0, math.nan), new.clone().requires_grad_()
    loss = lightrft.PolicyLoss(0.2, use_cpg_loss=is_cpgd)(leaf, unknown, unknown - old + advantages, mask)
    assert_same_bits(loss, found)
    assert torch.autograd.grad(loss, leaf)[0].isfinite().all()
    with pytest.raises(
        InvalidInputError, match=r"advantages must be \[N, A\] or \[N, 1\] for log_probs \[3, 4\]; got \[4\]"
    ):
        lightrft.PolicyLoss(0.2, use_cpg_loss=is_cpgd)(new, old, advantages[0], mask)
    assert lightrft.masked_mean(torch.tensor([1.0, 3.0, math.nan]), torch.tensor([1, 1, 0])) == 2


def test_the_fake_strategy_trains_plain_modules() -> None:
    fake = lightrft.get_fake_strategy(SimpleNamespace(train_batch_size=1, actor_learning_rate=0.1))
    model, data = torch.nn.Linear(1, 1), torch.ones(4, 1)
    assert fake.prepare(model) is model and fake.gather_and_generate({}, [[1]]) == []
    triple, nothing, _, reference = fake.prepare_models_and_optimizers(model, None, [], None, None, max_steps=100)
    _, optimizer, scheduler = triple
    assert nothing == (None, None, None) and reference is None
    losses = []
    for _ in range(20):
        loss = (model(data) - 3).square().mean()
        fake.backward(loss, model, optimizer)
        fake.optimizer_step(optimizer, model, scheduler)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert (fake.all_reduce(2.0), fake.get_rank(), fake.setup_inference_engine(None)) == (2.0, 0, None)
    fake.update_engine_weights(model)  # type: ignore[arg-type]
    fake.maybe_sleep_inference_engine()


def run_on_two_ranks(arguments: list[str], tmp_path: Path, **environment: str) -> list[str]:
    """Run the example as torchrun does; return what rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*warm(*ENGINES), str(ROOT / "examples" / "lightrft_grpo.py"), *arguments],
            env=without_settings() | world | environment | {"RANK": rank, "LOCAL_RANK": rank, "RLCORE_DEVICE": "cpu"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    ended = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return ended[0][0].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["fsdp2", "deepspeed"])
def test_the_grpo_program_learns_on_two_ranks(executor: str, path: Path, tmp_path: Path) -> None:
    environment = {}
    if executor == "deepspeed":
        if not DEEPSPEED.is_dir() and importlib.util.find_spec("deepspeed") is None:
            pytest.skip("needs DeepSpeed: DS_ACCELERATOR=cpu pip install --no-build-isolation 'deepspeed>=0.19.8'")
        environment = {"PYTHONPATH": str(DEEPSPEED), "DS_ACCELERATOR": "cpu"}
    sizes = "--max_steps 8 --rollout_batch_size 8 --train_batch_size 64 --micro_train_batch_size 16"
    flags = "--engine_type hf --use_kl_loss --enable_engine_sleep --adam_offload"
    rates = "--actor_learning_rate 1e-3 --l2 0"
    arguments = f"--pretrain {path} --ckpt_path {tmp_path / 'checkpoints'} {sizes} {flags} {rates}".split()
    steps = run_on_two_ranks([*arguments, *["--fsdp"] * (executor == "fsdp2")], tmp_path, **environment)
    rewards = [float(found) for line in steps for found in re.findall(r"reward (\S+)", line)]
    assert len(rewards) == 8 and sum(rewards[-2:]) > sum(rewards[:2]) + 0.1
    assert len(list((tmp_path / "checkpoints" / "step8").glob("data-*/weights-*"))) == 2


def test_the_rule_gives_a_share_of_right_digits() -> None:
    assert lightrft_grpo.reward_fn("21$", "213") == pytest.approx(2 / 3)
    assert lightrft_grpo.arguments(["--fsdp", "--pretrain", "x"]).n_samples_per_prompt == 8
