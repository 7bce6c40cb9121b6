"""transformers' own Trainer with rlcore's losses, against the same Trainer with losses of logits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlcore.errors import InvalidInputError, StateError, UnsupportedError
from rlcore.integrations.causal_head import CausalHead
from rlcore.integrations.transformers import (
    OffloadOptimizer,
    distillation_loss,
    dpo_loss,
    next_token_loss,
    sequence_logprobs,
    train_without_logits,
)
from tests.accuracy import assert_as_accurate, assert_same_bits

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCABULARY, LENGTH = 40, 9


def model_of(dtype: torch.dtype = torch.float32, family: str = "Qwen2", **options: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**shape, **heads, **options)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=torch.float32).to(dtype)


def rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        is_prompt = torch.arange(LENGTH) < torch.randint(1, LENGTH - 2, (), generator=generator)
        found.append({"input_ids": ids, "labels": ids.masked_fill(is_prompt, -100), **columns})
    return found


class Trained(NamedTuple):
    losses: Tensor
    gradients: list[Tensor]


class Gradients(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **unused: Any) -> None:
        self.found = [parameter.grad.clone() for parameter in model.parameters()]


def trained(model: Any, folder: Path, *, columns: dict[str, Any] | None = None, **options: Any) -> Trained:
    """Return the loss of 16 steps, of two batches each, and the gradients of the last one; no weight changes."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=16, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.0,
        max_grad_norm=0.0, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    gradients = Gradients()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(128, **(columns or {})), callbacks=[gradients], **options
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(torch.tensor(losses, dtype=torch.float64), gradients.found)


def token_logprobs(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    following = labels[:, 1:]
    every = outputs.logits[:, :-1].log_softmax(-1)
    is_scored = following != -100
    return every.gather(-1, following.clamp(min=0)[..., None]).squeeze(-1).where(is_scored, 0.0), is_scored


def by_logits_dpo(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    chosen, rejected = (token_logprobs(outputs, labels)[0].sum(-1) + 20.0).chunk(2)
    return -functional.logsigmoid(0.3 * (chosen - rejected)).mean() / 2  # two batches a step


def by_logits_distillation(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logprob, is_scored = token_logprobs(outputs, labels)
    return ((logprob + 2.0).square() * is_scored).sum() / 2 / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "plain_loss", "columns"),
    [
        (next_token_loss, None, {}),
        (functools.partial(dpo_loss, beta=0.3), by_logits_dpo, {"ref_logprobs": torch.tensor(-20.0)}),
        (distillation_loss, by_logits_distillation, {"teacher_logprobs": torch.full((LENGTH,), -2.0)}),
    ],
    ids=["next token", "dpo", "distillation"],
)
@pytest.mark.parametrize("family", ["Qwen2", "Gemma2"])
def test_trainer_has_the_losses_and_gradients_of_the_logits(
    loss: Callable[..., Tensor], plain_loss: Any, columns: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """Gemma 2 has a softcap; a step is of two batches, whose numbers of labels differ."""
    found = trained(train_without_logits(model_of(family=family), loss), tmp_path, columns=columns)
    plain = trained(model_of(family=family), tmp_path, compute_loss_func=plain_loss)
    exact = trained(model_of(torch.float64, family), tmp_path, compute_loss_func=plain_loss)
    assert_as_accurate(found.losses.float(), plain.losses.float(), exact.losses, what="losses")
    assert_as_accurate(found.gradients, plain.gradients, exact.gradients, what="gradients")


def test_a_model_that_trains_gives_a_loss_and_no_logits_and_else_is_as_before() -> None:
    model = model_of()
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in ("input_ids", "labels")}
    before = model.eval()(**batch)
    assert train_without_logits(model) is model
    after = model(**batch)
    assert_same_bits(after.logits, before.logits, "the same operations")
    assert_same_bits(after.loss, before.loss, "the same operations")
    model.train()
    assert model(**batch).logits is None
    with pytest.raises(UnsupportedError, match="give each process whole rows"):  # the loss would not be that of the row
        model(**batch, shift_labels=batch["labels"].roll(-1, 1))
    assert model(input_ids=batch["input_ids"]).logits is not None
    assert model.generate(batch["input_ids"][:1, :3], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 5)


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    """As averages of weights and models of reference are made."""
    model = train_without_logits(model_of()).train()
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in ("input_ids", "labels")}
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(3)
    plain = model_of()
    plain.load_state_dict(copied.state_dict())
    expected = train_without_logits(plain).train()(**batch).loss
    found = copied(**batch).loss
    assert_same_bits(found, expected, "the same operations")
    found.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_models_with_another_loss_are_refused_and_keep_their_forward() -> None:
    balanced = model_of(family="Mixtral", num_local_experts=2, output_router_logits=True)
    with pytest.raises(UnsupportedError, match="experts' balance; set output_router_logits=False"):
        train_without_logits(balanced)
    other = model_of()
    other.loss_function = lambda *args, **options: torch.zeros(())
    with pytest.raises(UnsupportedError, match="not that of the next token"):
        train_without_logits(other)
    assert "forward" not in vars(balanced) | vars(other)


def test_columns_of_another_shape_are_named() -> None:
    model = model_of()
    head, labels = CausalHead(model), torch.ones(3, LENGTH, dtype=torch.int64)
    hidden = torch.zeros(3, LENGTH, 32)
    assert sequence_logprobs(head, hidden, labels).shape == (3,)
    with pytest.raises(InvalidInputError, match=r"got 3 rows and ref_logprobs of shape \(3,\)"):
        dpo_loss(head, hidden, labels, ref_logprobs=torch.zeros(3))
    with pytest.raises(InvalidInputError, match=r"each label, \(3, 9\); got \(3,\)"):
        distillation_loss(head, hidden, labels, teacher_logprobs=torch.zeros(3))


class Watch(transformers.TrainerCallback):
    """Notes whether the optimizer can be used while the model is evaluated."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_prediction_step(self, args: Any, state: Any, control: Any, *, optimizer: Any, **unused: Any) -> None:
        try:
            optimizer.state_dict()
        except StateError:
            self.seen.append("away")
        else:
            self.seen.append("here")


def weights_after(callbacks: list[Any], folder: Path) -> dict[str, Tensor]:
    model = model_of()
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(8), eval_dataset=rows(4), callbacks=callbacks)
    trainer.train()
    return model.state_dict()


@pytest.mark.slow
def test_the_optimizer_is_away_in_evaluations_and_training_and_checkpoints_are_the_same(tmp_path: Path) -> None:
    watch = Watch()
    found = weights_after([OffloadOptimizer(), watch], tmp_path / "away")
    assert watch.seen == ["away"] * 4
    plain_watch = Watch()
    plain = weights_after([plain_watch], tmp_path / "here")
    assert plain_watch.seen == ["here"] * 4
    for name, weight in found.items():
        assert_same_bits(weight, plain[name], name)
    folders = [tmp_path / side / "checkpoint-4" / "optimizer.pt" for side in ("away", "here")]
    states = [torch.load(path, weights_only=True)["state"] for path in folders]
    for number, state in states[0].items():
        assert_same_bits(state["exp_avg"], states[1][number]["exp_avg"], "data that is moved")
