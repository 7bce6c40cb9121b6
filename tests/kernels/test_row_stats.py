"""``row_stats=`` of the log-probability operators; over several ranks in ranked_logits.py and ranked_heads.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.kernels.dispatch import Query, choose
from rlcore.kernels.row_stats import ROW_STATS
from rlcore.kernels.softmax_rows import Logprobs
from rlcore.ops import linear_logprob, token_logprob
from rlcore.registry import OpImplementation, registry
from tests.accuracy import assert_same_bits, assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64

IMPLEMENTATIONS = ["reference", "chunked"]
SHAPES = [(1, 17), (127, 1), (127, 1000), (17, 4097), (65537, 7)]  # as in test_token_logprob.py
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(T, V, dtype) for T, V in SHAPES for dtype in DTYPES if T < 2**16 or dtype == torch.float32]


def random_logits(T: int, V: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Every other target is the first of the largest logits, of which half-precision rows often have several."""
    generator = torch.Generator().manual_seed(T * 10007 + V)
    logits = (torch.randn(T, V, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, V, (T,), generator=generator)
    return logits, torch.where(torch.arange(T) % 2 == 0, logits.argmax(1), targets)


def assert_match_float64(found: Mapping[str, Tensor], scaled_TV: Tensor, targets: Tensor, reach: float = 0.0) -> None:
    """Compare with the definitions. No partial sum of a logit is above ``reach``; 0 if logits were given as such."""
    exact_TV = scaled_TV.double()
    V = exact_TV.shape[1]
    logprob_TV = exact_TV.log_softmax(1)
    square_TV = (2 * logprob_TV).exp()
    # An exponential is off by what its exponent, a difference of two logits, was rounded by.
    felt_TV = 1 + 2 * reach + logprob_TV.abs()
    total_T = (logprob_TV.exp() * felt_TV).sum(1)
    assert_within_rounding(
        found["sum_squares"],
        square_TV.sum(1),
        terms=V + 16,
        magnitude=2 * ((square_TV * felt_TV).sum(1) + square_TV.sum(1) * total_T),
        what="sum_squares",
    )
    assert_within_rounding(
        found["mean_logit"], exact_TV.mean(1), terms=V + 8, magnitude=exact_TV.abs().mean(1) + reach, what="mean_logit"
    )
    assert found["is_top1"].dtype == torch.bool
    assert torch.equal(found["is_top1"], exact_TV.argmax(1) == targets)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T, V, dtype", CASES, ids=str)
def test_row_stats_of_logits_match_float64(T: int, V: int, dtype: torch.dtype, implementation: str) -> None:
    logits, targets = random_logits(T, V, dtype)
    found = token_logprob(logits, targets, temperature=1.25, row_stats=ROW_STATS, implementation=implementation)
    assert [*found.row_stats] == [*ROW_STATS]
    assert_match_float64(found.row_stats, logits.double() / 1.25, targets)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_row_has_its_own_temperature(implementation: str) -> None:
    logits, targets = random_logits(127, 50)
    temperature = torch.linspace(0.5, 2, 127)
    found = token_logprob(
        logits, targets, temperature=temperature, row_stats=ROW_STATS, implementation=implementation
    ).row_stats
    assert_match_float64(found, logits.double() / temperature.double()[:, None], targets)


def whole_numbers(T: int, H: int, V: int) -> list[Tensor]:
    """Hidden states, weight and bias whose products are exact, so that many logits are equal."""
    generator = torch.Generator().manual_seed(T + V)
    return [torch.randint(-2, 3, shape, generator=generator).float() for shape in ((T, H), (V, H), (V,))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 24.0}, {"softcap": 24.0, "logit_scale": 0.5, "temperature": 0.8}], ids=str
)
def test_row_stats_of_hidden_states_match_float64(
    options: dict[str, float], dtype: torch.dtype, implementation: str
) -> None:
    hidden, weight, bias = (x.to(dtype) for x in whole_numbers(70, 9, 301))
    logits = hidden.double() @ weight.double().T + bias.double()
    targets = torch.where(torch.arange(70) % 2 == 0, logits.argmax(1), torch.arange(70))
    found = linear_logprob(
        hidden, weight, targets, bias=bias, row_stats=ROW_STATS, implementation=implementation, **options
    ).row_stats
    cap, scale = options.get("softcap"), options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    assert (capped == capped.amax(1, keepdim=True)).sum(1).max() > 1  # ties
    assert_match_float64(found, capped * scale, targets, reach=scale * float(logits.abs().max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ignored_rows_are_zero_whatever_they_hold(implementation: str) -> None:
    logits, targets = random_logits(6, 50)
    logits[1], logits[4] = math.nan, math.inf
    targets[[1, 4]] = -7
    scored = functools.partial(token_logprob, row_stats=ROW_STATS, ignore_index=-7, implementation=implementation)
    found = scored(logits, targets).row_stats
    assert not any(values[[1, 4]].any() for values in found.values())
    assert found["sum_squares"][[0, 2, 3, 5]].gt(0).all()
    padded = scored(logits.view(2, 3, 50), targets.view(2, 3)).row_stats
    assert all(torch.equal(padded[name].flatten(), found[name]) for name in ROW_STATS)
    assert padded["is_top1"].shape == (2, 3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_masked_column_has_no_probability_and_makes_the_mean_infinite(implementation: str) -> None:
    logits, targets = random_logits(20, 30, torch.float64)
    keep = torch.ones(20, 30, dtype=torch.bool).scatter_(1, logits.argmax(1, keepdim=True), False)
    masked = logits.masked_fill(~keep, -math.inf)
    found = token_logprob(
        logits, masked.argmax(1), keep_mask=keep, row_stats=ROW_STATS, implementation=implementation
    ).row_stats
    assert found["is_top1"].all() and (found["mean_logit"] == -math.inf).all()
    exact = masked.softmax(1).square().sum(1)
    assert_within_rounding(found["sum_squares"], exact, terms=60, magnitude=20 * exact)
    missed = token_logprob(logits, targets, keep_mask=keep, row_stats=["is_top1"], implementation=implementation)
    assert not missed.row_stats["is_top1"][::2].any()  # what would be the largest is masked


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_they_have_no_gradient_and_change_none(implementation: str) -> None:
    def run(row_stats: tuple[str, ...]) -> tuple[Logprobs, Tensor]:
        leaf = logits.clone().requires_grad_()
        found = token_logprob(leaf, targets, with_entropy=True, row_stats=row_stats, implementation=implementation)
        assert found.entropy is not None
        (gradient,) = torch.autograd.grad((found.logprob * 2 + found.entropy).sum(), leaf)
        return found, gradient

    logits, targets = random_logits(40, 33)
    (found, gradient), (plain, expected) = run(ROW_STATS), run(())
    assert not any(values.requires_grad for values in found.row_stats.values())
    for got, want in zip((*found, gradient), (*plain, expected), strict=True):
        assert_same_bits(got, want)  # the same operations, with others beside them


def test_who_does_not_ask_gets_two_values_and_no_numbers() -> None:
    logits, targets = random_logits(4, 9)
    found = token_logprob(logits, targets)
    logprob, entropy = found
    assert logprob is found.logprob and entropy is None and not found.row_stats
    one = token_logprob(logits, targets, row_stats=["mean_logit"])
    assert [*one.row_stats] == ["mean_logit"] and len(one) == 2


@pytest.mark.parametrize(
    ("row_stats", "requires_grad"), [(("is_top1", "sum_squares"), True), (["mean_logit"], False)], ids=str
)
def test_a_full_graph_has_them_too(row_stats: Any, requires_grad: bool) -> None:
    torch.compiler.reset()
    hidden, weight, _ = (x.double().requires_grad_(requires_grad) for x in whole_numbers(24, 5, 40))
    targets = torch.arange(24)
    targets[1] = -100

    def scored(hidden: Tensor, weight: Tensor) -> tuple[Any, ...]:
        of_hidden = linear_logprob(hidden, weight, targets, with_entropy=True, row_stats=row_stats)
        of_logits = token_logprob((hidden @ weight.T).view(2, 12, -1), targets.view(2, 12), row_stats=row_stats)
        total = of_hidden.logprob.sum() + of_hidden.entropy.sum() + of_logits.logprob.sum()
        return total, *(found.row_stats[name] for found in (of_hidden, of_logits) for name in row_stats)

    total, *found = torch.compile(scored, fullgraph=True, backend="aot_eager")(hidden, weight)
    expected_total, *expected = scored(hidden, weight)
    assert not any(values.requires_grad for values in found)
    for got, want in zip(found, expected, strict=True):
        assert_same_bits(got, want)  # the operator runs as it does outside of graphs
    if requires_grad:
        gradients = [torch.autograd.grad(of, [hidden, weight]) for of in (total, expected_total)]
        assert_equal_in_float64(*gradients, terms=24 + 40)
    torch.compiler.reset()


@pytest.mark.parametrize("row_stats", ["is_top1", ["is_top2"], ["is_top1", "is_top1"], None, 3], ids=str)
def test_other_names_are_refused(row_stats: Any) -> None:
    logits, targets = random_logits(4, 9)
    message = "row_stats must be a sequence of different names among sum_squares, mean_logit, is_top1; got "
    with pytest.raises(InvalidInputError, match=message):
        token_logprob(logits, targets, row_stats=row_stats)
    with pytest.raises(InvalidInputError, match=message):
        linear_logprob(logits, logits, targets % 4, row_stats=row_stats)


def test_a_kernel_whose_logits_stay_in_tiles_refuses_and_another_implementation_runs() -> None:
    chosen = choose("linear_logprob", Query("cpu", torch.bfloat16, 64, 100, frozenset({"row_stats"})))
    refused = dict(chosen.refused)
    assert refused["tiled"] == "its logits stay in the tiles of the product, and it computes no row_stats of them"
    assert chosen.implementation == "chunked" and "row_stats" not in refused["rows"]


def without_row_stats(logits: Tensor, problem: Any) -> Logprobs:
    return Logprobs(logits.log_softmax(-1).gather(-1, problem.rows.target[..., None]).squeeze(-1), None)


@pytest.fixture
def _a_plugins_implementation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = OpImplementation("token_logprob", "*", "plain", 99, f"{__name__}:without_row_stats", None, "a plugin")
    monkeypatch.setitem(registry().ops, "token_logprob", [entry])
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.usefixtures("_a_plugins_implementation")
def test_a_plugins_implementation_that_leaves_them_out_is_found() -> None:
    logits, targets = random_logits(4, 9)
    assert token_logprob(logits, targets).logprob.shape == (4,)
    with pytest.raises(UnsupportedError, match="the implementation that was chosen returned no is_top1; its predicate"):
        token_logprob(logits, targets, row_stats=["is_top1"])
