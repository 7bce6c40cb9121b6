"""Optimizers and schedulers that a module holds are each stepped once, and its output head lies in no block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

import rlcore
from rlcore.engines.fsdp2 import sharding
from rlcore.engines.fsdp2.optimizers import check_sharded
from rlcore.errors import InvalidInputError, UnsupportedError, WorkerError
from rlcore.nn import OutputHead, TrainModule, optimizers_of
from rlcore.ops import reinforce
from tests.accuracy import assert_same_bits

from .train_batches import repeated

VOCAB, HIDDEN = 7, 4


class Bigram(TrainModule):
    """Each token is predicted from the one before it."""

    make_optimizers: Callable[[Any], None]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def wrap_classes(self) -> set[str]:
        return {"Linear"}

    def materialization_source(self) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        with torch.device("cpu"):
            shapes = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN), "head.bias": (VOCAB,)}
            return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def hidden_states(self, batch: Mapping[str, Any]) -> Tensor:
        found: Tensor = self.embed(batch["input_ids"])
        return found

    def output_head(self) -> OutputHead:
        return OutputHead(self.head.weight, self.head.bias)

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if make := getattr(type(self), "make_optimizers", None):
            make(self)

    def add_gradients(self) -> None:
        self.head.weight.square().sum().backward()


def built(make: Callable[[Any], None] | None = None, **options: Any) -> rlcore.TrainEngine:
    with rlcore.meta_device():
        module = type("Made", (Bigram,), {"make_optimizers": make} if make else {})()
    return rlcore.TrainEngine(module).build(devices="cpu:0", **options)


def module_of(engine: rlcore.TrainEngine) -> Any:
    return engine.executors[0].workers[0].worker.module


def batch() -> dict[str, Tensor]:
    ids = torch.arange(6) % VOCAB
    return {"input_ids": ids, "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32), "advantages": torch.ones(6)}


def test_an_optimizer_with_two_names_steps_once() -> None:
    def make(module: Any) -> None:
        module.other = module.optimizer

    with built() as one, built(make) as two:
        for engine in (one, two):
            found = engine.train_batch(batch(), reinforce())
            assert [name for name in found if name.startswith("lr/")] == ["lr/optimizer"]
        expected = one.state_dict()
        for name, value in two.state_dict().items():
            assert_same_bits(value, expected[name], "the same step")


def test_a_scheduler_in_another_one_is_stepped_by_that_alone() -> None:
    def make(module: Any) -> None:
        module.first = LinearLR(module.optimizer, 0.1, 1.0, 3)
        module.second = StepLR(module.optimizer, 2)
        module.scheduler = SequentialLR(module.optimizer, [module.first, module.second], [3])
        module.alias = module.scheduler

    model = Bigram()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make(model)
    with built(make) as engine:
        for _ in range(6):
            assert engine.train_batch(batch(), reinforce())["lr/optimizer"] == model.optimizer.param_groups[0]["lr"]
            model.optimizer.step()
            model.scheduler.step()


def test_two_schedulers_that_do_not_know_each_other_are_both_stepped() -> None:
    def make(module: Any) -> None:
        module.first, module.second = StepLR(module.optimizer, 1, 0.5), ConstantLR(module.optimizer, 0.5, 1)

    with built(make) as engine:
        rates = [engine.train_batch(batch(), reinforce())["lr/optimizer"] for _ in range(2)]
    assert rates == [0.05, 0.05]  # halved by one, and doubled back by the other


def test_optimizers_and_schedulers_in_lists_and_dicts_step_once_and_are_saved(tmp_path: Path) -> None:
    def make(module: Any) -> None:
        del module.optimizer
        parts = {"em/bed": module.embed, "head": module.head}
        module.optimizers = {name: torch.optim.AdamW(part.parameters(), lr=0.1) for name, part in parts.items()}
        module.schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in module.optimizers.values()]

    def alone(module: Any) -> None:
        module.optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module.scheduler = StepLR(module.optimizer, 1, 0.5)

    with built(make) as engine, built(alone) as expected:
        for rate in (0.1, 0.05):
            found = engine.train_batch(batch(), reinforce())
            assert found["lr/optimizers.em/bed"] == found["lr/optimizers.head"] == rate
            expected.train_batch(batch(), reinforce())
        engine.save(tmp_path / "saved")
        engine.train_batch(batch(), reinforce())
        engine.load(tmp_path / "saved")
        for each in (engine, expected):
            assert each.train_batch(batch(), reinforce())[f"lr/{'optimizer' * (each is expected) or 'optimizers.head'}"]
        for name, value in engine.state_dict().items():
            assert_same_bits(value, expected.state_dict()[name], "the same steps")


def test_a_rate_that_is_a_tensor_is_told_as_a_number_and_comes_back_as_a_tensor(tmp_path: Path) -> None:
    def make(module: Any) -> None:
        module.optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1), fused=True)
        module.scheduler = LinearLR(module.optimizer, total_iters=10)

    with built(make) as engine:
        rates = [engine.train_batch(batch(), reinforce())["lr/optimizer"] for _ in range(2)]
        assert {*map(type, rates)} == {float} and rates[0] < rates[1]
        engine.save(tmp_path / "saved")
        expected = engine.train_batch(batch(), reinforce()), engine.state_dict()
        engine.load(tmp_path / "saved")
        assert engine.train_batch(batch(), reinforce()) == expected[0]
        for name, value in engine.state_dict().items():
            assert_same_bits(value, expected[1][name], "the same step")
        assert isinstance(module_of(engine).optimizer.param_groups[0]["lr"], Tensor)


def test_gradients_in_bfloat16_do_not_depend_on_the_number_of_micro_batches() -> None:
    """16 alike sum to the gradient of one, to the bit: their weights are a 16th, and float32 has room for the sum."""

    def make(module: Any) -> None:
        module.optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def fails_at_the_second(logprob: Tensor, entropy: Any, per_token: Any) -> Any:
        seen.append(len(logprob))
        if len(seen) % 2 == 0:
            raise ValueError("planted")
        return -logprob, {}

    seen: list[int] = []
    one, many = batch(), repeated(batch(), 16)
    with built(make, dtype="bfloat16") as expected, built(make, dtype="bfloat16") as engine:
        for _ in range(2):
            norm = expected.train_batch(one, reinforce(), max_grad_norm=None)["grad_norm"]
            found = engine.train_batch(many, reinforce(), max_grad_norm=None, max_tokens_per_micro_batch=6)
            assert found["grad_norm"] == norm
            for name, value in engine.state_dict().items():
                assert_same_bits(value, expected.state_dict()[name], name)
            with pytest.raises(WorkerError, match="planted"):  # the next step begins without its gradients
                engine.train_batch(many, fails_at_the_second, max_tokens_per_micro_batch=6)
        engine.add_gradients()  # for an optimizer that a method steps
        assert module_of(engine).head.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.Adafactor, "torch's Adafactor, on several workers is not supported.*use torch.optim.AdamW"),
        (torch.optim.Rprop, "torch's Rprop, on several workers is not supported.*use torch.optim.AdamW"),
        (lambda those: torch.optim.Adagrad(those, fused=True), "an Adagrad with fused=True, .*leave fused out"),
    ],
)
def test_optimizers_that_cannot_step_shards_are_refused_by_name(make: Callable[..., Any], told: str) -> None:
    module = Bigram()
    module.some = [torch.optim.AdamW(module.embed.parameters()), make(module.head.parameters())]
    with pytest.raises(UnsupportedError, match=rf"^some.1 of Bigram, {told}"):
        check_sharded(module)


def test_a_scheduler_that_needs_a_metric_is_refused_before_anything_is_trained() -> None:
    def make(module: Any) -> None:
        module.scheduler = ReduceLROnPlateau(module.optimizer)

    with pytest.raises(UnsupportedError, match=r"scheduler of Made, a ReduceLROnPlateau, .* in a list .* by a method"):
        built(make)


def test_a_scheduler_that_needs_a_metric_is_left_to_a_method_of_the_module_in_a_list() -> None:
    def make(module: Any) -> None:
        module.set_aside = [ReduceLROnPlateau(module.optimizer)]

    with built(make) as engine:
        assert engine.train_batch(batch(), reinforce())["lr/optimizer"] == 0.1


class _Unread(dict[str, Any]):
    def values(self) -> Any:
        raise AssertionError("somebody looks through the user's data")

    __iter__ = items = values


def test_what_lies_deeper_in_a_modules_data_is_not_looked_through() -> None:
    module = Bigram()
    module.history = [[_Unread()], {"step": _Unread()}]
    module.lazy = _Unread()
    module.kept = {"embed": torch.optim.SGD(module.embed.parameters())}
    assert [*optimizers_of(module)] == ["kept.embed"]


def test_a_checkpoint_is_continued_without_the_gradients_that_were_there(tmp_path: Path) -> None:
    """They come from somebody's backward before it, and lie on the device or in host memory."""
    with built() as clean, built() as engine:
        clean.train_batch(batch(), reinforce())
        expected = clean.state_dict()
        engine.save(tmp_path / "saved")
        for is_away in (False, True):
            engine.call("add_gradients")
            if is_away:
                engine.offload("grads")
            engine.load(tmp_path / "saved")
            if is_away:
                engine.onload("grads")
            engine.train_batch(batch(), reinforce())
            for name, value in engine.state_dict().items():
                assert_same_bits(value, expected[name], "the same step")


def test_an_output_head_in_a_block_is_refused_where_blocks_are_sharded() -> None:
    """Its gradient would be the sum over the workers, not the mean: the loss reads the weight outside the block."""
    module = Bigram()
    told = "the output head of Bigram has a parameter of 'head', whose class Linear is in wrap_classes()"
    with pytest.raises(InvalidInputError) as caught:
        sharding._check_head(module, sharding.blocks_of(module))
    assert str(caught.value).startswith(told)
    sharding._check_head(module, {"embed": module.embed})
