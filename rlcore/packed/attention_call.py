"""The properties of a layer's attention call, by which an implementation is chosen and heads are dealt out to ranks."""

from __future__ import annotations

from typing import NamedTuple


class AttentionCall(NamedTuple):
    """The properties of the attention call of one layer."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    """The number of tokens that a token attends to, itself included; None: all before it."""
    softcap: float | None = None
    has_sinks: bool = False
    has_dropout: bool = False

    def of_rank(self, num_ranks: int) -> AttentionCall:
        """Return the call of one of the ranks to which the heads are dealt out; it has a head of keys at least."""
        return self._replace(query_heads=self.query_heads // num_ranks, kv_heads=max(1, self.kv_heads // num_ranks))
