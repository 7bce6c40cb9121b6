"""README.md shows what the records say; a table cannot be made from a run that did not pass."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from records import a_record as full_record
from rlcore.bench.readme import main, report, rewritten
from rlcore.bench.results_page import page

from rlcore.bench import readme_tables
from rlcore.bench.record import Call, CaseResult, Metric, Record, read, write
from rlcore.bench.text import size
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


def test_report_is_what_its_records_say() -> None:
    made = ROOT / "docs" / "report.html"
    assert (made.read_text() if made.exists() else None) == report(RESULTS), "run: make results"


def test_full_runs_make_a_report_and_a_table_in_which_what_was_not_measured_is_said_to_be(tmp_path: Path) -> None:
    assert report(tmp_path) is None
    write(full_record(), tmp_path / "full-cpu.json")
    two = full_record(20.0, accelerator_model_name="a GPU", accelerators_per_node=2)
    links = [case for case in two.cases if case.name.startswith("collectives/")]
    write(msgspec.structs.replace(two, cases=links), tmp_path / "full-gpu.json")
    other = full_record(accelerator_model_name="a GPU", accelerators_per_node=1)
    write(other, tmp_path / "kernels-gpu.json")  # of another machine, whatever its name says
    system = msgspec.structs.replace(two.system, hw_notes="other jobs")
    engine = measured("train/dense_1.5b", "engine", {}, time=1.0, tokens_a_device=5000.0)
    calls = [Call(started_at=two.started_at, commit="a" * 40, rounds={engine.name: [9.0]})]
    more = msgspec.structs.replace(two, cases=[engine, *two.cases[:1]], calls=calls, num_threads=9, system=system)
    write(more, tmp_path / "train-gpu.json")
    html = report(tmp_path)
    assert html is not None and "<title>rlcore bench: cpu, gpu, kernels-gpu</title>" in html
    assert all(text in html for text in (">5,000<", "aaaaaaaaaaaa", "other jobs"))
    for made in ("kernels-gpu.json", "train-gpu.json"):
        (tmp_path / made).unlink()
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
    known = "full, kernels, offload, quickstart, startup, train, workers"
    with pytest.raises(BenchError, match=rf"^no table 'speed' for the README; known: {known}$"):
        rewritten(EMPTY.replace("startup", "speed"), tmp_path)
    with pytest.raises(BenchError, match=r"^no record startup-\*\.json in .*; make one with: rlcore bench run -o$"):
        rewritten(EMPTY, tmp_path)


def test_operators_stand_beside_the_best_of_the_others_that_passed(tmp_path: Path) -> None:
    def result(case: str, implementation: str, value: float) -> CaseResult:
        names = {"time": "s", "logprob_error": "1", "peaked_logprob_error": "1"}
        metrics = [Metric(name=name, unit=unit, samples=[value] * 3) for name, unit in names.items()]
        return CaseResult(name=case, implementation=implementation, status="pass", params={}, metrics=metrics)

    cases = sorted({case for case, _ in readme_tables._RACES.values()})
    slow = CaseResult(name=cases[0], implementation="broken", status="fail", params={}, reason="no")
    found = [
        result(case, *side) for case in cases for side in [("rows", 2e-3), ("tiled", 1e-3), ("a", 4e-3), ("b", 3e-3)]
    ]
    write(a_record(cases=[slow, *found]), tmp_path / "kernels-gpu.json")
    lines = rewritten(EMPTY.replace("startup", "kernels"), tmp_path).splitlines()
    assert lines[3].endswith(" | rlcore | best of the others | ratio |")
    assert lines[5].endswith(" | 1 ms, tiled | 3 ms, b | 3.00 |")
    assert lines[5 + len(readme_tables._RACES) - 1].endswith(" | 1.0e-03, tiled | 3.0e-03, b | 3.00 |")
    write(a_record(cases=[one for one in found if one.implementation in "ab"]), tmp_path / "kernels-gpu.json")
    with pytest.raises(BenchError, match=r"^kernels/\S+ passed for one side alone in the record of "):
        rewritten(EMPTY.replace("startup", "kernels"), tmp_path)


def measured(case: str, implementation: str, params: dict[str, int | float | str], **values: float) -> CaseResult:
    units = {"tokens_a_device": "token/s", "peak_memory": "B", "moved": "B", "time": "s"}
    metrics = [Metric(name=name, unit=units.get(name, "1"), samples=[value]) for name, value in values.items()]
    return CaseResult(name=case, implementation=implementation, status="pass", params=params, metrics=metrics)


def test_training_stands_beside_the_plain_loop(tmp_path: Path) -> None:
    found = []
    for case, lengths, recompute in (
        ("train/dense_1.5b", "equal", "False"),
        ("train/dense_1.5b", "uneven", "False"),
        ("train/dense_7b", "equal", "True"),
    ):
        sizes = {"lengths": lengths, "recompute": recompute}
        found.append(measured(case, "torch FSDP2", sizes, time=0.2, tokens_a_device=40e3, peak_memory=50e9))
        found.append(measured(case, "engine", sizes, time=0.1, tokens_a_device=80e3, peak_memory=40e9))
    noted = msgspec.structs.replace(a_record().system, hw_notes="three other jobs")
    write(a_record(cases=found, system=noted), tmp_path / "train-gpu.json")
    lines = rewritten(EMPTY.replace("startup", "train"), tmp_path).splitlines()
    assert "| noted | three other jobs |  |  |  |  |  |" in lines
    assert [line.partition(" | ")[2] for line in lines[5:9]] == [
        "80,000 | 40,000 | 2.00 | 40 GB | 50 GB | 0.80 |",
        "80,000 | 40,000 | 2.00 | 40 GB | 50 GB | 0.80 |",
        "80,000 | 40,000 | 2.00 | 40 GB | 50 GB | 0.80 |",
        "not measured |  |  |  |  |  |",
    ]
    write(a_record(cases=[one for one in found if one.implementation == "torch FSDP2"]), tmp_path / "train-gpu.json")
    with pytest.raises(BenchError, match=r"^train/dense_1.5b has no number for engine, equal in the record"):
        rewritten(EMPTY.replace("startup", "train"), tmp_path)


def test_offload_is_told_as_a_share_of_a_pinned_copy(tmp_path: Path) -> None:
    shares = {"to_host_of_link": 0.5, "to_device_of_link": 0.25}
    link = {"link_to_host": 50e9, "link_to_device": 40e9, "moved": 91e9}
    first = {f"first_{name}": share / 2 for name, share in shares.items()}
    found = [
        measured(case, implementation, {"bytes": 3 << 30}, time=2.0, **shares, **first, **link)
        for case, implementation, _ in dict.fromkeys(readme_tables._MOVED.values())
    ]
    unique = list({(one.name, one.implementation): one for one in found}.values())
    write(a_record(cases=unique), tmp_path / "offload-gpu.json")
    lines = rewritten(EMPTY.replace("startup", "offload"), tmp_path).splitlines()
    assert lines[5:8] == [
        "| a 7B trainer of 91 GB, for the first time | 25.0 % | 12.5 % |  |",
        "| the same later, there and back | 50.0 % | 25.0 % | 2.0 s |",
        "| 3 GiB for the first time | 50.0 % | 25.0 % | 2.0 s |",
    ]
    assert "| a pinned copy | 50.0 GB/s | 40.0 GB/s |  |" in lines
    write(a_record(cases=unique[1:]), tmp_path / "offload-gpu.json")
    with pytest.raises(BenchError, match=r"^offload/trainer is missing in the record of "):
        rewritten(EMPTY.replace("startup", "offload"), tmp_path)
