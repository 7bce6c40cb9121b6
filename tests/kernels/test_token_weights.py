from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import token_weights
from tests.accuracy import assert_within_rounding

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])  # the last sequence has no token that counts
VALUE = torch.arange(12.0).view(3, 4)

EXPECTED = {
    "token-mean": VALUE[MASK != 0].mean(),
    "token-sum": VALUE[MASK != 0].sum(),
    "seq-mean-token-sum": ((0 + 1 + 2) + 5) / torch.tensor(2.0),
    "seq-mean-token-mean": ((0 + 1 + 2) / 3 + 5) / torch.tensor(2.0),
    "seq-mean-token-sum-norm": ((0 + 1 + 2) + 5) / torch.tensor(2.0 * 8),
}


def extra(mode: str) -> dict[str, Any]:
    return {"max_length": 8} if mode == "seq-mean-token-sum-norm" else {}


@pytest.mark.parametrize("mode", EXPECTED)
def test_the_weighted_sum_is_the_aggregate_of_that_name(mode: Any) -> None:
    weight = token_weights(mode, MASK, **extra(mode))
    assert weight.dtype == torch.float32 and weight[MASK == 0].count_nonzero() == 0
    exact, summed = EXPECTED[mode].double(), (weight * VALUE).abs().sum()
    # 12 products of rounded weights; and the expected number is rounded, too.
    assert_within_rounding((weight * VALUE).sum(), exact, terms=12 + 4, magnitude=summed)


@pytest.mark.parametrize("mode", EXPECTED)
def test_packed_weights_are_the_padded_ones(mode: Any) -> None:
    is_present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]) != 0
    edges = torch.tensor([0, 4, 6, 7], dtype=torch.int32)
    packed = token_weights(mode, MASK[is_present], cu_seqlens=edges, **extra(mode))
    assert torch.equal(packed, token_weights(mode, MASK, **extra(mode))[is_present])


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_with_the_total_of_the_step_micro_batches_add_up(mode: Any, as_tensor: bool) -> None:
    count: float = 4 if mode == "token-mean" else 2
    total: float | Tensor = torch.tensor(count) if as_tensor else count
    parts = [token_weights(mode, MASK[rows], total=total, **extra(mode)) for rows in (slice(0, 1), slice(1, 3))]
    assert torch.equal(torch.cat(parts), token_weights(mode, MASK, **extra(mode)))


@pytest.mark.parametrize("mode", EXPECTED)
def test_nothing_that_counts_gives_zeros(mode: Any) -> None:
    assert token_weights(mode, torch.zeros(2, 3), **extra(mode)).count_nonzero() == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mode": "mean"}, "mode must be one of token-mean, token-sum, .*; got 'mean'"),
        ({"mask": torch.ones(2, 2, 2)}, r"mask must be \[N, L\] or packed \[T\]; got \[2, 2, 2\]"),
        ({"mode": "seq-mean-token-mean", "mask": torch.ones(3)}, "a packed mask needs cu_seqlens"),
        (
            {"mode": "seq-mean-token-mean", "mask": torch.ones(3), "cu_seqlens": torch.tensor([0, 9])},
            r"token_weights: cu_seqlens must rise from 0 to the 3 tokens; got \[0, 9\]",
        ),
        ({"mode": "seq-mean-token-sum-norm"}, "'seq-mean-token-sum-norm' needs max_length >= 1, .* got None"),
        (
            {"mask": torch.tensor([[1.0, torch.nan]])},
            r"token_weights: mask must be 0 or another number for each token; got nan at \[0, 1\]",
        ),
        (
            {"mode": "seq-mean-token-mean", "cu_seqlens": torch.tensor([0, 4, 8])},
            r"cu_seqlens goes with a packed mask \[T\], and the rows of mask \[3, 4\] are sequences already; give one",
        ),
        ({"max_length": 3}, "'token-mean' takes no max_length; got 3"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        token_weights(**({"mode": "token-mean", "mask": MASK} | arguments))


@pytest.mark.parametrize("total", [0, 0.0, torch.tensor(0)])
def test_a_total_of_nothing_goes_with_a_mask_of_nothing_alone(total: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"^token_weights: total must be above 0 where a token of mask counts; got"
    ):
        token_weights("token-mean", MASK, total=total)
    assert token_weights("token-mean", torch.zeros(2, 3), total=total).count_nonzero() == 0
