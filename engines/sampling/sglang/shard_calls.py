"""The executor's end of calls to the shards of its replica, which are in SGLang's scheduler processes.

``collective_rpc`` brings all schedulers to ``serve`` of scheduler_process.py, at the same place between two steps. It
sends no results, and waits for good where a scheduler has ended; so it is called in a thread, and each scheduler
connects to a socket of the executor.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rlcore.engines.sampling.replica.worker_processes import WorkerProcesses
from rlcore.engines.sampling.sglang.scheduler_process import PATIENCE_S
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket

_LOOK_AGAIN_S = 0.2
"""Not a deadline: the engine has one for each call, and a process that ends closes its connection."""
_ENDED_S = 10.0


class ShardCalls:
    """Makes calls of all shards; of one thread at a time.

    Args:
        folder: where the schedulers look for the socket ``name``.
        call_schedulers: brings all schedulers to ``serve``, and returns when they have left it.
    """

    def __init__(
        self, folder: str, name: str, count: int, processes: WorkerProcesses, call_schedulers: Callable[[], None]
    ) -> None:
        self._count = count
        self._processes = processes
        self._call_schedulers = call_schedulers
        self._path = os.path.join(folder, name)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(count)
        self._listener.settimeout(_LOOK_AGAIN_S)
        self._controls: list[ControlSocket] = []
        self._calling: threading.Thread | None = None
        self.pids: dict[int, int] = {}
        """The process of each rank, known from the first call on."""

    @property
    def are_open(self) -> bool:
        """The schedulers wait for calls, and make no step."""
        return bool(self._controls)

    def open(self, method: str) -> None:
        """Have the schedulers wait for calls.

        Args:
            method: what errors call the purpose.

        Raises:
            WorkerDiedError: a scheduler has ended.
        """
        self._processes.require(method)
        self._calling = threading.Thread(target=self._call_schedulers, name="rlcore-sglang-rpc", daemon=True)
        self._calling.start()
        found: dict[int, ControlSocket] = {}
        while len(found) < self._count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._processes.require(method)
                continue
            control = ControlSocket(connection)
            rank, pid = msgspec.msgpack.decode(control.recv(PATIENCE_S))
            found[rank], self.pids[rank] = control, pid
        self._controls = [found[rank] for rank in range(self._count)]

    def answers(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """Call a method of each shard, at once; return each ``ShardAnswer``."""
        for control, arguments in zip(self._controls, calls, strict=True):
            control.send(msgspec.msgpack.encode((method, arguments)))
        return [control.recv(PATIENCE_S) for control in self._controls]

    def close(self) -> None:
        """Let the schedulers go on."""
        for control in self._controls:
            control.close()
        self._controls = []
        if self._calling is not None:
            self._calling.join(_ENDED_S)

    def end(self) -> None:
        """Take no more connections."""
        self.close()
        self._listener.close()
        os.unlink(self._path)
