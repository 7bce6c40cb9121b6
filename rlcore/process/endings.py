"""The end of a process in words."""

from __future__ import annotations

import signal

CONNECTION_LOST = 89
"""The exit code of a child that ends because it cannot read from its parent, or write to it, any more."""
_UNKNOWN_SENDER = "sent by somebody, or by the kernel for want of memory"


def how_it_ended(code: int, sender: str = _UNKNOWN_SENDER) -> str:
    """Say how a process ended, by its exit code; ``-n`` stands for signal ``n``, as in ``subprocess``.

    Args:
        sender: who sends SIGKILL, such as ``MemoryKills.explanation`` says.
    """
    if code == CONNECTION_LOST:
        return (
            f"ended with exit code {code}, which says that it lost the connection to its parent (something in it may "
            "have closed file descriptors that are not its own; what it printed says more)"
        )
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = f" ({sender})" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def crash_report(text: str) -> str:
    """Return what faulthandler wrote when the process crashed, the last such part of ``text``; "" if it did not."""
    _, found, stack = text.rpartition("Fatal Python error: ")
    return found + stack if found else ""
