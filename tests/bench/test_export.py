"""Other programs read our records, we read pytest-benchmark's, and no device is compared with another unseen."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from records import RESULTS, a_record
from typer.testing import CliRunner

from rlcore.bench import pytest_plugin
from rlcore.bench.compare import compare
from rlcore.bench.record import Record, read, write
from rlcore.bench.reports.export import read_any, to_csv, to_pytest_benchmark
from rlcore.cli.bench import bench
from rlcore.errors import BenchError
from tests.warm import run_warm


def test_csv_has_a_line_for_each_metric_and_for_each_result_without_one() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(a_record()))))
    step = next(row for row in rows if row["case"] == "rl/step" and row["metric"] == "generate")
    assert (step["median"], step["unit"], step["n"], step["status"]) == ("3.0", "s", "3", "pass")
    assert step["params"] == "devices=1 model=qwen2-tiny prompts=4 samples=4"
    blocked = next(row for row in rows if row["case"] == "copies/to_device")
    assert (blocked["status"], blocked["reason"], blocked["median"]) == ("blocked", "it is the host", "")
    assert len(rows) == sum(max(1, len(result.metrics)) for result in a_record().cases)


def test_pytest_benchmark_reads_the_export_of_every_record(tmp_path: Path) -> None:
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(to_pytest_benchmark(read(path)))
    (tmp_path / "made.json").write_text(to_pytest_benchmark(a_record()))
    files = sorted(map(str, tmp_path.glob("*.json")))
    command = [sys.executable, "-m", "pytest_benchmark", "compare", "--columns=median,rounds", "--sort=name", *files]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250, cwd=tmp_path).stdout
    assert "rl/step[fsdp2+hf-devices=1-model=qwen2-tiny" in shown
    assert "startup/import[python]" in shown and "workers/call" in shown


def test_export_is_read_back_whole(tmp_path: Path) -> None:
    record = a_record()
    (tmp_path / "made.json").write_text(to_pytest_benchmark(record))
    found = read_any(tmp_path / "made.json")
    assert msgspec.structs.replace(found, cases=[]) == msgspec.structs.replace(record, cases=[])
    passed = [result for result in record.cases if result.status == "pass"]
    assert found.cases == passed
    rows = compare(record, found, names=("a", "b")).rows
    assert all(row.verdict == "about equal" or row.reason == "too few samples" for row in rows if row.difference)
    assert sum(row.difference is not None for row in rows) == len(passed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"benchmarks": [], "machine_info": {}}', "is of pytest-benchmark, but not of a run with -p rlcore.bench"),
        ("[]", "is no rlcore.bench/1 record: Expected `object`, got `array`"),
        ('{"schema": "rlcore.bench/1"', "is no rlcore.bench/1 record: Input data was truncated"),
    ],
)
def test_foreign_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text(text)
    with pytest.raises(BenchError) as caught:
        read_any(tmp_path / "theirs.json")
    assert message in str(caught.value)


def test_pytest_benchmark_file_without_samples_is_refused(tmp_path: Path) -> None:
    found = json.loads(to_pytest_benchmark(a_record()))
    del found["benchmarks"][0]["stats"]["data"]
    (tmp_path / "theirs.json").write_text(json.dumps(found))
    with pytest.raises(BenchError, match=r"--benchmark-save-data: KeyError: 'data'$"):
        read_any(tmp_path / "theirs.json")


def test_command_prints_the_export(tmp_path: Path) -> None:
    write(a_record(), tmp_path / "a.json")
    run = CliRunner()
    assert run.invoke(bench, ["export", str(tmp_path / "a.json")]).stdout == to_csv(a_record())
    made = run.invoke(bench, ["export", str(tmp_path / "a.json"), "--format", "pytest-benchmark"]).stdout
    assert json.loads(made)["machine_info"]["rlcore"]["system"]["device"] == "cpu:0"
    assert run.invoke(bench, ["export", str(tmp_path / "a.json"), "--format", "xml"]).exit_code == 2


# --------------------------------------------------------------------------------------------- pytest plugin

SLOW_BY_HALF = """
from rlcore.bench.pytest_plugin import benchmark_on
from rlcore.registry import get_device
{extra}
def work(count):
    total = 0
    for number in range(count):
        total += number
    return total

def test_loop(benchmark_on):
    assert benchmark_on(get_device("cpu"), work, {count}) > 0

def test_other(benchmark_on):
    assert benchmark_on(get_device("cpu"), work, 3000) > 0
"""


@pytest.fixture
def micro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run two micro-benchmarks with the plugin; the first does ``count`` rounds of a loop."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # in which pytest-benchmark measures nothing

    def run(*arguments: str, count: int = 3000) -> Any:
        (tmp_path / "test_micro.py").write_text(SLOW_BY_HALF.format(count=count, extra=""))
        command = ["-m", "pytest", "-q", "-p", "rlcore.bench.pytest_plugin", "--benchmark-only"]
        timing = ["--benchmark-max-time=0.3", "--benchmark-min-rounds=30"]
        return run_warm([*command, *timing, "test_micro.py", *arguments], cwd=tmp_path)

    return run


def test_machine_info_says_which_device_and_another_is_refused() -> None:
    info: dict[str, Any] = {}
    pytest_plugin.pytest_benchmark_update_machine_info(info)
    here = msgspec.convert(info["rlcore"], Record).device_name
    pytest_plugin.pytest_benchmark_compare_machine_info({"machine_info": info})
    theirs = info["rlcore"] | {"system": info["rlcore"]["system"] | {"accelerator_model_name": "Ascend910B"}}
    for machine_info, name in (({"rlcore": theirs}, "Ascend910B"), ({}, "not recorded")):
        with pytest.raises(pytest.UsageError) as refused:
            pytest_plugin.pytest_benchmark_compare_machine_info({"machine_info": machine_info})
        assert f"another device: theirs is {name}, this one is {here}; rlcore bench compare" in str(refused.value)


@pytest.mark.slow
def test_plugin_records_the_device_and_compare_catches_a_regression(
    micro: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("before", 3000), ("after", 9000)):
        made = micro(f"--benchmark-json={name}.json", count=count)
        assert made.returncode == 0, made.stdout + made.stderr
    record = read_any(tmp_path / "before.json")
    assert record.system.device == "cpu:0" and "torch" in record.dependencies
    assert [case.name for case in record.cases] == ["test_micro.py::test_loop", "test_micro.py::test_other"]
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(bench, ["compare", "before.json", "after.json", "--fail-on-regression", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)[0]["rows"][0]["verdict"] == "slower"
    shutil.copy("before.json", "same.json")
    same = CliRunner().invoke(bench, ["compare", "before.json", "same.json", "--fail-on-regression"])
    assert same.exit_code == 0


@pytest.mark.slow
def test_plugin_keeps_devices_apart_and_refuses_another(micro: Callable[..., Any], tmp_path: Path) -> None:
    assert micro("--benchmark-autosave").returncode == 0
    (saved,) = tmp_path.glob(".benchmarks/*/*/*.json")
    ours = json.loads(saved.read_text())
    assert saved.parent.parent.name == "".join(c if c.isalnum() else "-" for c in saved.parent.parent.name).strip("-")
    assert "Linux-CPython" in saved.parent.name
    assert micro("--benchmark-compare").returncode == 0
    system = ours["machine_info"]["rlcore"]["system"] | {"accelerator_model_name": "Ascend910B"}
    other = ours["machine_info"]["rlcore"] | {"system": system}
    saved.write_text(json.dumps(ours | {"machine_info": ours["machine_info"] | {"rlcore": other}}))
    refused = micro("--benchmark-compare")
    assert refused.returncode != 0
    assert "another device: theirs is Ascend910B, this one is " in refused.stdout + refused.stderr
