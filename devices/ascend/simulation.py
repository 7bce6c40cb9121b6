"""Detection of a simulated CANN below torch_npu.

A simulation identifies itself. Its ``libascendcl.so`` exports ``rlcore_simulation``, which returns its name, and
``rlcore_simulation_log``, which returns the path of a file. In that file all processes of the run write a line for each
operator, "operator NAME" or "refused NAME". No setting can hide a simulation, or present CANN as one.
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
    """Return the name of the simulation below torch_npu, or ""."""
    return _asked("rlcore_simulation")


def found() -> Simulation | None:
    """Return the operators that the simulation has computed and refused so far; None where there is none."""
    if not name():
        return None
    return counted(name(), Path(_asked("rlcore_simulation_log")).read_text().splitlines())


def counted(name: str, log: Iterable[str]) -> Simulation:
    """Read the lines of a log, in which each process that used an operator wrote its name once."""
    names: dict[str, set[str]] = {"operator": set(), "refused": set()}
    for line in log:
        kind, _, operator = line.partition(" ")
        names[kind].add(operator)
    return Simulation(name, operators=tuple(sorted(names["operator"])), refused=tuple(sorted(names["refused"])))


@functools.cache
def _asked(symbol: str) -> str:
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)  # the library that torch_npu has loaded
        answer = getattr(library, symbol)
    except (OSError, AttributeError):
        return ""
    answer.restype = ctypes.c_char_p
    text: bytes = answer()
    return text.decode()
