"""The table of docs/devices.md is made from reports, and shows failures and reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.conformance.members import required_members
from rlcore.conformance.table import into, main, table
from rlcore.errors import InvalidInputError

ROOT = Path(__file__).resolve().parents[2]


def report(name: str, **members: tuple[str, str, str]) -> dict[str, Any]:
    keys = ("support", "reason", "result")
    return {
        "schema": "rlcore.conformance/1",
        "device": {"name": f"{name}:0", "vendor": "v", "product": f"{name} product"},
        "versions": {"rlcore": "1", "torch": "2.13.0", "python": "3.11"},
        "members": {m: dict(zip(keys, how, strict=True)) | {"evidence": "hardware"} for m, how in members.items()},
        "tests": {"test_one": {}, "test_other": {}},
    }


REPORTS = [
    report("a", pool=("unsupported", "no MemPool", "skipped"), stats=("native", "", "passed")),
    report(
        "b", pool=("emulated", "no MemPool", "passed"), stats=("native", "", "failed"), more=("native", "", "untested")
    ),
]

TABLE = """\
| member | a | b |
| --- | --- | --- |
| `pool` | unsupported (1) | emulated (1) |
| `stats` | native | native, **failed** |
| `more` | absent | native, untested |

1. no MemPool

* a:0: a product, torch 2.13.0, evidence hardware; by 2 tests 1 members passed, 0 failed, 1 skipped, 0 untested
* b:0: b product, torch 2.13.0, evidence hardware; by 2 tests 1 members passed, 1 failed, 0 skipped, 1 untested"""


def test_the_table_has_a_row_for_each_member_and_a_note_for_each_reason() -> None:
    assert table(REPORTS) == TABLE


def test_a_simulated_device_is_called_so_and_its_operators_are_counted() -> None:
    simulation = {"name": "simulated X", "operators_simulated": 7, "operators_refused": 2, "refused": ["a", "b"]}
    lines = table([REPORTS[0] | {"simulation": None}, REPORTS[1] | {"simulation": simulation}]).splitlines()
    assert lines[0] == "| member | a | b (simulated X) |"
    assert "evidence hardware; by 2 tests 1 members passed" in lines[-2]
    assert "evidence hardware, 7 operators simulated, refused: a, b; by 2 tests 1 members passed" in lines[-1]


def test_what_lies_below_torch_is_told_by_the_names_that_the_device_gave() -> None:
    """Reports from before this was recorded, as that of ``REPORTS``, have none of it."""
    versions = REPORTS[1]["versions"] | {"torch-npu": "2.13.0", "driver": "25.3.rc1"}
    lines = table([REPORTS[0], REPORTS[1] | {"versions": versions}]).splitlines()
    assert "product, torch 2.13.0, evidence" in lines[-2]
    assert "product, torch 2.13.0, torch-npu 2.13.0, driver 25.3.rc1, evidence" in lines[-1]


def test_the_commit_is_told_where_the_report_has_one() -> None:
    lines = table([REPORTS[0] | {"commit": None}, REPORTS[1] | {"commit": f"{'0123456789' * 4}-modified"}]).splitlines()
    assert "product, torch 2.13.0, evidence" in lines[-2]
    assert "product, torch 2.13.0, commit 012345678901 with changes, evidence" in lines[-1]


def test_the_table_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "devices.md"
    document.write_text("# Devices\n<!-- members -->\nold\n<!-- /members -->\nend\n")
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    for path, found in zip(paths, REPORTS, strict=True):
        path.write_text(json.dumps(found))
    main([*map(str, paths), "--into", str(document)])
    assert document.read_text() == f"# Devices\n<!-- members -->\n{TABLE}\n<!-- /members -->\nend\n"


def test_the_page_shows_the_reports_of_the_repository() -> None:
    paths = sorted((ROOT / "bench" / "results" / "conformance").glob("*.json"))
    page = (ROOT / "docs" / "devices.md").read_text()
    assert [path.stem for path in paths] == ["cpu", "cuda", "npu", "simdev"]
    assert page == into(page, table([json.loads(path.read_text()) for path in paths])), "run: make results"


def test_a_document_without_marks_and_a_file_that_is_no_report_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"needs a line <!-- members --> and after it a line <!-- /members -->"):
        into("<!-- /members --> <!-- members -->", "x")
    with pytest.raises(InvalidInputError, match=r"has schema .rlcore.conformance/1., this one .rlcore.bench/1."):
        table([{"schema": "rlcore.bench/1"}])


def test_required_members_are_named_in_full_in_short_or_as_a_group() -> None:
    known = ["memory.pool", "memory.export_ipc", "streams.new", "profiler.start"]
    assert required_members(["pool", "streams.new"], known) == {"memory.pool", "streams.new"}
    assert required_members(["ipc"], known) >= {"memory.export_ipc", "memory.revoke"}
    with pytest.raises(InvalidInputError, match="names 2 members"):
        required_members(["new"], [*known, "profiler.new"])
