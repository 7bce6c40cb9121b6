"""The meta device, but for whole numbers: a second instance of a model for traces of its loader is made within.

Integer tensors, such as the map from experts to those of this worker, are real: loaders read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FACTORIES = {torch.arange, torch.empty, torch.full, torch.ones, torch.tensor, torch.zeros}


@contextlib.contextmanager
def made_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors are made on a device and with a dtype where none is named, those of whole numbers on the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _WholeNumbersAreReal():
            yield
    finally:
        torch.set_default_dtype(before)


class _WholeNumbersAreReal(TorchFunctionMode):
    """Inside, tensors of whole numbers are made on the CPU where no device is named."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES and kwargs.get("device") is None and _makes_whole_numbers(func, args, kwargs):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _makes_whole_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func is torch.arange and all(isinstance(bound, int) for bound in args)
    return not (dtype.is_floating_point or dtype.is_complex)
