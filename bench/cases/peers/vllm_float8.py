"""New weights for a vLLM that keeps them in float8, beside one that keeps them in the trainer's bfloat16.

A case is one start of vLLM. vLLM's own loader gets the same weights in it, and has to leave the same bytes, scales
included; a sync that left any of them to that loader fails. A model whose two copies in bfloat16 have no room on the
device has fewer layers, and says so in its name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench import steps
from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.bench.cases.peers import vllm_worker
from rlcore.bench.cases.peers.vllm_pair import TIMEOUT_S, EnginePair
from rlcore.bench.cases.timing import timed
from rlcore.device import Device
from rlcore.errors import MissingDependencyError
from rlcore.types import SyncReport

_NUM_RUNS = 5
_ROOM = 0.88
"""The share of the device that two copies may have; vLLM's cache, activations and contexts have the rest."""
_KV_BYTES, _KV_BYTES_ON_HOST = 2 << 30, 1 << 24
_ELEMENT_BYTES = 2
"""An element of bfloat16."""
_PART = 1 << 29
"""Elements of a buffer in which weights go to vLLM's own loader."""
QUANTIZATIONS = {"bfloat16": None, "fp8_per_block": "fp8_per_block", "fp8_per_tensor": "fp8_per_tensor"}


def fitting(model: ModelShape, total_bytes: int) -> ModelShape:
    """Return the model with as many of its layers as two copies in bfloat16 have room for."""
    ends = 2 * model.vocabulary * model.hidden
    attention = 2 * model.hidden * (model.q + model.kv)
    layer = attention + 3 * model.mlps * model.hidden * model.inner
    most = int((_ROOM * total_bytes / 2 / _ELEMENT_BYTES - ends) // layer)
    return model if most >= model.layers else replace(model, name=f"{model.name}, {most} layers", layers=most)


class WholeSync(NamedTuple):
    seconds: float
    state: int
    """The state of the trainer's weights, 0 or 1."""
    sums: list[dict[str, int]]
    """Checksums of vLLM's parameters, scales among them."""
    report: SyncReport | None


class Float8Pair(EnginePair):
    """A trainer in bfloat16, and a vLLM that has quantised its weights, or not."""

    def __init__(self, model: ModelShape, quantization: str | None, device: Device) -> None:
        vllm_worker.register()
        super().__init__(model, device, vllm_worker.EXECUTOR)
        self._quantization = quantization

    def start(self) -> None:
        """Build both, and give vLLM its first weights."""
        device = self.device
        is_host = device.spec.is_host
        steps.begin("build of the engine")
        self.infer.build(
            devices=device.name,
            load_format="auto" if is_host else "dummy",
            dtype="bfloat16",
            quantization=self._quantization,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=16,
            kv_cache_memory_bytes=_KV_BYTES_ON_HOST if is_host else _KV_BYTES,
            timeout_s=TIMEOUT_S,
        )
        self.infer.meta()
        steps.begin("build of the trainer")
        self.train.build(devices=device.name, dtype="bfloat16", timeout_s=TIMEOUT_S)
        self.infer.onload()
        self.sync_first()

    def turn(self) -> WholeSync:
        """Sync when both engines' memory is new, as after a step of training while vLLM was away."""
        self.infer.meta()
        self.train.offload()
        self.train.onload()
        self.step()
        self.infer.onload("weights")
        done = self.again()
        self.infer.onload("kv_cache")
        return done

    def again(self) -> WholeSync:
        """Sync new weights into memory that the sync before has opened."""
        self.step()
        self.device.synchronize()
        report, seconds = timed(lambda: self.train.sync_weights(self.infer))
        return self._done(seconds, report)

    def loader(self) -> WholeSync:
        """Give vLLM's own loader all weights: it quantises them as it does when it starts."""
        self.step()
        self.device.synchronize()
        _, seconds = timed(self._reload)
        return self._done(seconds, None)

    def _reload(self) -> None:
        named = self.train.call("named")[0]
        size = max(_PART, *(weight.numel() for _, weight in named))
        buffer = torch.empty(size, dtype=torch.bfloat16, device=self.device.torch_device)
        for part in _parts(named, size):
            end = 0
            for _, weight in part:
                begin, end = end, end + weight.numel()
                buffer[begin:end] = weight.flatten()
            handle = self.device.memory.export_ipc(buffer)
            self.device.synchronize()
            self.ask_each("reload", handle.to_bytes(), [(name, tuple(weight.shape)) for name, weight in part])
            self.device.memory.revoke(handle)
        self.ask_each("reload", None, [])

    def _done(self, seconds: float, report: SyncReport | None) -> WholeSync:
        (of_replica,) = self.ask_each("sums")
        return WholeSync(seconds, self.state, of_replica, report)


def _parts(named: Sequence[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights in runs of at most ``size`` elements."""
    part: list[tuple[str, Tensor]] = []
    filled = 0
    for name, weight in named:
        if filled + weight.numel() > size:
            yield part
            part, filled = [], 0
        part.append((name, weight))
        filled += weight.numel()
    yield part


def _quantities(done: WholeSync) -> dict[str, Quantity]:
    if done.report is None:
        return {}
    return {
        f"route_{done.report.route}": Quantity(1, "1"),
        "by_vllms_loader": Quantity(done.report.fallback_bytes, "B"),
    }


def _prepare(model: ModelShape, quantization: str | None, device: Device) -> Work:
    try:
        import vllm
    except ImportError as error:
        raise MissingDependencyError("vllm", needed_for="this case", extra="vllm") from error
    shape = model if device.spec.is_host else fitting(model, device.properties().total_bytes)
    pair = Float8Pair(shape, quantization, device)
    try:
        pair.start()
    except BaseException:
        pair.close()
        raise
    expected: dict[int, list[dict[str, int]]] = {}

    def check(done: WholeSync) -> None:
        wanted = expected.setdefault(done.state, done.sums)
        expect(done.sums == wanted, "vLLM's weights and scales are not those that another way has made")
        expect(expected.get(0) != expected.get(1), "the weights of two steps are the same")
        by_loader = 0 if done.report is None else done.report.fallback_bytes
        expect(not by_loader, f"{by_loader} bytes of a sync by plan went through vLLM's own loader")

    def contender(name: str, run: Any, most_runs: int | None = None) -> Contender:
        return Contender(
            name, run, check, seconds=lambda done: done.seconds, quantities=_quantities, most_runs=most_runs
        )

    return Work(
        (contender("turn", pair.turn), contender("again", pair.again), contender("vllms_loader", pair.loader, 2)),
        {
            "model": pair.name,
            "bytes": pair.nbytes,
            "names": pair.num_names,
            "quantization": quantization or "none",
            "vllm": vllm.__version__,
        },
        num_runs=_NUM_RUNS,
        close=pair.close,
    )


def _case(name: str, model: ModelShape, kept_as: str, estimate_s: float) -> Case:
    return Case(
        f"weight_sync/vllm_float8/{name}_{kept_as}",
        f"new weights from bfloat16 for a vLLM that keeps them in {kept_as}, {model.name} shapes (tiny on a host)",
        functools.partial(_prepare, model, QUANTIZATIONS[kept_as]),
        effort="full",
        estimate_s=estimate_s,
    )


cases = tuple(
    _case(name, model, kept_as, estimate_s)
    for name, model, estimate_s in (("7b", QWEN_7B, 60.0), ("30b_a3b", QWEN_30B_A3B, 120.0))
    for kept_as in QUANTIZATIONS
)
