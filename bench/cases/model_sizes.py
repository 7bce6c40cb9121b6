"""Shapes of the language models whose weights the cases of a weight sync send."""

from __future__ import annotations

from typing import NamedTuple


class ModelSizes(NamedTuple):
    """Sizes of a decoder with grouped-query attention and a gated MLP; embedding and head are two tensors."""

    vocab: int
    hidden: int
    inner: int
    """The width of one expert, where there are any."""
    q: int
    kv: int
    layers: int
    experts: int
    """0: the MLP is dense."""

    @property
    def mlps(self) -> int:
        """The number of MLPs in each layer."""
        return max(1, self.experts)

    def divided(self, by: int) -> ModelSizes:
        """Divide every width by ``by``; layers and experts stay as many."""
        widths = {name: getattr(self, name) // by for name in ("vocab", "hidden", "inner", "q", "kv")}
        return self._replace(**widths)


QWEN2_7B = ModelSizes(vocab=152064, hidden=3584, inner=18944, q=3584, kv=512, layers=28, experts=0)
QWEN3_30B_A3B = ModelSizes(vocab=151936, hidden=2048, inner=768, q=4096, kv=512, layers=48, experts=128)
