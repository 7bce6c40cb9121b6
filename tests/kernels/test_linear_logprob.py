from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.ops import linear_logprob
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding
from tests.kernels.plain import (
    assert_equal_in_float64,
    assert_scores_as_accurate,
    doubled,
    gradients,
    linear_scores,
    token_scores,
)

IMPLEMENTATIONS = ["reference", "chunked"]
# one row, odd everywhere, off-block, more rows than 16 bits count
SHAPES = [(1, 8, 7), (127, 13, 1000), (70, 20, 4097), (65537, 3, 7)]
REAL_VOCABULARIES = [(3, 5, 151936), (1, 3, 262144)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES if shape[0] < 2**16 or dtype == torch.float32]


def random_inputs(T: int, H: int, V: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + 100 * H + 10000 * V)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=generator) / H**0.5 * 2).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[0], targets[-1] = 0, V - 1
    return hidden, weight, targets


def assert_matches_float64(leaves: Sequence[Tensor], targets: Tensor, implementation: str, **options: Any) -> None:
    """Leaves: hidden, weight, and bias if there is one."""
    hidden, weight, *bias = leaves
    found = linear_logprob(
        hidden,
        weight,
        targets,
        bias=bias[0] if bias else None,
        with_entropy=True,
        implementation=implementation,
        **options,
    )
    assert found.logprob.dtype == torch.float32
    assert_scores_as_accurate(found, functools.partial(linear_scores, targets=targets, **options), leaves)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T, H, V, dtype", CASES, ids=str)
def test_linear_logprob_matches_float64(T: int, H: int, V: int, dtype: torch.dtype, implementation: str) -> None:
    *leaves, targets = random_inputs(T, H, V, dtype)
    assert_matches_float64(leaves, targets, implementation, temperature=1.3)


@pytest.mark.parametrize("T, H, V", REAL_VOCABULARIES)
def test_real_vocabularies_match_float64(T: int, H: int, V: int) -> None:
    *leaves, targets = random_inputs(T, H, V)
    assert_matches_float64(leaves, targets, "chunked", temperature=1.3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_only_token_is_certain(implementation: str) -> None:
    hidden, weight, targets = random_inputs(1, 3, 1)
    found = linear_logprob(hidden, weight, targets, with_entropy=True, implementation=implementation)
    assert not any(x.any() for x in (*found, *gradients(found, [hidden, weight])))


OPTIONS = [
    {},
    {"softcap": 3.0},
    {"logit_scale": 0.4},
    {"softcap": 2.0, "logit_scale": 3.0, "temperature": 0.7},
    {"temperature": torch.linspace(0.5, 2.0, 40)},
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "scale", "both", "temperatures"])
def test_every_option_matches_float64(options: dict[str, Any], has_bias: bool, implementation: str) -> None:
    *leaves, targets = random_inputs(40, 9, 51)
    bias = [torch.randn(51, requires_grad=True)] if has_bias else []
    assert_matches_float64([*leaves, *bias], targets, implementation, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_linear_logprob_passes_gradcheck(implementation: str) -> None:
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, -100, 2, 2])

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_logprob(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=0.9,
            softcap=4.0,
            with_entropy=True,
            implementation=implementation,
        )

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size, offset", [(80.0, 0.0), (1.0, 1e4), (0.0, 0.0), (1.0, -1e4)])
def test_extreme_logits(size: float, offset: float, implementation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.eye(16).repeat(4, 1).requires_grad_()
    weight = ((torch.rand(500, 16, generator=generator) * 2 - 1) * size + offset).requires_grad_()
    targets = torch.randint(0, 500, (64,), generator=generator)
    assert_matches_float64([hidden, weight], targets, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bias_of_minus_infinity_takes_columns_out(implementation: str) -> None:
    hidden, weight, targets = random_inputs(40, 9, 51, torch.float64)
    bias = torch.zeros(51)
    bias[48:] = -math.inf  # rows that only pad the vocabulary
    found = linear_logprob(hidden, weight, targets % 48, bias=bias, with_entropy=True, implementation=implementation)
    want = linear_scores(hidden, weight[:48], targets=targets % 48)
    assert_equal_in_float64(found, want, terms=51)
    d_hidden, d_weight = gradients(found, [hidden, weight])
    assert_equal_in_float64([d_hidden, d_weight], gradients(want, [hidden, weight]), terms=51)
    assert d_weight[48:].count_nonzero() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bias_that_takes_all_columns_out_gives_nan(implementation: str) -> None:
    hidden, weight, targets = random_inputs(4, 9, 51)
    found = linear_logprob(
        hidden, weight, targets, bias=torch.full((51,), -math.inf), with_entropy=True, implementation=implementation
    )
    assert all(x.isnan().all() for x in (*found, *gradients(found, [hidden, weight])))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ignored_rows_contribute_exactly_nothing(dtype: torch.dtype, implementation: str) -> None:
    hidden, weight, targets = random_inputs(30, 8, 40, dtype)
    is_ignored = torch.arange(30) % 3 == 0
    targets[is_ignored] = -100
    with torch.no_grad():
        hidden[is_ignored] = math.nan
    found = linear_logprob(hidden, weight, targets, with_entropy=True, implementation=implementation)
    d_hidden, d_weight = gradients(found, [hidden, weight])
    for rows in (*found, d_hidden):
        assert rows[is_ignored].count_nonzero() == 0 and rows[~is_ignored].isfinite().all()
    assert d_weight.isfinite().all()


def test_results_do_not_depend_on_the_chunk_size() -> None:
    T, H, V = 127, 16, 301
    hidden, weight, targets = random_inputs(T, H, V, torch.float64)
    one_row = 3 * V * 8
    runs = []
    for budget in (one_row, 10 * one_row, None):
        found = linear_logprob(hidden, weight, targets, with_entropy=True, memory_budget_bytes=budget)
        runs.append((*found, *gradients(found, [hidden, weight])))
    for run in runs[1:]:
        assert_equal_in_float64(run, runs[0], terms=T + V)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_however_many_chunks_the_weights_gradient_is_rounded_once(dtype: torch.dtype) -> None:
    """All terms of an element have one sign, so that each rounding of a partial sum would stay."""
    hidden, weight, _ = random_inputs(256, 8, 50, dtype)
    hidden = (hidden.detach().abs() + 0.5).requires_grad_()
    targets = torch.zeros(256, dtype=torch.int64)
    found = linear_logprob(hidden, weight, targets, memory_budget_bytes=3 * 50 * 4)  # a row at a time
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (exact,) = torch.autograd.grad(linear_logprob(*wide, targets).logprob.sum(), wide[1])
    (gradient,) = torch.autograd.grad(found.logprob.sum(), weight)
    # Of the logits' gradients, of the sum, and less than one for all of float32.
    assert_within_rounding(gradient, exact, terms=3, magnitude=exact.abs(), dtype=dtype)


def test_reruns_are_bit_identical() -> None:
    hidden, weight, targets = random_inputs(127, 16, 301, torch.bfloat16)
    runs = []
    for _ in range(2):
        found = linear_logprob(hidden, weight, targets, with_entropy=True)
        runs.append((*found, *gradients(found, [hidden, weight])))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_strided_inputs_give_the_same() -> None:
    hidden, weight, targets = random_inputs(60, 9, 51, torch.float64)
    strided_hidden = torch.cat((hidden, hidden), 1).detach()[:, 9:].requires_grad_()
    strided_weight = weight.detach().T.contiguous().T.requires_grad_()
    assert not strided_hidden.is_contiguous() and not strided_weight.is_contiguous()
    found = linear_logprob(strided_hidden, strided_weight, torch.stack((targets, targets), 1)[:, 0])
    want = linear_logprob(hidden, weight, targets)
    assert_equal_in_float64(found.logprob, want.logprob, terms=60)
    got, expected = gradients(found, [strided_hidden, strided_weight]), gradients(want, [hidden, weight])
    assert_equal_in_float64(got, expected, terms=60)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_asked_for_are_computed(needs: tuple[bool, bool]) -> None:
    hidden, weight, targets = random_inputs(20, 6, 30)
    everything = gradients(linear_logprob(hidden, weight, targets), [hidden, weight])
    inputs = [x.detach().requires_grad_(needed) for x, needed in zip((hidden, weight), needs, strict=True)]
    logprob, _ = linear_logprob(*inputs, targets)
    assert logprob.requires_grad == any(needs)
    asked = [x for x in inputs if x.requires_grad]
    if asked:
        found = gradients((logprob, None), asked)
        assert_same_bits(found[0], everything[needs.index(True)])  # the same product


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T", [0, 5])
def test_no_tokens_or_only_ignored_ones_give_a_differentiable_zero(T: int, implementation: str) -> None:
    hidden, weight = torch.randn(T, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logprob, entropy = linear_logprob(
        hidden, weight, torch.full((T,), -100), with_entropy=True, implementation=implementation
    )
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == (T,) and logprob.count_nonzero() == 0
    assert hidden.grad.count_nonzero() == 0 and weight.grad.count_nonzero() == 0


def test_under_autocast_the_operands_are_lowered_as_in_linear_and_the_logits_are_not() -> None:
    hidden, weight, targets = random_inputs(20, 6, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprob(hidden, weight, targets)
        d_weight = gradients(found, [weight])[0]
    rounded = linear_logprob(hidden.bfloat16(), weight.bfloat16(), targets)
    assert torch.equal(found.logprob, rounded.logprob) and d_weight.dtype == torch.float32
    plain, exact = (
        linear_scores(hidden.bfloat16().to(wide), weight.bfloat16().to(wide), targets=targets)
        for wide in (torch.float32, torch.float64)
    )
    assert_as_accurate(found.logprob, plain[0], exact[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype", "wide"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_operands_of_two_dtypes_are_used_in_the_wider_and_get_gradients_in_their_own(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, wide: torch.dtype, implementation: str
) -> None:
    hidden, weight, targets = random_inputs(20, 6, 30)
    leaves = [x.detach().to(dtype).requires_grad_() for x, dtype in ((hidden, hidden_dtype), (weight, weight_dtype))]
    found = linear_logprob(*leaves, targets, with_entropy=True, implementation=implementation)
    same = [x.detach().to(wide).requires_grad_() for x in leaves]
    want = linear_logprob(*same, targets, with_entropy=True, implementation=implementation)
    assert found.logprob.dtype == wide
    assert torch.equal(found.logprob, want.logprob) and torch.equal(found.entropy, want.entropy)
    for got, leaf, exact in zip(gradients(found, leaves), leaves, gradients(want, same), strict=True):
        assert torch.equal(got, exact.to(leaf.dtype)), "rounded once, at the end"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_may_have_several_dimensions(implementation: str) -> None:
    hidden, weight, targets = random_inputs(24, 6, 30)
    targets[3] = -100
    temperature = torch.linspace(0.5, 2, 24)
    options = {"with_entropy": True, "implementation": implementation}
    want = linear_logprob(hidden, weight, targets, temperature=temperature, **options)
    whole = hidden.view(2, 12, 6)
    found = linear_logprob(whole, weight, targets.view(2, 12), temperature=temperature.view(2, 12), **options)
    assert found.logprob.shape == found.entropy.shape == (2, 12)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one.flatten(), other)
    for one, other in zip(gradients(found, [hidden, weight]), gradients(want, [hidden, weight]), strict=True):
        assert torch.equal(one, other)
    shifted = linear_logprob(whole[:, :-1], weight, targets.view(2, 12)[:, 1:], **options)
    assert torch.equal(shifted.logprob[1], linear_logprob(hidden[12:23], weight, targets[13:], **options).logprob)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_scale_before_the_softcap_is_one_after_a_smaller_softcap(implementation: str) -> None:
    hidden, weight, targets = (x.detach() for x in random_inputs(20, 6, 30))
    leaves = doubled(hidden, weight)
    scale, cap = 0.4, 1.5
    found = linear_logprob(
        *leaves, targets, softcap=cap / scale, logit_scale=scale, with_entropy=True, implementation=implementation
    )
    logits = cap * torch.tanh(leaves[0] @ leaves[1].T * scale / cap)
    want = token_scores(logits, targets)
    assert_equal_in_float64(list(found), list(want), terms=64)
    assert_equal_in_float64(gradients(found, leaves), gradients(want, leaves), terms=64)


GOOD = {
    "hidden": torch.zeros(4, 3),
    "weight": torch.zeros(5, 3),
    "targets": torch.zeros(4, dtype=torch.int64),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(3)}, r"hidden must be \[T, H\] or \[..., T, H\]; got \[3\]"),
        ({"hidden": torch.zeros(2, 2, 3)}, r"targets must be one token for each row of hidden = \[2, 2\]; got \[4\]"),
        (
            {"hidden": torch.zeros(2, 2, 3), "targets": torch.zeros(2, 2).long(), "temperature": torch.ones(4)},
            r"temperature must be a float, or one value for each target = \[2, 2\]; got \[4\]",
        ),
        ({"hidden": torch.zeros(4, 3, dtype=torch.int32)}, "hidden must be float32, bfloat16, float16, float64; got"),
        ({"weight": torch.zeros(5, 4)}, r"weight must be \[V, H\] with H = 3; got \[5, 4\]"),
        ({"weight": torch.zeros(0, 3)}, r"weight must be \[V, H\] with H = 3; got \[0, 3\]"),
        ({"weight": torch.zeros(5, 3).long()}, "weight must be float32, bfloat16, float16, float64; got torch.int64"),
        ({"weight": torch.zeros(5, 3, device="meta")}, r"weight is on meta but hidden is on cpu; .* \.to\(hidden"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets must be one token .* = \[4\]; got \[3\]"),
        ({"targets": torch.tensor([0, 1, 2, 5])}, r"token ids in \[0, 5\) .* got 5 at \[3\]"),
        ({"bias": torch.zeros(4)}, r"bias must be one value for each row of weight = \[5\]; got \[4\]"),
        ({"targets": torch.tensor([0, 1, -7, 4])}, r"token ids in \[0, 5\) or ignore_index=-100; got -7 at \[2\]"),
        ({"targets": torch.zeros(4)}, "targets must be int64 or int32 token ids; got torch.float32"),
        ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "targets is on meta but hidden is on cpu"),
        ({"weight": torch.zeros(5)}, r"weight must be \[V, H\] with H = 3; got \[5\]"),
        ({"bias": torch.zeros(5, device="meta")}, "bias is on meta but hidden is on cpu"),
        ({"bias": torch.zeros(5, dtype=torch.int64)}, "bias must be float32, .*; got torch.int64"),
        ({"temperature": -1.0}, "temperature must be a finite number > 0; got -1.0"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0; got 0.0"),
        ({"temperature": math.nan}, "temperature must be a finite number > 0; got nan"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0, 1.0])}, r"finite and > 0; got 0 at \[1\]"),
        ({"temperature": torch.tensor([1.0, 1.0, math.nan, 1.0])}, r"finite and > 0; got nan at \[2\]"),
        ({"temperature": torch.ones(3)}, r"temperature must be a float, or one value .* = \[4\]; got \[3\]"),
        ({"temperature": torch.ones(4, device="meta")}, "temperature is on meta but targets is on cpu"),
        ({"temperature": torch.ones(4, requires_grad=True)}, r"temperature requires grad, .* temperature.detach"),
        ({"softcap": 0.0}, "softcap must be a finite number > 0; got 0.0"),
        ({"logit_scale": math.inf}, "logit_scale must be a finite number > 0; got inf"),
        ({"memory_budget_bytes": 59}, r"memory_budget_bytes=59 does not hold one row of 5 logits; the least is 60"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        linear_logprob(**(GOOD | change))  # type: ignore[arg-type]


def test_what_is_no_process_group_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"group must be a torch.distributed.ProcessGroup .* in; got object"):
        linear_logprob(**GOOD, group=object())  # type: ignore[arg-type]


def test_the_reference_refuses_a_memory_budget() -> None:
    with pytest.raises(UnsupportedError, match="reference: it holds all logits at once"):
        linear_logprob(**GOOD, memory_budget_bytes=2**20, implementation="reference")
