"""The methods that rlcore adds to vLLM's worker class, which finds this by its dotted path. Nothing here needs Ray.

The one method is called by name. It takes and returns plain bytes, which vLLM sends as they are.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from rlcore.engines.sampling.replica.calls import answer
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmWorker
from rlcore.engines.sampling.vllm.shard import TensorParallelShard

if "vllm" in sys.modules:  # a worker process of vLLM imports this before it loads the model
    versions.keep_weights_plain()


class RlcoreWorkerExtension:
    """Mixed into ``vllm.v1.worker.gpu_worker.Worker`` and similar classes: every name is prefixed."""

    def rlcore_call(self, method: str, calls: bytes) -> bytes:
        """Call a method of this worker's ``TensorParallelShard``, or of an attribute of it, such as "receiver.begin".

        Args:
            calls: msgpack of a list with the arguments for each worker of the replica, by rank; or, where each worker
                is called by a process of its own, with this worker's alone.

        Returns:
            msgpack of a ``ShardAnswer``.
        """
        each = msgspec.msgpack.decode(calls)
        worker: VllmWorker = self  # type: ignore[assignment]
        return answer(_shard_of(worker), method, each[worker.rank % len(each)])


def _shard_of(worker: Any) -> TensorParallelShard:
    """Return the worker's shard, made at the first call: by then the model is loaded and the KV cache allocated."""
    found: TensorParallelShard | None = getattr(worker, "_rlcore_shard", None)
    if found is None:
        found = worker._rlcore_shard = TensorParallelShard(worker)
    return found
