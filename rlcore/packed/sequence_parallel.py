"""Sequence parallelism as in Ulysses: the ranks of a group share each packed row, and exchange heads for attention.

Each of P ranks computes 1/P of a row's tokens, which are neighbours: embeddings, projections, MLPs and the output head.
Attention reads all tokens of a sequence, but each of its heads works alone. One exchange before it gives each rank all
tokens of 1/P of the heads; one after it gives each rank its own tokens back with all heads. So every implementation of
packed attention runs unchanged (S. Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509, 2023).

P must divide the number of query heads. Where it does not divide the number of key and value heads, they must divide P:
each is then replicated, sent to all of the ranks whose queries read it.

Letters: T tokens of a row, a multiple of P; S = T / P tokens of a rank; F values of a token; D width of a head.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlcore.packed.attention_call import AttentionCall


def own_tokens(num_tokens: int, rank: int, num_ranks: int) -> range:
    """Return which tokens of a row a rank computes; where the row does not divide, the last ranks have fewer."""
    size = -(-num_tokens // num_ranks)
    return range(min(rank * size, num_tokens), min((rank + 1) * size, num_tokens))


def why_not_split(call: AttentionCall, num_ranks: int) -> str | None:
    """Return the reason why the heads of an attention call cannot be dealt out to so many ranks, or None."""
    if call.query_heads % num_ranks:
        return f"its {call.query_heads} query heads do not divide by {num_ranks}; take a divisor of them"
    if call.kv_heads % num_ranks and num_ranks % call.kv_heads:
        return (
            f"its {call.kv_heads} key and value heads neither divide by {num_ranks} nor divide it; take a divisor or "
            "a multiple of them"
        )
    return None


class SequenceGroup:
    """The ranks that share each packed row, as one of them sees it. It must live as long as it is used."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.name = str(group.group_name)
        _groups[self.name] = self

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part p of [P, ...], contiguous, to rank p; return what each rank sent here, in their order."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received

    def add_up(self, tensor: Tensor) -> None:
        """Overwrite a tensor by its sum over the ranks."""
        dist.all_reduce(tensor, group=self.group)

    def own(self, num_tokens: int) -> slice:
        """Return which tokens of a row this rank computes."""
        tokens = own_tokens(num_tokens, self.rank, self.size)
        return slice(tokens.start, tokens.stop)

    def evened(
        self, input_ids: Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return the row with a last sequence of padding if its tokens do not divide among the ranks."""
        missing = -len(input_ids) % self.size
        if not missing:
            return input_ids, cu_seqlens, lengths
        edges = torch.cat([cu_seqlens, cu_seqlens[-1:] + missing])
        return pad(input_ids, (0, missing)), edges, (*lengths, missing)

    def to_heads(self, *qkv: Tensor) -> list[Tensor]:
        """Give tokens for heads: of queries, keys and values [1, heads, S, D] return [1, heads of this rank, T, D]."""
        parts = [self._by_rank(x) for x in qkv]
        got_PSF: Tensor = torch.ops.rlcore.exchange_parts(torch.cat(parts, dim=-1), self.name)
        rows_TF = torch.split(got_PSF.flatten(0, 1), [part.shape[-1] for part in parts], dim=-1)
        return [
            torch.unflatten(rows, -1, (-1, x.shape[-1])).transpose(0, 1)[None]
            for rows, x in zip(rows_TF, qkv, strict=True)
        ]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Give heads for tokens: of [1, T, heads of this rank, D] return [1, S, heads, D]."""
        own_heads, width = attended.shape[2:]
        parts_PSF = torch.unflatten(attended[0], 0, (self.size, -1)).flatten(2)
        got_PSF: Tensor = torch.ops.rlcore.exchange_parts(parts_PSF, self.name)
        return torch.unflatten(got_PSF, -1, (own_heads, width)).transpose(0, 1).flatten(1, 2)[None]

    def _by_rank(self, x: Tensor) -> Tensor:
        """Reshape [1, heads, S, D] to [P, S, F], whose part p has the heads of rank p."""
        if x.shape[1] % self.size:
            x = x.repeat_interleave(self.size // x.shape[1], dim=1)
        return torch.unflatten(x[0], 0, (self.size, -1)).transpose(1, 2).flatten(2)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Return the entries of this rank's query heads."""
        return torch.unflatten(per_head, 0, (self.size, -1))[self.rank]

    def as_seen_here(self, module: Any, query: Tensor, key: Tensor) -> Any:
        """Return an attention module as its own attention function must see it where only these heads are."""
        return _ModuleOfOwnHeads(module, self, query.shape[1] // key.shape[1])


class _ModuleOfOwnHeads:
    """An attention module on a rank that has some of its heads: functions of transformers read these attributes."""

    def __init__(self, module: Any, group: SequenceGroup, num_key_value_groups: int) -> None:
        self._module = module
        self._group = group
        self.num_key_value_groups = num_key_value_groups

    @property
    def sinks(self) -> Tensor:
        return self._group.own_heads(self._module.sinks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ------------------------------------------------------------------------------------------------------- exchange

_groups: WeakValueDictionary[str, SequenceGroup] = WeakValueDictionary()
"""By name, which is what an operator can be given: compiled code takes no process group."""


@torch.library.custom_op("rlcore::exchange_parts", mutates_args=())
def _exchange_parts(parts: Tensor, group: str) -> Tensor:
    """Call ``SequenceGroup.exchange`` of the group of this name.

    To the compiler it is one operator: no graph breaks at it, and "selective" recomputation keeps its result.
    """
    return _groups[group].exchange(parts.contiguous())


@_exchange_parts.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.rlcore.exchange_parts(grad, ctx.group), None


_exchange_parts.register_autograd(_exchange_back, setup_context=_keep_group)


class _Joined(torch.autograd.Function):
    """All ranks' rows of a vector. Each rank computes the same with them, so that its own gradient is whole."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: slice, num_rows: int, group: SequenceGroup) -> Tensor:
        ctx.rows = rows
        joined = own.new_zeros(num_rows)
        joined[rows] = own
        group.add_up(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.rows], None, None, None


def joined_rows(own: Tensor, rows: slice, num_rows: int, group: SequenceGroup) -> Tensor:
    """Return the vector of ``num_rows`` of which every rank has other ``rows``.

    The gradient of this rank's rows is its own alone: all ranks must compute one and the same loss of the result.
    """
    joined: Tensor = _Joined.apply(own, rows, num_rows, group)  # type: ignore[no-untyped-call]
    return joined
