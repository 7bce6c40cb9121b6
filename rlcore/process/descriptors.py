"""The descriptors of a worker process: as many as it may have, and a watch that they do not run out unexplained.

Libraries end the process when they get none: gloo does by SIGABRT, when it cannot accept a connection.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time

from rlcore.process.tcp_sockets import describe, foreign_connections

_log = logging.getLogger(__name__)

_MOST = 1 << 20
"""The kernel's own limit where nobody changed it (/proc/sys/fs/nr_open); programs that walk over all numbers end."""
_PERIOD_S = 1.0
_TOO_MANY = 0.5  # of the limit


def raise_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one, at most 2**20."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def watch() -> None:
    """Warn, from a thread of its own, as soon as half of the descriptors are in use, and say what holds them."""
    threading.Thread(target=_watch, name="rlcore-descriptors", daemon=True).start()


def _watch() -> None:
    warned = ""
    while True:
        time.sleep(_PERIOD_S)
        try:
            warning = what_is_wrong()
        except OSError as error:
            warning = f"this process cannot look at its descriptors: {error}"
        if warning and not warned:
            _log.warning(warning)
        warned = warning


def what_is_wrong() -> str:
    """Return a warning that half of the descriptors are in use; "" where fewer are."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_open = len(os.listdir("/proc/self/fd")) - 1
    if limit == resource.RLIM_INFINITY or num_open < _TOO_MANY * limit:
        return ""
    foreign = foreign_connections()
    return (
        f"{num_open} of the {limit} descriptors that this process may have are in use, "
        f"{describe(foreign) if foreign else 'none of them by a connection of another user'}. Gloo ends a process that "
        "has none left by SIGABRT; raise the hard limit (ulimit -Hn)"
    )
