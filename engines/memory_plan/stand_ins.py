"""Stand-ins, for meta tensors alone, for code that asks a device, needs values, or compiles.

Each replaces a function of a library by one that does the same for every tensor that is not on the meta device, so that
engines in other threads go on as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlcore.engines._torch_private import (
    FLASH_ATTENTION,
    HOST_ATTENTION,
    MASKED_ATTENTION,
    device_lists_of_optimizers,
)
from rlcore.engines.memory_plan.ledger import Flops
from rlcore.planned import PlannedDevice


def _attention_flops(products: int) -> Callable[..., int]:
    """Return a count of ``products`` of causal attention over sequences that are as long as the longest."""

    def count(*args: Any, **_: Any) -> int:
        query, longest = args[0], args[5]
        return int(products * query.shape[0] * query.shape[1] * query.shape[2] * longest)

    return count


FLOPS: dict[str, Flops] = {
    "torch_attn::_varlen_attn": _attention_flops(2),
    "torch_attn::_varlen_attn_backward": lambda grad_out, query, *rest, **_: _attention_flops(5)(
        query, *rest[:3], rest[4], rest[6]
    ),
}


@contextlib.contextmanager
def stand_ins(device: PlannedDevice) -> Iterator[None]:
    """Let the code of a step run on meta tensors that stand for tensors on ``device``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_launches_of_nothing())
        stack.enter_context(_optimizers_implementation(is_host=not device.arch))
        stack.enter_context(_no_autocast_of_meta())
        stack.enter_context(_flex_attention())
        stack.enter_context(_functions(is_host=not device.arch))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, made(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _is_meta(value: Any) -> bool:
    tensor = getattr(value, "base", value)  # of a tensor descriptor
    return isinstance(tensor, Tensor) and tensor.device.type == "meta"


@contextlib.contextmanager
def _launches_of_nothing() -> Iterator[None]:
    """Launch no Triton kernel that is given meta tensors."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def made(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if any(map(_is_meta, args)):
                return None
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

        return run

    with _replaced(JITFunction, "run", made):
        yield


@contextlib.contextmanager
def _optimizers_implementation(*, is_host: bool) -> Iterator[None]:
    """Let optimizers, and norms of many tensors, take for meta tensors the implementation of the planned device."""

    def with_meta(before: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*before(), "meta"]

    with contextlib.ExitStack() as stack:
        for owner, name, is_for_hosts in device_lists_of_optimizers():
            if is_for_hosts or not is_host:
                stack.enter_context(_replaced(owner, name, with_meta))
        yield


def _no_autocast_of_meta() -> contextlib.AbstractContextManager[None]:
    """Let torch answer that nothing is autocast on the meta device; by itself it raises."""

    def made(asked: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *device_type: False if device_type == ("meta",) else asked(*device_type)

    return _replaced(torch, "is_autocast_enabled", made)


@contextlib.contextmanager
def _functions(*, is_host: bool) -> Iterator[None]:
    """Let functions of torch do with meta tensors what they do with those of the planned device.

    Padded attention would hold all scores. Products of the groups of experts would be refused in float32.
    """

    def attending(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            is_multiplied_out = is_host and value.shape[-1] != query.shape[-1]  # its kernel takes equal widths alone
            if _is_meta(query) and not is_multiplied_out:
                return _attend(query, key, value, *args, is_host=is_host, **kwargs)
            return plain(query, key, value, *args, **kwargs)

        return attend

    def multiplying(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def multiply(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
            if _is_meta(a) and a.dtype != torch.bfloat16:
                result: Tensor = torch.ops.transformers.grouped_mm_fallback(a, b, kwargs["offs"])
                return result
            return plain(a, b, **kwargs)

        return multiply

    with _replaced(functional, "scaled_dot_product_attention", attending):
        if not hasattr(functional, "grouped_mm"):
            yield
            return
        with _replaced(functional, "grouped_mm", multiplying):
            yield


def _attend(  # noqa: PLR0917  # the arguments of torch's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    is_host: bool,
) -> Tensor:
    common: dict[str, Any] = {"scale": scale}
    if is_host:
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        found = HOST_ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, **common)
    elif attn_mask is None and query.dtype != torch.float32 and value.shape[-1] == query.shape[-1]:
        found = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, **common)
    else:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        keeps_sums = torch.is_grad_enabled()
        found = MASKED_ATTENTION(query, key, value, bias, keeps_sums, dropout_p, is_causal, **common)
    result: Tensor = found[0]
    return result


# ----------------------------------------------------------------------------------------------- flex attention


@functools.cache
def _flex_operator() -> Any:
    """Return attention with the memory of compiled flex attention: ``fn(query, key, value) -> (output, log sums)``."""

    @torch.library.custom_op("rlcore_plan::flex_attention", mutates_args=())
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("it is for meta tensors")

    @attend.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        return out, query.new_empty(query.shape[:3], dtype=torch.float32)

    @torch.library.custom_op("rlcore_plan::flex_attention_backward", mutates_args=())
    def backward(  # noqa: PLR0917  # an operator's arguments are given by place
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("it is for meta tensors")

    @backward.register_fake
    def _(  # noqa: PLR0917
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    def run_backward(ctx: Any, grad_out: Tensor, grad_sums: Tensor | None) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        return backward(grad_out, query, key, value, out, sums)

    attend.register_autograd(run_backward, setup_context=save)
    return attend


@contextlib.contextmanager
def _flex_attention() -> Iterator[None]:
    """Let transformers' flex attention, which compiles, take what its compiled kernels take."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        yield
        return
    plain = ALL_ATTENTION_FUNCTIONS["flex_attention"]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_meta(query):
            return plain(module, query, key, value, *args, **kwargs)
        out, _ = _flex_operator()(query, key, value)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS["flex_attention"] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["flex_attention"]
