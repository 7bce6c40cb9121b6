"""Arguments of another kind than a function takes are refused by name, and not by what fails on them further down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import InvalidInputError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

from .train_batches import packed_batch, padded_batch


@pytest.fixture(scope="session")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)

    return Policy


def test_of_a_train_engine(engine: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        r"save\(\) takes a non-empty str or Path as folder, got None": lambda: engine.save(None),
        r"load\(\) takes a non-empty str or Path as folder, got None": lambda: engine.load(None),
        r"export\(\) takes a non-empty str or Path as folder, got 3": lambda: engine.export(3),
        r"load_state_dict\(\) takes a mapping of tensors, as state_dict\(\) gives, as state, got None": lambda: (
            engine.load_state_dict(None)
        ),
        r"swap\(\) takes a list of pairs .* as out, got <": lambda: rlcore.swap(out=engine, in_=[]),
        r"swap\(\) takes a list of pairs .* such as \[\(train, \(\)\)\], as in_, got None": lambda: rlcore.swap(
            out=[],
            in_=None,  # type: ignore[arg-type]
        ),
    }
    for message, call in calls.items():
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            call()


def test_weights_that_are_no_numbers_are_refused_and_change_nothing(engine: Any) -> None:
    state = engine.state_dict()
    name = list(state)[-1]
    wrong = {**state, name: state[name].clone()}
    wrong[name].view(-1)[3] = torch.nan
    with pytest.raises(InvalidInputError, match=rf"^load_state_dict\(\) got NaN in {name}; give weights that are"):
        engine.load_state_dict({key: value + 1 if key != name else value for key, value in wrong.items()})
    assert all(torch.equal(value, state[key]) for key, value in engine.state_dict().items())


def test_no_engine_reserves_more_than_the_host_has(policy: Any, qwen2_folder: Any) -> None:
    told = r"^reserve_host_bytes must be at most \d+, the memory of this host, or None; got 4611686018427387904$"
    with pytest.raises(InvalidInputError, match=told):
        rlcore.InferenceEngine(qwen2_folder).build(devices="cpu", reserve_host_bytes=1 << 62)


def test_a_batch_whose_mask_numbers_its_sequences_is_refused(engine: Any) -> None:
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.tensor([[1, 1, 2, 2]])}
    with pytest.raises(InvalidInputError, match=r"attention_mask must be 0 or 1 for each token; got 2 at \[0, 2\]"):
        engine.forward_logprobs(batch)


def test_outputs_that_are_none_are_refused() -> None:
    for outputs, message in {"x": "takes a list or tuple as outputs, got 'x'", (3,): "got a list that has 3"}.items():
        with pytest.raises(InvalidInputError, match=rf"^collate\(\) .*{message}$"):
            rlcore.collate(outputs)  # type: ignore[arg-type]


class Wrapper(torch.optim.Optimizer):
    """An optimizer by its class only, as those of accelerate are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_of_offloaded() -> None:
    module: Any = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    calls: dict[str, tuple[Any, ...]] = {
        "modules with parameters, or optimizers; this ReLU has none": (torch.nn.ReLU(),),
        "modules with parameters, or optimizers; got none": (),
        "torch.nn.Module and torch.optim.Optimizer, got StepLR; give each": (module, optimizer, scheduler),
        "optimizers of torch, or wrappers with one as .optimizer; this Wrapper wraps int": (Wrapper(3),),
    }
    for message, arguments in calls.items():
        with pytest.raises(InvalidInputError, match=rf"^offloaded\(\) takes {message}"), rlcore.offloaded(*arguments):
            pass
    assert module.weight.untyped_storage().nbytes() > 0


def test_an_attention_mask_of_another_shape_is_named_with_that_of_the_tokens(engine: rlcore.TrainEngine) -> None:
    batch = padded_batch()
    for mask in (batch["attention_mask"][:, :-1], batch["attention_mask"][:-1], batch["attention_mask"][0]):
        message = (
            rf"^attention_mask must have the shape of input_ids, \[5, 12\], got \[{', '.join(map(str, mask.shape))}\]"
        )
        with pytest.raises(InvalidInputError, match=message):
            engine.train_batch(batch | {"attention_mask": mask}, ppo_clip())
        with pytest.raises(InvalidInputError, match=message):
            engine.forward_logprobs(batch | {"attention_mask": mask})


def test_a_loss_mask_of_fractions_is_refused(engine: rlcore.TrainEngine) -> None:
    batch = padded_batch()
    batch["loss_mask"] = batch["loss_mask"].float()
    engine.train_batch(batch, ppo_clip())
    for value in (0.5, 2.0, -1.0, float("nan")):
        batch["loss_mask"][1, 2] = value
        message = rf"^loss_mask must be 0 or 1, or False or True, for each token, got {value}; .* multiply in loss_fn"
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(InvalidInputError, match=message):
                call(batch, ppo_clip())
        with pytest.raises(InvalidInputError, match=message):
            engine.forward_logprobs(batch)


def test_a_batch_without_a_trained_token_takes_a_step_and_warns(
    engine: rlcore.TrainEngine, caplog: pytest.LogCaptureFixture
) -> None:
    batch = padded_batch()
    engine.train_batch(batch, ppo_clip())
    assert "no token" not in caplog.text
    found = engine.train_batch(batch | {"loss_mask": torch.zeros(5, 12)}, ppo_clip())
    assert (found["num_tokens"], found["grad_norm"], found["loss"]) == (0, 0.0, 0.0)
    assert "no token that is trained on: optimizers and schedulers take a step all the same" in caplog.text
    assert engine.train_batch(batch, ppo_clip())["lr/optimizer"] == pytest.approx(1e-2 / 4), "the third step's rate"


def test_a_packed_batch_with_masked_tokens_is_refused(engine: rlcore.TrainEngine) -> None:
    """All of its tokens are of sequences: what the mask leaves out would be scored, and seen by the tokens after it."""
    batch = packed_batch()
    whole = torch.ones_like(batch["input_ids"])
    kept = engine.eval_batch(batch, ppo_clip())["loss"]
    assert engine.eval_batch(batch | {"attention_mask": whole}, ppo_clip())["loss"] == kept

    def counts(logprob: torch.Tensor, entropy: Any, per_token: Any) -> Any:
        return logprob, {"attended_mean": per_token["attention_mask"].float()}

    assert engine.eval_batch(batch | {"attention_mask": whole}, counts)["attended_mean"] == 1
    one, sequence = whole.clone(), torch.ones(7)
    one[3] = sequence[2] = 0
    message = r"^attention_mask is (0|0.0|False) for token \d+ of a packed batch, .*; leave it out of input_ids and"
    for mask in (one, one.bool(), sequence):
        masked = batch | {"attention_mask": mask}
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(InvalidInputError, match=message):
                call(masked, ppo_clip())
        with pytest.raises(InvalidInputError, match=message):
            engine.forward_logprobs(masked)


def test_log_probs_are_of_any_arrays_that_are_trained_on(engine: rlcore.TrainEngine) -> None:
    batch = {name: value for name, value in padded_batch().items() if name in ("input_ids", "attention_mask")}
    expected = engine.forward_logprobs(batch)
    for mask in (batch["attention_mask"], batch["attention_mask"].long()):
        given = {"input_ids": batch["input_ids"], "attention_mask": mask}
        for form in (lambda value: value.numpy(), lambda value: value.tolist()):
            found = engine.forward_logprobs({name: form(value) for name, value in given.items()})
            assert torch.equal(found, expected)
    assert torch.equal(engine.forward_logprobs({"input_ids": [[3, 4], [5, 6]]})[:, 0], torch.zeros(2))
    with pytest.raises(InvalidInputError, match=r"^batch entry 'input_ids' must be a tensor or numbers, got"):
        engine.forward_logprobs({"input_ids": [[3, 4], [5]]})
