"""The messages between a parent and its worker process.

A parent's calls are cloudpickled (``pickled_calls.py``): a child runs its parent's code anyway, and classes of a script
or notebook must travel. A child with another interpreter gets plain data (``plain_calls.py``). A child's answers are
plain data in any case (``answers.py``): the parent unpickles nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["start", "call", "cancel", "close", "end", "result", "event", "error"]


class MessageHead(msgspec.Struct, array_like=True):
    """The head of every message."""

    kind: Kind
    call: int = 0
    """The number of the call that it belongs to."""
    worker: int = 0
    """The number of the worker that is called."""


class WorkerReference:
    """A worker of the receiving process, by number."""

    def __init__(self, number: int) -> None:
        self.number = number
