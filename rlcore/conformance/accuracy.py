"""How far a device's floating-point results may lie from the true ones."""

from __future__ import annotations

import torch

AS_ACCURATE = 4.0
"""Times the CPU's own error: devices add in other orders, which changes it by less."""


def inaccuracy(found: torch.Tensor, on_cpu: torch.Tensor, exact: torch.Tensor) -> str:
    """Return "" if ``found`` is about as near to ``exact`` as what the CPU gives in the same dtype, or what is wrong.

    The errors are compared in the root mean square and at the worst element, so there should be some dozens of them.

    Args:
        exact: the same computed in float64.
    """
    unit = torch.finfo(on_cpu.dtype).eps / 2  # in which both are stored
    error, allowed = ((values.detach().cpu().double() - exact).abs() for values in (found, on_cpu))
    for measure, name in ((_root_mean_square, "root mean square"), (torch.max, "worst element")):
        limit = AS_ACCURATE * measure(allowed) + unit * measure(exact.abs())
        if not measure(error) <= limit:
            return f"error {float(measure(error)):.3g} ({name}), {float(measure(allowed)):.3g} on the CPU"
    return ""


def is_rounded(found: torch.Tensor, exact: torch.Tensor, roundings: int) -> bool:
    """Whether each element is what so many roundings in its dtype make of ``exact``, if they lose no more than that.

    A sum or product of n positive numbers takes n - 1, in any order; each is wrong by half of ``eps`` at most.
    """
    wide = torch.complex128 if found.dtype.is_complex else torch.float64
    limit = roundings * torch.finfo(found.dtype).eps / 2 * exact.abs()
    return bool(((found.cpu().to(wide) - exact).abs() <= limit).all())


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()
