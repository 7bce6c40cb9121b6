"""The last line says what ran and why something did not; a module without a test is found."""

from __future__ import annotations

import re
import subprocess
import sys
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


def test_a_package_that_runs_elsewhere_does_not_excuse_a_new_module_of_it(tmp_path: Path) -> None:
    for file in ("rlcore/conformance/train_executor/__init__.py", "examples/new.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "rlcore" / "conformance" / "train_executor" / "test_new.py").touch()
    assert unreached(set(), tmp_path) == ["rlcore.conformance.train_executor.test_new", "rlcore.examples.new"]


def test_every_module_that_runs_elsewhere_exists_and_so_do_the_tests_that_run_it() -> None:
    named = [name for names in ELSEWHERE.values() for name in names]
    assert sorted(set(named)) == sorted(named)
    assert set(named) <= set(_modules(ROOT))
    assert all((ROOT / file).is_file() for file in ELSEWHERE)


def test_a_run_with_skipped_tests_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no GPU')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.summary", "-p", "no:cacheprovider", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert [line for line in found.stdout.splitlines() if "passed" in line] == [found.stdout.splitlines()[-1]]
    assert re.fullmatch(r"1 passed, 1 skipped \(1 no GPU\), \d+ s", found.stdout.splitlines()[-1])
