"""Whether what is loaded as CANN is CANN.

A stand-in says so itself: its ``libascendcl.so`` exports ``rlcore_simulation``, which returns its name, and
``rlcore_simulation_log``, which returns the path of a file with a line for each operator, "operator NAME" or "refused
NAME", of all processes of the run. No setting makes a stand-in real, or CANN a stand-in.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from rlcore.types import Simulation

_LIBRARY = "libascendcl.so"


def name() -> str:
    """Of the stand-in below torch_npu, or ""."""
    return _asked("rlcore_simulation")


def found() -> Simulation | None:
    """What the stand-in has computed and refused so far; None where there is none."""
    if not name():
        return None
    log = Path(_asked("rlcore_simulation_log"))
    lines = dict.fromkeys(log.read_text().splitlines())
    told = {kind: tuple(sorted(line[len(kind) + 1 :] for line in lines if line.startswith(f"{kind} ")))
            for kind in ("operator", "refused")}  # fmt: skip
    return Simulation(name(), operators=told["operator"], refused=told["refused"])


@functools.cache
def _asked(symbol: str) -> str:
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)  # the one that torch_npu has loaded
        answer = getattr(library, symbol)
    except (OSError, AttributeError):
        return ""
    answer.restype = ctypes.c_char_p
    text: bytes = answer()
    return text.decode()
