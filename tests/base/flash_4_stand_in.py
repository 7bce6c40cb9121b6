"""The two functions of the package flash-attn-4 that rlcore calls, in plain torch: it runs on GPUs alone."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor


class FlashAttention4:
    """A stand-in for the module ``flash_attn.cute.interface``, by its conventions and names of arguments."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []
        """Each backward adds what it was told."""

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        softcap: float,
        window_size_left: int | None,
        learnable_sink: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor | None, ...]:
        assert causal and return_lse and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k >= int(cu_seqlens_q.diff().max())
        weights = _Weights(
            q,
            k,
            cu_seqlens=cu_seqlens_q,
            left=window_size_left,
            scale=softmax_scale,
            softcap=softcap,
            sinks=learnable_sink,
        )
        output = torch.einsum("hij,jhd->ihd", weights.of_tokens, _wide(v, weights.group))
        return output.to(q.dtype).contiguous(), weights.log_sum.float(), None, None, None

    def _flash_attn_bwd(  # noqa: PLR0917  # the package's order
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        softcap: float,
        window_size_left: int | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        deterministic: bool,
        learnable_sink: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the gradients by their formulas: below an operator torch records nothing."""
        assert causal and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        self.deterministic.append(deterministic)
        weights = _Weights(
            q,
            k,
            cu_seqlens=cu_seqlens_q,
            left=window_size_left,
            scale=softmax_scale,
            softcap=softcap,
            sinks=learnable_sink,
        )
        assert torch.equal(weights.log_sum.float(), lse)
        grad, group = _wide(dout), weights.group
        mean = (grad * _wide(out)).sum(-1).T[..., None]
        of_scores = weights.of_tokens * (torch.einsum("ihd,jhd->hij", grad, _wide(v, group)) - mean) * weights.slope
        found = [  # in the strides of their tensors, as the package does
            torch.einsum("hij,jhd->ihd", of_scores, _wide(k, group)) * softmax_scale,
            torch.einsum("hij,ihd->jhd", of_scores, _wide(q)).unflatten(1, (-1, group)).sum(2) * softmax_scale,
            torch.einsum("hij,ihd->jhd", weights.of_tokens, grad).unflatten(1, (-1, group)).sum(2),
        ]
        if learnable_sink is not None:
            found.append(-(weights.of_sink * mean).sum((1, 2)))
        like = [q, k, v] if learnable_sink is None else [q, k, v, learnable_sink]
        return tuple(torch.empty_like(x).copy_(grad) for x, grad in zip(like, found, strict=True))


class _Weights:
    """The weights of attention [heads, T, T]: a token sees itself and ``left`` tokens before it, in its sequence."""

    def __init__(
        self,
        *qk: Tensor,
        cu_seqlens: Tensor,
        left: int | None,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        query, key = qk
        total, self.group = len(query), query.shape[1] // key.shape[1]
        scores = torch.einsum("ihd,jhd->hij", _wide(query), _wide(key, self.group)) * scale
        bent = torch.tanh(scores / softcap) if softcap else scores.new_zeros(())
        self.slope = 1 - bent**2
        """Derivative of the capped scores by the scores."""
        row = torch.arange(total)
        sequence = torch.searchsorted(cu_seqlens[1:], row, right=True)
        apart = row[:, None] - row
        seen = (sequence[:, None] == sequence) & (apart >= 0) & (apart <= (total if left is None else left))
        scores = (softcap * bent if softcap else scores).masked_fill(~seen, float("-inf"))
        sink = scores.new_full((len(scores),), float("-inf")) if sinks is None else sinks.to(scores)
        scores = torch.cat([scores, sink[:, None, None].expand(-1, total, 1)], -1)
        self.log_sum = scores.logsumexp(-1)
        self.of_tokens, self.of_sink = scores.softmax(-1).split([total, 1], -1)


def _wide(x: Tensor, times: int = 1) -> Tensor:
    return (x if x.dtype == torch.float64 else x.float()).repeat_interleave(times, 1)


def modules_of(made: FlashAttention4) -> dict[str, ModuleType]:
    """Return the entries of ``sys.modules`` by which it is imported."""
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, is_package=True)
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        setattr(modules["flash_attn.cute.interface"], name, getattr(made, name))
    return modules
