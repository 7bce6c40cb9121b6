"""New weights for an engine in another process on the same device, as shares of a plain copy of the same bytes.

The engine keeps them fused, as vLLM does. Beside rlcore's routes stands the loop that most frameworks have: for each
tensor by name a copy, a handle, a call, and the engine's own loader.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.model_sizes import QWEN2_7B, QWEN3_30B_A3B, ModelSizes
from rlcore.bench.cases.timing import Measured, median_time, self_timed, timed
from rlcore.device import Device
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.offload.group import offloaded
from rlcore.engines.weight_sync.channels.peers import LocalPeers, WorkerPeers, call_each
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.engines.weight_sync.options import RoundOptions
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.engines.weight_sync.sender import Sender
from rlcore.engines.weight_sync.session import SyncSession
from rlcore.engines.weight_sync.target import Target
from rlcore.engines.weight_sync.transports.base import Route
from rlcore.nn import TrainModule
from rlcore.types import IpcHandle, SyncReport
from rlcore.weights.view import WeightView

_TIMEOUT_S = 300.0
_ROUNDS, _WARM_UP = 5, 2
_NUM_RUNS = 3
_HOST_SHRINK = 8
"""Sizes on a host are divided by it."""


class _Layer(nn.Module):
    """Fused, in bfloat16; the trainer's and the engine's alike differ only in what they are called."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        stack = (sizes.experts,) if sizes.experts else ()
        shapes = {
            "qkv": (sizes.q + 2 * sizes.kv, sizes.hidden),
            "o": (sizes.hidden, sizes.q),
            "gate_up": (*stack, 2 * sizes.inner, sizes.hidden),
            "down": (*stack, sizes.hidden, sizes.inner),
            "norm": (sizes.hidden,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, _parameter(*shape))


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)


class _FusedModel(nn.Module):
    """The weights as the engine holds them."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed, self.head = _parameter(sizes.vocab, sizes.hidden), _parameter(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList([_Layer(sizes) for _ in range(sizes.layers)])

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight of a checkpoint into its part."""
        for name, weight in weights:
            number, *rest = name.split(".")
            holder: Any = self if number == "top" else self.layers[int(number)]
            self.part(holder, rest).copy_(weight)

    def part(self, holder: Any, rest: list[str]) -> Tensor:
        """Return the part of a fused tensor of ``holder`` that a checkpoint has under a name."""
        q, kv = self.sizes.q, self.sizes.kv
        match rest:
            case ["q"]:
                return holder.qkv[:q]  # type: ignore[no-any-return]
            case ["k"]:
                return holder.qkv[q : q + kv]  # type: ignore[no-any-return]
            case ["v"]:
                return holder.qkv[q + kv :]  # type: ignore[no-any-return]
            case ["gate" | "up" as half, *expert]:
                stack = holder.gate_up[int(expert[0])] if expert else holder.gate_up
                return stack.chunk(2)[half == "up"]  # type: ignore[no-any-return]
            case ["down", expert]:
                return holder.down[int(expert)]  # type: ignore[no-any-return]
            case [name]:
                return getattr(holder, name)  # type: ignore[no-any-return]
        raise KeyError(".".join(rest))


class _Trainer(TrainModule):
    """Holds the same tensors, and names every weight as a checkpoint does: experts one by one."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.model = _FusedModel(sizes)

    def weight_views(self, adapters: Any = "merged") -> Iterator[WeightView]:
        for name in ("embed", "head"):
            yield self._view(f"top.{name}", getattr(self.model, name), [name])
        for number, layer in enumerate(self.model.layers):
            for name in self._names():
                path = name.split(".")
                yield self._view(f"{number}.{name}", getattr(layer, _FUSED.get(path[0], path[0])), path)

    def _names(self) -> list[str]:
        experts = [f".{number}" for number in range(self.model.sizes.experts)] or [""]
        return [*"qkvo", "norm", *(f"{name}{at}" for at in experts for name in ("gate", "up", "down"))]

    def _view(self, name: str, parameter: Tensor, path: list[str]) -> WeightView:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return WeightView(name, parameter, self.model.part(_Whole(whole), path))


_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


class _Whole:
    """Gives one tensor for every tensor of a layer that is asked for."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Tensor:
        return self._whole


class _FusedTarget(Target):
    def __init__(self, model: _FusedModel, device: Device) -> None:
        self.device = device
        self._model = model

    def meta_model(self) -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            model = _FusedModel(self._model.sizes)
        return model, model.load_weights

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._model.load_weights(weights)

    def committed(self, version: int) -> None:
        """Drop nothing: nothing is kept."""


class _EngineWorker:
    """The worker in the other process."""

    def __init__(self, context: WorkerContext) -> None:
        self._device = context.device

    def build(self, sizes: tuple[int, ...]) -> None:
        with torch.device(self._device.torch_device):
            self._model = _FusedModel(ModelSizes(*sizes))
        self._receiver = Receiver(_FusedTarget(self._model, self._device))

    def sync_call(self, method: str, calls: list[Any] | None) -> list[Any]:
        return call_each([self._receiver], method, calls)

    def take(self, name: str, handle: bytes) -> None:
        """Take one tensor, as frameworks give it."""
        with self._device.memory.import_ipc(IpcHandle.from_bytes(handle)) as mapping:
            self._model.load_weights([(name, mapping.tensor.clone())])
            self._device.synchronize()

    def corners(self) -> list[float]:
        """Return the first value of each tensor."""
        return [float(parameter.view(-1)[0]) for parameter in self._model.parameters()]

    def close(self) -> None:
        self._receiver.close()


class _Pair(NamedTuple):
    """A trainer here and an engine there."""

    trainer: _Trainer
    sender: Sender
    group: WorkerGroup

    def ask(self, method: str, *args: Any) -> Any:
        return self.group.call(method, [(args, {})])[0]


@contextlib.contextmanager
def _started(device: Device, sizes: ModelSizes) -> Iterator[_Pair]:
    with torch.device(device.torch_device):
        trainer = _Trainer(sizes)
    for parameter in trainer.parameters():
        parameter.fill_(0)
    sender = Sender(ModuleSourceTensors(trainer, 1), device)
    group = start_workers(_EngineWorker, "the engine", [device.name], launcher="process", timeout_s=_TIMEOUT_S)
    try:
        pair = _Pair(trainer, sender, group)
        pair.ask("build", tuple(sizes))
        yield pair
        group.stop()
        sender.close()
    finally:
        group.kill("the bench is over")


_Once = Callable[[bool], SyncReport | None]
"""Runs one round; with True one that has nothing new but the version."""


def _run(device: Device, sizes: ModelSizes, make: Callable[[_Pair], _Once]) -> Measured:
    """Time rounds in a steady state; the trainer's weights change before each."""
    with _started(device, sizes) as pair:
        once = make(pair)
        done = [_one_round(device, pair, once, number) for number in range(1, _ROUNDS + _WARM_UP + 1)]
        more = {} if done[-1][0] is None else _beside(device, pair, once)
        value = float(next(pair.trainer.parameters()).view(-1)[0])
        nbytes = sum(parameter.nbytes for parameter in pair.trainer.parameters())
        return _measured((pair.ask("corners"), value), [seconds for _, seconds in done], nbytes, more)


def _measured(
    values: tuple[list[float], float], seconds: list[float], nbytes: int, more: Mapping[str, Quantity]
) -> Measured:
    """``values``: what arrived in each tensor, and what was sent. The first round plans, tests and opens memory."""
    median_s = statistics.median(seconds[_WARM_UP:])
    found = {"throughput": Quantity(nbytes / median_s, "byte/s"), "first_round": Quantity(seconds[0], "s"), **more}
    return Measured(values, median_s, found)


def _check(values: tuple[list[float], float]) -> None:
    found, sent = values
    expect(set(found) == {sent}, f"the engine holds {set(found)}, not {sent}")


def _one_round(device: Device, pair: _Pair, once: _Once, value: float) -> tuple[SyncReport | None, float]:
    for parameter in pair.trainer.parameters():
        parameter.fill_(value)
    device.synchronize()
    return timed(lambda: once(False))


def _beside(device: Device, pair: _Pair, once: _Once) -> Mapping[str, Quantity]:
    """Time a round with nothing new, and one after the trainer's weights have left the device and come back."""
    found = {"nothing_new": Quantity(median_time(_ROUNDS, lambda: once(True))[1], "s")}
    if device.spec.is_host:  # where what was shared cannot leave
        return found
    pair.sender.revoke()
    with offloaded(pair.trainer):
        pass
    report, seconds = _one_round(device, pair, once, 100.0)
    found["after_offload"] = Quantity(seconds, "s")
    if report is not None and report.handles_opened:
        found["handles_after_offload"] = Quantity(report.handles_opened, "handle")
    return found


def _by_route(route: Route) -> Callable[[_Pair], _Once]:
    def make(pair: _Pair) -> _Once:
        session = SyncSession(LocalPeers("the trainer", [pair.sender]), WorkerPeers(pair.group, _TIMEOUT_S))
        options = RoundOptions(version=1, route=route, timeout_s=_TIMEOUT_S)
        return lambda is_same: session.run(replace(options, is_same=is_same), contextlib.nullcontext)

    return make


def _per_tensor(device: Device) -> Callable[[_Pair], _Once]:
    def make(pair: _Pair) -> _Once:
        def loop(is_same: bool) -> None:
            for name, weight in pair.trainer.named_weights():
                copy = weight.clone(memory_format=torch.contiguous_format)
                handle = device.memory.export_ipc(copy)
                device.synchronize()
                pair.ask("take", name, handle.to_bytes())
                device.memory.revoke(handle)

        return loop

    return make


def _prepare(sizes: ModelSizes, device: Device) -> Work:
    sizes = sizes.divided(_HOST_SHRINK) if device.spec.is_host else sizes

    def contender(name: str, make: Callable[[_Pair], _Once]) -> Contender:
        return self_timed(name, lambda: _run(device, sizes, make), _check)

    routes: list[Route] = ["packed", "direct"]
    names = sizes.layers * (5 + 3 * sizes.mlps) + 2
    contenders = [contender(route, _by_route(route)) for route in routes]
    if not sizes.experts:  # it would take minutes
        contenders.append(contender("per_tensor", _per_tensor(device)))
    return Work(
        (_plain_copy(device, sizes), *contenders),
        {"names": names, "hidden": sizes.hidden, "layers": sizes.layers, "experts": sizes.experts},
        num_runs=_NUM_RUNS,
    )


def _plain_copy(device: Device, sizes: ModelSizes) -> Contender:
    """Return one copy of as many bytes within the device: no sync can be faster."""

    def run() -> Measured:
        with torch.device("meta"):
            nbytes = sum(parameter.nbytes for parameter in _FusedModel(sizes).parameters())
        source = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)
        destination = torch.empty_like(source)
        seconds = [timed(lambda: destination.copy_(source), device)[1] for _ in range(_ROUNDS + _WARM_UP)]
        return _measured(([float(destination[-1])], 1.0), seconds, nbytes, {})

    return self_timed("plain_copy", run, _check)


cases = (
    Case(
        "weight_sync/dense",
        "new weights of Qwen2 7B shapes (an eighth of each on a host) for an engine in another process",
        lambda device: _prepare(QWEN2_7B, device),
        estimate_s=110.0,
    ),
    Case(
        "weight_sync/experts",
        "new weights of Qwen3 30B-A3B shapes (an eighth of each on a host), 18,674 names, for another process",
        lambda device: _prepare(QWEN3_30B_A3B, device),
        effort="full",
        estimate_s=400.0,
    ),
)
