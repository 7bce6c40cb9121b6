"""Triton kernels on the CPU, under TRITON_INTERPRET=1, which Triton reads when it is imported.

test_triton.py runs this file in a process of its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlcore.kernels.dispatch import Query, choose
from rlcore.ops import token_logprob

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy warns of inf - inf

EPSILON = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random_logits(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*shape, generator=generator) * 4).to(dtype)
    return logits, torch.randint(0, shape[-1], shape[:-1], generator=generator)


def upstream(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def assert_matches_float64(logits: Tensor, targets: Tensor, *, atol: float = 2e-6, **options: object) -> None:
    """Forward and backward, with different upstream gradients for log-probability and entropy."""
    g, g_bar = upstream(*targets.shape)
    results = []
    for implementation, dtype in (("triton", logits.dtype), ("reference", torch.float64)):
        z = logits.detach().to(dtype)
        z = (logits.detach() if dtype == logits.dtype else z).requires_grad_()  # keeps strides
        kwargs = {k: v.to(dtype) if k == "temperature" and isinstance(v, Tensor) else v for k, v in options.items()}
        found = token_logprob(z, targets, with_entropy=True, implementation=implementation, **kwargs)
        (gradient,) = torch.autograd.grad(
            [found.logprob, found.entropy], z, [g.to(found.logprob), g_bar.to(found.logprob)]
        )
        results.append((found.logprob.detach(), found.entropy.detach(), gradient))
    (logprob, entropy, gradient), (true_logprob, true_entropy, true_gradient) = results
    torch.testing.assert_close(logprob.double(), true_logprob, rtol=2e-7, atol=atol)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=1e-6, atol=atol)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=EPSILON[logits.dtype], atol=atol)


# smallest, odd, one past a tile of the statistics, one past a block of the gradient
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 8193), (2, 3, 4097)], ids=str)
def test_rows_match_float64(shape: tuple[int, ...]) -> None:
    assert_matches_float64(*random_logits(*shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_half_precision_are_not_rounded_again(dtype: torch.dtype) -> None:
    assert_matches_float64(*random_logits(3, 300, dtype=dtype))


def test_rows_with_peaks_offsets_and_masked_columns() -> None:
    logits, targets = random_logits(6, 500)
    logits[0] *= 20  # |z| up to about 250
    logits[1] += 1e4
    logits[2] = -3e4
    logits[3, 1::2] = -math.inf
    targets[3] = 0
    logits[4] = -math.inf
    logits[4, 7] = 0.0
    targets[4] = 7
    assert_matches_float64(logits, targets, atol=2e-5)


def test_rows_with_a_temperature_each_and_a_keep_mask() -> None:
    logits, targets = random_logits(2, 5, 99)
    keep = torch.rand(logits.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    keep.scatter_(-1, targets[..., None], True)
    assert_matches_float64(logits, targets, temperature=torch.linspace(0.5, 2, 10).view(2, 5), keep_mask=keep)


@pytest.mark.parametrize("view", ["batch without its last token", "every second column", "transposed"])
def test_rows_of_any_strides(view: str) -> None:
    logits, _ = random_logits(3, 6, 40)
    views = {
        "batch without its last token": logits[:, :-1],
        "every second column": logits[0, :, ::2],
        "transposed": logits[0].T,
    }
    strided = views[view]
    assert_matches_float64(strided, torch.arange(strided[..., 0].numel()).view(strided.shape[:-1]) % strided.shape[-1])


def test_ignored_rows_are_exactly_zero_whatever_they_hold() -> None:
    logits, targets = random_logits(4, 50)
    logits[1], targets[1] = math.nan, -100
    logits.requires_grad_()
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    (found.logprob.sum() + found.entropy.sum()).backward()
    assert found.logprob[1] == 0 and found.entropy[1] == 0 and not logits.grad[1].any()
    assert logits.grad.isfinite().all() and logits.grad[0].any()


def test_nan_in_a_row_that_counts_is_not_hidden() -> None:
    logits, targets = random_logits(2, 50)
    logits[0, 3] = math.nan
    found = token_logprob(logits, targets, with_entropy=True, implementation="triton")
    assert found.logprob.isnan().tolist() == [True, False] and found.entropy.isnan().tolist() == [True, False]


def test_backward_in_place_overwrites_the_logits() -> None:
    logits, targets = random_logits(3, 60)
    leaf = logits.requires_grad_()
    gradients = []
    for inplace in (False, True):
        scaled = leaf * 1.0
        token_logprob(scaled, targets, inplace_backward=inplace, implementation="triton").logprob.sum().backward()
        gradients.append(leaf.grad.clone())
        leaf.grad = None
    assert torch.equal(*gradients) and torch.equal(scaled, gradients[1])


def test_rows_of_nothing() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    found = token_logprob(logits, torch.zeros(0, dtype=torch.long), with_entropy=True, implementation="triton")
    found.logprob.sum().backward()
    assert found.logprob.shape == (0,) and found.entropy.shape == (0,) and logits.grad.shape == (0, 5)


def test_float64_is_refused_with_the_reason() -> None:
    refused = dict(choose("token_logprob", Query("cpu", torch.float64, 0, 10)).refused)
    assert refused["triton"] == "it computes in float32, and the inputs are float64"
