"""Versions of CANN and of the NPU driver, from the files that their installers write: no library is loaded."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
_LINE = re.compile(r"^\s*version\s*=\s*\[?\"?([\w.-]+)", re.IGNORECASE | re.MULTILINE)
_PARTS = re.compile(r"\d+|[a-z]+")
_INFO_FILES = ("*/ascend_*_install.info", "ascend_*_install.info", "version.cfg", "opp/version.info")


@functools.total_ordering
class Version:
    """A version such as 8.5.0, 8.3.RC1 or 25.3.rc1; a release candidate comes before its release."""

    def __init__(self, text: str) -> None:
        self.text = text
        parts = _PARTS.findall(text.lower())
        numbers = parts[: parts.index("rc")] if "rc" in parts else parts
        candidate = int(parts[parts.index("rc") + 1]) if "rc" in parts[:-1] else 1 << 30
        major, minor, patch = ([int(part) for part in numbers if part.isdecimal()] + [0, 0, 0])[:3]
        self._key = (major, minor, patch, candidate)

    @property
    def minor(self) -> tuple[int, int]:
        """Return the first two numbers."""
        return self._key[:2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key == other._key

    def __lt__(self, other: Version) -> bool:
        return self._key < other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.text


CANN_FOR_IPC, DRIVER_FOR_IPC = Version("8.3.RC1"), Version("25.3.rc1")
"""The oldest versions with which verl uses IPC on NPUs; torch_npu itself names none."""


def cann_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of CANN that its set_env.sh exports; None before that was sourced."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if environ.get(name):
            return Path(environ[name])
    return None


def cann(environ: Mapping[str, str] = os.environ) -> Version | None:
    """Return the version of CANN; None where there is none, or its files do not name one."""
    home = cann_home(environ)
    if home is None:
        return None
    found = (path for pattern in _INFO_FILES for path in sorted(home.glob(pattern)))
    return next(filter(None, map(_version_in, found)), None)


def driver(path: Path = DRIVER_FILE) -> Version | None:
    """Return the version of the driver; None where there is none."""
    return _version_in(path)


def below_torch() -> dict[str, str]:
    """Return the versions of torch-npu, CANN and the driver; unknown ones are left out."""
    found = {"torch-npu": importlib.metadata.version("torch-npu"), "CANN": cann(), "driver": driver()}
    return {name: str(version) for name, version in found.items() if version is not None}


def _version_in(path: Path) -> Version | None:
    if not path.is_file():
        return None
    said = _LINE.search(path.read_text(errors="replace"))
    return Version(said[1]) if said else None
