"""One tensor-parallel shard of a replica, in the process of its scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from rlcore.engines.offload.group import OffloadGroup
from rlcore.engines.sampling.replica.shard import ReplicaShard
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.interfaces import SglangScheduler
from rlcore.engines.sampling.sglang.saved_memory import SavedGroup
from rlcore.engines.sampling.sglang.target import SglangTarget
from rlcore.engines.weight_sync.planning.coverage import checkpoint_trace
from rlcore.errors import UnsupportedError
from rlcore.registry import get_device


class SglangShard(ReplicaShard):
    """Its methods are called between two steps, on all ranks at the same place."""

    def __init__(self, scheduler: SglangScheduler) -> None:
        self._scheduler = scheduler
        runner = versions.model_runner(scheduler)
        device = get_device(str(next(runner.model.parameters()).device))
        super().__init__(SglangTarget(runner, device))
        versions.forget_stop_tokens(scheduler)
        self._kv_caches()  # build() refuses one that is not found, whatever the device
        if device.spec.is_host:  # no graph is captured that would keep addresses
            self._offload_groups = {
                "weights": OffloadGroup(device, self.model.parameters),
                "kv_cache": OffloadGroup(device, self._kv_caches),
            }
        else:
            self._offload_groups = {
                "weights": SavedGroup(device, "weights", self.model.parameters, self._kept),
                "kv_cache": SavedGroup(device, "kv_cache", self._kv_caches, tuple),
            }

    @property
    def model(self) -> nn.Module:
        return versions.model_runner(self._scheduler).model

    def _kept(self) -> Iterator[Tensor]:
        """Yield tensors in the memory of the weights that no sync brings again."""
        yield from self.model.buffers()
        yield from (tensor for _, tensor in self._target.strays())

    def _kv_caches(self) -> list[Tensor]:
        return versions.kv_caches(self._scheduler)

    def _kv_cache_is_back(self) -> None:
        for cache in versions.kv_caches(self._scheduler):
            cache.zero_()

    # ------------------------------------------------------------------------------------------- its requests

    def limits(self) -> tuple[int, int]:
        """Return how many tokens a prompt and its completion may have together, and how many a prompt."""
        return versions.limits(self._scheduler)

    def num_layers(self) -> int:
        """Return the layers of the model, which routes of tokens are told by."""
        return versions.num_layers(versions.model_runner(self._scheduler))

    def pause(self, keeps_cache: bool) -> None:
        versions.pause(self._scheduler, keeps_cache=keeps_cache)
        self.device.synchronize()

    def go_on(self) -> None:
        versions.go_on(self._scheduler)

    def flush(self) -> None:
        """Drop all cached keys and values; the scheduler is paused without any."""
        versions.flush_cache(self._scheduler)

    def progress(self) -> dict[str, int]:
        """Return how many tokens each request under way has."""
        return {request.rid: len(request.output_ids) for request in versions.unfinished(self._scheduler)}

    # ---------------------------------------------------------------------------------------------- weights

    def differing_after_reload(self, path: str) -> list[str]:
        """Return the tensors that a reload of the model's own folder changes.

        Raises:
            UnsupportedError: a parameter gets nothing of the folder, such as a head that SGLang does not tie.
        """
        trace = checkpoint_trace(self._target, self._target.checkpoint() or {}, self._target.tensors())
        if trace.refusal:
            raise UnsupportedError(f"{path} in SGLang", f"{trace.refusal}, which SGLang leaves as it made it")
        return super().differing_after_reload(path)

    def made_with(self, arguments: list[str]) -> None:
        """Take the arguments of the engine, by which a later program finds the plan that was tested here."""
        self._target.arguments = arguments

    def derived(self) -> list[str]:
        """Return the tensors of numbers beside the parameters, which no plan can write."""
        return [name for name, tensor in self._target.strays() if tensor.is_floating_point()]
