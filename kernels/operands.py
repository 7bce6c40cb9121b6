"""Checks of the arguments that operators share.

Shapes and dtypes are checked always. Values are checked at once on the CPU and under ``RLCORE_DEBUG``; on an
accelerator they are checked on the device, without waiting for it, and a violation stops the process at a
later call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rlcore.arguments import FLAG, WHOLE, kind_of
from rlcore.errors import InvalidInputError
from rlcore.settings import Settings
from rlcore.tensor_data import dtype_name

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def is_debugging() -> bool:
    return _debugs(os.environ.get("RLCORE_DEBUG", ""))


@functools.cache
def _debugs(value: str) -> bool:
    """Reading all settings would take 70 microseconds of every operator."""
    return Settings.from_env({"RLCORE_DEBUG": value}).debug != ""


def is_checked_on_device(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` are checked without waiting for them."""
    return not tensor.is_cpu and not is_debugging()


def check_values(ok: Tensor, message: Callable[[], str]) -> None:
    """``ok`` is a bool tensor that must be true everywhere; ``message`` is only called when it can be shown.

    Raises:
        InvalidInputError: on the CPU or with RLCORE_DEBUG=1; otherwise a device-side assertion.
    """
    if is_checked_on_device(ok):
        ok = ok.all() if ok.dim() else ok
        torch._assert_async(ok, "an operator of rlcore got bad values; RLCORE_DEBUG=1 shows which")
    elif not bool(ok.all()):
        raise InvalidInputError(message())


def kernels_verdict(device: torch.device) -> Tensor:
    """What a kernel sets to False where it meets a bad value, for ``check_values``."""
    return torch.ones((), dtype=torch.bool, device=device)


def first_violation(ok_T: Tensor, values_T: Tensor) -> str:
    """Such as "7 at [3]", for messages."""
    position = (~ok_T).nonzero()[0].tolist()
    return f"{values_T[tuple(position)].item():g} at {position}"


def unlowered(device_type: str) -> AbstractContextManager[Any]:
    """Where autocast changes no dtype. Entering ``torch.autocast`` is slow, and seldom needed."""
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
    """Refuse what would silently get no gradient."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(f"{name} requires grad, but no gradient flows to it; pass {name}.detach()")


def check_mask(name: str, mask: Tensor) -> None:
    """Whatever is not 0 counts, and that NaN does not say."""
    if mask.is_floating_point():
        is_known = ~mask.isnan()
        check_values(
            is_known,
            lambda: f"{name} must be 0 or another number for each token; got {first_violation(is_known, mask)}",
        )


def check_binary(name: str, mask: Tensor) -> None:
    """What else a mask may hold, such as numbers of sequences, would mean that a token counts."""
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
    try:  # of a tensor it would wait for the device
        is_positive = not isinstance(value, bool | Tensor) and math.isfinite(value) and value > 0
    except TypeError:
        is_positive = False
    if not is_positive:
        raise InvalidInputError(f"{name} must be a finite number > 0; got {value!r}")


def checked_targets(targets: Tensor, vocab_size: int | Tensor, ignore_index: int) -> Tensor:
    """``targets`` as int64, each a token id or ``ignore_index``."""
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
    """``check_token_range`` of tokens that are 0 where they are ignored: half as many small kernels."""
    is_valid = known.clamp(0, vocab_size - 1) == known
    check_values(
        is_valid, lambda: f"targets must be token ids in [0, {vocab_size}); got {first_violation(is_valid, known)}"
    )


def checked_temperature(
    temperature: float | Tensor, targets: Tensor, ignore_index: int, wide: torch.dtype
) -> float | Tensor:
    """A float, or a tensor like ``targets`` of dtype ``wide`` in which ignored rows have 1."""
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
