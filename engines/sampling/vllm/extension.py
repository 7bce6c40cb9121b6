"""The methods that rlcore adds to vLLM's worker class, which finds this by its dotted path. Nothing here needs Ray.

The one method is called by name. It takes and returns plain bytes, which vLLM sends as they are.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import msgspec

from rlcore.engines.launchers.failures import WorkerFailure, describe
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import VllmWorker
from rlcore.engines.sampling.vllm.shard import TensorParallelShard
from rlcore.errors import RlcoreError

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
        arguments = each[worker.rank % len(each)]
        try:
            result, failure = attrgetter(method)(_shard_of(worker))(*arguments), None
        except RlcoreError as error:  # vLLM would send its text alone to another process
            result, failure = None, describe(error)
        return msgspec.msgpack.encode((result, failure))


class ShardAnswer(msgspec.Struct, array_like=True):
    """The answer of ``rlcore_call``."""

    result: Any
    """The result of the method; None after an error."""
    failure: WorkerFailure | None
    """An error of rlcore's own."""


def _shard_of(worker: Any) -> TensorParallelShard:
    """Return the worker's shard, made at the first call: by then the model is loaded and the KV cache allocated."""
    found: TensorParallelShard | None = getattr(worker, "_rlcore_shard", None)
    if found is None:
        found = worker._rlcore_shard = TensorParallelShard(worker)
    return found
