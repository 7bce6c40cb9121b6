"""The limits of the floating-point error of a device's results."""

from __future__ import annotations

import torch

AS_ACCURATE = 4.0
"""Factor of the CPU's own error: other orders of addition change the error by less."""


def inaccuracy(found: torch.Tensor, on_cpu: torch.Tensor, exact: torch.Tensor, *, reference: str = "on the CPU") -> str:
    """Return "" if ``found`` is about as near to ``exact`` as the CPU's result in the same dtype, or what is wrong.

    The errors are compared in the root mean square and at the worst element, so there should be some dozens of them.

    Args:
        exact: the same computation in float64.
        reference: says in the text where ``on_cpu`` was computed, if not on the CPU.
    """
    unit = torch.finfo(on_cpu.dtype).eps / 2  # the rounding of both results when stored
    error, allowed = ((values.detach().cpu().double() - exact).abs() for values in (found, on_cpu))
    for measure, name in ((_root_mean_square, "root mean square"), (torch.max, "worst element")):
        limit = AS_ACCURATE * measure(allowed) + unit * measure(exact.abs())
        if not measure(error) <= limit:
            return f"error {float(measure(error)):.3g} ({name}), {float(measure(allowed)):.3g} {reference}"
    return ""


def is_rounded(found: torch.Tensor, exact: torch.Tensor, roundings: int) -> bool:
    """Return True if each element of ``found`` is within the error of so many roundings of ``exact`` in its dtype.

    A sum or product of n positive numbers rounds n - 1 times, in any order, by half of ``eps`` at most.
    """
    wide = torch.complex128 if found.dtype.is_complex else torch.float64
    limit = roundings * torch.finfo(found.dtype).eps / 2 * exact.abs()
    return bool(((found.cpu().to(wide) - exact).abs() <= limit).all())


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()
