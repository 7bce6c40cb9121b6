"""The program of one process of a ``RewardPool``: it calls reward functions, one at a time, until its input ends.

A function comes as a pickle from the parent, whose code this process runs, over the inherited standard input. What goes
back is msgpack and never unpickled.

A function may fork. Its children have neither pipe to the parent, who would wait for the last one that has it, and die
with this process, which leads a session of its own.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
from functools import partial
from typing import IO

from rlcore.errors import one_line
from rlcore.process.framing import (
    put_nothing_at,
    read_message,
    take_standard_input,
    take_standard_output,
    write_message,
)


def main() -> None:
    pipe, answers = take_standard_input(), take_standard_output()
    for one in (pipe, answers):
        os.register_at_fork(after_in_child=partial(put_nothing_at, one.fileno()))
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, calls), daemon=True).start()
    while True:
        body = calls.get()
        try:
            function, args, kwargs = pickle.loads(body)
            answer = {"value": _plain(function(*args, **kwargs))}
        except BaseException as error:
            answer = {"error": one_line(error)}
        write_message(answers, answer)


def _read(pipe: IO[bytes], calls: queue.SimpleQueue[bytes]) -> None:
    """Put the parent's calls into ``calls``; end this process with the parent, whatever a function does meanwhile."""
    while (body := read_message(pipe, bytes)) is not None:
        calls.put(body)
    os.killpg(os.getpid(), signal.SIGKILL)  # with what functions have started


def _plain(value: object) -> object:
    """Return a reward as Python's own number, or list of them: it may be of numpy or torch."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"a reward function must return a number or a list of numbers, got {value!r:.100}")
