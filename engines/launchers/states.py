"""The activity of a worker that did not answer in time, read from the stack that it shows."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import PurePath

_FRAME = re.compile(r'File "(.*?)", line \d+ in (\S+)')
_COLLECTIVE = ("/torch/distributed/", "/rlcore/collectives/", "/collectives/")
_PLUMBING = ("/torch/_ops.py", "/threading.py", "/torch/utils/_contextlib.py", "/queue.py")
"""Files between a frame that waits and the one that says for what."""
STOPPED = "the process is stopped (SIGSTOP)"
GONE = "the process has ended"


class Suspicion(IntEnum):
    """How likely a worker is the one that the others wait for, the most likely first."""

    STOPPED = 0
    GONE = 1
    ELSEWHERE = 2
    """In code of its own, while others may wait for it in a collective."""
    UNKNOWN = 3
    IN_COLLECTIVE = 4


def state_of_worker(stack: str) -> tuple[Suspicion, str]:
    """Return what the stack says, and the same in words.

    Args:
        stack: faulthandler's, the innermost frame first; or the words that stand for it.
    """
    if stack == STOPPED:
        return Suspicion.STOPPED, "is stopped (SIGSTOP)"
    if stack == GONE:
        return Suspicion.GONE, "has ended"
    frames = [frame for frame in _FRAME.findall(stack) if not frame[0].endswith(_PLUMBING)]
    if not frames:
        return Suspicion.UNKNOWN, "shows no stack"
    file, function = frames[0]
    if any(folder in file for folder in _COLLECTIVE):
        return Suspicion.IN_COLLECTIVE, f"is in a collective ({function})"
    return Suspicion.ELSEWHERE, f"is in {function} ({PurePath(file).name})"
