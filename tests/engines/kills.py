"""A kill at each moment of what a process does on disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a fork that is killed before its ``number``-th touch of the file system; False if it lived."""
    child = os.fork()
    if child == 0:
        left = [number]

        def count(event: str, _: Any) -> None:
            if event == "open" or event.startswith(("os.", "shutil.")):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
