"""What is meant to be reached is said beside what was, on the device it was meant for and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from records import a_record, result

from rlcore.bench.bars import Bar, bars, verdicts
from rlcore.bench.case import load_cases
from rlcore.bench.headlines import Run
from rlcore.bench.report import render
from rlcore.bench.result import CaseResult, Record, write
from rlcore.bench.results_page import page
from rlcore.cli.bench_output import print_results

CASES = [
    result("op", "ours", 0.010, {"size": "big"}, bus_bandwidth=9e9),
    result("op", "ours", 0.001, {"size": "small"}),
    result("op", "theirs", 0.012, {"size": "big"}),
    CaseResult(name="op", implementation="third", status="blocked", params={}, reason="not here"),
]


def on_a_gpu(cases: list[CaseResult] = CASES, name: str = "NVIDIA H200") -> Record:
    return msgspec.structs.replace(a_record(accelerator_model_name=name), cases=cases)


def a_bar(implementation: str = "ours", size: str = "big", **options: Any) -> Bar:
    what = {"implementation": implementation, "size": size}
    return Bar(case="op", what=what, device="H200", source="a test", **options)


@pytest.mark.parametrize(
    ("bar", "told", "value", "word"),
    [
        (a_bar(at_most=0.011), "time at most 11 ms", "10 ms", "pass"),
        (a_bar(at_most=0.009), "time at most 9 ms", "10 ms", "miss"),
        (a_bar(size="small", at_most=0.009), "time at most 9 ms", "1 ms", "pass"),
        (a_bar(metric="bus_bandwidth", at_least=1e10), "bus_bandwidth at least 10 GB/s", "9 GB/s", "miss"),
        (
            a_bar(at_most=0.9, times={"implementation": "theirs"}),
            "time at most 0.9 times that of theirs",
            "0.833",
            "pass",
        ),
        (
            a_bar(at_least=2, times={"implementation": "third"}),
            "time at least 2 times that of third",
            "",
            "not measured",
        ),
        (
            a_bar(at_least=2, times={"implementation": "ours"}),  # of which size?
            "time at least 2 times that of ours",
            "",
            "not measured",
        ),
        (a_bar("third", at_most=1.0), "time at most 1 s", "", "not measured"),
    ],
)
def test_verdict_of_a_bar(bar: Bar, told: str, value: str, word: str) -> None:
    (verdict,) = verdicts(on_a_gpu(), [bar])
    assert verdict.cells()[2:] == [told, value, word, "a test"]


def test_every_result_that_is_meant_has_a_verdict() -> None:
    both = Bar(case="op", what={"implementation": "ours"}, at_most=0.005, device="H200", source="a test")
    assert [(one.word, one.cells()[1]) for one in verdicts(on_a_gpu(), [both])] == [("miss", "ours"), ("pass", "ours")]


def test_a_bar_says_nothing_of_another_device_or_of_what_did_not_run() -> None:
    bar = a_bar(at_most=1.0)
    skipped = CaseResult(name="op", implementation="", status="skipped", params={}, reason="no time")
    for record in (on_a_gpu(name="NVIDIA H100"), on_a_gpu(name=""), on_a_gpu([skipped]), on_a_gpu([])):
        assert verdicts(record, [bar]) == []


def test_bars_are_of_cases_that_there_are_and_have_one_limit() -> None:
    assert {bar.case for bar in bars()} <= load_cases().keys()
    assert all((bar.at_most is None) != (bar.at_least is None) for bar in bars())
    assert all(bar.device and bar.source and "implementation" in bar.what for bar in bars())


def test_bars_of_training_find_what_the_case_measures_on_one_device() -> None:
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
        )
        for implementation, lengths, recompute in rows
    ]
    unmeasured = [verdict.cells() for verdict in verdicts(on_a_gpu(cases)) if verdict.word == "not measured"]
    assert [cells[2] for cells in unmeasured] == ["tokens_a_device at least 0.97 times that of engine on one device"]


def test_bars_of_memory_and_of_the_first_cycle_find_what_their_cases_measure() -> None:
    memory = {"device_memory_last_to_second": 1.0, "host_memory_last_to_second": 1.03}
    cases = [
        result("offload/training", "no offload", 1.0),
        result("offload/training", "offload after each step", 1.0, **memory),
        result("offload/first", "arena", 1.5, to_host=1.7e10),
        result("offload/first", "torch_pin_memory", 20.0, to_host=1.2e9),
        result("train/materialize", "engine", 2.0, read_a_rank=6.7e9, anonymous_memory=2e9),
    ]
    found = {(verdict.bar.case, verdict.bar.metric): verdict.word for verdict in verdicts(on_a_gpu(cases))}
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
    assert "time at most 14.2 ms  15 ms     miss  issue 5" in capsys.readouterr().out
    html = render([Run("mine", on_a_gpu(cases))])
    assert "mine: what is meant to be reached" in html and '<td class="tight">miss</td>' in html
    assert "meant to be reached" not in render([Run("host", a_record())])
