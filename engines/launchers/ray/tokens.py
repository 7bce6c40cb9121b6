"""The file of Ray's token, which lets whoever reads it run code on every host of the cluster."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)


def token_file() -> Path | None:
    """Return the file from which Ray takes the token; None when the token is in the environment, or nowhere."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path if path.is_file() else None


def warn_of_readable_token() -> None:
    """Warn of a token file that other users of this host can read, as Ray writes it."""
    path = token_file()
    if path is None:
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning(
            "other users of this host can read Ray's token in %s (mode %04o), and so run code on the whole cluster; "
            "run: chmod 600 %s",
            *(path, mode, path),
        )
