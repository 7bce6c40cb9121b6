"""The operators of torch_npu's own that are simulated, from their public description, in plain torch.

Registered under the schemas of the wheel, so that a wrong name or argument is refused as on hardware; gradients go
through the wheel's own formulas. What is not here is refused.
"""

# ruff: noqa: PLR0917 - the wheel's schemas
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("npu", "IMPL")
_ALL = 2147483647


def register() -> None:
    for function in (rms_norm, rms_norm_backward, fusion_attention_v3, fusion_attention_grad_v3,
                     fusion_attention, fusion_attention_grad):  # fmt: skip
        _library.impl(f"npu_{function.__name__}", _logged(function), "PrivateUse1", allow_override=True)
    _library.impl("repeat_interleave_backward_int", _repeat_backward, "PrivateUse1", allow_override=True)


def _logged(function: Any) -> Any:
    known: list[str] = []

    def operator(*arguments: Any, **keywords: Any) -> Any:
        if not known:
            known.append(function.__name__)
            torch.ops.cann_sim.log_operator(f"npu::npu_{function.__name__}")
        return function(*arguments, **keywords)

    return operator


def _repeat_backward(grad: Tensor, x: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    """What torch_npu's formula of ``repeat_interleave`` asks for."""
    if dim is None:
        return grad.view(*x.shape, repeats).sum(-1)
    dim %= x.dim()
    return grad.reshape(*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]).sum(dim + 1)


# ------------------------------------------------------------------------------------------------ normalisation


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    axes = tuple(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    rstd = (wide.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    return ((wide * rstd) * gamma.float()).to(x.dtype), rstd


def rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    axes = tuple(range(x.dim() - gamma.dim(), x.dim()))
    normal, wide = x.float() * rstd, dy.float()
    scaled = wide * gamma.float()
    dx = rstd * (scaled - normal * (scaled * normal).mean(axes, keepdim=True))
    outer = tuple(range(x.dim() - gamma.dim()))
    return dx.to(x.dtype), (wide * normal).sum(outer) if outer else wide * normal


# ------------------------------------------------------------------------------------------------ attention


def fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Any = None,
    padding_mask: Any = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = _ALL, next_tockens: int = _ALL, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(input_layout, keep_prob, pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink)
    probability, peak, total = _probability(query, key, atten_mask, scale, sparse_mode, pre_tockens, next_tockens)
    out = (probability @ _heads(value, query)).to(query.dtype)
    shape = (*peak.shape[:-1], 8)  # as the kernel pads them
    none = torch.zeros(0, device=query.device, dtype=query.dtype)
    number = torch.zeros(1, dtype=torch.int64)
    return out, peak.expand(shape).contiguous(), total.expand(shape).contiguous(), none, number, number.clone()


def fusion_attention_grad_v3(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *, pse: Any = None,
    padding_mask: Any = None, atten_mask: Tensor | None = None, softmax_max: Any = None, softmax_sum: Any = None,
    softmax_in: Any = None, attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = _ALL, next_tockens: int = _ALL, inner_precise: int = 0, seed: Any = None, offset: Any = None,
    prefix: Any = None, actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(input_layout, keep_prob, pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink)
    probability, _, _ = _probability(query, key, atten_mask, scale_value, sparse_mode, pre_tockens, next_tockens)
    wide = dy.float()
    d_value = probability.transpose(-1, -2) @ wide
    d_probability = wide @ _heads(value, query).transpose(-1, -2)
    d_score = probability * (d_probability - (d_probability * probability).sum(-1, keepdim=True)) * scale_value
    d_query = (d_score @ _heads(key, query)).to(query.dtype)
    d_key = d_score.transpose(-1, -2) @ query.float()
    none = torch.zeros(0, device=query.device, dtype=query.dtype)
    return d_query, _shared(d_key, key), _shared(d_value, value), none, none.clone()


def _refuse(layout: str, keep_prob: float, *options: Any) -> None:
    given = [
        option for option in options if option is not None and not (isinstance(option, Tensor) and not len(option))
    ]
    if layout != "BNSD" or keep_prob != 1.0 or given:
        raise NotImplementedError(
            "npu_fusion_attention is simulated for BNSD, without dropout, pse, prefix and lengths"
        )


def _heads(of_keys: Tensor, query: Tensor) -> Tensor:
    return of_keys.float().repeat_interleave(query.shape[1] // of_keys.shape[1], 1)


def _shared(gradient: Tensor, of_keys: Tensor) -> Tensor:
    batch, heads = of_keys.shape[:2]
    return gradient.view(batch, heads, -1, *gradient.shape[2:]).sum(2).to(of_keys.dtype)


def _probability(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, mode: int, before: int, after: int
) -> tuple[Tensor, Tensor, Tensor]:
    score = query.float() @ _heads(key, query).transpose(-1, -2) * scale
    rows, columns = score.shape[-2:]
    place = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    if mode in (2, 3):  # causal from the first corner, or from the last
        hidden = place > (columns - rows if mode == 3 else 0)
    elif mode in (0, 4):  # a band, of lengths that are the same
        hidden = (place > after) | (place < -before)
    else:
        raise NotImplementedError(f"npu_fusion_attention is not simulated for sparse_mode={mode}")
    hidden = hidden.to(score.device)
    if mask is not None and mode == 0:
        hidden = hidden | mask.bool()
    score = score.masked_fill(hidden, -math.inf)
    peak = score.amax(-1, keepdim=True)
    exp = (score - peak.masked_fill(peak == -math.inf, 0)).exp()
    total = exp.sum(-1, keepdim=True)
    return exp / total.clamp_min(1e-30), peak, total


# ------------------------------------------------------------------------------------------------ packed attention


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Any = None,
    padding_mask: Any = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = _ALL, next_tockens: int = _ALL, inner_precise: int = 0, prefix: Any = None,
    actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Any = None, dropout_mask: Any = None, seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Of packed sequences (TND), causal or within a band, under the compressed mask."""
    _refuse_unless_packed(input_layout, atten_mask, sparse_mode, actual_seq_qlen, actual_seq_kvlen)
    _refuse("BNSD", keep_prob, pse, padding_mask, prefix, sink, dropout_mask)
    outputs = []
    for q, k, v in zip(*(_sequences(x, actual_seq_qlen) for x in (query, key, value)), strict=True):
        probability, _, _ = _probability(q, k, None, scale, sparse_mode, pre_tockens, next_tockens)
        outputs.append(_packed(probability @ _heads(v, q)))
    statistics = torch.zeros(*query.shape[:2], 8, device=query.device)  # the simulated backward makes its own
    none = torch.zeros(0, device=query.device, dtype=query.dtype)
    return torch.cat(outputs).to(query.dtype), statistics, statistics.clone(), none, 0, 0, 0


def fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *, pse: Any = None,
    padding_mask: Any = None, atten_mask: Tensor | None = None, softmax_max: Any = None, softmax_sum: Any = None,
    softmax_in: Any = None, attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = _ALL, next_tockens: int = _ALL, inner_precise: int = 0, seed: int = 0, offset: int = 0,
    numels: int = 0, prefix: Any = None, actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse_unless_packed(input_layout, atten_mask, sparse_mode, actual_seq_qlen, actual_seq_kvlen)
    gradients = []
    for parts in zip(*(_sequences(x, actual_seq_qlen) for x in (query, key, value, dy)), strict=True):
        found = fusion_attention_grad_v3(
            *parts, head_num, "BNSD", scale_value=scale_value, keep_prob=keep_prob, pre_tockens=pre_tockens,
            next_tockens=next_tockens, pse=pse, padding_mask=padding_mask, prefix=prefix, sink=sink,
            sparse_mode=sparse_mode,
        )  # fmt: skip
        gradients.append([_packed(gradient) for gradient in found[:3]])
    none = torch.zeros(0, device=query.device, dtype=query.dtype)
    return *(torch.cat(part) for part in zip(*gradients, strict=True)), none, none.clone()


def _refuse_unless_packed(layout: str, mask: Tensor | None, mode: int, of_queries: Any, of_keys: Any) -> None:
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    if layout != "TND" or mode not in (3, 4) or mask is None or not torch.equal(mask.cpu(), triangle):
        raise NotImplementedError(
            "npu_fusion_attention is simulated for TND with sparse_mode 3 or 4 and the mask of 2048 that they take"
        )
    if of_queries is None or of_queries != of_keys:
        raise NotImplementedError("npu_fusion_attention is simulated for queries and keys of the same lengths")


def _sequences(x: Tensor, ends: list[int]) -> list[Tensor]:
    """[T, heads, D] to [1, heads, L, D] of each sequence."""
    starts = [0, *ends[:-1]]
    return [x[start:end].transpose(0, 1)[None] for start, end in zip(starts, ends, strict=True)]


def _packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
