"""What rlcore adds to vLLM's worker class, found by its dotted path. Nothing here needs Ray.

Its one method is called by name and takes and gives plain bytes, so that vLLM sends them as they are.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from rlcore.engines.launchers.failures import WorkerFailure, describe
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.interfaces import Worker
from rlcore.engines.sampling.vllm.shard import Share
from rlcore.errors import RlcoreError

if "vllm" in sys.modules:  # a worker process of vLLM's own, which imports this before it loads the model
    versions.keep_weights_plain()


class RlcoreWorkerExtension:
    """Mixed into ``vllm.v1.worker.gpu_worker.Worker`` and its like: every name is prefixed."""

    def rlcore_call(self, method: str, calls: bytes) -> bytes:
        """Call ``Share.<method>``.

        Args:
            calls: msgpack of a list with the arguments for each worker of the replica, by rank; where each worker has
                a process that calls it alone, its own.

        Returns:
            msgpack of [what it returned, None] or, of rlcore's own errors, [None, ``WorkerFailure``].
        """
        each = msgspec.msgpack.decode(calls)
        worker: Worker = self  # type: ignore[assignment]
        arguments = each[worker.rank % len(each)]
        try:
            result, failure = getattr(_share_of(worker), method)(*arguments), None
        except RlcoreError as error:  # another process would be told of it as text
            result, failure = None, describe(error)
        return msgspec.msgpack.encode((result, failure))


class Answer(msgspec.Struct, array_like=True):
    """What ``rlcore_call`` returns."""

    result: Any
    failure: WorkerFailure | None


def _share_of(worker: Any) -> Share:
    """Made at the first call: then the model is loaded and the KV cache is there."""
    found: Share | None = getattr(worker, "_rlcore_share", None)
    if found is None:
        found = worker._rlcore_share = Share(worker)
    return found
