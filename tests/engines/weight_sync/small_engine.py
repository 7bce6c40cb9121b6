"""A small inference executor that keeps its weights as large ones do, and checkpoints of every shape it takes.

Query, key and value are one tensor, with grouped heads, replicated where there are fewer than shards; so are gate and
up; experts are stacked; the vocabulary is cut and padded; a head may be tied to the embedding; one weight is changed as
it is loaded. It generates nothing: ``held()`` gives what each worker holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlcore.engines.executors.worker import Worker
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.weight_sync.channels.peers import call_each
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.target import Target
from rlcore.nn import TrainModule
from rlcore.registry import registry


class Sizes(NamedTuple):
    """The sizes of a model."""

    vocab: int = 37
    hidden: int = 24
    inner: int = 20
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    layers: int = 2
    experts: int = 0
    is_tied: bool = False
    has_state: bool = False
    """A weight that the engine keeps as -exp(weight), in float32."""


def checkpoint(sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights by their checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes(sizes).items()}


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by its checkpoint name."""
    hidden, inner = sizes.hidden, sizes.inner
    found: dict[str, tuple[int, ...]] = {"embed.weight": (sizes.vocab, hidden)}
    for number in range(sizes.layers):
        at = f"layers.{number}."
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            found[f"{at}{name}_proj.weight"] = (heads * sizes.head_dim, hidden)
            found[f"{at}{name}_proj.bias"] = (heads * sizes.head_dim,)
        found[f"{at}o_proj.weight"] = (hidden, sizes.heads * sizes.head_dim)
        for expert in [f"experts.{e}." for e in range(sizes.experts)] or [""]:
            found[f"{at}{expert}gate_proj.weight"] = (inner, hidden)
            found[f"{at}{expert}up_proj.weight"] = (inner, hidden)
            found[f"{at}{expert}down_proj.weight"] = (hidden, inner)
        found[f"{at}norm.weight"] = (hidden,)
        if sizes.has_state:
            found[f"{at}A_log"] = (sizes.heads,)
    if not sizes.is_tied:
        found["head.weight"] = (sizes.vocab, hidden)
    return found


class Checkpoint(TrainModule):
    """A module whose parameters have the checkpoint's names."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = dict(weights)
        for name, tensor in weights.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, nn.Parameter(torch.empty_like(tensor, device="meta")))

    def materialization_source(self) -> Mapping[str, Tensor]:
        return self._weights

    @torch.no_grad()
    def add(self, amount: float) -> None:
        """A training step, as far as weights are concerned."""
        for parameter in self.parameters():
            parameter.add_(amount)

    @torch.no_grad()
    def move(self) -> None:
        """Put other memory in the place of two parameters."""
        self.embed.weight = nn.Parameter(self.embed.weight + 1)
        norm = self.get_parameter("layers.0.norm.weight")
        norm.data = norm + 1


class SmallModel(nn.Module):
    """One shard."""

    def __init__(self, sizes: Sizes, shard: int, shards: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.shard, self.shards = sizes, shard, shards
        self.kv_shards = min(shards, sizes.kv_heads)
        hidden, inner = sizes.hidden, sizes.inner // shards
        q, kv = (heads * sizes.head_dim for heads in (sizes.heads // shards, sizes.kv_heads // self.kv_shards))
        self.vocab_rows = -(-sizes.vocab // (8 * shards)) * 8

        def empty(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, float("nan"), dtype=kind), requires_grad=False)

        self.embed = empty(self.vocab_rows, hidden)
        self.head = self.embed if sizes.is_tied else empty(self.vocab_rows, hidden)
        for number in range(sizes.layers):
            layer = nn.Module()
            layer.qkv_weight, layer.qkv_bias = empty(q + 2 * kv, hidden), empty(q + 2 * kv)
            layer.o = empty(hidden, q)
            stack = (sizes.experts,) if sizes.experts else ()
            layer.gate_up, layer.down = empty(*stack, 2 * inner, hidden), empty(*stack, hidden, inner)
            layer.norm = empty(hidden)
            if sizes.has_state:
                layer.A = empty(sizes.heads // shards, kind=torch.float32)
            self.add_module(f"layer{number}", layer)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load as vLLM's loaders do: by name, in any order, each into its part of a fused tensor."""
        for name, weight in weights:
            if name in ("embed.weight", "head.weight"):
                self._load_vocab(self.embed if name == "embed.weight" else self.head, weight)
                continue
            _, number, *rest = name.split(".")
            self._load_layer(getattr(self, f"layer{number}"), rest, weight)

    def _load_vocab(self, rows: Tensor, weight: Tensor) -> None:
        first = self.shard * self.vocab_rows
        own = weight[first : first + self.vocab_rows]
        rows[: own.shape[0]].copy_(own)
        rows[own.shape[0] :].fill_(0)

    def _load_layer(self, layer: Any, rest: list[str], weight: Tensor) -> None:
        stack: tuple[int, ...] = ()
        if rest[0] == "experts":
            stack, rest = (int(rest[1]),), rest[2:]
        match rest:
            case ["q_proj" | "k_proj" | "v_proj" as name, leaf]:
                self._load_qkv(getattr(layer, f"qkv_{leaf}"), name[0], weight)
            case ["o_proj", _]:
                layer.o.copy_(self._cut(weight, 1))
            case ["gate_proj" | "up_proj" as name, _]:
                half = layer.gate_up[stack].chunk(2)[name == "up_proj"]
                half.copy_(self._cut(weight, 0))
            case ["down_proj", _]:
                layer.down[stack].copy_(self._cut(weight, 1))
            case ["norm", _]:
                layer.norm.copy_(weight)
            case ["A_log"]:
                if not weight.is_meta and weight.isnan().any():
                    raise ValueError("A_log is not a number")
                layer.A.copy_(-torch.exp(self._cut(weight, 0).float()))
            case _:
                raise KeyError(".".join(rest))

    def _load_qkv(self, fused: Tensor, name: str, weight: Tensor) -> None:
        q = self.sizes.heads // self.shards * self.sizes.head_dim
        kv = self.sizes.kv_heads // self.kv_shards * self.sizes.head_dim
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[name]
        shard = self.shard if name == "q" else self.shard * self.kv_shards // self.shards
        fused.narrow(0, start, size).copy_(weight.narrow(0, shard * size, size))

    def _cut(self, weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(self.shards, dim)[self.shard]


class SmallTarget(Target):
    def __init__(self, worker: SmallWorker) -> None:
        self.device = worker.device
        self._worker = worker

    def meta_model(self) -> Any:
        with torch.device("meta"):
            model = self._worker.new_model()
        return model, model.load_weights

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._worker.model.named_parameters()}

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._worker.model.load_weights(weights)

    def committed(self, version: int) -> None:
        self._worker.versions.append(version)


class SmallWorker(Worker):
    runs_on_many_devices = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._context = context

    def build(self, path: Path, *, sizes: tuple[Any, ...], shards: int = 1, dtype: str = "float32") -> None:
        self._shape = Sizes(*sizes), self._context.rank % shards, shards, getattr(torch, dtype)
        with torch.device(self.device.torch_device):
            self.model = self.new_model()
        self.model.load_weights(load_file(path).items())
        self.versions: list[int] = []
        self.receiver = Receiver(SmallTarget(self))
        self.offload_groups = {
            "weights": OffloadGroup(self.device, self.model.parameters, lambda guard, state: None),
            "kv_cache": OffloadGroup(self.device, tuple, lambda guard, state: None),
        }

    def new_model(self) -> SmallModel:
        return SmallModel(*self._shape)

    def sync_call(self, method: str, calls: list[Any] | None) -> list[Any]:
        return call_each([self.receiver], method, calls)

    def held(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}

    def committed_versions(self) -> list[int]:
        return self.versions

    def close(self) -> None:
        self.receiver.close()
        super().close()


class ApartWorker(SmallWorker):
    """A worker in a process of its own, as vLLM's are."""

    owns_process = True


def registered() -> AbstractContextManager[Any]:
    """Within it they are the inference executors "small" and "small_apart"."""
    workers = {"small": SmallWorker, "small_apart": ApartWorker}
    entries = {("inference", name): (f"{__name__}:{worker.__name__}", "the tests") for name, worker in workers.items()}
    return mock.patch.dict(registry().executors, entries)


def write(weights: Mapping[str, Tensor], path: Path) -> Path:
    save_file(dict(weights), path)
    return path


def expected(
    weights: Mapping[str, Tensor],
    sizes: Sizes,
    shards: int,
    dtype: torch.dtype,
    devices: Sequence[str | torch.device] = (),
) -> list[dict[str, Tensor]]:
    """Return the tensors of each shard of a fresh engine, on the host.

    Args:
        devices: of each shard, by default the host. One may round ``exp`` as another does not.
    """
    return [
        _loaded(weights, SmallModel(sizes, shard, shards, dtype), device)
        for shard, device in zip(range(shards), devices or ["cpu"] * shards, strict=True)
    ]


def _loaded(weights: Mapping[str, Tensor], model: SmallModel, device: str | torch.device) -> dict[str, Tensor]:
    model.to(device).load_weights((name, weight.to(device)) for name, weight in weights.items())
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
