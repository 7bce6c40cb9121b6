"""Calls that a parent pickles for its worker process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from unittest import mock

import cloudpickle
import pytest
import torch

from rlcore.engines.launchers.pickled_calls import dump_pickled_call, load_pickled_call, one_call
from rlcore.kernels.losses.interface import LossFn
from rlcore.ops import combine, gspo, kl, ppo_clip, tis


def pickled_functions(call: object) -> int:
    """How many functions cloudpickle had to look into."""
    with mock.patch.object(
        cloudpickle.cloudpickle, "_find_imported_submodules", wraps=cloudpickle.cloudpickle._find_imported_submodules
    ) as looks:
        dump_pickled_call(call)
    return looks.call_count


@pytest.mark.parametrize(
    "make", [ppo_clip, lambda: gspo(form="token"), lambda: combine(ppo_clip(clip_low=0.1), kl(coef=0.5))]
)
def test_a_loss_of_rlcores_is_pickled_once(make: Callable[[], LossFn]) -> None:
    loss_fn = make()
    first = pickled_functions((loss_fn,))
    assert first > 0
    assert pickled_functions((loss_fn, 1)) < first


@pytest.mark.parametrize("loss_fn", [ppo_clip(clip_low=0.1), tis(ppo_clip(clip_high=0.3), cap=2.0)])
def test_it_arrives_as_it_is(loss_fn: LossFn) -> None:
    per_token = {"advantages": torch.randn(8), "old_logprobs": torch.randn(8), "rollout_logprobs": torch.randn(8)}
    logprob = torch.randn(8)
    for _ in range(2):
        body, tensors = dump_pickled_call((loss_fn, loss_fn))
        first, second = pickle.loads(body)
        assert first is second
        assert not tensors
        value, stats = first(logprob, None, per_token)
        wanted, wanted_stats = loss_fn(logprob, None, per_token)
        assert torch.equal(value, wanted)
        assert stats.keys() == wanted_stats.keys()


def test_a_users_loss_is_pickled_once_for_all_workers_of_a_call() -> None:
    def loss_fn(logprob: torch.Tensor) -> torch.Tensor:
        return torch.exp(logprob)

    assert pickled_functions((loss_fn,)) == pickled_functions((loss_fn,)) == 1
    with one_call():
        assert pickled_functions((loss_fn, 0)) == 1
        assert pickled_functions((loss_fn, 1)) == 0
        arrived, number = pickle.loads(dump_pickled_call((loss_fn, 2))[0])
    assert (arrived(torch.zeros(1)), number) == (1, 2)
    assert pickled_functions((loss_fn,)) == 1


def test_a_tensor_that_a_function_closes_over_travels_beside_each_call() -> None:
    table = torch.arange(1 << 16)

    def loss_fn() -> torch.Tensor:
        return table

    with one_call():
        for _ in range(2):
            body, tensors = dump_pickled_call((loss_fn, table))
            assert len(tensors) == 1
            assert len(body) < 1 << 14
            first, second = load_pickled_call(body, tensors, {})
            assert first() is second


def test_arguments_that_all_workers_share_are_pickled_once() -> None:
    shared, other = torch.arange(1 << 16), torch.arange(1 << 16)

    def dumped(*args: object, **kwargs: object) -> tuple[bytes, list[torch.Tensor]]:
        return dump_pickled_call(("step", list(args), kwargs))

    with one_call():
        first = dumped(shared, size=3)
        assert dumped(shared, size=3) is first
        for differs in (dumped(other, size=3), dumped(shared, size=4), dumped(shared, width=3), dumped(shared, 3)):
            assert differs is not first
            assert differs[0] != first[0] or differs[1][0].data_ptr() == other.data_ptr()
        # An object that has gone leaves its id to the next, which is another argument.
        for value in range(20):
            assert pickle.loads(dumped([value])[0])[1] == [[value]]
    assert dumped(shared, size=3) is not dumped(shared, size=3), "between two calls anything may change"


def test_a_function_of_no_module_arrives() -> None:
    namespace: dict[str, Callable[[], int]] = {}
    exec("def loss_fn(): return 4", namespace)
    namespace["loss_fn"].__module__ = None  # type: ignore[assignment]
    (arrived,) = pickle.loads(dump_pickled_call((namespace["loss_fn"],))[0])
    assert arrived() == 4


def test_what_a_users_function_closes_over_may_change() -> None:
    coefficients = [1.0]

    def loss_fn() -> list[float]:
        return coefficients

    def sent() -> list[float]:
        (arrived,) = pickle.loads(dump_pickled_call((loss_fn,))[0])
        return list(arrived())

    assert sent() == [1.0]
    coefficients.append(2.0)
    assert sent() == [1.0, 2.0]
