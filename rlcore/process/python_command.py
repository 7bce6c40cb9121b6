"""The command that starts a Python process which finds the same modules as this one."""

from __future__ import annotations

import json
import os
import sys

_PROGRAM = """\
import json, sys
from importlib import import_module
sys.path[:] = json.loads(sys.argv[1]) or sys.path
module, _, function = sys.argv[2].partition(":")
getattr(import_module(module), function)(*sys.argv[3:])
"""


def python_command(entry: str, *arguments: object, python: str = "") -> list[str]:
    """Return a command that calls ``entry``, "package.module:function", with the arguments as text.

    The new process looks for modules where this one does: a package may have been found through ``sys.path`` alone.
    With ``python``, another interpreter, it looks where that interpreter does by itself.
    """
    started = [python, "-P"] if python else [sys.executable]
    path = [] if python else [os.fspath(folder) for folder in sys.path]
    return [*started, "-c", _PROGRAM, json.dumps(path), entry, *map(str, arguments)]
