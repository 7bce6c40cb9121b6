"""Gradients of parameters in bfloat16, which are added up over micro-batches in float32.

A sum in bfloat16 has 8 binary digits: of many micro-batches, each of the later ones is less than its last digit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class GradientSums:
    """The gradients of parameters: wide between two micro-batches, and narrow for the optimizer.

    A parameter in float32 is left alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._narrow = [one for one in parameters if one.is_floating_point() and one.itemsize < torch.float32.itemsize]
        self._wide: list[nn.Parameter] = []

    def widen(self) -> None:
        """Hold the gradients that there are in float32, so that the next backward adds to that."""
        self._wide += [_retyped(one, torch.float32) for one in self._narrow if one.grad is not None]
        self._narrow = [one for one in self._narrow if one.grad is None]

    def narrow(self) -> None:
        """Round the sums to the dtypes of their parameters; nothing if none is wide."""
        if self._wide:
            self._narrow += [_retyped(one, one.dtype) for one in self._wide]
            self._wide = []


def _retyped(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Give the gradient of a parameter, if there is one, and those that autograd adds to it another dtype."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
    return parameter
