"""Whether what is loaded as CANN is CANN.

A stand-in says so itself: its ``libascendcl.so`` exports ``rlcore_simulation``, which returns its name, and
``rlcore_simulation_log``, which returns the path of a file with a line for each operator, "operator NAME" or "refused
NAME", of all processes of the run. No setting makes a stand-in real, or CANN a stand-in.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
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
    return counted(name(), Path(_asked("rlcore_simulation_log")).read_text().splitlines())


def counted(name: str, log: Iterable[str]) -> Simulation:
    """From the lines of its log, in which a name stands once for each process that used it."""
    names: dict[str, set[str]] = {"operator": set(), "refused": set()}
    for line in log:
        kind, _, operator = line.partition(" ")
        names[kind].add(operator)
    return Simulation(name, operators=tuple(sorted(names["operator"])), refused=tuple(sorted(names["refused"])))


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
