"""docs/bring_up.md: its checklist is the report of the conformance suite."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.conftest import ROOT

REPORTS = sorted((ROOT / "bench" / "results" / "conformance").glob("*.json"))


def checklist() -> list[list[str]]:
    """The members that each line of the page names, as patterns."""
    page = (ROOT / "docs" / "bring_up.md").read_text()
    _, _, table = page.partition("| line of the report |")
    lines = [line.split(" | ")[0] for line in table.split("\n\n")[0].splitlines()[2:]]
    return [[_whole(one, of=line) for one in re.findall(r"`([\w.*]+)`", line)] for line in lines]


def _whole(name: str, of: str) -> str:
    """Return a member with its part, which the first name of a line has."""
    part = of.partition("`")[2].partition(".")[0]
    return name if "." in name or name == "capabilities" else f"{part}.{name}"


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_every_line_of_a_report_is_in_one_line_of_the_checklist_in_its_order(report: Path) -> None:
    members = list(json.loads(report.read_text())["members"])
    lines = checklist()
    places = [[n for n, line in enumerate(lines) if any(fnmatch(member, one) for one in line)] for member in members]
    assert {member: where for member, where in zip(members, places, strict=True) if len(where) != 1} == {}
    assert {where for (where,) in places} == set(range(len(lines))), "and no line is about nothing"
    told = [where for member, (where,) in zip(members, places, strict=True) if member != "capabilities"]
    assert told == sorted(told)
