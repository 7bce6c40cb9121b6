"""Why there is no number is said once and in few words, and nothing that has none is left out."""

from __future__ import annotations

import pytest

from rlcore.bench.missing import missing, shortened
from rlcore.bench.result import CaseResult, Metric


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
    def without(name: str, reason: str, status: str = "blocked") -> CaseResult:
        return CaseResult(name=name, implementation="x", status=status, params={}, reason=reason)  # type: ignore[arg-type]

    time = Metric(name="time", unit="s", samples=[1.0])
    passed = CaseResult(name="p", implementation="x", status="pass", params={}, metrics=[time])
    cases = [without("a", "no GPU"), passed, without("b", "no room", "oom"), without("c", "no GPU")]
    assert missing(cases) == [("blocked", "x", "no GPU", ("a", "c")), ("oom", "x", "no room", ("b",))]
