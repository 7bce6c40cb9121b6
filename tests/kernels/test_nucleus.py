from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlcore.errors import InvalidInputError
from rlcore.ops import keep_mask, token_logprob
from tests.kernels.plain import assert_equal_in_float64


def row_by_row(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[bool]:
    """The definition in words: most probable first, later columns first among equals."""
    order = sorted(range(len(logits)), key=lambda column: (-logits[column], -column))
    if 0 < top_k < len(logits):
        least = logits[order[top_k - 1]]
        order = [column for column in order if logits[column] >= least]
    mass = [math.exp((logits[column] - logits[order[0]]) / temperature) for column in order]
    total, before, kept = sum(mass), 0.0, []
    for column, part in zip(order, mass, strict=True):
        if not kept or before < top_p * total or top_p == 1:
            kept.append(column)
        before += part
    return [column in kept for column in range(len(logits))]


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.31, 1e-6])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 5, 40, 1000])
def test_the_mask_is_its_definition(top_k: int, top_p: float) -> None:
    logits = torch.randn(30, 40, dtype=torch.float64)
    found = keep_mask(logits, temperature=0.8, top_p=top_p, top_k=top_k)
    assert found.tolist() == [row_by_row(row, 0.8, top_p, top_k) for row in logits.tolist()]


def test_rows_of_mixed_requests_each_get_their_own_limits() -> None:
    logits = torch.randn(5, 30)
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0])
    top_p = torch.tensor([0.9, 1.0, 0.5, 1.0, 0.2])
    top_k = torch.tensor([-1, 3, 10, 0, 100])
    found = keep_mask(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    for row in range(5):
        alone = keep_mask(
            logits[row : row + 1],
            temperature=float(temperature[row]),
            top_p=float(top_p[row]),
            top_k=int(top_k[row]),
        )
        assert torch.equal(found[row : row + 1], alone)


def test_top_p_is_renormalised_over_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first two, 0.4 / 0.7 = 0.57 is enough for 0.5; of all four it is not.
    assert keep_mask(logits, temperature=1.0, top_p=0.5, top_k=2).tolist() == [[True, False, False, False]]
    assert keep_mask(logits, temperature=1.0, top_p=0.5).tolist() == [[True, True, False, False]]


def test_equal_logits_are_cut_the_same_way_every_time() -> None:
    found = keep_mask(torch.zeros(3, 1000), temperature=1.0, top_p=0.4995)
    assert found.tolist() == [[False] * 500 + [True] * 500] * 3
    assert keep_mask(torch.zeros(1, 10), temperature=1.0, top_k=3).all()  # ties with the third stay


def test_the_most_probable_token_stays_even_if_top_p_is_below_the_rounding_of_one() -> None:
    logits = torch.randn(20, 30)
    found = keep_mask(logits, temperature=1.0, top_p=1e-9)
    assert torch.equal(found.nonzero()[:, 1], logits.argmax(1))


def test_top_p_of_one_keeps_tokens_whose_probability_underflows() -> None:
    logits = torch.tensor([[0.0, -500.0], [0.0, -500.0]])
    found = keep_mask(logits, temperature=1.0, top_p=torch.tensor([1.0, 0.999]))
    assert found.tolist() == [[True, True], [True, False]]


def test_the_result_does_not_depend_on_other_rows_or_on_strides() -> None:
    logits = torch.randn(50, 64)
    found = keep_mask(logits, temperature=1.0, top_p=0.7, top_k=20)
    column_major = logits.T.contiguous().T
    assert torch.equal(keep_mask(column_major, temperature=1.0, top_p=0.7, top_k=20), found)
    assert torch.equal(keep_mask(logits[7:9], temperature=1.0, top_p=0.7, top_k=20), found[7:9])


def test_log_probabilities_under_the_mask_are_those_of_the_renormalised_distribution() -> None:
    logits = torch.randn(20, 30, dtype=torch.float64)
    keep = keep_mask(logits, temperature=0.7, top_p=0.8)
    targets = torch.multinomial(torch.softmax(logits / 0.7, 1) * keep, 1).squeeze(1)
    found, _ = token_logprob(logits, targets, temperature=0.7, keep_mask=keep)
    p = torch.softmax(logits / 0.7, 1) * keep
    want = (p / p.sum(1, keepdim=True))[range(20), targets].log()
    assert_equal_in_float64(found, want, terms=30)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"logits_TV": torch.zeros(3)}, r"logits must be \[T, V\] with V > 0; got \[3\]"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0; got 0.0"),
        ({"temperature": torch.tensor([1.0, 0.0])}, "temperature must be > 0; got"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        ({"top_p": "0.5"}, "^top_p must be a number, or a tensor of one for each row; got '0.5'$"),
        ({"top_k": 2.5}, "^top_k must be a whole number, or a tensor of one for each row; got 2.5$"),
        ({"top_p": torch.tensor([0.5, 1.5])}, r"top_p must be in \(0, 1\]; got"),
        (
            {"top_k": torch.ones(3, dtype=torch.int64)},
            r"top_k must be a number, or one for each row = \[2\]; got \[3\]",
        ),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        keep_mask(**({"logits_TV": torch.zeros(2, 4), "temperature": 1.0, "top_p": 0.5} | arguments))
