"""Another Python interpreter that runs workers: an environment of its own, with the same version of rlcore."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rlcore import __version__
from rlcore.errors import InvalidInputError

_LONGEST_S = 60.0


def checked_interpreter(python: str | os.PathLike[str]) -> str:
    """Return the path of an interpreter, which may be given as a name on the PATH.

    Raises:
        InvalidInputError: it is no Python, or has another version of rlcore or none; the message says what to do.
    """
    given = os.path.expanduser(os.fspath(python))
    found = shutil.which(given)
    if found is None:
        raise InvalidInputError(f"python={given!r} is no program; give the bin/python of an environment")
    path = os.path.abspath(found)  # links are kept: by them an environment's python finds its packages
    _check(path)
    return path


@functools.cache
def _check(python: str) -> None:
    command = [python, "-P", "-c", "import rlcore; print(rlcore.__version__)"]
    ours = __version__
    wanted = f"install rlcore {ours} there: {python} -m pip install <the wheel or clone of this one>"
    try:
        result = subprocess.run(
            command,
            env=environment_for(python, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInputError(f"python={python!r} does not run: {error}") from error
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise InvalidInputError(f"python={python!r} cannot import rlcore ({reason}); {wanted}")
    if (version := result.stdout.strip()) != ours:
        raise InvalidInputError(f"python={python!r} has rlcore {version}, and this is {ours}; {wanted}")


def environment_for(python: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` as it is after the interpreter's environment was activated."""
    folder = str(Path(python).parent)
    kept = {name: value for name, value in environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    return kept | {"PATH": os.pathsep.join(filter(None, (folder, environ.get("PATH", ""))))}
