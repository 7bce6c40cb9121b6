"""The versions of another project's engine that rlcore was checked against."""

from __future__ import annotations

import logging
import re

from rlcore.errors import UnsupportedError

_log = logging.getLogger("rlcore.engines.sampling")


def check_version(engine: str, version: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> None:
    """Refuse a version that is older than rlcore knows, and warn of a newer one: most go on as the last one did.

    Args:
        engine: the name of the engine. In lower case it is that of the package and of the executor, too.
        oldest: the first version, as many of its numbers as count.
        newest: the last version, likewise.

    Raises:
        UnsupportedError: the version is too old, or is not written as one.
    """
    number = numbers_of(version, len(oldest))
    first, last = (".".join(map(str, bound)) for bound in (oldest, newest))
    most = last if len(newest) == 3 else f"{last}.99"
    package = engine.lower()
    if number < oldest:
        raise UnsupportedError(
            f"{engine} {version}",
            f"the {package} executor knows {first} to {last}; run: pip install '{package}>={first},<={most}'",
        )
    if number > newest:
        _log.warning(
            "%s %s is newer than what rlcore was checked against, %s to %s; if something fails in it, run: "
            "pip install '%s<=%s'",
            engine, version, first, last, package, most,
        )  # fmt: skip


def numbers_of(version: str, count: int) -> tuple[int, ...]:
    """Return the first numbers of a version, or none if it is not written as one."""
    found = re.match(r"\.".join([r"(\d+)"] * count), version)
    return tuple(map(int, found.groups())) if found else ()
