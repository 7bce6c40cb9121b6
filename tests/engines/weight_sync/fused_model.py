"""A small engine's model, tensor and expert parallel, with loaders as inference engines have them.

Letters: H hidden size, D head size, I inner size, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Sizes:
    H: int = 8
    D: int = 4
    heads: int = 4
    kv_heads: int = 2
    I: int = 8  # noqa: E741
    V: int = 11
    E: int = 4
    layers: int = 2
    is_tied: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of one worker."""

    size: int = 1
    rank: int = 0
    splits_experts: bool = False


def names(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a checkpoint."""
    s = sizes
    yield "embed.weight", (s.V, s.H)
    for layer in range(s.layers):
        for part, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            yield f"layers.{layer}.{part}.weight", (heads * s.D, s.H)
            yield f"layers.{layer}.{part}.bias", (heads * s.D,)
        yield f"layers.{layer}.o.weight", (s.H, s.heads * s.D)
        yield f"layers.{layer}.norm.weight", (s.H,)
        for expert in range(s.E):
            yield f"layers.{layer}.experts.{expert}.gate.weight", (s.I, s.H)
            yield f"layers.{layer}.experts.{expert}.up.weight", (s.I, s.H)
            yield f"layers.{layer}.experts.{expert}.down.weight", (s.H, s.I)
    yield "norm.weight", (s.H,)
    if not s.is_tied:
        yield "head.weight", (s.V, s.H)


def _parameter(*shape: int, sizes: Sizes) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=sizes.dtype), requires_grad=False)


def _narrowed(tensor: Tensor, dim: int, share: Share) -> Tensor:
    size = tensor.shape[dim] // share.size
    return tensor.narrow(dim, share.rank * size, size)


class Attention(nn.Module):
    """qkv in one matrix; key heads that are fewer than the workers are had by several."""

    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        self.sizes, self.share = sizes, share
        self.heads, self.kv_heads = sizes.heads // share.size, max(1, sizes.kv_heads // share.size)
        rows = (self.heads + 2 * self.kv_heads) * sizes.D
        self.qkv = nn.Module()
        self.qkv.weight = _parameter(rows, sizes.H, sizes=sizes)
        self.qkv.bias = _parameter(rows, sizes=sizes)
        self.o = nn.Module()
        self.o.weight = _parameter(sizes.H, self.heads * sizes.D, sizes=sizes)

    def load(self, part: str, kind: str, weight: Tensor) -> None:
        if part == "o":
            self.o.weight.data.copy_(_narrowed(weight, 1, self.share))
            return
        heads = self.heads if part == "q" else self.kv_heads
        first = {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}[part] * self.sizes.D
        total = self.sizes.heads if part == "q" else self.sizes.kv_heads
        own = self.share.rank * total // self.share.size  # the same for workers that share a key head
        into = getattr(self.qkv, kind).data.narrow(0, first, heads * self.sizes.D)
        into.copy_(weight.narrow(0, own * self.sizes.D, heads * self.sizes.D))


class Experts(nn.Module):
    """Gate and up of all experts in one tensor, down transposed in another."""

    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        self.share = share
        self.map = list(range(sizes.E))
        inner = sizes.I
        if share.splits_experts:
            per = sizes.E // share.size
            self.map = [e - share.rank * per if e // per == share.rank else -1 for e in range(sizes.E)]
        else:
            inner //= share.size
        local = sum(e >= 0 for e in self.map)
        self.w13 = _parameter(local, 2 * inner, sizes.H, sizes=sizes)
        self.w2 = _parameter(local, inner, sizes.H, sizes=sizes)

    def load(self, expert: int, part: str, weight: Tensor) -> None:
        local = self.map[expert]
        if local < 0:
            return
        dim = 1 if part == "down" else 0
        own = weight if self.share.splits_experts else _narrowed(weight, dim, self.share)
        if part == "down":
            self.w2.data[local].copy_(own.t())
        else:
            half = self.w13.shape[1] // 2
            self.w13.data[local].narrow(0, half * (part == "up"), half).copy_(own)


class Vocabulary(nn.Module):
    """Rows padded to a multiple of 4 for each worker."""

    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        self.sizes, self.share = sizes, share
        self.rows = -(-sizes.V // (4 * share.size)) * 4
        self.weight = _parameter(self.rows, sizes.H, sizes=sizes)

    def load(self, weight: Tensor) -> None:
        first = min(self.share.rank * self.rows, self.sizes.V)
        count = min(self.rows, self.sizes.V - first)
        self.weight[:count].data.copy_(weight.narrow(0, first, count))
        self.weight[count:].data.fill_(0)


class Norm(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = _parameter(sizes.H, sizes=sizes)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        self.attention, self.experts = Attention(sizes, share), Experts(sizes, share)
        self.norm = Norm(sizes)


class FusedModel(nn.Module):
    def __init__(self, sizes: Sizes, share: Share) -> None:
        super().__init__()
        self.embed = Vocabulary(sizes, share)
        self.layers = nn.ModuleList(Layer(sizes, share) for _ in range(sizes.layers))
        self.norm = Norm(sizes)
        self.head = self.embed if sizes.is_tied else Vocabulary(sizes, share)
        self.register_buffer("cache", torch.arange(6.0))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self._loader(name)(weight)

    def _loader(self, name: str) -> Callable[[Tensor], Any]:
        match name.split("."):
            case ["embed" | "head" as part, _]:
                return getattr(self, part).load
            case ["norm", _]:
                return self.norm.weight.data.copy_
            case ["layers", layer, "norm", _]:
                return self.layers[int(layer)].norm.weight.data.copy_
            case ["layers", layer, "experts", expert, part, _]:
                return lambda weight: self.layers[int(layer)].experts.load(int(expert), part, weight)
            case ["layers", layer, part, kind]:
                return lambda weight: self.layers[int(layer)].attention.load(part, kind, weight)
        raise KeyError(name)


def meta(sizes: Sizes, share: Share) -> FusedModel:
    with torch.device("meta"):
        return FusedModel(sizes, share)
