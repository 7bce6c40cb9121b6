"""FlashAttention 4 over packed sequences: the package flash-attn-4, whose kernels are written in NVIDIA's CuTe DSL.

It compiles its kernels when they are first asked for, which no graph of torch.compile can hold. So the two halves of
the package's own ``autograd.Function`` are operators of torch here: no graph breaks at them, and "selective"
recomputation keeps their results. These halves are no public names of the package; the probe of ``choice`` refuses a
version in which they are others.

Letters: T packed tokens, N sequences, D width of a head.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from rlcore.packed.implementations import PackedSequences, cast_alike

_DETERMINISTIC = "FLASH_ATTENTION_DETERMINISTIC"
"""A variable of transformers for flash-attn 2 and 3, which means this package, too."""


def attend_flash_4(
    module: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, **options: Any
) -> Tensor:
    """Call FlashAttention 4 for a pack."""
    output, _ = torch.ops.rlcore.flash_attention_4(
        *(x[0].transpose(0, 1) for x in cast_alike(query, key, value)),
        packed.cu_seqlens,
        packed.max_length,
        options["scaling"],
        options.get("sliding_window"),
        options.get("softcap") or 0.0,
        options.get("s_aux"),
    )
    result: Tensor = output[None]
    return result


@torch.library.custom_op("rlcore::flash_attention_4", mutates_args=())
def _attend(  # noqa: PLR0917  # torch's operators with gradients take all by position
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output [T, heads, D], and the logarithm of the sum of each row's weights, [heads, T] float32."""
    from flash_attn.cute.interface import _flash_attn_fwd  # an extra

    output, log_sum, *_ = _flash_attn_fwd(
        query,
        key,
        value,
        **_options(cu_seqlens, longest, scale, window, softcap, sinks),
        return_lse=True,
    )
    return output, log_sum


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_tokens, heads, _width = query.shape
    output = query.new_empty(num_tokens, heads, value.shape[-1])
    return output, query.new_empty(heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("rlcore::flash_attention_4_backward", mutates_args=())
def _attend_backward(  # noqa: PLR0917
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of query, key and value, and of the sinks where there are some."""
    from flash_attn.cute.interface import _flash_attn_bwd

    gradients = _flash_attn_bwd(
        query,
        key,
        value,
        output,
        grad,
        log_sum,
        **_options(cu_seqlens, longest, scale, window, softcap, sinks),
        deterministic=torch.are_deterministic_algorithms_enabled() or os.environ.get(_DETERMINISTIC) == "1",
    )
    return list(gradients)


@_attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> list[Tensor]:
    of = [query, key, value] if others[-1] is None else [query, key, value, others[-1]]
    return [torch.empty_like(x) for x in of]


def _options(  # noqa: PLR0917
    cu_seqlens: Tensor, longest: int, scale: float, window: int | None, softcap: float, sinks: Tensor | None
) -> dict[str, Any]:
    """Return the arguments that both halves have. Their window does not count the token itself.

    What they take for the longest length is a bound. It is never a short one, for which they would compile the same
    kernels again.
    """
    longest = max(longest, _SHORTEST_BOUND)
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None else window - 1,
        "softcap": softcap,
        "learnable_sink": sinks,
    }


_SHORTEST_BOUND = 256
"""The bound in tokens. Up to 192 they compile for one block of queries or keys."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, ctx.longest, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, sinks)
    ctx.set_materialize_grads(False)  # nobody has a gradient of the logarithms


def _back(ctx: Any, grad: Tensor | None, grad_of_log_sum: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    *tensors, sinks = ctx.saved_tensors
    dq, dk, dv, *dsinks = torch.ops.rlcore.flash_attention_4_backward(
        grad, *tensors, ctx.longest, ctx.scale, ctx.window, ctx.softcap, sinks
    )
    of_options = None, None, None, None, None  # boundaries, longest, scale, window, softcap
    return dq, dk, dv, *of_options, dsinks[0] if dsinks else None


_attend.register_autograd(_back, setup_context=_keep)
