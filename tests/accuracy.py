"""How far a floating-point result may lie from the true one: the rule of every such comparison in the tests.

A limit follows from the arithmetic, never from what one machine gave. Processors, instruction sets, thread counts and
versions of torch add the same numbers in different orders, and each result is right. Make the strongest claim that
holds:

* `assert_same_bits`: both sides do the same operations in the same order, or only move data. The test says why.
* `assert_within_rounding`: the number of roundings is known. A sum of n terms x, in any order, is wrong by at most
  ``n u sum |x|``, where u is half the distance from 1 to the next number of the dtype (N. Higham, Accuracy and
  Stability of Numerical Algorithms, 2nd edition, section 4.2). Rounding errors of both signs cancel, so
  ``6 sqrt(n) u sum |x|`` holds for all but one sum in 10^7 (N. Higham and T. Mary, A New Approach to Probabilistic
  Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019). The lower of the two counts.
* `assert_as_accurate`: the way is long (a model, a backward pass). The error against float64 may be four times that of
  a plain computation in the same dtype, in the root mean square and at the worst element. Two right ways to compute the
  same differ less than that, as tests/test_accuracy.py shows, and a missing term differs much more.
* `assert_parts_as_accurate`: the same of tensors in one unit, such as weights after a step, of which some are small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

AS_ACCURATE = 4.0
"""How many times the reference's own error is still as accurate."""


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the relative error of ``terms`` roundings in ``dtype``, one after the other.

    A sum of n numbers has n, a product of k factors has k. An elementary function such as ``exp`` counts 4: the
    vectorised ones of torch (SLEEF, MKL) are wrong by up to 4 units in the last place.
    """
    unit = torch.finfo(dtype).eps / 2
    return min(terms, 6 * math.sqrt(terms)) * unit / (1 - min(terms * unit, 0.5))


def assert_same_bits(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Two tensors have the same shape, dtype and bits; a NaN equals a NaN."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    differs = (found != expected) & ~(found.isnan() & expected.isnan())
    assert not differs.any(), (
        f"{what or 'result'}: {int(differs.sum())} of {found.numel()} elements differ, "
        f"by at most {float((found.double() - expected.double())[differs].abs().max()):.3g}"
    )


def assert_within_rounding(
    found: Tensor | float,
    exact: Tensor | float,
    *,
    terms: int,
    magnitude: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
    what: str = "",
) -> None:
    """Each element is as near to ``exact`` as ``terms`` roundings of numbers up to ``magnitude`` in ``dtype`` allow.

    Args:
        found: the result under test.
        exact: the true value, computed in float64 (or by hand).
        terms: see `rounding`.
        magnitude: what is rounded: for a sum, the sum of its terms' absolute values. ``|exact|`` if not given, which is
            right where nothing cancels.
        dtype: what the arithmetic is done in; that of ``found`` if not given (float64 for a Python float).
    """
    found = found.detach() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
    exact = _float64(exact)
    assert found.shape == exact.shape, f"{what or 'result'}: shape {found.shape}, expected {exact.shape}"
    size = exact.abs() if magnitude is None else _float64(magnitude).to(exact.device)
    stored = torch.finfo(found.dtype)
    limit = rounding(terms, dtype or found.dtype) * size + stored.eps / 2 * exact.abs() + stored.tiny
    error = _error(found, exact, what)
    excess = (error / limit.nan_to_num(stored.tiny)).nan_to_num().flatten()
    assert (excess <= 1).all(), (
        f"{what or 'result'}: error {float(error.max()):.3g}, {float(excess.max()):.3g} times what rounding allows"
    )


def assert_as_accurate(
    found: Tensor | Sequence[Tensor],
    reference: Tensor | Sequence[Tensor],
    exact: Tensor | Sequence[Tensor],
    *,
    factor: float = AS_ACCURATE,
    what: str = "",
) -> None:
    """``found`` is no more than ``factor`` times as far from ``exact`` as ``reference`` is.

    Args:
        found: the result under test, or several of one computation, such as all gradients of a model. Each of several
            is measured by the root mean square of its exact values, and their errors are taken together: those of one
            tensor often have one cause. At least 16 elements in all, as the error of one number is a matter of luck.
        reference: the same by a plain computation in the same dtype.
        exact: the same in float64.
    """
    found, reference, exact = ([x] if isinstance(x, Tensor) else list(x) for x in (found, reference, exact))
    shapes = [[x.shape for x in side] for side in (found, reference, exact)]
    assert shapes[0] == shapes[1] == shapes[2], f"{what or 'result'}: shapes {shapes[0]}, expected {shapes[2]}"
    unit = max(torch.finfo(x.dtype).eps for x in found) / 2
    scales = [1.0] if len(exact) == 1 else [_rms(_finite(_float64(x))) or 1.0 for x in exact]
    found, reference, exact = (_joined(side, scales) for side in (found, reference, exact))
    assert exact.numel() >= 16, f"{what or 'result'}: {exact.numel()} elements; give terms to assert_within_rounding"
    error, allowed = _error(found, exact, what), _error(reference, exact, f"reference of {what or 'result'}")
    finite = _finite(exact)
    for measure, name in ((_rms, "root mean square"), (_worst, "worst element")):
        limit = factor * measure(allowed) + unit * measure(finite)
        assert measure(error) <= limit, (
            f"{what or 'result'}: error {measure(error):.3g} ({name}), at most {limit:.3g}: "
            f"{factor:g} times that of the reference"
        )


def assert_parts_as_accurate(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor], exact: Mapping[str, Tensor], *, what: str = "weights"
) -> None:
    """All tensors together are `assert_as_accurate`, and each is so in the root mean square, however small it is.

    Elements of a tensor owe their errors to common causes. Those of a bias that starts at 0 are errors of a gradient
    and come from a handful of roundings: between 1 and 5 independent ones in the tests' Qwen2, whose biases were four
    times as far off in one right computation as in another in up to 4 of 100 pairs. With one normal cause each, that is
    so in 16 of 100, whatever the number of elements. So no tensor is measured by its own reference alone: a reference
    that is lucky there counts as far off as it is over all elements, whose errors have thousands of causes. A tensor
    whose true error is up to 0.7 of that, and one normal cause, is then above four times it once in 10^8.

    Args:
        found: the results under test by name, all in the same unit.
        reference: the same by a plain computation in the same dtype.
        exact: the same in float64.
    """
    assert found.keys() == reference.keys() == exact.keys(), f"{what}: names differ"
    shapes = [{name: side[name].shape for name in exact} for side in (found, exact)]
    assert shapes[0] == shapes[1], f"{what}: shapes {shapes[0]}, expected {shapes[1]}"
    joined = [torch.cat([side[name].flatten() for name in exact]) for side in (found, reference, exact)]
    assert_as_accurate(*joined, what=f"all {what}")
    overall = _rms(_error(*map(_float64, joined[1:]), f"reference of {what}"))
    for name, true in ((name, _float64(tensor)) for name, tensor in exact.items()):
        error, own = _rms(_error(found[name], true, name)), _rms(_error(reference[name], true, f"reference of {name}"))
        limit = AS_ACCURATE * max(own, overall) + torch.finfo(found[name].dtype).eps / 2 * _rms(true)
        assert error <= limit, (
            f"{name}: error {error:.3g} (root mean square), at most {limit:.3g}: {AS_ACCURATE:g} times that of the "
            f"reference, which is {own:.3g} here and {overall:.3g} over all {what}"
        )


def _error(found: Tensor, exact: Tensor, what: str) -> Tensor:
    """Return the distances; what is infinite or NaN must be so on both sides, and counts 0."""
    found = _float64(found).to(exact.device)
    same = (found == exact) | (found.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (found - exact).abs())
    assert error.isfinite().all(), f"{what or 'result'}: {int((~error.isfinite()).sum())} elements are not finite"
    return error


def _float64(values: Tensor | float) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).detach()


def _joined(results: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    return torch.cat([(_float64(x) / scale).flatten() for x, scale in zip(results, scales, strict=True)])


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()]


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _worst(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
