"""Real runs on this machine: two of the same code are equal, and a planted slowdown is found, alone.

Both sides take turns, round by round, each round in a new process, so that a neighbour who comes or goes meets both.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import pytest
from steady_cases import PLANTED, cases

from rlcore.bench.case import Case
from rlcore.bench.compare import Comparison, compare
from rlcore.bench.isolated import Isolated
from rlcore.bench.measure import Sampling
from rlcore.bench.result import CaseResult, Record
from rlcore.bench.runner import Run

ROUNDS = 30
ONCE = Sampling(min_samples=1, max_samples=1, max_warmup=2, stable_spread=1.0)
SCRIPT = str(Path(__file__).with_name("steady_cases.py"))
SIDES = ("before", "after")


def taken_in_turns(path: Path, slowdown: float) -> Comparison:
    with (
        Isolated("cpu", (sys.executable, SCRIPT, "0")) as a,
        Isolated("cpu", (sys.executable, SCRIPT, str(slowdown))) as b,
    ):
        order = itertools.cycle(([0, 1], [1, 0]))

        def both(case: Case) -> list[CaseResult]:
            found = {side: (a, b)[side].run_case(case, ONCE) for side in next(order)}
            return [
                msgspec.structs.replace(result, implementation=SIDES[side]) for side in (0, 1) for result in found[side]
            ]

        # One run holds both sides, as two contenders.
        record = Run(record=a.new_record("full"), path=path, run=both, rounds=ROUNDS).cases(list(cases().values()))
    return compare(*(side_of(record, side) for side in SIDES), names=SIDES)


def side_of(record: Record, side: str) -> Record:
    mine = [
        msgspec.structs.replace(case, implementation="torch") for case in record.cases if case.implementation == side
    ]
    return msgspec.structs.replace(record, cases=mine)


def shown(found: Comparison) -> str:
    rows = [(row.case, row.verdict, row.difference) for row in found.rows]
    return "\n".join(f"{case} {verdict} {difference}" for case, verdict, difference in rows)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_planted_slowdown_of_10_percent_is_found_with_30_samples_and_nothing_else_is(tmp_path: Path) -> None:
    found = taken_in_turns(tmp_path / "both.json", slowdown=0.1)
    print(shown(found))
    verdicts = {row.case: row.verdict for row in found.rows}
    assert verdicts.pop(PLANTED) == "slower"
    assert sum(verdict != "about equal" for verdict in verdicts.values()) <= 0.05 * len(verdicts)
