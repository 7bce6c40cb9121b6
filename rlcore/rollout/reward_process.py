"""The program of one process of a ``RewardPool``: it calls reward functions, one at a time, until its input ends.

A function comes as a pickle from the parent, whose code this process runs, over the inherited standard input. What goes
back is msgpack and never unpickled.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading

from rlcore.errors import one_line
from rlcore.process.framing import read_message, take_standard_output, write_message


def main() -> None:
    answers = take_standard_output()
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    while True:
        body = calls.get()
        try:
            function, args, kwargs = pickle.loads(body)
            answer = {"value": _plain(function(*args, **kwargs))}
        except BaseException as error:
            answer = {"error": one_line(error)}
        write_message(answers, answer)


def _read(calls: queue.SimpleQueue[bytes]) -> None:
    """Put the parent's calls into ``calls``; end this process with the parent, whatever a function does meanwhile."""
    while (body := read_message(sys.stdin.buffer, bytes)) is not None:
        calls.put(body)
    os._exit(0)


def _plain(value: object) -> object:
    """Return a reward as Python's own number, or list of them: it may be of numpy or torch."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"a reward function must return a number or a list of numbers, got {value!r:.100}")
