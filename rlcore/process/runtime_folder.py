"""The folder in which processes of this user keep the files that live as long as they do."""

from __future__ import annotations

import os
from pathlib import Path

from rlcore.errors import StateError
from rlcore.settings import Settings


def runtime_folder() -> Path:
    """Return ``Settings.runtime``, made if needed, for this user alone.

    Raises:
        StateError: it cannot be made, or belongs to another user.
    """
    folder = Settings.from_env().runtime
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"the folder {folder} cannot be made: {error}; set RLCORE_RUNTIME to another one") from error
    if folder.stat().st_uid != os.getuid():  # anybody can make a folder of that name in /tmp
        raise StateError(f"the folder {folder} belongs to another user; set RLCORE_RUNTIME to one of your own")
    return folder
