"""The socket at which an agent takes its workers' questions to the store actor."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from rlcore.engines.launchers.ray._ray_private import plain_bytes
from rlcore.engines.launchers.ray.store_actor import ActorStoreAnswer, ActorStoreRequest
from rlcore.errors import RlcoreError
from rlcore.process.framing import read_message, write_message
from rlcore.process.socket_address import socket_address


class StoreSocket:
    """Listens at ``path``, in a folder that nobody else can enter, until the process ends.

    Attributes:
        actor: Ray's handle of the store actor that answers; a new one takes the place of one that has died.
    """

    def __init__(self, path: Path, actor: Any) -> None:
        self.actor = actor
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_address(path) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._thread(self._accept)

    def _thread(self, task: Any, *arguments: Any) -> None:
        threading.Thread(target=task, args=arguments, name="rlcore-ray-store", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._thread(self._serve, self._listener.accept()[0])

    def _serve(self, connection: socket.socket) -> None:
        # A worker that ends closes its connection; an actor that is gone closes those of all workers.
        with contextlib.suppress(OSError, RlcoreError), connection, connection.makefile("rwb") as file:
            pipe = cast("IO[bytes]", file)
            while (request := read_message(pipe, ActorStoreRequest)) is not None:
                answer = plain_bytes(self.actor.ask.remote(msgspec.msgpack.encode(request)), None)
                write_message(pipe, msgspec.msgpack.decode(answer, type=ActorStoreAnswer))
