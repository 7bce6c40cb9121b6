"""The inference executor ``sglang``: one worker drives an SGLang engine on all devices of a replica."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from rlcore.engines.launchers.runtime_files import StoreFolder
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.prompts import PromptReader
from rlcore.engines.sampling.replica.arguments import RETURN_EXPERTS
from rlcore.engines.sampling.replica.executor import ReplicaExecutor
from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.arguments import check_arguments, engine_arguments, in_words
from rlcore.engines.sampling.sglang.engine_thread import EngineThread
from rlcore.engines.sampling.sglang.interfaces import SglangEngine
from rlcore.engines.sampling.sglang.replica import SglangReplica
from rlcore.engines.sampling.sglang.scheduler_process import FOLDER, SOCKET, last_words, run_scheduler, serve
from rlcore.engines.sampling.sglang.shard import SglangShard
from rlcore.engines.sampling.sglang.shard_calls import ShardCalls
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.errors import InvalidInputError, StateError, UnsupportedError
from rlcore.process.guard import MemoryFile, remove_memory, shared_memory
from rlcore.process.socket_address import MOST_BYTES

_LONGEST_NAME = "tmp" + 8 * "x"
"""The name of a socket of SGLang's, as Python names temporary files."""


class SglangExecutor(ReplicaExecutor):
    """Drives one replica with SGLang, whose schedulers are processes of their own on any number of devices."""

    engine_name: ClassVar[str] = "SGLang"
    plain_build: ClassVar[str] = "build with disable_cuda_graph=True"

    _replica: SglangReplica

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._store: StoreFolder | None = None
        """The folder of this replica's sockets; that of the workers is all replicas', and may be on no disk."""
        self._thread: EngineThread | None = None
        self._processes: WorkerProcesses | None = None
        self._calls: ShardCalls | None = None
        self._memory: set[MemoryFile] = set()
        """The files that the schedulers share by name: they are ended without a chance to remove them."""
        self._derived: list[str] = []

    @classmethod
    def check(cls, path: Path, options: Mapping[str, Any], python: str | os.PathLike[str] | None) -> None:
        check_arguments(options, python)
        check_model_folder(path)

    def build(self, path: str | Path, /, **engine_args: Any) -> None:
        """Load the model and allocate the KV cache.

        Args:
            path: a Hugging Face model folder with safetensors weights.
            engine_args: fields of ``sglang.srt.server_args.ServerArgs``, but for those that rlcore sets.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            DeviceError: torch_memory_saver was not preloaded on a GPU.
            InvalidInputError: an argument that SGLang does not know or refuses, or that only rlcore sets.
            MissingDependencyError, UnsupportedError: SGLang is absent, of a version that rlcore does not know, or has
                no such dtype on the device, or no experts of tokens.
            WorkerDiedError: a process that SGLang started has ended.
        """
        self._folder = check_model_folder(path)
        arguments = engine_arguments(engine_args, self._folder, self.context)
        self.engine_version = versions.prepare(self.device, self._num_shards)
        chooses = not self.device.spec.is_host and "attention_backend" not in arguments
        if chooses and versions.lacks_flash_attention(self.device):
            arguments["attention_backend"] = "triton"
        if engine_args.get(RETURN_EXPERTS) and self.device.spec.is_host:
            versions.check_experts_of_host(RETURN_EXPERTS, self.engine_version, self.device.name)
        self._reader = reader = PromptReader(self._folder, None, "context_length, max_total_tokens")
        signal.signal(signal.SIGQUIT, lambda *_: None)  # a scheduler that fails sends it, and would end this process
        self._store = StoreFolder()
        os.environ[FOLDER] = folder = _checked(self._store.path)
        processes = WorkerProcesses(
            self.context,
            self._num_shards,
            partial(self._name_of, folder),  # the variable is another's when a later executor builds in this process
            reports_errors=False,
            clean_up=self._remove_memory,
        )
        self._processes = processes
        with processes.needed_for("build"):
            self._thread = EngineThread(
                lambda: versions.new_engine(arguments, folder, run_scheduler, partial(last_words, folder))
            )
        self._memory = shared_memory([child.pid or 0 for child in active_children()])  # build() may fail from now on
        engine: SglangEngine = self._thread.engine
        self._calls = ShardCalls(
            folder, SOCKET, self._num_shards, processes, lambda: engine.collective_rpc(f"rlcore_{serve.__name__}")
        )
        self._replica = SglangReplica(self._thread, self._calls, processes, reader, arguments["random_seed"])
        reader.max_positions, reader.max_prompt = self._call(SglangShard.limits)[0]
        self._call(SglangShard.made_with, in_words(arguments))
        if engine_args.get(RETURN_EXPERTS):
            self._replica.num_routed_layers = self._call(SglangShard.num_layers)[0]
        if engine_args.get("load_format") != "dummy":  # "dummy" weights are in no folder
            self._prove_reload(path)
        if self._host_memory is not None:
            self._call(SglangShard.reserve, *self._host_memory)

    def _name_of(self, folder: str, process: BaseProcess) -> str:
        ranks = {pid: rank for rank, pid in self._calls.pids.items()} if self._calls is not None else {}
        where = [f"process {process.pid}"]
        if (rank := ranks.get(process.pid or 0)) is not None:
            where += [f"tensor-parallel rank {rank}", self.context.devices[rank]]
        words = last_words(folder, process.pid)
        return f"SGLang's scheduler ({', '.join(where)})" + (f" after {words!r}" if words else "")

    def _remove_memory(self) -> None:
        remove_memory(self._memory)

    def _call_each(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self._thread is None:
            raise StateError("the sglang executor has no engine yet; call build(path)")
        return self._replica.call_each(method, calls)

    def sync_call(self, method: str, calls: list[Any] | None) -> list[Any]:
        """See the base. From the begin of a round to its end the schedulers do nothing but wait for its calls."""
        results = super().sync_call(method, calls)
        if method == Receiver.begin.__name__:
            self._replica.stay()
        elif method in (Receiver.commit.__name__, Receiver.abandon.__name__):
            self._replica.leave()
        return results

    def _prove_reload(self, path: str | Path) -> None:
        super()._prove_reload(path)
        self._derived = sorted({name for names in self._call(SglangShard.derived) for name in names})

    def _require_reload(self, purpose: str) -> None:
        super()._require_reload(purpose)
        if self._derived:
            raise UnsupportedError(
                f"{purpose} into {self._folder.path.name} on {self.context.device_name}",
                f"{self.engine_name} {self.engine_version} keeps {len(self._derived)} tensors beside the parameters, "
                f"such as {self._derived[0]!r}: they may be derived from the weights, and would stay as they are; "
                "build the engine again from an exported folder",
            )

    def reserve_host_memory(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        """See ``Worker.reserve_host_memory``; the schedulers are told when they have loaded the model."""
        self._host_memory = host_memory_bytes, reserve_host_bytes

    def close(self) -> None:
        if self._processes is not None:
            self._processes.end()
            self._remove_memory()
        if self._calls is not None:
            self._calls.end()
        if self._thread is not None:
            self._thread.end()
        if self._store is not None:
            self._store.remove()
        super().close()


def _checked(folder: str) -> str:
    """Return the folder; refuse one whose sockets would have paths that are too long."""
    if len(os.fsencode(os.path.join(folder, _LONGEST_NAME))) > MOST_BYTES:
        raise InvalidInputError(
            f"{folder} is too long a path for sockets, which have at most {MOST_BYTES} bytes of it: let "
            "RLCORE_RUNTIME name a folder with a shorter one"
        )
    return folder
