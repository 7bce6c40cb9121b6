"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (sent by somebody, or by the kernel for want of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def crash(stacks: str) -> str:
    """What faulthandler wrote when the process crashed."""
    _, found, stack = stacks.rpartition("Fatal Python error: ")
    return found + stack if found else ""
