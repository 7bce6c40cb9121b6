"""README.md shows what the records say; a table cannot be made from a run that did not pass."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from records import a_record as full_record

from rlcore.bench.readme import main, report, rewritten
from rlcore.bench.result import CaseResult, Metric, Record, read, write
from rlcore.bench.results_page import page
from rlcore.errors import BenchError
from rlcore.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
EMPTY = "before\n<!-- results:startup -->\nold\n<!-- /results -->\nafter\n"
CASES = ("startup/import", "startup/help", "dispatch/device", "dispatch/op")


def a_record(**changes: object) -> Record:
    return msgspec.structs.replace(read(RESULTS / "startup-cpu.json"), **changes)


def passed(name: str, *seconds: float) -> CaseResult:
    times = Metric(name="time", unit="s", samples=list(seconds))
    return CaseResult(name=name, implementation="x", status="pass", params={}, metrics=[times])


def test_readme_is_what_the_records_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert "<!-- results:quickstart -->" in text
    assert text == rewritten(text, RESULTS), "run: make results"


def test_readme_lists_every_variable_and_no_other() -> None:
    listed = re.findall(r"^\| `(RLCORE_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(VARIABLES)


def test_results_page_is_what_the_records_say() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == page(RESULTS), "run: make results"


def test_report_is_what_the_records_of_full_runs_say() -> None:
    made = ROOT / "docs" / "report.html"
    assert (made.read_text() if made.exists() else None) == report(RESULTS), "run: make results"


def test_full_runs_make_a_report_and_a_table_in_which_what_was_not_measured_is_said_to_be(tmp_path: Path) -> None:
    assert report(tmp_path) is None
    write(full_record(), tmp_path / "full-cpu.json")
    two = full_record(20.0, accelerator_model_name="a GPU", accelerators_per_node=2)
    links = [case for case in two.cases if case.name.startswith("collectives/")]
    write(msgspec.structs.replace(two, cases=links), tmp_path / "full-gpu.json")
    html = report(tmp_path)
    assert html is not None and "<title>rlcore bench: cpu, gpu</title>" in html
    lines = rewritten(EMPTY.replace("startup", "full"), tmp_path).splitlines()
    assert lines[3].endswith(" | 2 x a GPU |")
    assert "| tokens trained a second, whole step | 1,000 | not measured |" in lines
    assert "| matrix product attained, bfloat16 | 100 GFLOP/s | 100 GFLOP/s |" in lines
    assert "| device to device | not measured | not measured |" in lines


def test_results_page_shows_what_has_no_number_with_the_reason(tmp_path: Path) -> None:
    write(a_record(), tmp_path / "mine.json")
    failed = CaseResult(name="b", implementation="x", status="oom", params={}, reason="too | large\nby far")
    write(a_record(cases=[passed("a", 1.0, 2.0, 3.0), failed]), tmp_path / "mine.json")
    lines = page(tmp_path).splitlines()
    assert "| a | x |  | 2 s | 1.2 s to 2.8 s | 3 | n/a |  |" in lines
    assert "| oom | x | too / large | b |" in lines


@pytest.mark.parametrize("path", ["README.md", "docs/architecture.md", "docs/bench.md", "docs/results.md"])
def test_files_that_a_page_links_to_exist(path: str) -> None:
    page = ROOT / path
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


SHOWN = sorted(path for table in ("quickstart", "startup", "workers") for path in RESULTS.glob(f"{table}-*.json"))


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_record_that_the_readme_shows_passed_on_a_commit_without_changes(path: Path) -> None:
    record = read(path)
    assert {case.status for case in record.cases} == {"pass"}
    assert record.commit is not None and "changes" not in record.commits()


def test_table_has_a_column_for_each_machine_and_the_rest_stays(tmp_path: Path) -> None:
    gpu = msgspec.structs.replace(a_record().system, accelerator_model_name="a GPU")
    host = msgspec.structs.replace(a_record().system, host_processor_model_name="a CPU", host_processor_core_count=2)
    fast, slow = ([passed(name, 1.0, 3.0, time) for name in CASES] for time in (2e-6, 2.0))
    write(a_record(system=host, cases=slow), tmp_path / "startup-cpu.json")
    write(a_record(system=gpu, cases=fast, commit=f"{'a' * 40}-modified"), tmp_path / "startup-gpu.json")
    (tmp_path / "other-gpu.json").write_text("not read")
    lines = rewritten(EMPTY, tmp_path).splitlines()
    assert lines[:5] == [
        "before",
        "<!-- results:startup -->",
        "",
        "|  | a CPU, 2 cores | a GPU |",
        "| --- | --- | --- |",
    ]
    assert lines[5] == "| `import rlcore` in a new process, median | 2.0 s | 1.0 s |"
    assert lines[-3:] == ["", "<!-- /results -->", "after"]
    assert lines[-4].endswith("| aaaaaaaaaaaa with changes |")


def test_rewriting_twice_changes_nothing() -> None:
    once = rewritten(EMPTY, RESULTS)
    assert "old" not in once
    assert rewritten(once, RESULTS) == once


def test_main_rewrites_the_file_in_place(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench" / "results").symlink_to(RESULTS)
    (tmp_path / "README.md").write_text(EMPTY)
    main(tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == rewritten(EMPTY, RESULTS)
    for made in ("docs/results.md", "bench/record.schema.json"):
        assert (tmp_path / made).read_text() == (ROOT / made).read_text()


def test_case_that_did_not_pass_makes_no_table(tmp_path: Path) -> None:
    failed = CaseResult(name="startup/help", implementation="x", status="fail", params={}, reason="it broke")
    write(a_record(cases=[passed("startup/import", 1.0), failed]), tmp_path / "startup-cpu.json")
    with pytest.raises(BenchError, match=r"^startup/help has the status 'fail': it broke in the record of "):
        rewritten(EMPTY, tmp_path)
    write(a_record(cases=[]), tmp_path / "startup-cpu.json")
    with pytest.raises(BenchError, match=r"^startup/import is missing in the record of "):
        rewritten(EMPTY, tmp_path)


def test_unknown_table_and_missing_record_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        BenchError, match=r"^no table 'speed' for the README; known: full, quickstart, startup, workers$"
    ):
        rewritten(EMPTY.replace("startup", "speed"), tmp_path)
    with pytest.raises(BenchError, match=r"^no record startup-\*\.json in .*; make one with: rlcore bench run -o$"):
        rewritten(EMPTY, tmp_path)
