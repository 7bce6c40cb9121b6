"""The places through which the workers of one engine, or of a weight sync, find each other."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from rlcore.engines.launchers.ray.board import BoardRequest
from rlcore.engines.launchers.ray.places import BOARD
from rlcore.engines.launchers.ray.wire import encoded

if TYPE_CHECKING:
    from rlcore.engines.launchers.ray.link import HostLink


class HostStore:
    """A folder on one host, which goes with this object. Its agent's end lets the next process there remove it."""

    def __init__(self, link: HostLink) -> None:
        self.path = link.new_store()
        weakref.finalize(self, link.remove_store, self.path).atexit = False


class BoardPlace:
    """A part of the board, whose keys go with this object."""

    def __init__(self, board: Any) -> None:
        self.path = f"{BOARD}{uuid.uuid4().hex}"
        self.remove = weakref.finalize(self, _forget, board, self.path)
        self.remove.atexit = False


def _forget(board: Any, path: str) -> None:
    with contextlib.suppress(Exception):  # Ray may have been shut down
        board.ask.remote(encoded(BoardRequest("forget", [path])))
