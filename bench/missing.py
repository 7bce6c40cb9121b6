"""What has no number and why, in few words: for tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rlcore.bench.result import CaseResult

_CLASS_NAME = re.compile(r"^(?:\w+\.)*[A-Z]\w+: (?=.* )")
"""Before a sentence; "KeyError: 'T'" would say nothing without it."""
_UNSUPPORTED = " is not supported: "
_LONGEST = 110


class Missing(NamedTuple):
    status: str
    implementation: str
    why: str
    cases: tuple[str, ...]
    """All for which the three are the same."""


def missing(results: Iterable[CaseResult]) -> list[Missing]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if result.status != "pass":
            why = shortened(result.reason, result.implementation)
            found.setdefault((result.status, result.implementation, why), []).append(result.name)
    return [Missing(*same, tuple(cases)) for same, cases in found.items()]


def shortened(reason: str, implementation: str) -> str:
    """Its first line without the error's class and what was asked for; where each of several implementations has a
    reason, that of ``implementation``; at most 110 characters."""
    line = _CLASS_NAME.sub("", reason.partition("\n")[0])
    line = line.partition(_UNSUPPORTED)[2] or line
    mine = f"{implementation.partition(',')[0]}: "
    line = next((part.removeprefix(mine) for part in line.split("; ") if part.startswith(mine)), line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
