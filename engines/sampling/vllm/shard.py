"""One vLLM worker's tensor-parallel shard of a replica: moves and loads its weights and its KV cache."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlcore.activations import recording
from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.offload.host_arena import reserve_host_memory
from rlcore.engines.residency import Move
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmWorker
from rlcore.engines.sampling.vllm.mapped_allocations import MappedGroup
from rlcore.engines.sampling.vllm.reload_check import differing_after_reload
from rlcore.engines.sampling.vllm.target import VllmTarget
from rlcore.engines.weight_sync.receiver import Receiver
from rlcore.errors import DeviceError, UnsupportedError
from rlcore.registry import get_device
from rlcore.tensor_tree import tensor_to_bytes
from rlcore.types import OffloadReport
from rlcore.weights.source import in_files

_log = logging.getLogger(__name__)
_NEVER_FREED: list[Any] = []
"""Models and KV caches of shards that were closed while there was no room to map their memory again."""


class TensorParallelShard:
    """One tensor-parallel rank of a replica. The model is loaded and the KV cache allocated before it is made."""

    def __init__(self, worker: VllmWorker) -> None:
        self.device = get_device(str(worker.device))
        self.runner = worker.model_runner
        self._target = VllmTarget(self.model, worker.vllm_config, self.device)
        self.receiver = Receiver(self._target)
        if self.device.spec.is_host:  # no graph is captured that would keep addresses
            self._offload_groups = {
                "weights": OffloadGroup(self.device, self.model.parameters, lambda guard, state: None),
                "kv_cache": OffloadGroup(
                    self.device, lambda: versions.kv_caches(self.runner), lambda guard, state: None
                ),
            }
        else:
            self._offload_groups = {
                "weights": MappedGroup(self.device, "weights", self._kept),
                "kv_cache": MappedGroup(self.device, "kv_cache", tuple),
            }

    @property
    def model(self) -> nn.Module:
        return self.runner.get_model()

    # -------------------------------------------------------------------------------------------- residency

    def move(self, move: str, tag: str) -> tuple[OffloadReport, bool]:
        """Move a tag. The KV cache is never copied: its contents are lost, and it comes back as zeros.

        Returns:
            The report, and True if the tag is away now.
        """
        group = self._offload_groups[tag]
        if move == Move.ONLOAD:
            was_away = group.is_away
            report = group.onload()
            if tag == "kv_cache" and was_away:
                versions.reset_kv_cache(self.runner)
        else:
            is_copied = move == Move.OFFLOAD and tag == "weights"
            report = group.offload() if is_copied else group.meta()
            if tag == "weights" and not is_copied:
                self.receiver.lose_weights()
        return report, group.is_away

    def reserve(self, host_memory_bytes: int | None, reserve_host_bytes: int | None) -> None:
        reserve_host_memory(self.device, host_memory_bytes, reserve_host_bytes)

    def memory(self) -> dict[str, Any]:
        memory = self.device.memory
        return {
            "tags": {
                tag: {"device_bytes": group.device_bytes, "host_bytes": group.host_bytes}
                for tag, group in self._offload_groups.items()
            },
            "stats": dataclasses.asdict(memory.stats()),
            "info": dataclasses.asdict(memory.info()),
        }

    def _kept(self) -> Iterator[Tensor]:
        """Yield tensors in the memory of the weights that no sync brings again."""
        yield from self.model.buffers()
        yield from (tensor for _, tensor in self._target.strays())

    # ----------------------------------------------------------------------------------------- activations

    def watch_activations(self) -> None:
        """Keep what each part of the model computes at its last call, until ``watched_activations``."""
        self._watching = contextlib.ExitStack()
        self._activations = self._watching.enter_context(recording(self.model))

    def watched_activations(self) -> dict[str, bytes]:
        """Return the tensors as bytes, and watch no longer."""
        self._watching.close()
        found, self._activations = self._activations, {}
        return {name: tensor_to_bytes(value) for name, value in found.items()}

    # --------------------------------------------------------------------------------------------- weights

    def reload(self, path: str) -> None:
        """Load a model folder into the live model as vLLM does, with its processing after loading."""
        found = in_files(check_model_folder(path).weight_files)
        with self._target.reloading():
            self._target.reload((name, tensor.read(())) for name, tensor in found.items())
        self.device.synchronize()
        self.receiver.reloaded()

    def differing_after_reload(self, path: str) -> list[str]:
        """Return the tensors that a reload of the model's own folder changes.

        Raises:
            UnsupportedError: vLLM generates with packed copies of weights, which no reload changes.
        """
        if versions.packs_weights():
            raise UnsupportedError("vLLM's build for the CPU with packed weights", "they were to be left plain")
        return differing_after_reload(self._target, in_files(check_model_folder(path).weight_files))

    def close(self) -> None:
        """Drop the model. Unmapped memory is mapped again first, as vLLM's allocator frees only mapped memory."""
        self.receiver.close()
        versions.forget_reloads(self.model)
        away = [group for group in self._offload_groups.values() if group.is_away]
        try:
            for group in away:
                group.meta()
                group.onload()
        except DeviceError as error:
            _NEVER_FREED.append((self.model, list(versions.kv_caches(self.runner))))
            _log.warning(
                "this process can make no other vLLM engine: the memory of the last one was away when it was closed, "
                "and there is no room to bring it back. Call cuda() before close(). %s",
                error,
            )
        self.__dict__ = {}

    def is_whole(self) -> bool:
        """Return True if all weights are of one version."""
        return self.receiver.is_whole
