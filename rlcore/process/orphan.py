"""The end of a process that has lost its parent, where nobody else ends it.

A worker's guard ends all that the worker has started, unless it was killed with the worker. Whoever kills processes by
their command line misses one that has written a title over its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess


def end_without(parent: BaseProcess, patience_s: float) -> None:
    """Have this process killed when its parent has ended, but ``patience_s`` later: the guard comes first.

    The kernel's PR_SET_PDEATHSIG gives no time, is not heard of a parent that has ended before, and follows the thread
    of the parent that started this process.

    Args:
        parent: ``multiprocessing.parent_process()``; it may have ended by now.
    """
    threading.Thread(target=_end, args=(parent, patience_s), name="rlcore-orphan", daemon=True).start()


def _end(parent: BaseProcess, patience_s: float) -> None:
    parent.join()
    time.sleep(patience_s)
    os.kill(os.getpid(), signal.SIGKILL)
