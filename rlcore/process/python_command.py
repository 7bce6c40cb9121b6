"""The command that starts a Python process which finds the same modules as this one."""

from __future__ import annotations

import json
import os
import sys

_FIND = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)) or sys.path\n"
_CALL = """\
from importlib import import_module
module, _, function = sys.argv[1].partition(":")
getattr(import_module(module), function)(*sys.argv[2:])
"""


def python_command(entry: str, *arguments: object, python: str = "") -> list[str]:
    """Return a command that calls ``entry``, "package.module:function", with the arguments as text.

    The new process looks for modules where this one does: a package may have been found through ``sys.path`` alone.
    With ``python``, another interpreter, it looks where that interpreter does by itself.
    """
    return python_code(_CALL, entry, *arguments, python=python)


def python_code(code: str, *arguments: object, python: str = "") -> list[str]:
    """Return a command that runs ``code``, which finds modules as with ``python_command``.

    The arguments are in its ``sys.argv`` from the second place on.
    """
    started = [python, "-P"] if python else [sys.executable]
    path = [] if python else [os.fspath(folder) for folder in sys.path]
    return [*started, "-c", _FIND + code, json.dumps(path), *map(str, arguments)]
