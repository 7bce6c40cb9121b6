"""Pages and README show what the records say; a table cannot be made from a run that did not pass."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from records import a_record as full_record
from records import result

from rlcore.bench.publish import SHOWN, ReadmeRow, main, page, report, rewritten
from rlcore.bench.record import BenchCall, CaseResult, Metric, Record, read, write
from rlcore.bench.reports.tables import ResultTable
from rlcore.bench.reports.text import size
from rlcore.errors import BenchError
from rlcore.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
EMPTY = "before\n<!-- results -->\nold\n<!-- /results -->\nafter\n"


def a_record(**changes: object) -> Record:
    return msgspec.structs.replace(read(RESULTS / "startup-cpu.json"), **changes)


def passed(name: str, *seconds: float) -> CaseResult:
    times = Metric(name="time", unit="s", samples=list(seconds))
    return CaseResult(name=name, implementation="x", status="pass", params={}, metrics=[times])


def test_a_table_is_the_same_in_markdown_and_csv() -> None:
    table = ResultTable(["case", "", "median"], [["a|b", "", "1, 2"], ["c", "", ""]])
    assert table.compact().header == ["case", "median"]
    assert table.compact().markdown() == "| case | median |\n| --- | --- |\n| a/b | 1, 2 |\n| c |  |\n"
    assert table.csv() == 'case,,median\na|b,,"1, 2"\nc,,\n'


def test_readme_is_what_the_records_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- results -->") == 1
    assert text == rewritten(text, RESULTS), "run: make results"


def test_the_page_of_settings_lists_every_variable_and_no_other() -> None:
    listed = re.findall(r"^\| `(RLCORE_\w+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(VARIABLES)


def test_page_and_report_are_built_from_all_records_and_are_not_committed() -> None:
    made = page(RESULTS)
    assert [path.stem for path in RESULTS.glob("*.json") if f"\n## {path.stem}: " not in made] == []
    html = report(RESULTS)
    assert html is not None and "<title>rlcore bench: cpu, h200" in html
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/docs/results.md", "/docs/report.html"} <= set(ignored)


def test_full_runs_make_a_report_in_which_the_records_of_one_machine_are_one_column(tmp_path: Path) -> None:
    assert report(tmp_path) is None
    write(full_record(), tmp_path / "full-cpu.json")
    two = full_record(20.0, accelerator_model_name="a GPU", accelerators_per_node=2)
    links = [case for case in two.cases if case.name.startswith("collectives/")]
    write(msgspec.structs.replace(two, cases=links), tmp_path / "full-gpu.json")
    other = full_record(accelerator_model_name="a GPU", accelerators_per_node=1)
    write(other, tmp_path / "kernels-gpu.json")  # of another machine, whatever its name says
    system = msgspec.structs.replace(two.system, hw_notes="other jobs")
    engine = result("train/dense_1.5b", "engine", 1.0, tokens_a_device=5000.0)
    calls = [BenchCall(started_at=two.started_at, commit="a" * 40, rounds={engine.name: [9.0]})]
    more = msgspec.structs.replace(two, cases=[engine, *two.cases[:1]], calls=calls, num_threads=9, system=system)
    write(more, tmp_path / "train-gpu.json")
    html = report(tmp_path)
    assert html is not None and "<title>rlcore bench: cpu, gpu, kernels-gpu</title>" in html
    assert all(text in html for text in (">5,000<", "aaaaaaaaaaaa", "other jobs"))


def test_results_page_shows_what_has_no_number_with_the_reason(tmp_path: Path) -> None:
    write(a_record(), tmp_path / "mine.json")
    failed = CaseResult(name="b", implementation="x", status="oom", params={}, reason="too | large\nby far")
    write(a_record(cases=[passed("a", 1.0, 2.0, 3.0), failed]), tmp_path / "mine.json")
    lines = page(tmp_path).splitlines()
    assert "| a | x | 2 s | 1.2 s to 2.8 s | 3 |" in lines  # no sizes, shares or other metrics: no columns for them
    assert "| oom | x | too / large | b |" in lines


def test_results_page_says_once_what_is_the_same_and_folds_long_tables_of_the_machine(tmp_path: Path) -> None:
    write(full_record(), tmp_path / "mine.json")
    text = page(tmp_path)
    assert "Marks: shared: others used the host.\n" in text and text.count("others used the host") == 1
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any(line.startswith("| collectives/all_gather | gloo | 8 B | 100 µs |") for line in rows)
    assert any(line.startswith("|  |  | 16 MiB | 16.9 ms |") for line in rows)
    (step,) = (line for line in rows if line.startswith("| rl/step | "))
    assert step.startswith("| rl/step | fsdp2+hf | model qwen2-tiny, prompts 4, samples 4, devices 1 | 6.5 s |")
    cases = [
        msgspec.structs.replace(passed("ours/x", 1.0), implementation=name, params={"T": 4, "kind": "x", "n": n})
        for name, n in (("a", 1), ("a", 2), ("b", 2))
    ]
    other = msgspec.structs.replace(passed("ours/y", 1.0), params={"T": 4, "n": 3})
    write(a_record(cases=[*cases, other]), tmp_path / "mine.json")
    lines = page(tmp_path).splitlines()
    start = lines.index("### ours")
    assert lines[start + 2 : start + 10] == [
        "All: T 4.",
        "",
        "| case | implementation | sizes | median | n |",
        "| --- | --- | --- | --- | --- |",
        "| ours/x | a | n 1 | 1 s | 1 |",
        "|  |  | n 2 | 1 s | 1 |",
        "|  | b | n 2 | 1 s | 1 |",
        "| ours/y | x | n 3 | 1 s | 1 |",
    ]
    sweep = [msgspec.structs.replace(passed("product/x", 1.0), params={"K": K}) for K in range(12)]
    write(a_record(cases=sweep[1:]), tmp_path / "mine.json")
    assert "<details>" not in page(tmp_path)
    write(a_record(cases=sweep), tmp_path / "mine.json")
    assert "\n<details><summary>12 results</summary>\n\n| case |" in page(tmp_path)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (8, "8 B"),
        (1000, "1000 B"),
        (4096, "4 KiB"),
        (3 << 20, "3 MiB"),
        (1 << 30, "1 GiB"),
        (24580314 << 10, "25.2 GB"),
    ],
)
def test_sizes_are_exact_where_that_is_short(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


@pytest.mark.parametrize("name", sorted({shown.record for shown in SHOWN}))
def test_record_that_the_readme_shows_was_made_by_commits_without_changes(name: str) -> None:
    record = read(RESULTS / f"{name}.json")
    assert record.commit is not None and "changes" not in record.commits()


def of_ours(metric: str = "time", **selectors: object) -> list[ReadmeRow]:
    return [ReadmeRow("a name", "mine", "kernels/x", metric=metric, **selectors)]  # type: ignore[arg-type]


def the_row(shown: list[ReadmeRow], folder: Path) -> str:
    lines = rewritten(EMPTY, folder, shown).splitlines()
    assert lines[:2] == ["before", "<!-- results -->"] and lines[-3:] == ["", "<!-- /results -->", "after"]
    assert lines[3] == "|  | rlcore | beside it | ratio | measured on |"
    return lines[5]


def test_the_best_of_rlcore_stands_beside_the_best_of_the_others(tmp_path: Path) -> None:
    names = {"chunked": 2e-3, "tiled": 1e-3, "a": 4e-3, "b": 3e-3}
    found = [result("kernels/x", name, value, tokens=1 / value) for name, value in names.items()]
    slow = CaseResult(name="kernels/x", implementation="broken", status="fail", params={}, reason="no")
    write(a_record(cases=[slow, *found]), tmp_path / "mine.json")
    host = a_record().device_name
    assert the_row(of_ours(beside={}), tmp_path) == f"| a name | 1 ms, tiled | 3 ms, b | 3.00 | {host} |"
    sides = {"ours": {"implementation": "chunked"}, "beside": {"implementation": "a"}}
    assert the_row(of_ours(**sides), tmp_path) == f"| a name | 2 ms, chunked | 4 ms, a | 2.00 | {host} |"


def test_a_rate_is_the_better_the_higher_and_a_number_can_stand_alone(tmp_path: Path) -> None:
    found = [
        result("kernels/x", name, 1.0, {"lengths": "equal"}, new_tokens=rate)
        for name, rate in (("engine", 80e3), ("torch FSDP2", 40e3))
    ]
    two = msgspec.structs.replace(a_record().system, accelerator_model_name="a GPU", accelerators_per_node=2)
    write(a_record(cases=found, system=two), tmp_path / "mine.json")
    sides = {"ours": {"implementation": "engine", "lengths": "equal"}, "beside": {"implementation": "torch FSDP2"}}
    row = "| a name | 80 ktoken/s, engine | 40 ktoken/s, torch FSDP2 | 2.00 | 2 x a GPU |"
    assert the_row(of_ours("new_tokens", **sides), tmp_path) == row
    assert the_row(of_ours(), tmp_path) == "| a name | 1 s |  |  | 2 x a GPU |"


def test_rewriting_twice_changes_nothing() -> None:
    once = rewritten(EMPTY, RESULTS)
    assert "old" not in once
    assert rewritten(once, RESULTS) == once


def test_main_makes_every_page_and_the_schema(tmp_path: Path) -> None:
    for folder in ("bench", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bench" / "results").symlink_to(RESULTS)
    (tmp_path / "README.md").write_text(EMPTY)
    main(tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == rewritten(EMPTY, RESULTS)
    assert (tmp_path / "docs/results.md").read_text() == page(RESULTS)
    assert (tmp_path / "docs/report.html").read_text() == report(RESULTS)
    schema = "bench/record.schema.json"
    assert (tmp_path / schema).read_text() == (ROOT / schema).read_text()


def test_case_that_did_not_pass_makes_no_table(tmp_path: Path) -> None:
    failed = CaseResult(name="kernels/x", implementation="y", status="fail", params={}, reason="it broke")
    write(a_record(cases=[failed]), tmp_path / "mine.json")
    with pytest.raises(BenchError, match=r"^kernels/x has no number in mine.json \(y: fail: it broke\); the README"):
        rewritten(EMPTY, tmp_path, of_ours())
    write(a_record(cases=[result("kernels/x", "a peer", 1.0)]), tmp_path / "mine.json")
    with pytest.raises(BenchError, match=r"^kernels/x has no number of rlcore in mine.json; the README"):
        rewritten(EMPTY, tmp_path, of_ours(beside={}))
    with pytest.raises(BenchError, match=r"^kernels/x has no number for engine in mine.json; the README"):
        rewritten(EMPTY, tmp_path, of_ours(ours={"implementation": "engine"}))
    write(a_record(cases=[]), tmp_path / "mine.json")
    with pytest.raises(BenchError, match=r"^kernels/x is not in mine.json; the README shows only what passed$"):
        rewritten(EMPTY, tmp_path, of_ours())
