"""The inference executor ``vllm``: what one worker runs, a vLLM engine on all devices of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlcore.engines.completion import RequestOutput
from rlcore.engines.executors.prompts import ParamsLike, Prompt, PromptReader, params_of_each
from rlcore.engines.executors.vllm import versions
from rlcore.engines.executors.vllm.arguments import engine_arguments
from rlcore.engines.executors.vllm.replica import PauseMode, Replica
from rlcore.engines.executors.worker import MemoryReport, Worker
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.named_tensors import mismatch
from rlcore.engines.pretrained import check_model_folder
from rlcore.engines.residency import Move
from rlcore.engines.weight_source import in_files
from rlcore.errors import RlcoreError, StateError, SyncError
from rlcore.types import MemoryInfo, MemoryStats, OffloadReport


class VllmWorker(Worker):
    """Drives one replica. Whether its weights are on the devices is the inference engine's business."""

    runs_on_many_devices: ClassVar[bool] = True
    owns_process: ClassVar[bool] = True
    drives_replica: ClassVar[bool] = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._context = context
        self._engine: versions.Engine | None = None
        self._host_memory: tuple[int | None, int | None] | None = None

    def build(self, path: str | Path, **engine_args: Any) -> None:
        """Loads the model and allocates the KV cache.

        Args:
            path: a Hugging Face model folder with safetensors weights.
            engine_args: vLLM's own (``vllm.EngineArgs``), but for those that rlcore sets. ``kv_cache_memory_bytes`` is
                a device's; without it, most of what is free beside the weights.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            InvalidInputError: an argument that vLLM does not know or refuses, or that is rlcore's.
            MissingDependencyError, UnsupportedError: vLLM is absent, or of a version that rlcore does not know.
        """
        self._folder = check_model_folder(path)
        self.vllm_version = versions.prepare()
        arguments = engine_arguments(engine_args, versions.argument_names(), self._folder, self._context)
        engine = versions.new_engine(arguments)
        self._engine = engine
        longest = engine.vllm_config.model_config.max_model_len
        reader = PromptReader(self._folder, longest, "max_model_len")
        self._replica = Replica(engine, reader, self.device.activate)
        if self._host_memory is not None:
            engine.collective_rpc("rlcore_reserve", args=self._host_memory)

    # ------------------------------------------------------------------------------------------- generation

    def generate(
        self, prompts: Sequence[Prompt], params: ParamsLike | Sequence[ParamsLike] = None, *, version: int
    ) -> list[RequestOutput]:
        """As ``HfWorker.generate``."""
        return self._replica.run(prompts, params_of_each(prompts, params), version, self.emit)

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[ParamsLike], *, version: int
    ) -> None:
        """Begin these requests, which ``collect`` gives under these numbers."""
        self._replica.submit(numbers, prompts, params_of_each(prompts, params), version)

    def collect(self, timeout_s: float) -> dict[int, RequestOutput]:
        """What has ended; waits for the first of them, not longer than ``timeout_s``."""
        return self._replica.collect(timeout_s)

    def abort(self, numbers: Sequence[int] | None) -> int:
        """Give these requests up, None: all. Returns how many were unfinished."""
        return self._replica.abort(numbers)

    def pause(self, mode: PauseMode) -> None:
        self._replica.pause(mode)

    def resume(self, version: int) -> None:
        self._replica.resume(version)

    # -------------------------------------------------------------------------------------------- residency

    def onload(self, tag: str) -> OffloadReport:
        return self._move(Move.ONLOAD, tag)

    def offload(self, tag: str) -> OffloadReport:
        return self._move(Move.OFFLOAD, tag)

    def meta(self, tag: str) -> OffloadReport:
        return self._move(Move.META, tag)

    def _move(self, move: Move, tag: str) -> OffloadReport:
        engine = self._built()
        if tag == "kv_cache" and move is not Move.ONLOAD:
            self._replica.forget_cached()
        with self._replica.between_steps():
            found = engine.collective_rpc("rlcore_move", args=(move.value, tag))
            is_away = [memory["is_away"][tag] for memory in engine.collective_rpc("rlcore_memory")]
        if any(away is (move is Move.ONLOAD) for away in is_away):
            raise RlcoreError(f"{move.value}({tag!r}) left {sum(is_away)} of {len(is_away)} vLLM workers without it")
        return OffloadReport(
            moved_bytes=sum(report["moved_bytes"] for report in found),
            freed_device_bytes=sum(report["freed_device_bytes"] for report in found),
            seconds=max(report["seconds"] for report in found),
            pinned=all(report["pinned"] for report in found),
            first_use=any(report["first_use"] for report in found),
        )

    def reserve_host_memory(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """As ``Worker.reserve_host_memory``, of each of the replica's devices, when it is built."""
        self._host_memory = host_memory_bytes, reserve_host_bytes

    def memory_report(self) -> MemoryReport:
        """Of all devices of the replica together."""
        found = self._built().collective_rpc("rlcore_memory")

        def total(*path: str) -> int:
            values: list[Any] = found
            for name in path:
                values = [value[name] for value in values]
            return sum(values)

        return {
            "device": ", ".join(self._context.devices),
            "tags": {
                tag: {key: total("tags", tag, key) for key in ("device_bytes", "host_bytes")}  # type: ignore[misc]
                for tag in found[0]["tags"]
            },
            "stats": MemoryStats(**{key: total("stats", key) for key in found[0]["stats"]}),
            "info": MemoryInfo(**{key: total("info", key) for key in found[0]["info"]}),
        }

    # ---------------------------------------------------------------------------------------------- weights

    def read_weights(self, path: str | Path) -> None:
        """Checks that a folder holds the same model, for ``take_weights``; changes nothing yet.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            SyncError: it holds another model.
        """
        folder = check_model_folder(path)
        if found := mismatch(in_files(self._folder.weight_files), in_files(folder.weight_files)):
            raise SyncError(f"{folder.path} holds another model than the inference engine's: {found}")
        self._incoming = folder.path

    def take_weights(self) -> None:
        """Overwrites the weights by those of the folder that ``read_weights`` checked."""
        with self._replica.between_steps():
            self._built().collective_rpc("rlcore_reload", args=(str(self._incoming),))
        self._replica.forget_cached()

    def close(self) -> None:
        if self._engine is not None:
            self._replica.close()
        super().close()

    def _built(self) -> versions.Engine:
        if self._engine is None:
            raise StateError("the vllm worker has no engine yet; call build(path)")
        return self._engine
