"""The inference executor ``vllm``: one worker runs a vLLM engine on all devices of a replica."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rlcore.engines.launchers.runtime_files import StoreFolder
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, PromptReader
from rlcore.engines.sampling.replica.arguments import RETURN_EXPERTS
from rlcore.engines.sampling.replica.calls import results_of
from rlcore.engines.sampling.replica.executor import ReplicaExecutor
from rlcore.engines.sampling.vllm import ascend, versions
from rlcore.engines.sampling.vllm.arguments import BATCH_INVARIANT, check_arguments, engine_arguments
from rlcore.engines.sampling.vllm.extension import RlcoreWorkerExtension
from rlcore.engines.sampling.vllm.interfaces import VllmEngine
from rlcore.engines.sampling.vllm.replica import Replica
from rlcore.engines.sampling.vllm.shard import TensorParallelShard
from rlcore.engines.sampling.vllm.worker_processes import vllm_processes
from rlcore.errors import StateError, UnsupportedError
from rlcore.image_inputs import ImageInputs
from rlcore.planned import as_planned

_RPC = RlcoreWorkerExtension.rlcore_call.__name__
_RENDEZVOUS_S = 600.0
"""The longest wait for the other ranks to call build(): they load as long as this one."""


class VllmExecutor(ReplicaExecutor):
    """Drives one replica with vLLM."""

    engine_name: ClassVar[str] = "vLLM"
    plain_build: ClassVar[str] = "build with enforce_eager=True"
    joins_torchrun: ClassVar[bool] = True

    _replica: Replica

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: VllmEngine | None = None
        self._store = StoreFolder() if context.store else None
        """The folder of this replica's files; that of the workers is on no disk where they are on several hosts."""

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
                ``batch_invariant=True`` is vLLM's VLLM_BATCH_INVARIANT: a token's log-probs do not depend on what it
                is batched with; slower.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            InvalidInputError: an argument that vLLM does not know or refuses, or that only rlcore sets.
            MissingDependencyError, UnsupportedError: vLLM is absent, of a version that rlcore does not know, or a build
                for other devices; or the device is simulated.
            WorkerDiedError: a process that vLLM started has ended.
        """
        ascend.check_device(self.device)
        self._folder = check_model_folder(path)
        is_invariant = engine_args.pop(BATCH_INVARIANT, False)
        if is_invariant and self.device.spec.is_host:
            raise UnsupportedError(f"{BATCH_INVARIANT} on {self.device.name}", "vLLM has such kernels for GPUs alone")
        if engine_args.get(RETURN_EXPERTS) and self.device.spec.is_host:
            raise UnsupportedError(
                f"{RETURN_EXPERTS} on {self.device.name}",
                "vLLM's build for the CPU records none: in 0.26 its kernel of experts has no place for it, and 0.32 "
                "does it in a model runner that needs a Triton for CPUs; sample by executor='hf', or on a GPU",
            )
        self.engine_version = versions.prepare(is_batch_invariant=is_invariant, arch=as_planned(self.device).arch)
        versions.check_platform(self.device)
        arguments = engine_arguments(engine_args, self._folder, self.context)
        images = ImageInputs.of_folder(self._folder.path) if self._folder.reads_images else None
        self._reader = reader = PromptReader(self._folder, None, "max_model_len", images)
        if self._is_rank:
            self.context.process_group(_RENDEZVOUS_S)  # vLLM takes the default group for its world
        processes = vllm_processes(self.context)
        with processes.needed_for("build"):
            folder = self._store.path if self._store is not None else ""
            engine = versions.new_engine(arguments, self.context.rank, self.device.index, folder)
        reader.max_positions = engine.vllm_config.model_config.max_model_len
        self._engine, self._replica = engine, Replica(engine, processes, reader, self.device.activate)
        if self.device.spec.is_host or engine_args.get("load_format") != "dummy":  # "dummy" weights are in no folder
            self._prove_reload(path)
        if self._host_memory is not None:
            self._call(TensorParallelShard.reserve, *self._host_memory)

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, version: int
    ) -> None:
        if self._is_rank and self.context.world_size > 1:
            raise UnsupportedError(
                f"submit() on {self.context.world_size} ranks of torchrun",
                "they cannot make the same steps beside the program; use generate(), or tensor_parallel_size 1",
            )
        super().submit(numbers, prompts, params, version=version)

    def reserve_host_memory(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """See ``Worker.reserve_host_memory``; for each of the replica's devices.

        Processes that vLLM starts for them are told when they have loaded the model.
        """
        if self._num_shards == 1:  # vLLM's worker is in this process: it loads while the memory is allocated
            super().reserve_host_memory(host_memory_bytes, reserve_host_bytes)
        else:
            self._host_memory = host_memory_bytes, reserve_host_bytes

    def close(self) -> None:
        if self._engine is not None:
            self._replica.close()
        if self._store is not None:
            self._store.remove()
        if self._engine is None or not self._is_rank:
            super().close()
            return
        self._engine.collective_rpc(_RPC, args=("close", msgspec.msgpack.encode([()])))
        with versions.leaving(self._engine, self.device):
            super().close()

    @property
    def _is_rank(self) -> bool:
        """True under torchrun: this process has one of vLLM's workers; other processes have the replica's others."""
        return not self.context.devices

    def _call_each(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self._engine is None:
            raise StateError("the vllm executor has no engine yet; call build(path)")
        with self._replica.between_steps(method):
            found = self._engine.collective_rpc(_RPC, args=(method, msgspec.msgpack.encode(calls)))
        return results_of(found, self.context, method)
