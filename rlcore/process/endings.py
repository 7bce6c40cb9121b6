"""The end of a process in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """Say how a process ended, by its exit code; ``-n`` stands for signal ``n``, as in ``subprocess``."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (sent by somebody, or by the kernel for want of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def crash_report(text: str) -> str:
    """Return what faulthandler wrote when the process crashed, the last such part of ``text``; "" if it did not."""
    _, found, stack = text.rpartition("Fatal Python error: ")
    return found + stack if found else ""
