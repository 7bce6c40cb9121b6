"""The inference executor ``vllm``: one worker runs a vLLM engine on all devices of a replica."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec

import msgspec

from rlcore.engines.executors.base import InferenceExecutor
from rlcore.engines.executors.worker import MemoryReport
from rlcore.engines.launchers.failures import raised
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.residency import Move
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, PromptReader
from rlcore.engines.sampling.request_queue import PauseMode
from rlcore.engines.sampling.vllm import ascend, versions
from rlcore.engines.sampling.vllm.arguments import check_arguments, engine_arguments
from rlcore.engines.sampling.vllm.extension import RlcoreWorkerExtension, ShardAnswer
from rlcore.engines.sampling.vllm.interfaces import VllmEngine
from rlcore.engines.sampling.vllm.replica import Replica
from rlcore.engines.sampling.vllm.shard import TensorParallelShard
from rlcore.engines.sampling.vllm.worker_processes import WorkerProcesses
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.errors import RlcoreError, StateError, SyncError, UnsupportedError
from rlcore.image_inputs import ImageInputs
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport
from rlcore.weights.names import mismatch
from rlcore.weights.source import in_files

P = ParamSpec("P")
_RPC = RlcoreWorkerExtension.rlcore_call.__name__
_RENDEZVOUS_S = 600.0
"""The longest wait for the other ranks to call build(): they load as long as this one."""
_SYNC, _VALUES = "a weight sync", "weights without values"
"""Reasons for which a replica makes no step."""


class VllmExecutor(InferenceExecutor):
    """Drives one replica. The inference engine knows if its weights are on the devices."""

    runs_on_many_devices: ClassVar[bool] = True
    owns_process: ClassVar[bool] = True
    joins_torchrun: ClassVar[bool] = True
    drives_replica: ClassVar[bool] = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: VllmEngine | None = None
        self._host_memory: tuple[int | None, int | None] | None = None
        self._differing: list[str] = []

    @classmethod
    def check(cls, path: Path, options: Mapping[str, Any], python: str | os.PathLike[str] | None) -> None:
        check_arguments(options, python)
        check_model_folder(path)

    def build(self, path: str | Path, /, **engine_args: Any) -> None:
        """Load the model and allocate the KV cache.

        Args:
            path: a Hugging Face model folder with safetensors weights.
            engine_args: fields of ``vllm.EngineArgs``, but for those that rlcore sets. ``kv_cache_memory_bytes`` is
                per device; without it the KV cache takes most of the memory that the weights leave free.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            InvalidInputError: an argument that vLLM does not know or refuses, or that only rlcore sets.
            MissingDependencyError, UnsupportedError: vLLM is absent, of a version that rlcore does not know, or a build
                for other devices; or the device is simulated.
            WorkerDiedError: a process that vLLM started has ended.
        """
        ascend.check_device(self.device)
        self._folder = check_model_folder(path)
        self.vllm_version = versions.prepare()
        versions.check_platform(self.device)
        arguments = engine_arguments(engine_args, self._folder, self.context)
        images = ImageInputs.of_folder(self._folder.path) if self._folder.reads_images else None
        self._reader = reader = PromptReader(self._folder, None, "max_model_len", images)
        if self._is_rank:
            self.context.process_group(_RENDEZVOUS_S)  # vLLM takes the default group for its world
        processes = WorkerProcesses(self.context)
        with processes.needed_for("build"):
            engine = versions.new_engine(arguments, self.context.rank, self.device.index, self.context.store)
        reader.max_positions = engine.vllm_config.model_config.max_model_len
        self._engine, self._replica = engine, Replica(engine, processes, reader, self.device.activate)
        if self.device.spec.is_host or engine_args.get("load_format") != "dummy":  # "dummy" weights are in no folder
            found = self._call(TensorParallelShard.differing_after_reload, str(path))
            self._differing = sorted({name for names in found for name in names})
        if self._host_memory is not None:
            self._call(TensorParallelShard.reserve, *self._host_memory)

    # ------------------------------------------------------------------------------------------- generation

    def check_prompts(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, numbers: Sequence[int]
    ) -> list[Sequence[int]]:
        return [list(token_ids) for token_ids in self._reader.read(prompts, params, numbers)]

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> list[RequestOutput]:
        return self._replica.run(prompts, params, version, self.emit)

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> None:
        if self._is_rank and self.context.world_size > 1:
            raise UnsupportedError(
                f"submit() on {self.context.world_size} ranks of torchrun",
                "they cannot make the same steps beside the program; use generate(), or tensor_parallel_size 1",
            )
        self._replica.submit(numbers, prompts, params, version)

    def collect(self, timeout_s: float, *, version: int) -> dict[int, RequestOutput]:
        return self._replica.collect(timeout_s)

    def progress(self) -> dict[int, int]:
        """Return the tokens that each request under way has so far, by its number."""
        return self._replica.progress()

    def abort(self, numbers: Sequence[int] | None) -> int:
        return self._replica.abort(numbers)

    def pause(self, mode: PauseMode, *, version: int) -> None:
        self._replica.pause(mode)

    def resume(self) -> None:
        self._replica.resume()

    # -------------------------------------------------------------------------------------------- residency

    def onload(self, tag: str) -> OffloadReport:
        return self._move(Move.ONLOAD, tag)

    def offload(self, tag: str) -> OffloadReport:
        return self._move(Move.OFFLOAD, tag)

    def meta(self, tag: str) -> OffloadReport:
        return self._move(Move.META, tag)

    def _move(self, move: Move, tag: str) -> OffloadReport:
        if move is not Move.ONLOAD:
            self._replica.hold(f"its {tag}, which left the device")
            if tag == "kv_cache":
                self._replica.forget_cached()
            elif move is Move.META:
                self._replica.hold(_VALUES)
        found, is_away = zip(*self._call(TensorParallelShard.move, move, tag), strict=True)
        if any(away is (move is Move.ONLOAD) for away in is_away):
            raise RlcoreError(f"{move.value}({tag!r}) left {sum(is_away)} of {len(is_away)} vLLM workers without it")
        if move is Move.ONLOAD:
            self._replica.release(f"its {tag}, which left the device")
        return OffloadReport(
            moved_bytes=sum(report["moved_bytes"] for report in found),
            freed_device_bytes=sum(report["freed_device_bytes"] for report in found),
            seconds=max(report["seconds"] for report in found),
            pinned=all(report["pinned"] for report in found),
            first_use=any(report["first_use"] for report in found),
        )

    def reserve_host_memory(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """See ``Worker.reserve_host_memory``; for each of the replica's devices.

        Processes that vLLM starts for them are told when they have loaded the model.
        """
        if self._num_shards == 1:  # vLLM's worker is in this process: it loads while the memory is allocated
            super().reserve_host_memory(host_memory_bytes, reserve_host_bytes)
        else:
            self._host_memory = host_memory_bytes, reserve_host_bytes

    def memory_report(self) -> MemoryReport:
        """Return one report for all devices of the replica together."""
        found = self._call(TensorParallelShard.memory)

        def total(*path: str) -> int:
            values: list[Any] = found
            for name in path:
                values = [value[name] for value in values]
            return sum(values)

        return {
            "device": ", ".join(self.context.devices),
            "tags": {
                tag: {key: total("tags", tag, key) for key in ("device_bytes", "host_bytes")}  # type: ignore[misc]
                for tag in found[0]["tags"]
            },
            "stats": MemoryStats(**{key: total("stats", key) for key in found[0]["stats"]}),
            "info": MemoryInfo(**{key: total("info", key) for key in found[0]["info"]}),
        }

    # ---------------------------------------------------------------------------------------------- weights

    def read_weights(self, path: str | Path) -> None:
        folder = check_model_folder(path)
        self._require_reload("load()")
        if found := mismatch(in_files(self._folder.weight_files), in_files(folder.weight_files)):
            raise SyncError(f"{folder.path} holds another model than the inference engine's: {found}")
        self._incoming = folder.path

    def take_weights(self, *, version: int) -> None:
        self._replica.hold(_VALUES)
        self._call(TensorParallelShard.reload, str(self._incoming))
        self._replica.weights_changed(version)
        self._replica.release(_VALUES)

    def sync_call(self, method: str, calls: list[Any] | None) -> list[Any]:
        """Call the receivers in the replica's vLLM workers. No step is made until the round has ended."""
        if method == Receiver.begin.__name__:
            self._replica.hold(_SYNC)
        if method == Receiver.prepare.__name__ and calls:
            self._require_reload("a weight sync")
            self._check_trainer(WeightManifest.from_bytes(calls[0][1]))
        each: list[Any] = [()] * self._num_shards if calls is None else calls
        results = self._call_each(f"receiver.{method}", each)
        if method == Receiver.commit.__name__:
            self._replica.weights_changed(version=each[0][1])
            self._replica.release(_SYNC, _VALUES)
        elif method == Receiver.abandon.__name__ and all(
            self._call(TensorParallelShard.is_whole)
        ):  # nothing was written
            self._replica.release(_SYNC)
        return results

    def _require_reload(self, purpose: str) -> None:
        if self._differing:
            raise UnsupportedError(
                f"{purpose} into {self._folder.path.name} on {self.context.device_name}",
                f"vLLM {self.vllm_version} reloads {len(self._differing)} tensors otherwise than it first loaded or "
                f"made them up, such as {self._differing[0]!r}; build the engine again from an exported folder",
            )

    def _check_trainer(self, manifest: WeightManifest) -> None:
        """Refuse the weights of another model: vLLM's loaders would fail midway, or load them without an error."""
        own = in_files(self._folder.weight_files)
        given = {weight.name: weight for weight in manifest.weights}
        shared = own.keys() & given.keys()
        found = mismatch({name: own[name] for name in shared}, {name: given[name] for name in shared})
        if found or not shared:
            raise SyncError(
                "the trainer's model is not the inference engine's, which keeps its weights: "
                f"{found or 'no weight of the one has the name of one of the other'}"
            )

    def close(self) -> None:
        if self._engine is not None:
            self._replica.close()
        if self._engine is None or not self._is_rank:
            super().close()
            return
        self._engine.collective_rpc(_RPC, args=("close", msgspec.msgpack.encode([()])))
        with versions.leaving(self._engine, self.device):
            super().close()

    # --------------------------------------------------------------------------------- vLLM's own workers

    @property
    def _is_rank(self) -> bool:
        """True under torchrun: this process has one of vLLM's workers; other processes have the replica's others."""
        return not self.context.devices

    @property
    def _num_shards(self) -> int:
        return len(self.context.devices) or 1

    def _call(
        self, method: Callable[Concatenate[TensorParallelShard, P], Any], *args: P.args, **_: P.kwargs
    ) -> list[Any]:
        """Call a method of every shard with the same arguments; results by rank, as msgpack has them."""
        return self._call_each(method.__name__, [args] * self._num_shards)

    def _call_each(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the shards, or of their receivers ("receiver.begin"), with the arguments of each."""
        if self._engine is None:
            raise StateError("the vllm executor has no engine yet; call build(path)")
        with self._replica.between_steps(method):
            found = self._engine.collective_rpc(_RPC, args=(method, msgspec.msgpack.encode(calls)))
        answers = [msgspec.msgpack.decode(data, type=ShardAnswer) for data in found]
        for answer in answers:
            if answer.failure is not None:
                raise raised(answer.failure, self.context, method)
        return [answer.result for answer in answers]
