"""The suite's options are there for the suite, from any folder, and for nobody else's tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.warm import run_warm


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_warm(["-m", "pytest", "-p", "no:cacheprovider", *arguments], cwd=folder)


def test_the_suite_wants_a_device(tmp_path: Path) -> None:
    found = pytest_in(tmp_path, "--pyargs", "rlcore.conformance")
    assert found.returncode == 4
    assert "name the device to test: --device NAME; `rlcore devices` lists them" in found.stderr


def test_options_may_come_before_the_suites_name(tmp_path: Path) -> None:
    found = pytest_in(tmp_path, "--device", "cpu", "--collect-only", "-q", "--pyargs", "rlcore.conformance.test_launch")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "::test_launch_facts_can_be_had_without_the_device" in found.stdout


@pytest.mark.slow
def test_a_report_has_what_other_processes_have_run(tmp_path: Path) -> None:
    suite = ("--pyargs", "rlcore.conformance.test_launch", "--device", "cpu", "--conformance-json", "report.json")
    found = pytest_in(tmp_path, "-n", "1", *suite)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tests"]["test_launch::test_launch_facts_can_be_had_without_the_device"]["result"] == "passed"
    assert report["members"]["launch.ray_resource"]["result"] == "passed"
    assert "passed   launch.ray_resource" in found.stdout


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "report.json"
    found = pytest_in(
        tmp_path, "--pyargs", "rlcore.conformance.test_launch", "--device", "cpu", "--conformance-json", str(path)
    )
    assert found.returncode == 4
    assert f"--conformance-json {path}: its folder does not exist or cannot be written" in found.stderr


def test_other_tests_may_have_a_device_option_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')")
    (tmp_path / "test_own.py").write_text("def test_own(pytestconfig): assert pytestconfig.getoption('device') == 'x'")
    assert pytest_in(tmp_path, "--device", "x").returncode == 0


def test_other_tests_do_not_get_the_options(tmp_path: Path) -> None:
    found = pytest_in(tmp_path, "--conformance-json", "x.json")
    assert found.returncode == 4
    assert "unrecognized arguments: --conformance-json" in found.stderr
