"""Estimates of a run's time, and of what fits into it: by what cases took here before, else by what authors say."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rlcore.atomic import write_file
from rlcore.bench.case import Case
from rlcore.bench.record import Effort, Record
from rlcore.bench.run import RunPlan
from rlcore.device import Device
from rlcore.settings import Settings

_START_S: dict[Effort, float] = {"quick": 6.0, "standard": 12.0, "full": 20.0}
"""To start the process that forks the others, and to measure the limits where they are not known."""
_ON_DEVICE_S = 2.0
"""Until a new process has an accelerator, beside what the authors say."""
_WHOLE_PROGRAM_S = 60.0
"""A round that takes so long is a whole program's, whose case states its number of runs: it has no second one."""


class _KnownDuration(msgspec.Struct, frozen=True):
    round_s: float
    is_repeated: bool


class Durations:
    """Seconds of each case on one device in runs of one kind. Kept in the cache folder."""

    def __init__(self, device: Device, plan: RunPlan) -> None:
        name = device.name.replace(":", "-")
        self._path = Settings.from_env().cache / f"bench-rounds-{name}-{plan.effort}.json"
        self._plan = plan
        self._known = _read(self._path)
        self._is_host = device.spec.is_host

    def of_round(self, case: Case) -> float:
        known = self._known.get(case.name)
        if known:
            return known.round_s
        return case.estimate_s if self._is_host else case.device_estimate_s or case.estimate_s + _ON_DEVICE_S

    def of(self, case: Case) -> float:
        """All its rounds."""
        known = self._known.get(case.name)
        is_repeated = known.is_repeated if known else case.estimate_s < _WHOLE_PROGRAM_S
        return self.of_round(case) * (self._plan.rounds if is_repeated else 1)

    def total(self, cases: Sequence[Case]) -> float:
        return _START_S[self._plan.effort] + sum(map(self.of, cases))

    def keep(self, record: Record) -> None:
        """Keep what the cases of the last call took. If the cache cannot be written, the next estimate is worse."""
        repeated = {result.name for result in record.cases if result.is_repeated}
        rounds = record.calls[-1].rounds if record.calls else {}
        found = {name: _KnownDuration(statistics.fmean(taken), name in repeated) for name, taken in rounds.items()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, msgspec.json.encode(self._known | found))


class TimeLimit:
    """Until when a run may last."""

    def __init__(self, minutes: float | None, durations: Durations, started: float) -> None:
        """``minutes`` count from ``started``, by ``time.monotonic``; None: as long as it takes."""
        self._end = None if minutes is None else started + 60 * minutes
        self._durations = durations

    @property
    def left_s(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()

    def has_time_for(self, case: Case) -> bool:
        """Return whether there is time for a round of the case."""
        return self.left_s is None or self._durations.of_round(case) <= self.left_s


def _read(path: Path) -> dict[str, _KnownDuration]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _KnownDuration])
    except (OSError, msgspec.DecodeError):
        return {}
