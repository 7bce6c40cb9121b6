"""Targets stand beside what was measured on their device; reasons for no number are short, and none is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from records import a_record, result

from rlcore.bench.case import load_cases
from rlcore.bench.publish import page
from rlcore.bench.record import CaseResult, Record, no_number, write
from rlcore.bench.reports.answers import ReportRun
from rlcore.bench.reports.page import render
from rlcore.bench.reports.summary import ResultTarget, outcomes, shortened, targets
from rlcore.bench.reports.tables import missing_table
from rlcore.cli.bench_output import print_results

CASES = [
    result("op", "ours", 0.010, {"size": "big"}, bus_bandwidth=9e9),
    result("op", "ours", 0.001, {"size": "small"}),
    result("op", "theirs", 0.012, {"size": "big"}),
    CaseResult(name="op", implementation="third", status="blocked", params={}, reason="not here"),
]


def on_a_gpu(cases: list[CaseResult] = CASES, name: str = "NVIDIA H200") -> Record:
    return msgspec.structs.replace(a_record(accelerator_model_name=name), cases=cases)


def a_target(implementation: str = "ours", size: str = "big", **options: Any) -> ResultTarget:
    of = {"implementation": implementation, "size": size}
    return ResultTarget(case="op", of=of, device="H200", source="a test", **options)


@pytest.mark.parametrize(
    ("target", "told", "value", "word"),
    [
        (a_target(at_most=0.011), "time at most 11 ms", "10 ms", "pass"),
        (a_target(at_most=0.009), "time at most 9 ms", "10 ms", "miss"),
        (a_target(size="small", at_most=0.009), "time at most 9 ms", "1 ms", "pass"),
        (a_target(metric="bus_bandwidth", at_least=1e10), "bus_bandwidth at least 10 GB/s", "9 GB/s", "miss"),
        (
            a_target(at_most=0.9, times_that_of={"implementation": "theirs"}),
            "time at most 0.9 times that of theirs",
            "0.833",
            "pass",
        ),
        (
            a_target(at_least=2, times_that_of={"implementation": "third"}),
            "time at least 2 times that of third",
            "",
            "not measured",
        ),
        (
            a_target(at_least=2, times_that_of={"implementation": "ours"}),  # of which size?
            "time at least 2 times that of ours",
            "",
            "not measured",
        ),
        (a_target("third", at_most=1.0), "time at most 1 s", "", "not measured"),
    ],
)
def test_outcome_of_a_target(target: ResultTarget, told: str, value: str, word: str) -> None:
    (outcome,) = outcomes(on_a_gpu(), [target])
    assert outcome.cells()[2:] == [told, value, word, "a test"]


def test_every_result_that_is_meant_has_a_outcome() -> None:
    both = ResultTarget(case="op", of={"implementation": "ours"}, at_most=0.005, device="H200", source="a test")
    assert [(one.word, one.cells()[1]) for one in outcomes(on_a_gpu(), [both])] == [("miss", "ours"), ("pass", "ours")]


def test_a_target_says_nothing_of_another_device_or_of_what_did_not_run() -> None:
    target = a_target(at_most=1.0)
    skipped = CaseResult(name="op", implementation="", status="skipped", params={}, reason="no time")
    for record in (on_a_gpu(name="NVIDIA H100"), on_a_gpu(name=""), on_a_gpu([skipped]), on_a_gpu([])):
        assert outcomes(record, [target]) == []


def test_targets_are_of_cases_that_there_are_and_have_one_limit() -> None:
    assert {target.case for target in targets()} <= load_cases().keys()
    assert all((target.at_most is None) != (target.at_least is None) for target in targets())
    assert all(target.device and target.source and "implementation" in target.of for target in targets())


def test_targets_of_training_find_what_the_case_measures_on_one_device() -> None:
    rows = [
        ("torch FSDP2", "equal", "False"),
        ("engine", "equal", "False"),
        ("torch FSDP2", "uneven", "False"),
        ("engine", "uneven", "False"),
    ]
    cases = [
        result(
            "train/dense_1.5b",
            implementation,
            0.2,
            {"lengths": lengths, "recompute": recompute, "devices": 1},
            tokens_a_device=4e4,
            peak_memory=4e10,
            beyond_device=5e-4,
        )
        for implementation, lengths, recompute in rows
    ]
    unmeasured = [outcome.cells() for outcome in outcomes(on_a_gpu(cases)) if outcome.word == "not measured"]
    wanted = [f"tokens_a_device at least {share} times that of engine on one device" for share in (0.97, 0.95)]
    assert [cells[2] for cells in unmeasured] == wanted


def test_targets_of_memory_and_of_the_first_cycle_find_what_their_cases_measure() -> None:
    memory = {"device_memory_last_to_second": 1.0, "host_memory_last_to_second": 1.03}
    cases = [
        result("offload/training", "no offload", 1.0),
        result("offload/training", "offload after each step", 1.0, **memory),
        result("offload/first", "arena", 1.5, to_host=1.7e10),
        result("offload/first", "torch_pin_memory", 20.0, to_host=1.2e9),
        result("train/materialize", "engine", 2.0, read_a_rank=6.7e9, anonymous_memory=2e9),
    ]
    found = {(outcome.target.case, outcome.target.metric): outcome.word for outcome in outcomes(on_a_gpu(cases))}
    assert found == {
        ("offload/training", "device_memory_last_to_second"): "pass",
        ("offload/training", "host_memory_last_to_second"): "miss",
        ("offload/first", "to_host"): "pass",
        ("train/materialize", "read_a_rank"): "pass",
        ("train/materialize", "anonymous_memory"): "miss",
    }


def test_terminal_page_and_report_show_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [result("kernels/linear_logprob_forward/8b", "tiled", 0.0150)]
    write(on_a_gpu(cases), tmp_path / "mine.json")
    bar = "time at most 14.2 ms | 15 ms | miss | issue 5 |"
    assert f"| kernels/linear_logprob_forward/8b | tiled | {bar}" in page(tmp_path)
    print_results(on_a_gpu(cases))
    assert re.search(r"time at most 14.2 ms +15 ms +miss +issue 5", capsys.readouterr().out)
    html = render([ReportRun("mine", on_a_gpu(cases))])
    assert "mine: what is meant to be reached" in html and "<td>miss</td>" in html
    assert "meant to be reached" not in render([ReportRun("host", a_record())])


# ------------------------------------------------------------------------------------------ without a number


@pytest.mark.parametrize(
    ("reason", "implementation", "told"),
    [
        ("UnsupportedError: trl is not supported: No module named 'trl'", "trl", "No module named 'trl'"),
        (
            "UnsupportedError: an op with implementation='rows' is not supported: tiled: bfloat16 alone; rows: no GPU",
            "rows, 3 GiB",
            "no GPU",
        ),
        ("torch.OutOfMemoryError: no room\nat all", "x", "no room"),
        ("its process was killed by SIGKILL", "", "its process was killed by SIGKILL"),
        ("AssertionError: " + "9 " * 200, "x", "9 " * 54 + "9…"),
        ("KeyError: 'T'", "x", "KeyError: 'T'"),
    ],
)
def test_a_reason_is_cut_to_what_the_reader_needs(reason: str, implementation: str, told: str) -> None:
    assert shortened(reason, implementation) == told


def test_one_line_for_each_reason_names_all_cases() -> None:
    cases = [
        no_number("a", "blocked", "no GPU", "x"),
        result("p", "x", 1.0),
        no_number("b", "oom", "no room", "x"),
        no_number("c", "blocked", "no GPU", "x"),
    ]
    found = missing_table(on_a_gpu(cases)).rows
    assert found == [["blocked", "x", "no GPU", "a, c"], ["oom", "x", "no room", "b"]]
