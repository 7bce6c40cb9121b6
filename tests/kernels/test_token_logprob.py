from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import InvalidInputError
from rlcore.ops import token_logprob
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding
from tests.kernels.plain import assert_equal_in_float64, assert_scores_as_accurate, doubled, token_scores

IMPLEMENTATIONS = ["reference", "chunked"]
# one row, odd, off-block, more rows than 16 bits count
SHAPES = [(1, 17), (127, 1), (127, 1000), (17, 4097), (65537, 7)]
REAL_VOCABULARIES = [(2, 151936), (1, 262144)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(T, V, dtype) for T, V in SHAPES for dtype in DTYPES if T < 2**16 or dtype == torch.float32]


def random_inputs(T: int, V: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T * 10007 + V)
    logits = (torch.randn(T, V, generator=generator) * scale).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[0], targets[-1] = 0, V - 1
    return logits, targets


def gradient(outputs: tuple[Tensor, Tensor], logits: Tensor) -> Tensor:
    """Return the gradients of a sum with unequal weights for rows, and for log-probability and entropy."""
    logprob, entropy = outputs
    weight = torch.linspace(-1, 2, logprob.numel(), dtype=logprob.dtype, device=logits.device).view(logprob.shape)
    return torch.autograd.grad((weight * logprob).sum() + (weight.cos() * entropy).sum(), logits)[0]


def assert_matches_float64(logits: Tensor, targets: Tensor, implementation: str, **options: Any) -> None:
    def formula(logits: Tensor) -> tuple[Tensor, Tensor]:
        return token_scores(logits, targets, **options)

    found = token_logprob(logits, targets, with_entropy=True, implementation=implementation, **options)
    assert found.logprob.dtype == found.entropy.dtype == torch.float32
    assert_scores_as_accurate(found, formula, [logits])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T, V, dtype", CASES, ids=str)
def test_token_logprob_matches_float64(T: int, V: int, dtype: torch.dtype, implementation: str) -> None:
    assert_matches_float64(*random_inputs(T, V, dtype), implementation, temperature=1.3)


@pytest.mark.parametrize("T, V", REAL_VOCABULARIES)
def test_real_vocabularies_match_float64(T: int, V: int) -> None:
    assert_matches_float64(*random_inputs(T, V), "chunked", temperature=1.3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_only_token_is_certain(implementation: str) -> None:
    logits = torch.tensor([[-3e4]], requires_grad=True)
    found = token_logprob(logits, torch.tensor([0]), with_entropy=True, implementation=implementation)
    assert found.logprob == found.entropy == gradient(found, logits) == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale, offset", [(80.0, 0.0), (1.0, 1e4), (0.0, 0.0), (1.0, -1e4)])
def test_extreme_logits_stay_exact(scale: float, offset: float, implementation: str) -> None:
    noise, targets = random_inputs(64, 1000)
    logits = (noise.detach().clamp(-1, 1) * scale + offset).requires_grad_()
    assert_matches_float64(logits, targets, implementation, temperature=0.7)


def test_reference_passes_gradcheck() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, -100, 3])
    keep = torch.tensor([True, True, False, True, True, True]).expand(4, 6)

    def run(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_logprob(
            logits, targets, temperature=0.8, with_entropy=True, keep_mask=keep, implementation="reference"
        )

    assert torch.autograd.gradcheck(run, logits)


def test_chunked_passes_gradcheck() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, -100, 3])
    temperature = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)

    def run(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_logprob(logits, targets, temperature=temperature, with_entropy=True, implementation="chunked")

    assert torch.autograd.gradcheck(run, logits)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T.contiguous().T,
        lambda x: torch.stack((x, x), 2)[..., 1],
        lambda x: torch.cat((x, x))[::2],
        lambda x: x[:1].expand(64, -1),
    ],
    ids=["column-major", "strided columns", "strided rows", "expanded"],
)
def test_strides_do_not_matter(view: object) -> None:
    base, _ = random_inputs(64, 37, torch.float64)
    strided = view(base.detach()).requires_grad_()  # type: ignore[operator]
    dense = strided.detach().contiguous().requires_grad_()
    targets = torch.arange(64) % 37
    found = token_logprob(strided, targets, with_entropy=True)
    want = token_logprob(dense, targets, with_entropy=True)
    assert_equal_in_float64(found, want, terms=37)
    assert_equal_in_float64(gradient(found, strided), gradient(want, dense), terms=37)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padded_logits_give_padded_results_also_when_shifted(implementation: str) -> None:
    whole = torch.randn(3, 9, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (3, 8))
    keep = torch.rand(3, 8, 11) < 0.9
    keep.scatter_(2, targets[..., None], True)
    temperature = torch.rand(3, 8, dtype=torch.float64) + 0.5
    found = token_logprob(
        whole[:, :-1],  # not flattenable: its strides skip a row for each sequence
        targets,
        temperature=temperature,
        with_entropy=True,
        keep_mask=keep,
        implementation=implementation,
    )
    want = token_scores(whole[:, :-1], targets, temperature=temperature, keep_mask=keep)
    assert_equal_in_float64(found, want, terms=11)
    d_whole = gradient(found, whole)
    assert_equal_in_float64(d_whole, gradient(want, whole), terms=11)
    assert d_whole[:, -1].count_nonzero() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ignored_rows_are_exact_zeros_even_with_nan_logits(dtype: torch.dtype, implementation: str) -> None:
    logits, targets = random_inputs(6, 50, dtype)
    targets[[1, 4]] = -7
    with torch.no_grad():
        logits[1], logits[4] = math.nan, math.inf
    found = token_logprob(logits, targets, with_entropy=True, ignore_index=-7, implementation=implementation)
    d_logits = gradient(found, logits)
    for rows in (found.logprob, found.entropy, d_logits):
        assert rows[[1, 4]].count_nonzero() == 0
        assert rows[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_columns_of_minus_infinity_have_no_probability_and_no_gradient(implementation: str) -> None:
    logits, targets = random_inputs(20, 30, torch.float64)
    dropped = torch.zeros(30, dtype=torch.bool)
    dropped[[0, 7, 29]] = True
    targets = torch.where(dropped[targets], 1, targets)
    masked = logits.detach().masked_fill(dropped, -math.inf).requires_grad_()
    found = token_logprob(masked, targets, with_entropy=True, implementation=implementation)
    kept = logits.detach()[:, ~dropped].requires_grad_()
    new_index = (~dropped).cumsum(0) - 1
    want = token_scores(kept, new_index[targets])
    assert_equal_in_float64(found, want, terms=30)
    d_logits = gradient(found, masked)
    assert d_logits[:, dropped].count_nonzero() == 0
    assert_equal_in_float64(d_logits[:, ~dropped], gradient(want, kept), terms=30)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_minus_infinities_gives_nan_and_so_does_its_gradient(implementation: str) -> None:
    logits, targets = random_inputs(4, 30)
    logits.data[[1, 3]], targets[3] = -math.inf, -100
    found = token_logprob(logits, targets, with_entropy=True, implementation=implementation)
    for rows in (*found, gradient(found, logits)):
        assert rows[1].isnan().all() and rows[[0, 2]].isfinite().all() and not rows[3].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chosen_token_outside_the_keep_mask_has_probability_zero(implementation: str) -> None:
    logits, targets = random_inputs(4, 9)
    keep = torch.ones(4, 9, dtype=torch.bool)
    keep[2, targets[2]] = False
    logprob, _ = token_logprob(logits, targets, keep_mask=keep, implementation=implementation)
    assert logprob[2] == -math.inf and logprob[[0, 1, 3]].isfinite().all()
    (d_logits,) = torch.autograd.grad(logprob, logits, torch.ones(4))
    assert d_logits[~keep].count_nonzero() == 0 and d_logits.isfinite().all()


def test_row_gradients_sum_to_zero() -> None:
    logits, targets = random_inputs(50, 4097, scale=5.0)
    d_logits = gradient(token_logprob(logits, targets, with_entropy=True), logits)
    # Each is off by a sum of exponentials, too, and by what makes it of that.
    assert_within_rounding(d_logits.sum(1), torch.zeros(50), terms=2 * 4097 + 16, magnitude=d_logits.abs().sum(1))


def test_reruns_are_bit_identical_and_permuting_tokens_permutes_the_result() -> None:
    logits, targets = random_inputs(200, 333)
    first = token_logprob(logits, targets, with_entropy=True)
    again = token_logprob(logits, targets, with_entropy=True)
    order = torch.randperm(200)
    permuted = token_logprob(logits[order], targets[order], with_entropy=True)
    assert torch.equal(first.logprob, again.logprob) and torch.equal(first.entropy, again.entropy)
    assert torch.equal(gradient(first, logits), gradient(again, logits))
    exact, _ = token_scores(logits.double(), targets)
    assert_as_accurate(permuted.logprob, first.logprob[order], exact[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inplace_backward_gives_the_same_gradient_in_the_memory_of_the_logits(dtype: torch.dtype) -> None:
    leaf, targets = random_inputs(33, 70, dtype)
    grads = []
    for inplace in (False, True):
        logits = leaf * 1.0
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        token_logprob(logits, targets, inplace_backward=inplace).logprob.sum().backward()
        grads.append(leaf.grad)
        leaf.grad = None
        assert (seen[0].data_ptr() == logits.data_ptr()) == inplace
    assert_same_bits(grads[0], grads[1])  # the same operations in another place


def test_an_inplace_backward_takes_one_row_that_was_expanded() -> None:
    """Its stride of 0 is of a dimension of size 1: no two elements share memory."""
    leaf, target = torch.randn(5, requires_grad=True), torch.tensor([3])
    logits = (leaf * 1.0).expand(4, 5)[:1]
    assert logits.stride() == (0, 1)
    token_logprob(logits, target, inplace_backward=True).logprob.sum().backward()
    found, leaf.grad = leaf.grad, None
    token_logprob((leaf * 1.0)[None], target).logprob.sum().backward()
    assert_same_bits(found, leaf.grad)  # the same operations in another place


def test_reading_the_logits_after_an_inplace_backward_raises() -> None:
    leaf, targets = random_inputs(33, 70)
    logits = leaf * 1.0
    first = token_logprob(logits, targets, inplace_backward=True).logprob.sum()
    second = token_logprob(logits, targets).logprob.sum()
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_only_the_entropy_or_only_the_logprob_may_be_differentiated() -> None:
    logits, targets = random_inputs(9, 20)
    (wide,) = doubled(logits)
    for index in (0, 1):
        sides = (token_logprob(logits, targets, with_entropy=True), logits), (token_scores(logits, targets), logits)
        # The upstream gradient is expanded: stride 0.
        got, own, exact = (
            torch.autograd.grad(scores[index].sum(), of)[0]
            for scores, of in (*sides, (token_scores(wide, targets), wide))
        )
        assert_as_accurate(got, own, exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T", [0, 3])
def test_no_tokens_or_only_ignored_ones_give_a_differentiable_zero(T: int, implementation: str) -> None:
    logits = torch.randn(T, 5, requires_grad=True)
    found = token_logprob(logits, torch.full((T,), -100), with_entropy=True, implementation=implementation)
    (found.logprob.sum() + found.entropy.sum()).backward()
    assert found.logprob.shape == (T,) and found.logprob.count_nonzero() == 0
    assert logits.grad.shape == (T, 5) and logits.grad.count_nonzero() == 0


def test_autocast_does_not_lower_the_precision() -> None:
    logits, targets = random_inputs(9, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = token_logprob(logits, targets).logprob
    assert torch.equal(inside, token_logprob(logits, targets).logprob)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(4, 5, dtype=torch.int64)}, "logits must be float32, bfloat16, float16, float64; got"),
        ({"logits": torch.zeros(5)}, r"logits must be \[..., T, V\] with V > 0; got \[5\]"),
        ({"logits": torch.zeros(4, 0)}, r"with V > 0; got \[4, 0\]"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets must be one token .* = \[4\]; got \[3\]"),
        ({"targets": torch.zeros(4)}, "targets must be int64 or int32 token ids; got torch.float32"),
        ({"targets": torch.tensor([0, 1, 5, 2])}, r"\[0, 5\) or ignore_index=-100; got 5 at \[2\]"),
        ({"targets": torch.tensor([0, 1, 2, -1])}, r"got -1 at \[3\]"),
        ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "targets is on meta but logits is on cpu"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0; got 0.0"),
        ({"temperature": math.nan}, "temperature must be a finite number > 0; got nan"),
        ({"temperature": torch.tensor([1.0, -2.0, 1.0, 1.0])}, r"finite and > 0; got -2 at \[1\]"),
        ({"temperature": torch.tensor([1.0, 1.0, 1.0, math.nan])}, r"finite and > 0; got nan at \[3\]"),
        ({"temperature": torch.tensor([1, 1, 1, 1])}, "temperature must be float32, .*; got torch.int64"),
        ({"temperature": torch.ones(3)}, r"temperature must be a float, or one value .* = \[4\]; got \[3\]"),
        ({"temperature": torch.ones(4, requires_grad=True)}, r"temperature requires grad, .* temperature.detach"),
        ({"keep_mask": torch.ones(4, 5)}, "keep_mask must be bool, True where a token may be sampled; got"),
        ({"keep_mask": torch.ones(4, 4, dtype=torch.bool)}, r"keep_mask must be like the logits = \[4, 5\]"),
        ({"logits": torch.zeros(4, 5, requires_grad=True), "inplace_backward": True}, "overwrite logits, a leaf"),
        ({"logits": torch.zeros(1, 5).expand(4, 5), "inplace_backward": True}, "do not share memory; got strides"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    good = {"logits": torch.zeros(4, 5), "targets": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(InvalidInputError, match=message):
        token_logprob(**(good | change))  # type: ignore[arg-type]


def test_rows_do_not_depend_on_what_is_scored_with_them() -> None:
    """But for the order of sums, which is another for one row than for many."""
    logits, targets = random_inputs(127, 1000, torch.float64)
    whole = token_logprob(logits, targets, with_entropy=True)
    for part in (slice(0, 1), slice(1, 50), slice(50, 127)):
        found = token_logprob(logits[part], targets[part], with_entropy=True)
        assert_equal_in_float64(found, [x[part] for x in whole], terms=logits.shape[-1])


def test_a_temperature_of_an_ignored_row_does_not_matter() -> None:
    logits, targets = random_inputs(3, 5)
    targets[1] = -100
    found = token_logprob(logits, targets, temperature=torch.tensor([1.0, math.nan, 1.0]), with_entropy=True)
    assert gradient(found, logits).isfinite().all()
