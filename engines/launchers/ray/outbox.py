"""The messages for the workers of one host, on their way to its agent: one message of Ray carries many of them.

Ray takes half a millisecond of the program for each of its own, and a call of all workers is a message for each worker.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from rlcore.engines.launchers.ray.wire import Posted, PostedBatch, encoded
from rlcore.tensor_data import dtype_name, host_bytes

BATCH_BYTES = 64 << 20
"""Tensors of so many bytes are sent on at once: the host takes them while the next are encoded."""

Send = Callable[[bytes, list[pickle.PickleBuffer]], None]
"""Sends an encoded ``PostedBatch``, and the bytes of its tensors, which Ray puts into its store for objects."""


class Outbox:
    """The messages that are not sent yet. What several workers get of one tensor's memory is sent once.

    Args:
        send: called in the order of the batches, by one thread at a time.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.RLock()
        self._order = 0
        self._messages: list[Posted] = []
        self._tensors: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._num_bytes = 0

    def post(self, posted: Posted, tensors: Sequence[Tensor]) -> None:
        """Take a message, which goes with the next ``flush``. Its tensors are contiguous and on the host.

        They must not change until then.
        """
        with self._lock:
            told = [(dtype_name(one.dtype), tuple(one.shape), self._place(one)) for one in tensors]
            self._messages.append(msgspec.structs.replace(posted, tensors=told))
            if self._num_bytes >= BATCH_BYTES:
                self.flush()

    def _place(self, tensor: Tensor) -> int:
        """Return the place of a tensor's bytes in the batch."""
        key = tensor.data_ptr(), tensor.nbytes
        if key not in self._tensors:
            self._tensors[key] = len(self._tensors), tensor
            self._num_bytes += tensor.nbytes
        return self._tensors[key][0]

    def flush(self) -> None:
        """Send all that was posted."""
        with self._lock:
            if not self._messages:
                return
            head = encoded(PostedBatch(self._order, self._messages))
            tensors = [tensor for _, tensor in self._tensors.values()]
            self._order += 1
            self._messages, self._tensors, self._num_bytes = [], {}, 0
            self._send(head, [pickle.PickleBuffer(host_bytes(one)) for one in tensors])
