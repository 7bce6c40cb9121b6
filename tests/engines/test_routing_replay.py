"""Routing replay from the sampler to the trainer's step: the hf executor's routes, batches, micro-batches, metrics."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.batch import to_packed
from rlcore.engines.executors.mismatch import MISMATCH, Mismatch
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.losses.interface import sequence_level
from rlcore.nn import HuggingFaceTrainModule
from rlcore.routing.routers import NO_ROUTE, ROUTES, routers_of, selecting
from tests.accuracy import assert_as_accurate, assert_parts_as_accurate, assert_within_rounding, rounding

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

NUM_EXPERTS = 6
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
EXPERTS = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module")
def folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen3MoeConfig

    return write_checkpoint(Qwen3MoeConfig(**tiny_config | {"num_hidden_layers": 3}, **EXPERTS))


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Iterator[rlcore.InferenceEngine]:
    with rlcore.InferenceEngine(folder, executor="hf") as engine:
        yield engine.build(devices="cpu", enable_return_routed_experts=True)


def params(**changes: Any) -> dict[str, Any]:
    return {"n": 2, "max_tokens": 9, "ignore_eos": True, "seed": 1} | changes


@pytest.fixture(scope="module")
def outputs(sampler: rlcore.InferenceEngine) -> list[RequestOutput]:
    return sampler.generate(PROMPTS, [params(), params(n=3, max_tokens=2), params(max_tokens=1)])


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def routes_alone(model: Any, ids: list[int]) -> Tensor:
    """Return what the routers themselves choose for one sequence, [tokens, layers, experts]."""
    found: dict[int, Tensor] = {}
    hooks = [
        router.module.register_forward_hook(lambda _, __, out, at=router.layer: found.update({at: out[2]}))
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([found.get(layer, torch.zeros(len(ids), 2)) for layer in range(3)], 1).to(torch.int16)


def test_completions_have_the_experts_of_every_token_that_ran(folder: Path, outputs: list[RequestOutput]) -> None:
    model = loaded(folder)
    for output in outputs:
        for completion in output.outputs:
            ids = output.prompt_token_ids + completion.token_ids
            found = completion.routed_experts
            assert found is not None
            assert torch.equal(found, routes_alone(model, ids[:-1])), "of left-padded rows, some of which have ended"


def test_submitted_requests_have_them_too_and_others_have_none(
    folder: Path, sampler: rlcore.InferenceEngine, outputs: list[RequestOutput]
) -> None:
    numbers = sampler.submit(PROMPTS[:1], params())
    collected = sampler.collect(None)
    assert list(collected) == list(numbers)
    for one, other in zip(collected[numbers[0]].outputs, outputs[0].outputs, strict=True):
        assert torch.equal(one.routed_experts, other.routed_experts)
    with rlcore.InferenceEngine(folder, executor="hf") as engine:
        engine.build(devices="cpu")
        assert engine.generate([[1, 2]], params(n=1))[0].outputs[0].routed_experts is None


def test_a_sampler_without_experts_refuses(qwen2_folder: Path) -> None:
    with rlcore.InferenceEngine(qwen2_folder, executor="hf") as engine:
        with pytest.raises(UnsupportedError, match="Qwen2ForCausalLM is not supported: it has no router"):
            engine.build(devices="cpu", enable_return_routed_experts=True)
        with pytest.raises(InvalidInputError, match="enable_return_routed_experts must be True or False, got 'yes'"):
            engine.build(devices="cpu", enable_return_routed_experts="yes")


# -------------------------------------------------------------------------------------------------- training


def policy(folder: Path) -> Any:
    from transformers import Qwen3MoeForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen3MoeForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def own_weights(self) -> dict[str, Tensor]:
            return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    with rlcore.meta_device():
        return Policy.from_pretrained(folder)


@pytest.fixture
def build(folder: Path) -> Iterator[Callable[..., rlcore.TrainEngine]]:
    engines: list[rlcore.TrainEngine] = []

    def make(**options: Any) -> rlcore.TrainEngine:
        engines.append(rlcore.TrainEngine(policy(folder)))
        return engines[-1].build(devices="cpu", **options)

    yield make
    for engine in engines:
        engine.close()


def forced(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with routes that no router would take, but for what has none."""
    generator = torch.Generator().manual_seed(7)
    first = torch.randint(NUM_EXPERTS, batch[ROUTES].shape[:-1], generator=generator)
    others = torch.stack([first, (first + 1) % NUM_EXPERTS], -1).to(torch.int16)
    return batch | {ROUTES: torch.where(batch[ROUTES] == NO_ROUTE, batch[ROUTES], others)}


def step_alone(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Taken]:
    """Log-probs [R], weights after a step of plain SGD on -sum(logprob), and the experts that ran: by transformers.

    Each sequence runs alone, with the routes of the batch if it has some.
    """
    logprobs, taken = [], Taken()
    routed = batch.get(ROUTES, torch.full((*batch["input_ids"].shape, 3, 1), NO_ROUTE))
    for row, mask in enumerate(batch["attention_mask"]):
        ids, routes = batch["input_ids"][row][mask], routed[row][mask]

        def select(router: Any, own: Tensor, routes: Tensor = routes) -> Tensor:
            route = routes[:, router.layer].long()
            return taken.keep(router, torch.where(route == NO_ROUTE, own, route))

        with selecting(routers_of(model), select):
            logits = model(input_ids=ids[None]).logits[0, :-1]
        logprob = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logprobs.append(logprob[batch["loss_mask"][row][mask][1:]])
    joined = torch.cat(logprobs)
    (-joined.mean()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    return joined.detach(), {name: one.detach() for name, one in model.named_parameters()}, taken


class Taken:
    """The experts that some tokens took, by layer."""

    def __init__(self) -> None:
        self._by_layer: dict[int, list[Tensor]] = {}

    def keep(self, router: Any, selected: Tensor) -> Tensor:
        self._by_layer.setdefault(router.layer, []).append(selected.detach())
        return selected

    def load(self) -> dict[str, float]:
        """Return the metrics of the load, in float64."""
        counts = torch.stack([torch.cat(one).flatten().bincount(minlength=6) for one in self._by_layer.values()])
        share = counts.double() / counts.sum(1, keepdim=True)
        entropy = -torch.special.xlogy(share, share).sum(1) / math.log(6)
        return {
            "max_over_mean": float(share.max() * 6),
            "entropy": float(entropy.mean()),
            "unused": float((counts == 0).double().mean()),
        }


def assert_load(metrics: dict[str, float], taken: Taken) -> None:
    """The counts are the same; a few operations in float32 follow."""
    for name, exact in taken.load().items():
        found = metrics[f"expert_load/{name}"]
        assert_within_rounding(found, exact, magnitude=1.0, terms=20, dtype=torch.float32)


def minus_logprob(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprob, {}


@pytest.mark.parametrize(
    ("options", "is_packed"),
    [
        ({}, True),
        pytest.param({"activation_checkpointing": True}, False, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "selective"}, True, marks=pytest.mark.slow),
    ],
    ids=["packed", "padded, recomputed", "packed, selective"],
)
def test_a_step_takes_the_experts_of_the_batch_and_the_routers_weights(
    folder: Path,
    outputs: list[RequestOutput],
    build: Callable[..., rlcore.TrainEngine],
    options: dict[str, Any],
    is_packed: bool,
) -> None:
    batch = forced(rlcore.collate(outputs))
    exact_model = loaded(folder).double()
    exact_model.config._experts_implementation = "eager"  # torch's grouped product takes no float64
    exact, exact_weights, _ = step_alone(exact_model, batch)
    reference, reference_weights, taken = step_alone(loaded(folder), batch)
    engine, kept = build(**options), batch["loss_mask"]
    given = to_packed(batch) if is_packed else batch
    scored = engine.forward_logprobs(given)
    if is_packed:
        scored, kept = scored[given["loss_mask"]], torch.ones_like(reference, dtype=torch.bool)
    assert_as_accurate(scored[kept], reference, exact)
    metrics = engine.train_batch(given, minus_logprob, max_tokens_per_micro_batch=30, max_grad_norm=None)
    assert_parts_as_accurate(engine.own_weights()[0], reference_weights, exact_weights)
    assert_load(metrics, taken)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "activation_checkpointing": "selective"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "recomputed", "compiled, selective"],
)
def test_the_load_of_experts_is_counted_without_routes_too(
    folder: Path, outputs: list[RequestOutput], build: Callable[..., rlcore.TrainEngine], options: dict[str, Any]
) -> None:
    """It is that of what the routers choose, of a batch of micro-batches, in a step and in an evaluation."""
    batch = rlcore.collate(outputs)
    del batch[ROUTES]
    _, _, taken = step_alone(loaded(folder), batch)
    engine, limit = build(**options), {"max_tokens_per_micro_batch": 30}
    assert_load(engine.eval_batch(batch, minus_logprob, **limit), taken)
    assert_load(engine.train_batch(batch, minus_logprob, **limit), taken)


def test_the_samplers_routes_bring_a_trainer_with_other_routers_back(
    outputs: list[RequestOutput], build: Callable[..., rlcore.TrainEngine]
) -> None:
    """The router's last bits decide between experts of equal score; here its weights are moved by more than that."""
    engine, batch = build(), rlcore.collate(outputs)
    state = engine.state_dict()
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) if "gate.weight" in name else tensor
        for name, tensor in state.items()
    }
    engine.load_state_dict(moved)
    plain = {name: entry for name, entry in batch.items() if name != ROUTES}
    without, replayed = engine.eval_batch(plain, minus_logprob), engine.eval_batch(batch, minus_logprob)
    assert replayed[f"{MISMATCH}mean"] < 0.5 * without[f"{MISMATCH}mean"]
    assert replayed[f"{MISMATCH}effective_sample_size"] > without[f"{MISMATCH}effective_sample_size"]


def test_routes_of_another_model_are_refused(
    outputs: list[RequestOutput], build: Callable[..., rlcore.TrainEngine]
) -> None:
    engine, batch = build(), rlcore.collate(outputs)
    for call in (engine.forward_logprobs, lambda given: engine.train_batch(given, minus_logprob)):
        with pytest.raises(InvalidInputError, match="routed_experts has 2 layers of 2 experts a token"):
            call(batch | {ROUTES: batch[ROUTES][:, :, :2]})
        with pytest.raises(InvalidInputError, match=r"routed_experts must be whole numbers of shape \[\d+ tokens"):
            call(batch | {ROUTES: batch[ROUTES].float()})


@pytest.fixture
def two_devices(
    shared_devices: tuple[str, ...], short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    return shared_devices


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"sequence_parallel_size": 2},
        {"data_parallel_size": 2, "expert_parallel_size": 2},
        {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    ],
    ids=["data", "Ulysses", "EP", "TP, EP"],
)
def test_ranks_take_the_routes_of_their_own_tokens(
    folder: Path,
    outputs: list[RequestOutput],
    build: Callable[..., rlcore.TrainEngine],
    two_devices: tuple[str, ...],
    options: dict[str, int],
) -> None:
    batch = forced(rlcore.collate(outputs))
    own = {name: entry for name, entry in batch.items() if name != ROUTES}
    alone, limit = build(), {"max_tokens_per_micro_batch": 30}
    reference, alone_own = alone.forward_logprobs(batch), alone.eval_batch(own, minus_logprob)
    alone_metrics = alone.train_batch(batch, minus_logprob)
    exact_model = loaded(folder).double()
    exact_model.config._experts_implementation = "eager"
    exact, _, taken = step_alone(exact_model, batch)
    with rlcore.TrainEngine(policy(folder)) as engine:
        engine.build(devices=two_devices, launcher="process", timeout_s=250, **options)
        found, own_metrics = engine.forward_logprobs(batch), engine.eval_batch(own, minus_logprob, **limit)
        metrics = engine.train_batch(batch, minus_logprob, **limit)
    kept = batch["loss_mask"]
    assert_as_accurate(found[kept], reference[kept], exact)
    assert_load(metrics, taken)
    assert_load(own_metrics, step_alone(loaded(folder), own)[2])
    assert loads(metrics) == loads(alone_metrics) != loads(own_metrics) == loads(alone_own), "of the same counts"
    p99 = f"{MISMATCH}p99"
    assert alone_metrics[p99] / 2 ** (1 / 32) <= metrics[p99] * (1 + rounding(8)), "the bin, or the next"


def loads(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("expert_load/")}


# -------------------------------------------------------------------------------------------------- mismatch


def apart_of(count: int, scale: float) -> Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scale", [1e-6, 0.05, 2.0])
def test_mismatch_is_that_of_all_tokens_however_they_come(scale: float) -> None:
    apart = apart_of(5000, scale)
    mismatch = Mismatch(torch.device("cpu"))
    for part in (*apart.split(999), torch.zeros(0)):
        mismatch.add(part)
    found = {name.removeprefix(MISMATCH): float(value) for name, value in mismatch.joined().items()}
    exact = apart.double()
    ratio = exact.clamp(max=20).exp()
    size = float(exact.abs().mean())
    assert_within_rounding(found["mean"], size, terms=len(apart), dtype=torch.float32)
    assert_within_rounding(found["bias"], float(exact.mean()), magnitude=size, terms=len(apart), dtype=torch.float32)
    share = float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum()))
    assert_within_rounding(found["effective_sample_size"], share, terms=3 * len(apart), dtype=torch.float32)
    p99 = float(exact.abs().quantile(0.99, interpolation="lower"))
    rounded = 1 + rounding(8)  # of a logarithm, its place among bins, and the power of two that is their edge
    assert p99 <= found["p99"] * rounded <= p99 * 2 ** (1 / 32) * rounded**2, "the upper edge of its bin"


def test_no_difference_and_no_token_are_no_mismatch() -> None:
    for apart in (torch.zeros(10), torch.zeros(0)):
        mismatch = Mismatch(torch.device("cpu"))
        mismatch.add(apart)
        assert [float(value) for value in mismatch.joined().values()] == [0.0, 0.0, 0.0, 1.0]


def test_a_watched_loss_is_the_same_loss() -> None:
    mismatch, seen = Mismatch(torch.device("cpu")), []

    @sequence_level
    def loss(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(per_token)
        return logprob * 2, {"x_mean": logprob}

    watched = mismatch.watching(loss)
    assert isinstance(watched, sequence_level)
    given = {"old_logprobs": torch.tensor([-1.0]), "rollout_logprobs": torch.tensor([-2.0])}
    value, stats = watched(torch.tensor([-1.0]), None, given)
    assert (value.tolist(), stats["x_mean"].tolist(), seen) == ([-2.0], [-1.0], [given])
    assert float(mismatch.joined()[f"{MISMATCH}bias"]) == 1.0, "against what was sampled"


def noisy(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"old_logprobs": batch["old_logprobs"] + batch["noise"]}


CAUSES = {
    "top_p or top_k": lambda batch: batch | {"old_logprobs": batch["old_logprobs"] + 0.05 * batch["noise"].abs()},
    "versions 3 to 4 of the weights": lambda batch: (
        noisy(batch) | {"versions": torch.where(batch["loss_mask"], 3 + (batch["input_ids"] % 2), -1)}
    ),
    "enable_return_routed_experts=True": lambda batch: {k: v for k, v in noisy(batch).items() if k != ROUTES},
    "fewer bits": noisy,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_step_with_a_mismatch_warns_once_and_names_the_cause(
    outputs: list[RequestOutput],
    build: Callable[..., rlcore.TrainEngine],
    caplog: pytest.LogCaptureFixture,
    cause: str,
) -> None:
    engine, batch = build(), rlcore.collate(outputs)
    with caplog.at_level(logging.WARNING, "rlcore"):
        engine.train_batch(batch, minus_logprob, max_grad_norm=1e-6)
        assert not caplog.messages, "the hf executor's are the trainer's"
        shape = batch["old_logprobs"].shape
        given = CAUSES[cause](batch | {"noise": torch.randn(shape, generator=torch.Generator().manual_seed(0))})
        for _ in range(2):
            metrics = engine.train_batch(given, minus_logprob, max_grad_norm=1e-6)
    assert (metrics[f"{MISMATCH}effective_sample_size"] < 0.9) is (cause != "top_p or top_k")
    assert len(caplog.messages) == 1, caplog.messages
    assert cause in caplog.messages[0]
