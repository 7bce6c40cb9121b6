"""One vLLM worker's tensor-parallel shard of a replica: moves and loads its weights and its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.sampling.replica.shard import ReplicaShard
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmWorker
from rlcore.engines.sampling.vllm.mapped_allocations import MappedGroup
from rlcore.engines.sampling.vllm.target import VllmTarget
from rlcore.errors import DeviceError, UnsupportedError
from rlcore.registry import get_device

_log = logging.getLogger(__name__)
_NEVER_FREED: list[Any] = []
"""Models and KV caches of shards that were closed while there was no room to map their memory again."""


class TensorParallelShard(ReplicaShard):
    """One tensor-parallel rank of a replica. The model is loaded and the KV cache allocated before it is made."""

    def __init__(self, worker: VllmWorker) -> None:
        device = get_device(str(worker.device))
        self.runner = worker.model_runner
        super().__init__(VllmTarget(self.model, worker.vllm_config, device))
        if device.spec.is_host:  # no graph is captured that would keep addresses
            self._offload_groups = {
                "weights": OffloadGroup(device, self.model.parameters),
                "kv_cache": OffloadGroup(device, lambda: versions.kv_caches(self.runner)),
            }
        else:
            self._offload_groups = {
                "weights": MappedGroup(device, "weights", self._kept),
                "kv_cache": MappedGroup(device, "kv_cache", tuple),
            }

    @property
    def model(self) -> nn.Module:
        return self.runner.get_model()

    def _kv_cache_is_back(self) -> None:
        versions.reset_kv_cache(self.runner)

    def _kept(self) -> Iterator[Tensor]:
        """Yield tensors in the memory of the weights that no sync brings again."""
        yield from self.model.buffers()
        yield from (tensor for _, tensor in self._target.strays())

    def differing_after_reload(self, path: str) -> list[str]:
        """Return the tensors that a reload of the model's own folder changes.

        Raises:
            UnsupportedError: vLLM generates with packed copies of weights, which no reload changes.
        """
        if versions.packs_weights():
            raise UnsupportedError("vLLM's build for the CPU with packed weights", "they were to be left plain")
        return super().differing_after_reload(path)

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
