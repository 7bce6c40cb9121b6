"""How long a run will take: what its cases took here before, or what their authors say."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rlcore.atomic import write_file
from rlcore.bench.case import Case
from rlcore.bench.runner import Plan
from rlcore.settings import Settings

_CHILD_S = 4.0
"""To start the process that forks the others."""
_WHOLE_PROGRAM_S = 60.0
"""A round that takes so long is a whole program's, whose case states its number of runs: it has no second one."""


class Durations:
    """Seconds of each case, all rounds, on one device in runs of one kind. Kept in the cache folder."""

    def __init__(self, device_name: str, plan: Plan) -> None:
        self._path = Settings.from_env().cache / f"bench-durations-{device_name.replace(':', '-')}-{plan.effort}.json"
        self._rounds = plan.rounds
        self._known = _read(self._path)
        self._started: dict[str, float] = {}
        self._spent: dict[str, float] = {}

    def of(self, case: Case) -> float:
        rounds = 1 if case.estimate_s >= _WHOLE_PROGRAM_S else self._rounds
        return self._known.get(case.name, case.estimate_s * rounds)

    def total(self, cases: Sequence[Case]) -> float:
        return _CHILD_S + sum(map(self.of, cases))

    def begin(self, case: Case) -> None:
        self._started[case.name] = time.monotonic()

    def end(self, case: Case) -> None:
        spent = time.monotonic() - self._started[case.name]
        self._spent[case.name] = self._spent.get(case.name, 0.0) + spent

    def keep(self) -> None:
        """For the next run; a cache that cannot be written costs it nothing but a better estimate."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, msgspec.json.encode(self._known | self._spent))


def _read(path: Path) -> dict[str, float]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.DecodeError):
        return {}
