"""The last line says what ran and why something did not; a module without a test is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.summary import ELSEWHERE, ROOT, _modules, last_line, unreached


def skipped(reason: str) -> SimpleNamespace:
    return SimpleNamespace(longrepr=("test_one.py", 3, f"Skipped: {reason}"))


def test_the_last_line_counts_what_ended_how_and_why_tests_were_skipped() -> None:
    stats = {"passed": [1, 2], "skipped": [skipped("no GPU"), skipped("no vLLM"), skipped("no GPU")]}
    assert last_line(stats) == "2 passed, 3 skipped (2 no GPU; 1 no vLLM)"
    assert last_line({"failed": [1], "error": [1]}) == "1 failed, 1 error"


def test_a_module_that_no_test_imports_is_found_but_for_those_that_run_in_other_processes(tmp_path: Path) -> None:
    for file in ("rlcore/__init__.py", "rlcore/__main__.py", "kernels/packing.py", "kernels/gae.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "rlcore" / "kernels").symlink_to("../kernels")
    assert unreached({"rlcore", "rlcore.kernels.packing"}, tmp_path) == ["rlcore.kernels.gae"]


def test_every_module_that_runs_elsewhere_exists() -> None:
    modules = set(_modules(ROOT))
    assert [name for name in ELSEWHERE if name not in modules | {"rlcore.conformance"}] == []
