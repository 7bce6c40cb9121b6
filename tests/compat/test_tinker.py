"""Tinker's interface: its losses, snapshots and futures over real engines, and its names against the real package."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.compat import tinker
from rlcore.compat.tinker import data as tinker_data
from rlcore.compat.tinker import service_client, types
from rlcore.compat.tinker.losses import DEFAULTS, LOSSES
from rlcore.engines.train import TrainEngine
from rlcore.errors import InvalidInputError, RolloutError, StateError, UnsupportedError
from rlcore.examples import tinker_grpo
from rlcore.quickstart.model import quickstart_model
from tests.accuracy import assert_within_rounding
from tests.model_rounding import logprob_rounding

TOKENS = [[1, 2, 10, 3, 4, 13, 7, 4, 18], [5, 6, 10, 7, 8, 13, 4, 3, 1, 18]]
STILL = types.AdamParams(learning_rate=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(seed=0, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def service(path: Path) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(folder=path.parent / "states", sampler={"dtype": "float32"}) as service:
        service.create_lora_training_client(str(path), rank=4, seed=0).result()
        yield service


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient, path: Path) -> tinker.TrainingClient:
    return service._clients[str(path)]


def data(**inputs: float) -> list[types.Datum]:
    """Two sequences of different lengths; each input differs from token to token."""
    generator = torch.Generator().manual_seed(0)
    return [
        types.Datum(
            types.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:]}
            | {name: mean + torch.rand(len(tokens) - 1, generator=generator) for name, mean in inputs.items()},
        )
        for tokens in TOKENS
    ]


def test_log_probs_are_those_of_the_base_model(training: tinker.TrainingClient, path: Path) -> None:
    """New adapters change nothing; the example's sequences lie in one batch and do not see each other."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    found = training.forward(data(weights=1.0), "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 2
    limit = logprob_rounding(path, num_tokens=max(map(len, TOKENS)))
    for tokens, output in zip(TOKENS, found.loss_fn_outputs, strict=True):
        logits = model(torch.tensor([tokens])).logits[0, :-1].detach()
        expected = logits.log_softmax(1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert (output["logprobs"].to_torch() - expected).abs().max() < limit


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_is_its_formula_and_so_are_its_gradients(loss: str, training: tinker.TrainingClient) -> None:
    """The same formula by ``forward_backward_custom`` gives the same sum, and gradients of the same norm."""
    sampled = -6.0 if loss == "cispo" else -3.5  # far below the model's: its default has no other limit than 4
    given = data(weights=-0.3) if loss == "cross_entropy" else data(logprobs=sampled, advantages=-0.4)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if loss == "ppo" else {}

    def formula(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for datum, logprob in zip(data, logprobs, strict=True):
            read = {name: one.to_torch() for name, one in datum.loss_fn_inputs.items()}
            if loss == "cross_entropy":
                total = total - (logprob * read["weights"]).sum()
                continue
            ratio, advantage = (logprob - read["logprobs"]).exp(), read["advantages"]
            clipped = ratio.clip(0.9, 1.1) if loss == "ppo" else ratio.clip(max=4.0)
            terms = {
                "importance_sampling": ratio * advantage,
                "ppo": torch.where(ratio * advantage < clipped * advantage, ratio, clipped) * advantage,
                "cispo": clipped.detach() * advantage * logprob,
                "dro": advantage * logprob - 0.025 * (logprob - read["logprobs"]) ** 2,
            }
            total = total - terms[loss].sum()
        return total, {"mine": float(total.detach())}

    found = training.forward_backward(given, loss, config)
    norm = training.optim_step(STILL).result().metrics["grad_norm"]
    own = training.forward_backward_custom(given, formula).result()
    own_norm = training.optim_step(STILL).result().metrics["grad_norm"]
    tokens, layers, products, longest = sum(map(len, TOKENS)), 3, 7, 512  # of the quickstart's model
    elementwise = [one["elementwise_loss"].to_torch() for one in found.result().loss_fn_outputs]
    total, magnitude = found.result().metrics["loss:sum"], float(torch.cat(elementwise).abs().sum())
    formula_terms = 4 * len(("log-prob", "exp", "product", "sum"))
    assert_within_rounding(
        total, own.metrics["mine"], terms=tokens * formula_terms, magnitude=magnitude, dtype=torch.float32
    )
    assert_within_rounding(norm, own_norm, terms=layers * products * longest, dtype=torch.float32)
    assert norm > 0


def test_snapshots_stay_what_they_were_while_the_trainer_goes_on(
    training: tinker.TrainingClient, service: tinker.ServiceClient, path: Path
) -> None:
    prompt, greedy = types.ModelInput.from_ints(TOKENS[0][:6]), types.SamplingParams(max_tokens=4, temperature=0.0)
    first = training.save_weights_and_get_sampling_client().result()
    saved = training.save_weights_for_sampler("first").result().path
    state = training.save_state("first").result().path
    before = first.sample(prompt, 1, greedy).result().sequences[0], first.compute_logprobs(prompt).result()
    for _ in range(3):
        training.forward_backward(data(weights=1.0), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-2))
    second = training.save_weights_and_get_sampling_client()  # may be used without result(), as earlier versions did
    clients = (first, service.create_sampling_client(saved).result(), service.create_sampling_client(None, str(path)))
    answers = [one.sample(prompt, 1, greedy, include_prompt_logprobs=True) for one in (*clients, second)]
    *same, other = [answer.result() for answer in answers]
    limit = logprob_rounding(path, num_tokens=10)
    for one in same:
        assert one.sequences[0].tokens == before[0].tokens
        assert one.prompt_logprobs[0] is None
        assert max(abs(a - b) for a, b in zip(one.prompt_logprobs[1:], before[1][1:], strict=True)) < limit
    assert max(abs(a - b) for a, b in zip(other.prompt_logprobs[1:], before[1][1:], strict=True)) > 100 * limit
    # The sampler's own log-probs are the trainer's for the same snapshot.
    sampled = other.sequences[0]
    scored = second.compute_logprobs(types.ModelInput.from_ints([*prompt.to_ints(), *sampled.tokens])).result()
    plain = second.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=1)).result().sequences[0]
    scored = second.compute_logprobs(types.ModelInput.from_ints([*prompt.to_ints(), *plain.tokens])).result()
    assert max(abs(a - b) for a, b in zip(plain.logprobs, scored[prompt.length :], strict=True)) < limit
    training.load_state_with_optimizer(state).result()
    again = training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()
    assert max(abs(a - b) for a, b in zip(again[1:], before[1][1:], strict=True)) < limit


def test_a_state_is_loaded_with_its_optimizer_or_without(training: tinker.TrainingClient) -> None:
    step, prompt = types.AdamParams(learning_rate=1e-2), types.ModelInput.from_ints(TOKENS[0][:6])

    def after_a_step() -> list[float]:
        training.forward_backward(data(weights=1.0), "cross_entropy")
        training.optim_step(step)
        return training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()[1:]

    def moments() -> list[int]:
        module: Any = training._host.train.executors[0].workers[0].worker.module
        return [int(one["step"]) for one in module.optimizer.state.values()]

    before = training.save_state("before").result().path
    after_a_step()
    state = training.save_state("moments").result().path
    kept = max(moments())
    went_on = after_a_step()
    assert training.load_state_with_optimizer(state).result().path == state and max(moments()) == kept
    assert after_a_step() == went_on
    assert training.load_state(state).result().path == state and moments() == []
    assert after_a_step() != went_on and set(moments()) == {1}
    training.load_state_with_optimizer(before).result()


def test_futures_are_awaited_and_stop_tokens_end_an_answer(training: tinker.TrainingClient) -> None:
    async def ask() -> tuple[Any, Any]:
        client = await training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.empty().append_int(1).append(types.EncodedTextChunk([2, 10, 3, 4, 13]))
        every = types.SamplingParams(max_tokens=6, seed=3, stop=torch.tensor([], dtype=torch.int64))  # type: ignore[arg-type]
        free = await client.sample(prompt, 3, every)
        (first, *_), _ = free.sequences[0].tokens, free
        stopped = asyncio.create_task(client.sample(prompt, 3, dataclasses.replace(every, stop=[first])).coroutine())
        return free, await stopped

    free, stopped = asyncio.run(ask())
    assert [len(one.tokens) for one in free.sequences] == [6] * 3 and free.sequences[0].stop_reason == "length"
    assert stopped.sequences[0].stop_reason == "stop" and len({one.sequence_id for one in free.sequences}) == 3


def test_programs_that_await_the_async_forms_run(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    async def program() -> None:
        tokens = types.ModelInput.from_ints([1, 2])
        gradients = await training.forward_backward_async(data(weights=1.0), "cross_entropy")
        update = await training.optim_step_async(STILL)
        assert (await gradients.result_async()).metrics and (await update.result_async()).metrics
        saved = await (await training.save_weights_for_sampler_async("async")).result_async()
        for client in (
            await training.save_weights_and_get_sampling_client_async(),
            await service.create_sampling_client_async(saved.path),
        ):
            answer = await client.sample_async(tokens, 2, types.SamplingParams(max_tokens=1))
            assert len(answer.sequences) == 2 and len(await client.compute_logprobs_async(tokens)) == 2

    asyncio.run(program())


def test_a_folder_may_be_named_as_the_beginning_of_another_and_a_closed_service_stays_closed(
    path: Path, tmp_path: Path
) -> None:
    with tinker.ServiceClient(sampler={"dtype": "float32"}) as service:
        for name in ("model", "model-2"):
            shutil.copytree(path, tmp_path / name)
            training = service.create_lora_training_client(str(tmp_path / name), rank=1).result()
        saved = training.save_weights_for_sampler("one").result()
        assert service.create_sampling_client(saved.path).result().get_base_model() == str(tmp_path / "model-2")
    with pytest.raises(StateError, match="the ServiceClient is closed; make another"):
        service.create_sampling_client(base_model=str(path))


def test_the_async_forms_call_the_methods_of_a_subclass() -> None:
    class Own(tinker.TrainingClient):
        def optim_step(self, optim_params: types.AdamParams) -> Any:
            return optim_params

        def save_weights_and_get_sampling_client(self, name: str | None = None) -> Any:
            return asyncio.sleep(0, name)

    async def program() -> None:
        client = object.__new__(Own)
        assert await client.optim_step_async(STILL) is STILL
        assert await client.save_weights_and_get_sampling_client_async("own") == "own"

    asyncio.run(program())


class _Host:
    """Builds no engines; ``close`` is counted."""

    made: list[_Host] = []  # noqa: RUF012 (shared on purpose)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.num_closes = 0
        self.made.append(self)
        self.at_build()

    @staticmethod
    def at_build() -> None: ...

    def close(self) -> None:
        self.num_closes += 1


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[_Host]:
    monkeypatch.setattr(service_client, "ModelHost", _Host)
    monkeypatch.setattr(_Host, "made", [])
    return _Host.made


def test_a_model_named_by_a_path_is_that_named_by_a_str(path: Path, hosts: list[_Host]) -> None:
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(path, rank=1).result()
        assert service.create_sampling_client(base_model=str(path)).result()._host is hosts[0]
        assert service.create_sampling_client(base_model=path).result()._host is hosts[0]
        saved = f"{client.get_info().model_data.model_name}/sampler/one"
        client._names[saved] = {}
        assert service.create_sampling_client(saved).result().get_base_model() == str(path)
    assert [host.num_closes for host in hosts] == [1]


def test_a_training_client_after_a_sampling_client_of_its_model_is_refused_with_the_reason(
    path: Path, hosts: list[_Host]
) -> None:
    with tinker.ServiceClient() as service:
        service.create_sampling_client(base_model=str(path)).result()
        with pytest.raises(StateError, match=r"the engines of a sampling client, .*; make the training client first"):
            service.create_lora_training_client(str(path), rank=1)
    assert len(hosts) == 1


def test_engines_that_were_built_while_the_service_was_closed_are_closed(
    path: Path, hosts: list[_Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tinker.ServiceClient()
    monkeypatch.setattr(_Host, "at_build", service.close)
    with pytest.raises(StateError, match="closed while the engines were built; make another"):
        service.create_sampling_client(base_model=str(path))
    assert [host.num_closes for host in hosts] == [1]


def test_a_failed_engine_is_restarted_for_samples_that_another_snapshot_waits_for(
    service: tinker.ServiceClient, training: tinker.TrainingClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, prompt, params = service._hosts[str(path)], types.ModelInput.from_ints([1, 2]), types.SamplingParams(4)
    first = training.save_weights_and_get_sampling_client()
    training.optim_step(STILL).result()
    second, fails = training.save_weights_and_get_sampling_client(), threading.Event()
    first.sample(prompt, 1, params).result()

    def collect(**_: Any) -> dict[int, Any]:
        if not fails.wait(0.001):
            return {}
        monkeypatch.undo()
        raise RolloutError("planted")

    monkeypatch.setattr(host.infer, "collect", collect)
    answers = [one.sample(prompt, 1, params) for one in (first, second)]
    late = asyncio.run(_gives_up(answers[1]))  # who stops waiting cancels nothing
    fails.set()
    assert late and [len(one.result(20).sequences) for one in answers] == [1, 1]
    assert host._fleet.num_failures == 1


def test_an_engine_that_fails_again_after_its_restart_fails_the_samples(
    service: tinker.ServiceClient, training: tinker.TrainingClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose weights have become NaN."""
    sampler, prompt = training.save_weights_and_get_sampling_client(), types.ModelInput.from_ints([1, 2])
    params = types.SamplingParams(4)
    sampler.sample(prompt, 1, params).result()

    def collect(**_: Any) -> dict[int, Any]:
        raise RolloutError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(service._hosts[str(path)].infer, "collect", collect)
        with pytest.raises(RolloutError, match=r"failed again .*: planted; the next sample\(\) restarts it: leave"):
            sampler.sample(prompt, 1, params).result(60)
    assert len(sampler.sample(prompt, 1, params).result(60).sequences) == 1


def test_a_prompt_that_ends_the_engine_is_not_begun_anew_after_it_was_given_up(
    service: tinker.ServiceClient, training: tinker.TrainingClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, params = training.save_weights_and_get_sampling_client(), types.SamplingParams(4)
    infer, poison, sent = service._hosts[str(path)].infer, [9, 9, 9], []

    def submit(prompts: list[Any], *arguments: Any, **options: Any) -> Any:
        sent.extend(prompts)
        if poison in prompts:
            raise RolloutError("planted")
        return type(infer).submit(infer, prompts, *arguments, **options)

    monkeypatch.setattr(infer, "submit", submit)
    with pytest.raises(RolloutError, match="leave out the prompt that it fails on"):
        sampler.sample(types.ModelInput.from_ints(poison), 1, params).result(60)
    assert len(sampler.sample(types.ModelInput.from_ints([1, 2]), 1, params).result(60).sequences) == 1
    assert sent == [poison, poison, [1, 2]]


def test_after_a_restart_that_failed_one_failure_does_not_count_as_the_second(
    service: tinker.ServiceClient, training: tinker.TrainingClient, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, prompt = training.save_weights_and_get_sampling_client(), types.ModelInput.from_ints([1, 2])
    infer, params, failures = service._hosts[str(path)].infer, types.SamplingParams(4), ["first", "second"]
    sampler.sample(prompt, 1, params).result()

    def collect(**options: Any) -> Any:
        if failures:
            raise RolloutError(failures.pop(0))
        return type(infer).collect(infer, **options)

    def restart() -> None:
        raise RolloutError("no restart")

    monkeypatch.setattr(infer, "collect", collect)
    with monkeypatch.context() as patch:
        patch.setattr(infer, "restart", restart)
        with pytest.raises(RolloutError, match="no inference engine is left: sampler 0: no restart"):
            sampler.sample(prompt, 1, params).result(60)
    assert len(sampler.sample(prompt, 1, params).result(60).sequences) == 1
    assert not failures


async def _gives_up(answer: Any) -> bool:
    try:
        await answer.result_async(0.05)
    except TimeoutError:
        return True
    return False


@pytest.mark.slow
def test_a_sampler_that_is_stopped_is_replaced_and_its_sample_comes(path: Path) -> None:
    sampler = {"devices": "cpu:1", "launcher": "process", "dtype": "float32"}
    with tinker.ServiceClient(trainer={"devices": "cpu:0"}, sampler=sampler, unhealthy_after_s=5) as service:
        client = service.create_sampling_client(base_model=str(path)).result()
        prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(4, seed=3)
        before = client.sample(prompt, 1, params).result(120)
        host = service._hosts[str(path)]
        os.kill(host.infer.executors[0].workers[0].process_id, signal.SIGSTOP)
        after = client.sample(prompt, 1, params).result(120)
        assert after.sequences[0].tokens == before.sequences[0].tokens
        assert host._fleet.num_failures == 1


def test_a_sample_that_close_cuts_short_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = tinker.ServiceClient(sampler={"dtype": "float32"})
    client = service.create_sampling_client(base_model=str(path)).result()
    monkeypatch.setattr(service._hosts[str(path)].infer, "collect", lambda **_: {})
    prompt, busy, go_on = types.ModelInput.from_ints([1]), threading.Event(), threading.Event()
    begun = client.sample(prompt, 1, types.SamplingParams(4))
    service._hosts[str(path)].submit(lambda: (busy.set(), go_on.wait(20)))
    queued = client.sample(prompt, 1, types.SamplingParams(4))
    busy.wait(20)
    threading.Timer(0.1, go_on.set).start()
    service.close()
    for answer, told in ((begun, "before this sample had ended"), (queued, "before this sample began")):
        with pytest.raises(StateError, match=told):
            answer.result(20)


def test_close_does_not_wait_for_samples_that_another_snapshot_waits_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tinker.ServiceClient(sampler={"dtype": "float32"})
    training = service.create_lora_training_client(str(path), rank=1).result()
    first = training.save_weights_and_get_sampling_client()
    training.optim_step(STILL).result()
    second, host = training.save_weights_and_get_sampling_client(), service._hosts[str(path)]
    monkeypatch.setattr(host.infer, "collect", lambda **_: {})
    waits, wait_for_samples = threading.Event(), host._wait_for_samples

    def wait() -> None:
        waits.set() if host._under_way else None
        wait_for_samples()

    monkeypatch.setattr(host, "_wait_for_samples", wait)
    prompt = types.ModelInput.from_ints([1])
    answers = [one.sample(prompt, 1, types.SamplingParams(4)) for one in (first, second)]
    assert waits.wait(20)
    closes = threading.Thread(target=service.close)
    closes.start()
    closes.join(20)
    assert not closes.is_alive()
    for answer, told in zip(answers, ("before this sample had ended", "before this sample began"), strict=True):
        with pytest.raises(StateError, match=told):
            answer.result(0)


def test_engines_are_closed_where_the_adapters_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    close = TrainEngine.close
    monkeypatch.setattr(TrainEngine, "close", lambda engine: (close(engine), closed.append(engine)))
    monkeypatch.setattr(TrainEngine, "state_dict", _raises)
    with tinker.ServiceClient(sampler={"dtype": "float32"}) as service:
        with pytest.raises(StateError, match="planted"):
            service.create_lora_training_client(str(path), rank=1)
        assert closed


def _raises(*_: Any, **__: Any) -> None:
    raise StateError("planted")


def test_the_example_learns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_grpo, "quickstart_model", lambda seed: path)
    rewards = tinker_grpo.main(4)
    assert rewards[-1] > rewards[0] + 0.5


@pytest.mark.parametrize("method", ["forward", "forward_backward", "forward_backward_custom"])
def test_a_datum_is_refused_before_the_gradients_of_others_are_added(
    method: str, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_data, "_MAX_TOKENS", 8)  # of which the first datum has as many
    first, second = data(weights=1.0)

    def changed(**inputs: Any) -> types.Datum:
        return types.Datum(second.model_input, {**second.loss_fn_inputs, **inputs})

    targets, length = second.loss_fn_inputs["target_tokens"].tolist(), second.model_input.length
    nan = changed(weights=[1.0, math.nan] + [0.0] * (length - 2))
    far, known = changed(target_tokens=[*targets[:-1], 21]), changed(target_tokens=[*targets[:-1], -100])
    refused = [
        (far, "has 21 in target_tokens; the model's token ids are 0 to 20, and -100 in target_tokens is no target")
    ]
    loss: Any = lambda _, logprobs: (sum(one.sum() for one in logprobs), {})  # noqa: E731
    if method != "forward_backward_custom":
        loss = "cross_entropy"
        refused.append((nan, "has nan as weights of token 1; give finite numbers, 0 where none is meant"))
    call = getattr(training, method)
    training.optim_step(STILL).result()
    for wrong, told in refused:
        with pytest.raises(InvalidInputError) as caught:
            call([first, wrong], loss)
        assert str(caught.value) == f"{method}(): datum 1 {told}"
    assert training.optim_step(STILL).result().metrics["grad_norm"] == 0
    call([first, known], loss).result()
    assert (training.optim_step(STILL).result().metrics["grad_norm"] > 0) == (method != "forward")


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_a_placeholder_among_log_probs_is_no_nan_where_the_advantage_is_0(
    loss: str, training: tinker.TrainingClient
) -> None:
    batch = data(logprobs=-3.0, advantages=0.0)
    first = {name: torch.as_tensor(value.data).clone() for name, value in batch[0].loss_fn_inputs.items()}
    first["logprobs"][0], first["advantages"][0] = -9999.0, 0.0
    training.optim_step(STILL).result()
    found = training.forward_backward([types.Datum(batch[0].model_input, first), batch[1]], loss).result()
    assert math.isfinite(found.metrics["loss:sum"])
    assert math.isfinite(training.optim_step(STILL).result().metrics["grad_norm"])


def test_a_step_with_gradients_that_are_not_finite_is_not_taken(training: tinker.TrainingClient) -> None:
    training.optim_step(STILL).result()
    training.forward_backward(data(weights=1e38), "cross_entropy").result()
    with pytest.raises(InvalidInputError, match=r"no step with gradients whose norm is (inf|nan): they are dropped"):
        training.optim_step(types.AdamParams(learning_rate=1.0)).result()
    assert training.optim_step(STILL).result().metrics["grad_norm"] == 0
    assert math.isfinite(training.forward(data(weights=1.0), "cross_entropy").result().metrics["loss:sum"])


def test_inputs_that_a_loss_does_not_read_are_refused(training: tinker.TrainingClient) -> None:
    told = (
        r"forward_backward\(\): datum 0 has loss_fn_inputs\['clip_low_threshold'\], which the loss does not read; "
        "accepted: target_tokens, logprobs, advantages"
    )
    with pytest.raises(InvalidInputError, match=told):
        training.forward_backward(data(logprobs=-3.0, advantages=0.0, clip_low_threshold=0.0), "ppo")


def test_a_loss_without_finite_derivatives_adds_no_gradients(
    training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_data, "_MAX_TOKENS", 8)

    def loss(_: Any, logprobs: list[torch.Tensor]) -> Any:
        return logprobs[0].sum() + (logprobs[1] - logprobs[1].detach()).sqrt().sum(), {}

    training.optim_step(STILL).result()
    with pytest.raises(InvalidInputError, match=r"in the log-probs of datum 1 is \[inf, inf.*no gradient was added"):
        training.forward_backward_custom(data(), loss).result()
    assert training.optim_step(STILL).result().metrics["grad_norm"] == 0


def test_numbers_may_be_numpys_or_tensors_and_a_loss_may_have_one_dimension(training: tinker.TrainingClient) -> None:
    ids = [1, 2, 10]
    for given in (torch.tensor(ids), list(torch.tensor(ids)), np.array(ids), list(np.array(ids)), tuple(ids), ids):
        found = types.ModelInput.from_ints(given).append_int(given[0]).to_ints()
        assert found == [*ids, 1] and {*map(type, found)} == {int}
    prompt, client = types.ModelInput.from_ints(ids), training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    (first, *_) = client.sample(prompt, 1, params).result().sequences[0].tokens
    for stop in (np.int64(first), torch.tensor(first)):
        stopped = client.sample(prompt, 1, dataclasses.replace(params, stop=[stop])).result().sequences[0]
        assert stopped.stop_reason == "stop" and stopped.tokens == [first]
    training.forward_backward_custom(
        data(), lambda _, logprobs: (sum(one.sum() for one in logprobs)[None], {})
    ).result()
    adam = types.AdamParams(learning_rate=torch.tensor(0.0), beta1=np.float64(0.5), grad_clip_norm=math.inf)
    assert (type(adam.learning_rate), type(adam.beta1)) == (float, float)
    assert training.optim_step(adam).result().metrics["grad_norm"] > 0
    inputs, losses = data(logprobs=0.0, advantages=1.0), set()
    for threshold in (0.5, np.float32(0.5), torch.tensor(0.5)):
        found = training.forward(inputs, "ppo", {"clip_low_threshold": threshold}).result()
        losses.add(found.metrics["loss:sum"])
    assert len(losses) == 1


@pytest.mark.parametrize("name", ["step=10", "a b", "step:1", "..a", "-1", "é"])
def test_a_name_may_be_that_of_any_file(name: str, training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler(name).result().path
    assert training.create_sampling_client(path)
    assert Path(training.save_state(name).result().path).name == name


def test_what_is_wrong_or_not_there_is_named(
    service: tinker.ServiceClient, training: tinker.TrainingClient, path: Path
) -> None:
    client, prompt = training.save_weights_and_get_sampling_client(), types.ModelInput.from_ints([1])
    nothing = types.ModelInput.empty()
    short = types.Datum(prompt, {"target_tokens": [1, 2], "weights": [1.0]})
    empty = types.Datum(nothing, {"target_tokens": [], "logprobs": [], "advantages": []})
    fractions = types.Datum(prompt, {"target_tokens": torch.tensor([1.5]), "weights": [1.0]})
    far = types.Datum(types.ModelInput.from_ints([10**6]), {"target_tokens": [1], "weights": [1.0]})
    for call, kind, told in (
        (lambda: training.forward_backward(data(), "cross_entropie"), InvalidInputError, "mean 'cross_entropy'"),
        (lambda: training.forward_backward(data(), "gspo"), UnsupportedError, "loss_fn='gspo' is not supported"),
        (lambda: training.forward_backward(data(), "ppo", {"clip": 1}), InvalidInputError, "no 'clip'; accepted"),
        (lambda: training.forward_backward(data(), "ppo"), InvalidInputError, "datum 0 has no loss_fn_inputs"),
        (lambda: training.forward_backward([], "ppo"), InvalidInputError, "needs at least one datum, got none"),
        (lambda: training.forward_backward([short], "cross_entropy"), InvalidInputError, "2 target_tokens for 1"),
        (lambda: types.Datum(prompt, {"weights": ["x"]}), InvalidInputError, "must be numbers"),
        (lambda: client.sample(prompt, 1, types.SamplingParams(stop="12")), UnsupportedError, "one token, and is 2"),
        (lambda: client.sample(prompt, 1, types.SamplingParams(), False, 5), UnsupportedError, "topk_prompt_logprobs"),
        (lambda: client.sample(nothing, 1, types.SamplingParams()), InvalidInputError, "a ModelInput with tokens as p"),
        (lambda: client.sample([1], 1, types.SamplingParams()), InvalidInputError, "a ModelInput with tokens as p"),
        (lambda: client.sample(prompt, 1, {"max_tokens": 1}), InvalidInputError, "takes SamplingParams as sampling_p"),
        (lambda: client.sample(prompt, 1, types.SamplingParams(stop=[None])), InvalidInputError, "token ids, each at"),
        (lambda: client.sample(prompt, 1, types.SamplingParams(stop=7)), InvalidInputError, "stop must be a text, or"),
        (lambda: types.TensorData([1, 2], "int64", [3]), InvalidInputError, r"of shape \[3\] cannot have 2 numbers"),
        (lambda: types.TensorData([1], "int32"), InvalidInputError, "dtype must be one of int64, float32; got 'int32'"),
        (lambda: training.forward_backward([fractions], "cross_entropy"), InvalidInputError, "0 has target_tokens of"),
        (lambda: client.compute_logprobs(nothing), InvalidInputError, "a ModelInput with tokens as prompt"),
        (lambda: training.forward_backward(short, "ppo"), InvalidInputError, "takes a list of Datum as data, got D"),
        (lambda: training.forward_backward([{}], "ppo"), InvalidInputError, "takes a list of Datum as data, got "),
        (lambda: training.forward_backward(data(), max), InvalidInputError, "takes a str as loss_fn, got <built-in"),
        (lambda: training.forward_backward(data(), "ppo", "x"), InvalidInputError, "or None as loss_fn_config, got"),
        (lambda: training.forward_backward([empty], "ppo"), InvalidInputError, "datum 0 has an empty model_input"),
        (lambda: training.forward([far], "cross_entropy"), InvalidInputError, "has 1000000 in model_input; the model"),
        (lambda: training.forward_backward_custom([{}], max), InvalidInputError, r"custom\(\) takes a list of Datum"),
        (lambda: training.forward_backward_custom(data(), 3), InvalidInputError, "takes a function as loss_fn, got 3"),
        (
            lambda: training.forward_backward_custom(data(), lambda given, found: found[0]).result(),
            InvalidInputError,
            r"must return \(loss, metrics\)",
        ),
        (
            lambda: training.forward_backward_custom(data(), lambda given, found: (found[0], {})).result(),
            InvalidInputError,
            "a tensor of one number that depends on",
        ),
        (lambda: training.optim_step({"lr": 1}), InvalidInputError, "takes AdamParams as optim_params, got {'lr'"),
        (lambda: types.AdamParams(learning_rate=float("nan")), InvalidInputError, "learning_rate must be a finite num"),
        (lambda: types.AdamParams(learning_rate="x"), InvalidInputError, "learning_rate must be a finite number of at"),
        (lambda: types.AdamParams(beta1=1), InvalidInputError, "beta1 must be a finite number of at least 0 below 1"),
        (lambda: types.ModelInput.from_ints("12"), InvalidInputError, "takes whole numbers of at least 0, got '12'"),
        (lambda: types.AdamParams(grad_clip_norm=-1), InvalidInputError, r"at least 0 \(0 or infinity: no c"),
        (lambda: types.AdamParams(learning_rate=torch.ones(2)), InvalidInputError, "learning_rate must be a finite"),
        (lambda: types.AdamParams(learning_rate=math.inf), InvalidInputError, "learning_rate must be a finite number"),
        (lambda: types.ModelInput.from_ints([True]), InvalidInputError, "takes whole numbers of at least 0, got "),
        (lambda: prompt.append_int(1.5), InvalidInputError, r"whole numbers of at least 0, got \[1.5\]"),
        (lambda: types.ModelInput.from_ints([-1]), InvalidInputError, "takes whole numbers of at least 0, got "),
        (lambda: types.ModelInput.from_ints(torch.tensor(1)), InvalidInputError, "takes whole numbers of at least 0"),
        (lambda: types.ModelInput.from_ints([1.5]), InvalidInputError, "takes whole numbers of at least 0, got "),
        (lambda: types.Datum([1], {}), InvalidInputError, r"a Datum takes a ModelInput and a mapping, got \[1\]"),
        (lambda: types.Datum(prompt, [1]), InvalidInputError, "a Datum takes a ModelInput and a mapping, got"),
        *(
            (lambda name=name: training.save_state(name), InvalidInputError, r'takes a name \(not "", "." or "..", a')
            for name in ("../mine", "", ".", "..", "a\0b", 3)
        ),
        (lambda: training.load_state(None), InvalidInputError, "takes a non-empty str or Path as path, got None"),
        (lambda: tinker.ServiceClient(trainer="cpu"), InvalidInputError, "a mapping, or None as trainer, got 'cpu'"),
        (lambda: tinker.ServiceClient(folder=None), InvalidInputError, "a non-empty str or Path as folder, got None"),
        (lambda: service.create_lora_training_client(None), InvalidInputError, "a non-empty str or Path as base_model"),
        (lambda: service.create_lora_training_client("m", 0), InvalidInputError, "at least 1 as rank, got 0"),
        (lambda: service.create_lora_training_client("m", 2, "x"), InvalidInputError, "or None as seed, got 'x'"),
        (lambda: service.create_lora_training_client("m", 2, 0, False, False), InvalidInputError, "needs train_mlp or"),
        (lambda: service.create_lora_training_client(str(path)), StateError, "has a client already"),
        (service.create_sampling_client, InvalidInputError, "takes one of model_path and base_model"),
        (lambda: service.create_sampling_client("x"), InvalidInputError, "no weights were saved as 'x'"),
        (lambda: training.forward([], "ppo", {"clip_low_threshold": "x"}), InvalidInputError, "a number, got 'x'"),
        (lambda: training.forward([], "dro", {"beta": math.nan}), InvalidInputError, "must be a number, got nan"),
        (lambda: tinker.ServiceClient(trainer={"data_parallel_size": 2}), UnsupportedError, "above 1"),
    ):  # fmt: skip
        with pytest.raises(kind, match=told):
            call()
    assert set(DEFAULTS) <= set(LOSSES)


def test_names_and_defaults_are_those_of_the_real_package() -> None:
    """Each method takes the real one's arguments, in their order and with their defaults, as far as it takes them."""
    real = pytest.importorskip("tinker", reason="Tinker's SDK is not installed: pip install tinker")
    for name in ("ServiceClient", "TrainingClient", "SamplingClient", "APIFuture"):
        ours, theirs = getattr(tinker, name), getattr(real, name)
        for method, function in inspect.getmembers(ours, inspect.isfunction):
            if method.startswith("_"):
                continue
            found = list(inspect.signature(function).parameters.values())
            wanted = list(inspect.signature(getattr(theirs, method)).parameters.values())
            positional = [one for one in wanted if one.kind is not inspect.Parameter.KEYWORD_ONLY]
            assert [one.name for one in found] == [one.name for one in positional[: len(found)]], f"{name}.{method}"
            assert [one.default for one in found] == [one.default for one in positional[: len(found)]] or (
                method in {"optim_step", "optim_step_async"}  # theirs may be left out for another optimizer's
            ), f"{name}.{method}"
    for name in ("AdamParams", "SamplingParams"):
        wanted = {field: one.default for field, one in getattr(real, name).model_fields.items()}
        assert {one.name: one.default for one in dataclasses.fields(getattr(types, name))} == wanted, name
    for name in ("SampledSequence", "SampleResponse", "ForwardBackwardOutput", "OptimStepResponse", "TensorData"):
        for field in dataclasses.fields(getattr(types, name)):
            theirs = getattr(real, name)
            fields = getattr(theirs, "model_fields", None) or theirs.__dataclass_fields__
            assert field.name in fields or hasattr(theirs, field.name), f"{name}.{field.name}"
    ours, theirs = types.ModelInput.from_ints([1, 2]).append_int(3), real.ModelInput.from_ints([1, 2]).append_int(3)
    assert (ours.to_ints(), ours.length) == (theirs.to_ints(), theirs.length) == ([1, 2, 3], 3)
    datum = {"target_tokens": [1, 2, 3], "weights": [0, 1, 1]}
    for name, one in types.Datum(ours, datum).loss_fn_inputs.items():
        other = real.Datum(model_input=theirs, loss_fn_inputs=datum).loss_fn_inputs[name]
        assert (one.dtype, one.tolist(), list(one.shape)) == (other.dtype, other.data, list(other.shape))
