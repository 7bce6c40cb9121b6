"""New weights for an engine in another process on the same device, as shares of a plain copy of the same bytes.

The engine keeps them fused, as vLLM does. rlcore's routes are compared with the loop that most frameworks have: for
each tensor by name a copy, a handle, a call, and the engine's own loader.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.bench.cases.timing import Measured, median_time, self_timed, timed
from rlcore.bench.cases.workers import BenchWorker, ask, worker_processes
from rlcore.device import Device
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.offload.standalone import offloaded
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

    def __init__(self, sizes: ModelShape) -> None:
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


def _parts(sizes: ModelShape) -> Iterator[tuple[str, str, Any]]:
    """Yield for each weight of a checkpoint, experts one by one, its name, its fused tensor and its part of that."""
    q, kv, inner = sizes.q, sizes.kv, sizes.inner
    yield from ((name, name, ()) for name in ("embed", "head"))
    for number in range(sizes.layers):
        attention = {"q": slice(q), "k": slice(q, q + kv), "v": slice(q + kv, None)}
        weights: dict[str, tuple[str, Any]] = {name: ("qkv", part) for name, part in attention.items()}
        weights |= {"o": ("o", ()), "norm": ("norm", ())}
        experts: list[tuple[str, Any]] = [(f".{expert}", (expert,)) for expert in range(sizes.experts)]
        for name, at in experts or [("", ())]:
            weights[f"gate{name}"] = "gate_up", (*at, slice(inner))
            weights[f"up{name}"] = "gate_up", (*at, slice(inner, None))
            weights[f"down{name}"] = "down", at
        for name, (fused, part) in weights.items():
            yield f"{number}.{name}", f"layers.{number}.{fused}", part


class _FusedModel(nn.Module):
    """The weights as the engine holds them."""

    def __init__(self, sizes: ModelShape) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed, self.head = (_parameter(sizes.vocabulary, sizes.hidden) for _ in range(2))
        self.layers = nn.ModuleList([_Layer(sizes) for _ in range(sizes.layers)])

    @functools.cached_property
    def parts(self) -> dict[str, tuple[nn.Parameter, Any]]:
        """The fused tensor of each weight of a checkpoint, and which part of it that is."""
        fused = dict(self.named_parameters())
        return {name: (fused[holder], part) for name, holder, part in _parts(self.sizes)}

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each weight of a checkpoint into its part."""
        for name, weight in weights:
            parameter, part = self.parts[name]
            parameter[part].copy_(weight)


class _Trainer(TrainModule):
    """Holds the same tensors, and names every weight as a checkpoint does."""

    def __init__(self, sizes: ModelShape) -> None:
        super().__init__()
        self.model = _FusedModel(sizes)

    def weight_views(self, adapters: Any = "merged") -> Iterator[WeightView]:
        for name, (parameter, part) in self.model.parts.items():
            yield WeightView(name, parameter, torch.empty_like(parameter, device="meta")[part])


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


class _EngineWorker(BenchWorker):
    """The worker in the other process."""

    def build(self, sizes: ModelShape) -> None:
        with torch.device(self.device.torch_device):
            self._model = _FusedModel(sizes)
        self._receiver = Receiver(_FusedTarget(self._model, self.device))

    def sync_call(self, method: str, calls: list[Any] | None) -> list[Any]:
        return call_each([self._receiver], method, calls)

    def take(self, name: str, handle: bytes) -> None:
        """Take one tensor, as frameworks give it."""
        with self.device.memory.import_ipc(IpcHandle.from_bytes(handle)) as mapping:
            self._model.load_weights([(name, mapping.tensor.clone())])
            self.device.synchronize()

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


@contextlib.contextmanager
def _started(device: Device, sizes: ModelShape) -> Iterator[_Pair]:
    with torch.device(device.torch_device):
        trainer = _Trainer(sizes)
    for parameter in trainer.parameters():
        parameter.fill_(0)
    sender = Sender(ModuleSourceTensors(trainer, 1), device)
    with contextlib.closing(sender), worker_processes(_EngineWorker, [device.name], timeout_s=_TIMEOUT_S) as group:
        ask(group, "build", sizes)
        yield _Pair(trainer, sender, group)


_Once = Callable[[bool], SyncReport | None]
"""Runs one round; with True one that has nothing new but the version."""


def _run(device: Device, sizes: ModelShape, make: Callable[[_Pair], _Once]) -> Measured:
    """Time rounds in a steady state; the trainer's weights change before each."""
    with _started(device, sizes) as pair:
        once = make(pair)
        done = [_one_round(device, pair, once, number) for number in range(1, _ROUNDS + _WARM_UP + 1)]
        more = {} if done[-1][0] is None else _beside(device, pair, once)
        value = float(next(pair.trainer.parameters()).view(-1)[0])
        nbytes = sum(parameter.nbytes for parameter in pair.trainer.parameters())
        return _measured((ask(pair.group, "corners"), value), [seconds for _, seconds in done], nbytes, more)


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


def send_one_by_one(device: Device, named: Iterable[tuple[str, Tensor]], take: Callable[[str, bytes], Any]) -> None:
    """Send each weight by name as a copy, a handle and a call to the engine's own loader, as frameworks do."""
    for name, weight in named:
        copy = weight.clone(memory_format=torch.contiguous_format)
        handle = device.memory.export_ipc(copy)
        device.synchronize()
        take(name, handle.to_bytes())
        device.memory.revoke(handle)


def _per_tensor(device: Device) -> Callable[[_Pair], _Once]:
    def make(pair: _Pair) -> _Once:
        take = functools.partial(ask, pair.group, "take")
        return lambda is_same: send_one_by_one(device, pair.trainer.named_weights(), take)

    return make


def _prepare(sizes: ModelShape, device: Device) -> Work:
    sizes = sizes.divided(_HOST_SHRINK) if device.spec.is_host else sizes

    def contender(name: str, make: Callable[[_Pair], _Once]) -> Contender:
        return self_timed(name, lambda: _run(device, sizes, make), _check)

    routes: list[Route] = ["packed", "direct"]
    names = sum(1 for _ in _parts(sizes))
    contenders = [contender(route, _by_route(route)) for route in routes]
    if not sizes.experts:  # it would take minutes
        contenders.append(contender("per_tensor", _per_tensor(device)))
    return Work(
        (_plain_copy(device, sizes), *contenders),
        {"names": names, "hidden": sizes.hidden, "layers": sizes.layers, "experts": sizes.experts},
        num_runs=_NUM_RUNS,
    )


def _plain_copy(device: Device, sizes: ModelShape) -> Contender:
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
        lambda device: _prepare(QWEN_7B, device),
        estimate_s=110.0,
    ),
    Case(
        "weight_sync/experts",
        "new weights of Qwen3 30B-A3B shapes (an eighth of each on a host), 18,674 names, for another process",
        lambda device: _prepare(QWEN_30B_A3B, device),
        effort="full",
        estimate_s=400.0,
    ),
)
