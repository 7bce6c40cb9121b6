"""Sizes of host memory that Linux tells in /proc."""

from __future__ import annotations

import re
from pathlib import Path


def proc_bytes(file: str, field: str) -> int:
    """Return a field of a file in /proc that is given in kB, such as "RssAnon" of "self/status"."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc", file).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
