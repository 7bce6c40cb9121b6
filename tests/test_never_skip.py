"""``--never-skip MARKER``, with which CI says that what these tests need is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.warm import run_warm

ROOT = Path(__file__).resolve().parents[1]

SKIPPED = """
import pytest
@pytest.mark.slow
def test_required(): pytest.skip("there is no such thing here")
def test_other(): pytest.skip("nor of this")
"""


@pytest.mark.parametrize(("option", "failed"), [([], ""), (["--never-skip", "slow"], "test_required")])
def test_a_skipped_test_fails_where_its_marker_is_required(tmp_path: Path, option: list[str], failed: str) -> None:
    result = _run(tmp_path, SKIPPED, *option)
    assert result.returncode == int(bool(failed)), result.stdout
    assert ("--never-skip: Skipped: there is no such thing here" in result.stdout) == bool(failed)
    assert ("1 failed, 1 skipped" if failed else "2 skipped") in result.stdout


def test_a_file_that_is_skipped_fails_as_it_may_have_had_such_tests(tmp_path: Path) -> None:
    code = "import pytest; pytest.importorskip('no_such_module')"
    assert _run(tmp_path, code).returncode == 5  # nothing was collected
    result = _run(tmp_path, code, "--never-skip", "slow")
    assert result.returncode == 2
    assert "--never-skip: Skipped: could not import 'no_such_module'" in result.stdout


def test_ci_requires_the_tests_on_the_simulated_cann() -> None:
    assert re.search(r'^make test-slow PYTEST_FLAGS=".*--never-skip npu_sim', (ROOT / ".ci" / "run").read_text(), re.M)
    assert re.search(r"^test-slow:.*\n.*npu_sim or slow", (ROOT / "Makefile").read_text(), re.M)


def _run(folder: Path, code: str, *options: str) -> Any:
    """In a folder of its own, with the conftest of these tests."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_one.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_one.py"]
    return run_warm(command, cwd=folder, env={"PYTHONPATH": str(ROOT)})
