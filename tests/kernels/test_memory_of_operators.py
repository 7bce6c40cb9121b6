"""Whole [T, V] logits never exist: every tensor that any operation returns is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.ops import combine, entropy_bonus, kl, linear_logprob, linear_loss, ppo_clip, sequence_level, token_logprob

T, H, V = 257, 8, 1031


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor made inside, views of ``known`` left out."""

    def __init__(self, known: Tensor | None = None) -> None:
        super().__init__()
        self.numel = 0
        self._known = None if known is None else known.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        sizes = [leaf.numel() for leaf in made if leaf.untyped_storage().data_ptr() != self._known]
        self.numel = max(self.numel, *sizes, 0)
        return result


def largest(run: Callable[[], Tensor]) -> int:
    with LargestTensor() as seen:
        run().backward()
    return seen.numel


def linear_case(implementation: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    targets = torch.arange(T)

    def run() -> Tensor:
        found = linear_logprob(hidden, weight, targets, with_entropy=True, softcap=5.0, implementation=implementation)
        return found.logprob.sum() + found.entropy.sum()

    return run


def loss_case(implementation: str, dtype: torch.dtype, edges: Tensor | None) -> Callable[[], Tensor]:
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    loss_fn = combine(ppo_clip(), kl(coef=0.1), entropy_bonus(coef=0.1))
    old = torch.full((T,), -7.0)

    def run() -> Tensor:
        return linear_loss(
            hidden,
            weight,
            torch.arange(T),
            loss_fn if edges is None else sequence_level(loss_fn),
            per_token={"old_logprobs": old, "ref_logprobs": old, "advantages": old},
            token_weight=torch.ones(T),
            cu_seqlens=edges,
            softcap=5.0,
            implementation=implementation,
        ).loss

    return run


CASES = {
    "linear_logprob": linear_case,
    "linear_loss": lambda *args: loss_case(*args, None),
    "linear_loss of short sequences": lambda *args: loss_case(*args, torch.arange(T + 1)),
    "linear_loss of one sequence": lambda *args: loss_case(*args, torch.tensor([0, T])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_chunked_never_holds_half_of_the_logits(case: str, dtype: torch.dtype) -> None:
    assert V * H < largest(CASES[case]("chunked", dtype)) < T * V / 2


@pytest.mark.parametrize("case", CASES)
def test_the_measure_sees_the_logits_of_the_reference(case: str) -> None:
    assert largest(CASES[case]("reference", torch.float32)) >= T * V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_token_logprob_makes_no_copy_of_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(T, V, dtype=dtype, requires_grad=True) * 1.0
    with LargestTensor(logits) as seen:
        found = token_logprob(logits, torch.arange(T), with_entropy=True, inplace_backward=True)
        torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), logits)
    assert V < seen.numel < T * V / 2


def test_the_measure_sees_the_copy_of_a_backward_that_is_not_in_place() -> None:
    logits = torch.randn(T, V, requires_grad=True) * 1.0
    with LargestTensor(logits) as seen:
        torch.autograd.grad(token_logprob(logits, torch.arange(T)).logprob.sum(), logits)
    assert seen.numel == T * V
