"""What stands in, for meta tensors alone, for code that asks a device or needs values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlcore.planning.ledger import Transient

_FLASH_ROWS, _FLASH_COLUMNS = 128, 32


def _flash_backward(  # noqa: PLR0917  # the operator's arguments
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor, *_: Any
) -> list[int]:
    """Return what the backward of flash attention 2 takes inside: see ``mha_varlen_bwd`` of its ``flash_api.cpp``.

    The gradient of the queries is summed in float32. Those of keys and values that several heads share are made for
    each head, and added up.
    """
    tokens, heads, width = query.shape
    rows = tokens + _FLASH_ROWS * (len(cu_seq_q) - 1)
    wide = math.ceil(width / _FLASH_COLUMNS) * _FLASH_COLUMNS
    shared = 0 if key.shape[1] == heads else tokens * heads * width * query.element_size()
    return [4 * heads * rows, 4 * rows * heads * wide, shared, shared]


TRANSIENT: dict[str, Transient] = {"torch_attn::_varlen_attn_backward": _flash_backward}
"""What operators take inside, where no dispatch mode sees it."""


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_launches_of_nothing())
        stack.enter_context(_meta_among_optimizers_devices())
        stack.enter_context(_no_autocast_of_meta())
        yield


@contextlib.contextmanager
def _launches_of_nothing() -> Iterator[None]:
    """Launch no Triton kernel that is given meta tensors."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if any(_is_meta(value) for value in args):
            return None
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def _is_meta(value: Any) -> bool:
    tensor = getattr(value, "base", value)  # of a tensor descriptor
    return isinstance(tensor, Tensor) and tensor.device.type == "meta"


@contextlib.contextmanager
def _meta_among_optimizers_devices() -> Iterator[None]:
    """Let optimizers take for meta tensors the implementation that they take for an accelerator's."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    names = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices")
    before = [(module, name, getattr(module, name)) for module in (optimizer, _foreach_utils) for name in names]
    for module, name, found in before:
        setattr(module, name, lambda found=found: [*found(), "meta"])
    try:
        yield
    finally:
        for module, name, found in before:
            setattr(module, name, found)


@contextlib.contextmanager
def _no_autocast_of_meta() -> Iterator[None]:
    """Let torch answer that nothing is autocast on the meta device; by itself it raises."""
    asked = torch.is_autocast_enabled

    def is_autocast_enabled(*device_type: str) -> bool:
        return False if device_type == ("meta",) else asked(*device_type)

    torch.is_autocast_enabled = is_autocast_enabled
    try:
        yield
    finally:
        torch.is_autocast_enabled = asked
