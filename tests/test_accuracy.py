"""The rule of comparisons holds for right results in every order of summation, and finds a missing term."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accuracy import (
    assert_as_accurate,
    assert_parts_as_accurate,
    assert_same_bits,
    assert_within_rounding,
    rounding,
)


def one_by_one(terms_NT: Tensor) -> Tensor:
    return terms_NT.cumsum(1)[:, -1]


def in_halves(terms_NT: Tensor) -> Tensor:
    while terms_NT.shape[1] > 1:
        terms_NT = terms_NT[:, ::2] + terms_NT[:, 1::2]
    return terms_NT[:, 0]


def in_lanes(terms_NT: Tensor) -> Tensor:
    return one_by_one(one_by_one(terms_NT.unflatten(1, (-1, 16)).mT.flatten(0, 1)).unflatten(0, (-1, 16)))


ORDERS = [one_by_one, in_halves, in_lanes, lambda terms_NT: terms_NT.sum(1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_in_any_order_is_within_rounding_and_one_without_a_term_is_not(
    order: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    terms_NT = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = terms_NT.double()
    options = {"terms": 256, "magnitude": exact.abs().sum(1), "dtype": dtype}
    assert_within_rounding(order(terms_NT), exact.sum(1), **options)
    if dtype == torch.float32:
        with pytest.raises(AssertionError, match="times what rounding allows"):
            assert_within_rounding(order(terms_NT)[:1] - terms_NT[:1, 0] / 100, exact[:1].sum(1), terms=256)


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_is_as_accurate_and_a_missing_row_is_not(order: Callable[[Tensor], Tensor]) -> None:
    terms_NT = torch.randn(300, 256, generator=torch.Generator().manual_seed(1))
    exact = terms_NT.double().sum(1)
    reference = in_halves(terms_NT)
    wrong = order(terms_NT).index_fill(0, torch.tensor([17]), 0.0)
    assert_as_accurate(order(terms_NT), order(terms_NT), exact)
    with pytest.raises(AssertionError, match=r"worst element|root mean square"):
        assert_as_accurate(wrong, reference, exact)


def test_of_several_results_each_is_measured_by_its_own_size() -> None:
    large_N, small_N = 1e6 * torch.randn(2, 200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = [large_N, small_N[:3] / 1e9]
    found = [x.float() for x in exact]
    assert_as_accurate(found, found, exact)
    wrong = [found[0], found[1] * (1 + 1e-5)]
    with pytest.raises(AssertionError, match="root mean square"):
        assert_as_accurate(wrong, found, exact)
    with pytest.raises(AssertionError, match="shapes"):
        assert_as_accurate(found[:1], found, exact)


def exact_weights() -> dict[str, Tensor]:
    """A large matrix, and a bias as after a step from 0."""
    options: Any = {"generator": torch.Generator().manual_seed(3), "dtype": torch.float64}
    return {"weight": torch.randn(64, 64, **options), "bias": 1e-3 * torch.randn(16, **options)}


def weights_of(exact: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """The weights in float32, with errors of the bias that have one cause and half the size of the matrix's."""
    cause = 1e-8 * torch.randn((), generator=generator) * torch.linspace(-1.7, 1.7, 16)
    return {"weight": exact["weight"].float(), "bias": (exact["bias"] + cause).float()}


@pytest.mark.slow
def test_a_few_elements_of_one_cause_are_as_accurate_however_lucky_their_reference_is() -> None:
    generator, exact, alarms = torch.Generator().manual_seed(4), exact_weights(), 0
    for _ in range(200):
        found, reference = weights_of(exact, generator), weights_of(exact, generator)
        assert_parts_as_accurate(found, reference, exact)
        try:
            assert_as_accurate(found["bias"], reference["bias"], exact["bias"])
        except AssertionError:
            alarms += 1
    assert alarms > 10, "by its own reference alone a right one is refused now and then"


DEFECTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a scale of 1.001": lambda bias: bias * 1.001,
    "a term of a thousand is missing": lambda bias: bias - bias.abs().mean() / 1000,
    "bfloat16": lambda bias: bias.bfloat16().float(),
    "the other sign": lambda bias: -bias,
    "one element is another": lambda bias: bias.index_fill(0, torch.tensor([5]), float(bias[4])),
    "one element is off by a thousandth": lambda bias: bias + bias.abs().max() / 1000 * torch.eye(16)[7],
    "two elements have changed places": lambda bias: bias[[1, 0, *range(2, 16)]],
    "it was not trained": torch.zeros_like,
}


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_a_few_small_elements_is_found_beside_many_large_ones(defect: Callable[[Tensor], Tensor]) -> None:
    generator, exact = torch.Generator().manual_seed(5), exact_weights()
    found, reference = weights_of(exact, generator), weights_of(exact, generator)
    with pytest.raises(AssertionError, match=r"bias: error .* \(root mean square\), at most|all weights: error"):
        assert_parts_as_accurate(found | {"bias": defect(found["bias"])}, reference, exact)


def test_parts_of_other_names_and_shapes_are_refused() -> None:
    exact = {"weight": torch.ones(16, dtype=torch.float64)}
    with pytest.raises(AssertionError, match="weights: names differ"):
        assert_parts_as_accurate({"bias": torch.ones(16)}, exact, exact)
    with pytest.raises(AssertionError, match="weights: shapes"):
        assert_parts_as_accurate({"weight": torch.ones(4, 4)}, exact, exact)


def test_few_roundings_are_counted_each_and_many_by_their_root() -> None:
    unit = torch.finfo(torch.float32).eps / 2
    assert rounding(9) == pytest.approx(9 * unit, rel=1e-4)
    assert rounding(10_000) == pytest.approx(600 * unit, rel=1e-2)
    assert rounding(1, torch.bfloat16) > 65_000 * rounding(1)


def test_a_luckily_exact_reference_leaves_room_for_one_rounding() -> None:
    exact = torch.full((16,), 1.0, dtype=torch.float64)
    assert_as_accurate(torch.full((16,), 1.0 + 2**-24), torch.ones(16), exact + 2**-25)
    with pytest.raises(AssertionError, match="give terms"):
        assert_as_accurate(torch.ones(3), torch.ones(3), torch.ones(3))


def test_what_is_not_finite_has_its_place() -> None:
    values = torch.tensor([1.0, -math.inf, math.nan])
    assert_within_rounding(values, values.double(), terms=1)
    assert_same_bits(values, values.clone())
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        assert_within_rounding(torch.tensor([1.0, 2.0, math.nan]), values.double(), terms=1)
    with pytest.raises(AssertionError, match="weights: 1 of 3 elements differ, by at most 1"):
        assert_same_bits(torch.tensor([2.0, -math.inf, math.nan]), values, "weights")


def test_a_python_float_counts_in_float64_unless_told() -> None:
    assert_within_rounding(0.1 + 0.2, 0.3, terms=1)
    assert_within_rounding(1.0 + 1e-7, 1.0, terms=2, dtype=torch.float32)
    with pytest.raises(AssertionError):
        assert_within_rounding(1.0 + 1e-7, 1.0, terms=2)
