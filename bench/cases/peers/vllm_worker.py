"""A vLLM replica that the bench can ask more of: to take weights as others give them, and what it holds then."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from torch import Tensor

from rlcore.device import Device
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.offload.storages import bytes_of
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.executor import VllmExecutor
from rlcore.engines.sampling.vllm.shard import TensorParallelShard
from rlcore.engines.weight_sync.planning.self_test import checksums
from rlcore.errors import UnsupportedError
from rlcore.registry import registry
from rlcore.types import IpcHandle

EXECUTOR = "vllm_measured"
Parts = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of weights that lie one after the other."""
_PACKED_BYTES = 2 << 30
"""vLLM's own default of 1 GiB does not take the embedding of a 7B model."""


def register() -> None:
    """Make it known as the inference executor ``EXECUTOR`` of this process."""
    registry().executors["inference", EXECUTOR] = (f"{__name__}:MeasuredVllmWorker", "the bench")


class MeasuredVllmWorker(VllmExecutor):
    """A worker of vLLM that the bench can ask for more.

    Giving host memory back, taking and transferring are for a replica of one device, whose worker is in this process.
    """

    def give_host_memory_back(self) -> None:
        """Free the blocks of host memory that hold nothing."""
        arena_of(self.device).trim()

    def ready_host_bytes(self) -> int:
        """Return the bytes of host memory in which an offload finds room at once."""
        return int(arena_of(self.device).free_bytes)

    def bare(self, tag: str) -> list[tuple[float, int]]:
        """Return, for each rank of vLLM, the seconds to map the memory of a released tag again, and its pieces.

        The memory is released again afterwards.
        """
        return self._on_vllms_workers(_bare, tag)

    def sums(self) -> list[dict[str, int]]:
        """Return, for each rank of vLLM, the checksums of its parameters."""
        return self._on_vllms_workers(_sums)

    def take(self, name: str, handle: bytes) -> None:
        """Load one tensor, as frameworks send it."""
        with self.device.memory.import_ipc(IpcHandle.from_bytes(handle)) as mapping:
            self._on_vllms_workers(_load, name, mapping.tensor)
            self.device.synchronize()

    def reload(self, handle: bytes | None, parts: Parts) -> None:
        """Give vLLM's own loader a part of all weights, in one reload that ends with a call without a handle.

        Args:
            handle: of a vector that has the weights one after the other.
        """
        if handle is None:
            self._on_vllms_workers(_end_reload)
            return
        with self.device.memory.import_ipc(IpcHandle.from_bytes(handle)) as mapping:
            self._on_vllms_workers(_reload, mapping.tensor, parts)
            self.device.synchronize()

    def transfer(self, method: str, argument: Any = None) -> None:
        """Call vLLM's own back end ``ipc`` on its worker's side."""
        self._on_vllms_workers(_transfer, method, argument)

    def _on_vllms_workers(self, run: Callable[..., Any], *arguments: Any) -> list[Any]:
        assert self._engine is not None
        return self._engine.collective_rpc(run, args=arguments)  # type: ignore[arg-type]


def _sums(worker: Any) -> dict[str, int]:
    own = dict(worker.model_runner.get_model().named_parameters())
    return dict(zip(own, checksums(parameter.detach() for parameter in own.values()), strict=True))


def _bare(worker: Any, tag: str) -> tuple[float, int]:
    """Make as many pieces as vLLM's allocator has, at the same addresses; a KV cache is set to zero besides."""
    shard: TensorParallelShard = worker._rlcore_shard
    device = shard.device
    parts = [part for chunk in shard._offload_groups[tag]._chunks for part in chunk.ranges]
    device.synchronize()
    started = time.perf_counter()
    for part in parts:
        part.storage.resize_(part.storage_bytes)
        if tag == "kv_cache":
            bytes_of(part.storage, 0, part.storage_bytes).zero_()
    seconds = time.perf_counter() - started
    device.synchronize()
    for part in parts:
        part.storage.resize_(0)
    return seconds, len(parts)


def _load(worker: Any, name: str, tensor: Tensor) -> None:
    worker.model_runner.get_model().load_weights([(name, tensor)])


def _reload(worker: Any, values: Tensor, parts: Parts) -> None:
    model = worker.model_runner.get_model()
    if getattr(worker, "_rlcore_reload", None) is None:
        worker._rlcore_reload = contextlib.ExitStack()
        worker._rlcore_reload.enter_context(versions.reloading(model, worker.vllm_config))
    sizes = [math.prod(shape) for _, shape in parts]
    # Copies: vLLM keeps what it is given until a layer is whole.
    each = zip(parts, values[: sum(sizes)].split(sizes), strict=True)  # type: ignore[no-untyped-call]
    model.load_weights([(name, part.view(shape).clone()) for (name, shape), part in each])


def _end_reload(worker: Any) -> None:
    worker._rlcore_reload.close()
    worker._rlcore_reload = None


def _transfer(worker: Any, method: str, argument: Any) -> None:
    engine = getattr(worker, "_rlcore_measured", None)
    if engine is None:
        from vllm.config.weight_transfer import WeightTransferConfig

        config = WeightTransferConfig(backend="ipc")
        arguments = config, worker.vllm_config, worker.device, worker.model_runner.get_model()
        engine = worker._rlcore_measured = _vllms_ipc().IPCWeightTransferEngine(*arguments)
    match method:
        case "start":
            engine.start_weight_update()
        case "update":
            engine.update_weights(argument)
        case "finish":
            engine.finish_weight_update()


def _vllms_ipc() -> Any:
    """vLLM's module of its back end ``ipc``.

    It imports Ray, for another way to reach workers than the one that is driven here: where Ray is not installed, an
    empty module stands in for it during the import.
    """
    is_absent = "ray" not in sys.modules and importlib.util.find_spec("ray") is None
    if is_absent:
        sys.modules["ray"] = types.ModuleType("ray")
    try:
        from vllm.distributed.weight_transfer import ipc_engine
    finally:
        if is_absent:
            del sys.modules["ray"]
    return ipc_engine


# ------------------------------------------------------------------------------------------- the trainer's side


class VllmIpcSender:
    """vLLM's own back end ``ipc``, on the trainer's side.

    Args:
        device: of the trainer.
        named: all weights, whole and on that device, by the names of a checkpoint; anew for each call.
        ask: calls ``MeasuredVllmWorker.transfer``.

    Raises:
        UnsupportedError: this installation cannot; says why.
    """

    def __init__(
        self,
        device: Device,
        named: Callable[[], Iterator[tuple[str, Tensor]]],
        ask: Callable[..., Any],
        *,
        is_packed: bool,
    ) -> None:
        self._named, self._ask, self._is_packed = named, ask, is_packed
        if device.spec.is_host:
            raise UnsupportedError("vLLM's own ipc engine", "it takes CUDA devices")
        try:
            ipc_engine = _vllms_ipc()
        except ImportError as error:
            raise UnsupportedError("vLLM's own ipc engine", f"it cannot be imported: {error}") from error
        if not hasattr(ipc_engine.IPCWeightTransferEngine, "trainer_send_weights"):
            raise UnsupportedError("vLLM's own ipc engine of this version", "the case drives that of 0.26 only")
        self._vllm: Any = ipc_engine

    def send(self) -> None:
        """Returns when vLLM has the weights."""
        arguments = self._vllm.IPCTrainerSendWeightsArgs(
            send_mode=lambda update: self._ask("update", asdict(update)),
            packed=self._is_packed,
            packed_buffer_size_bytes=_PACKED_BYTES,
        )
        self._ask("start")
        self._vllm.IPCWeightTransferEngine.trainer_send_weights(self._named(), arguments)
        self._ask("finish")
