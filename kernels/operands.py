"""Checks of arguments that several operators take.

Shapes and dtypes are always checked. Values are checked at once on the CPU and under ``RLCORE_DEBUG``. On an
accelerator they are checked on the device, without waiting for it, and a wrong one stops the process at a later call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rlcore.arguments import FLAG, WHOLE, kind_of
from rlcore.errors import InvalidInputError
from rlcore.kernels._torch_private import assert_on_device
from rlcore.settings import is_debugging
from rlcore.tensor_data import dtype_name

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def is_checked_on_device(tensor: Tensor) -> bool:
    """Return True if the values of ``tensor`` are checked without waiting for them."""
    return not tensor.is_cpu and not is_debugging()


def check_values(ok: Tensor, message: Callable[[], str]) -> None:
    """Check that ``ok``, a bool tensor, is True everywhere; ``message`` is only called where it can be shown.

    Raises:
        InvalidInputError: on the CPU or with RLCORE_DEBUG=1; otherwise a device-side assertion.
    """
    if is_checked_on_device(ok):
        ok = ok.all() if ok.dim() else ok
        assert_on_device(ok, "an operator of rlcore got bad values; RLCORE_DEBUG=1 shows which")
    elif not bool(ok.all()):
        raise InvalidInputError(message())


def kernels_verdict(device: torch.device) -> Tensor:
    """Return a True scalar for ``check_values``; a kernel sets it to False if it finds a bad value."""
    return torch.ones((), dtype=torch.bool, device=device)


def first_violation(ok_T: Tensor, values_T: Tensor) -> str:
    """Return the first wrong value for a message, such as "7 at [3]"."""
    position = (~ok_T).nonzero()[0].tolist()
    return f"{values_T[tuple(position)].item():g} at {position}"


def unlowered(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast changes no dtype. Entering ``torch.autocast`` is slow, and seldom needed."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


TENSOR = kind_of("a tensor", Tensor)
TENSORS = kind_of("a mapping of names to tensors", Mapping)


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InvalidInputError(f"{name} must be a tensor; got {type(value).__name__}")
    if value.layout != torch.strided:
        raise InvalidInputError(f"{name} must be dense; got {value.layout}: pass its to_dense()")


def is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_float(name: str, tensor: Tensor) -> None:
    check_tensor(name, tensor)
    if tensor.dtype not in FLOATS:
        accepted = ", ".join(dtype_name(dtype) for dtype in FLOATS)
        raise InvalidInputError(f"{name} must be {accepted}; got {tensor.dtype}")


def check_same_device(first: str, device: torch.device, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.device != device:
            raise InvalidInputError(
                f"{name} is on {tensor.device} but {first} is on {device}; move it with .to({first}.device)"
            )


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    check_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        raise InvalidInputError(f"{name} must be {meaning} = {list(shape)}; got {list(tensor.shape)}")


def check_constant(name: str, tensor: Tensor | None) -> None:
    """Refuse a tensor that would silently get no gradient."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(f"{name} requires grad, but no gradient flows to it; pass {name}.detach()")


def check_mask(name: str, mask: Tensor) -> None:
    """Refuse NaN: every other value that is not 0 counts."""
    if mask.is_floating_point():
        is_known = ~mask.isnan()
        check_values(
            is_known,
            lambda: f"{name} must be 0 or another number for each token; got {first_violation(is_known, mask)}",
        )


def check_binary(name: str, mask: Tensor) -> None:
    """Refuse other values than 0 and 1: numbers of sequences, for example, would all count."""
    is_known = (mask == 0) | (mask == 1)
    check_values(is_known, lambda: f"{name} must be 0 or 1 for each token; got {first_violation(is_known, mask)}")


def check_no_nan(name: str, values: Tensor) -> None:
    is_number = ~values.isnan()
    check_values(is_number, lambda: f"{name} must be numbers; got {first_violation(is_number, values)}")


def check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidInputError(f"{name} must be a finite number; got {value}")


def check_flag(name: str, value: object) -> None:
    if not FLAG.has(value):
        raise InvalidInputError(f"{name} must be {FLAG.words}; got {value!r}")


def check_positive(name: str, value: float) -> None:
    try:  # isfinite of a tensor would wait for the device
        is_positive = not isinstance(value, bool | Tensor) and math.isfinite(value) and value > 0
    except TypeError:
        is_positive = False
    if not is_positive:
        raise InvalidInputError(f"{name} must be a finite number > 0; got {value!r}")


def checked_targets(targets: Tensor, vocab_size: int | Tensor, ignore_index: int) -> Tensor:
    """Return ``targets`` as int64, each a token id or ``ignore_index``."""
    check_token_dtype(targets)
    check_token_range(targets, vocab_size, ignore_index)
    return targets.long()


def check_ignore_index(ignore_index: object) -> None:
    if not WHOLE.has(ignore_index) or not -(2**63) <= ignore_index < 2**63:  # type: ignore[operator]
        raise InvalidInputError(f"ignore_index must be a whole number of 64 bits, such as -100; got {ignore_index!r}")


def check_token_dtype(targets: Tensor) -> None:
    if targets.dtype not in _INTEGERS:
        raise InvalidInputError(f"targets must be int64 or int32 token ids; got {targets.dtype}")


def check_token_range(targets: Tensor, vocab_size: int | Tensor, ignore_index: int) -> None:
    is_valid_T = ((targets >= 0) & (targets < vocab_size)) | (targets == ignore_index)
    check_values(
        is_valid_T,
        lambda: (
            f"targets must be token ids in [0, {vocab_size}) or ignore_index={ignore_index}; "
            f"got {first_violation(is_valid_T, targets)}"
        ),
    )


def check_known_tokens(known: Tensor, vocab_size: int) -> None:
    """Check as ``check_token_range`` tokens that are 0 in ignored rows: half as many small kernels."""
    is_valid = known.clamp(0, vocab_size - 1) == known
    check_values(
        is_valid, lambda: f"targets must be token ids in [0, {vocab_size}); got {first_violation(is_valid, known)}"
    )


def checked_temperature(
    temperature: float | Tensor, targets: Tensor, ignore_index: int, wide: torch.dtype
) -> float | Tensor:
    """Return a float, or a tensor like ``targets`` of dtype ``wide`` in which ignored rows have 1."""
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
        return float(temperature)
    check_constant("temperature", temperature)
    check_float("temperature", temperature)
    check_shape("temperature", temperature, tuple(targets.shape), "a float, or one value for each target")
    check_same_device("targets", targets.device, temperature=temperature)
    values_T = temperature.detach().to(wide).masked_fill(targets == ignore_index, 1.0)
    is_valid_T = (values_T > 0) & values_T.isfinite()
    check_values(
        is_valid_T,
        lambda: f"temperature must be finite and > 0; got {first_violation(is_valid_T, values_T)}",
    )
    return values_T
