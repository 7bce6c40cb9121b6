"""The process of one of SGLang's schedulers, which has a device of the replica: rlcore's shard of it lives there too.

SGLang imports this by name when it starts the process. ``collective_rpc("rlcore_serve")`` comes to all ranks at the
same place between two steps: each then connects to the executor and answers its calls, until that closes the
connection. So no step is made meanwhile. The calls and answers are plain data.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from rlcore.engines.sampling.replica.calls import answer
from rlcore.engines.sampling.sglang import versions
from rlcore.engines.sampling.sglang.interfaces import SglangScheduler
from rlcore.engines.sampling.sglang.sampling import sample
from rlcore.engines.sampling.sglang.shard import SglangShard
from rlcore.engines.weight_sync.channels.control_socket import ControlSocket
from rlcore.process.guard import remove_memory, shared_memory
from rlcore.process.orphan import end_without

FOLDER = "_RLCORE_SGLANG_FOLDER"
"""The environment variable with the folder of the executor's socket."""
SOCKET = "calls"
_WORDS = "last-words-"
_PR_SET_PDEATHSIG = 1  # prctl(2); SGLang asks to be killed as soon as its parent has ended
_GUARD_S = 10.0
"""How long the guard has to look at the shared memory of schedulers and to end them."""
PATIENCE_S = 365 * 86400.0
"""Not a deadline: the executor's end closes when it has no more calls, and with its process."""


class _LastWords(logging.Handler):
    """Writes the error that ends a scheduler where the executor finds it: SGLang's end says no more than its code."""

    def emit(self, record: logging.LogRecord) -> None:
        if "Traceback" in record.getMessage():
            Path(os.environ[FOLDER], f"{_WORDS}{os.getpid()}").write_text(record.getMessage(), "utf-8")


def last_words(folder: str, pid: int | None = None) -> str:
    """Return the error of a scheduler that has ended, in one line; "" if it has said none.

    Args:
        pid: the scheduler's; None is any.
    """
    for path in Path(folder).glob(f"{_WORDS}{pid or '*'}"):
        lines = path.read_text("utf-8").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """Run a scheduler, called by SGLang in place of its ``run_scheduler_process``."""
    if (parent := parent_process()) is not None:  # what it imported first took seconds
        end_without(parent, _GUARD_S)
    logging.getLogger(versions.SCHEDULER_LOG).addHandler(_LastWords(logging.ERROR))
    try:
        versions.run_scheduler(arguments, keywords, rpc=serve, sample=sample, folder=os.environ[FOLDER])
    finally:  # SGLang leaves it, also where it fails before the executor has seen this process
        remove_memory(shared_memory([os.getpid()]))


def serve(scheduler: SglangScheduler) -> None:
    """Answer the executor's calls until it closes the connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.path.join(os.environ[FOLDER], SOCKET))
    control = ControlSocket(connection)
    try:
        control.send(msgspec.msgpack.encode((dist.get_rank(), os.getpid())))
        while True:
            try:
                method, arguments = msgspec.msgpack.decode(control.recv(PATIENCE_S))
            except ConnectionError:
                return
            control.send(answer(_Served(scheduler), f"shard.{method}", arguments, catches=Exception))
    finally:
        control.close()


class _Served:
    """A scheduler, whose shard is made in the first call: by then the model is loaded, and an error is the call's."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def shard(self) -> SglangShard:
        found: SglangShard | None = getattr(self._scheduler, "_rlcore_shard", None)
        if found is None:
            found = self._scheduler._rlcore_shard = SglangShard(self._scheduler)
            # The guard of the executor's process ends this one too, and sees before what it shares by name. Where the
            # guard was killed, ``end_without`` ends it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        return found
