"""The record: what is written is read again, half a file is never seen, a wrong one is refused by file and field."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.bench.record import CaseResult, Metric, Record, System, encode, read, write
from rlcore.bench.reports.export import read_any
from rlcore.errors import BenchError


def a_record(num_samples: int = 3) -> Record:
    times = Metric(name="time", unit="s", samples=[0.5 + i for i in range(num_samples)])
    system = System(
        device="cpu:0",
        accelerators_per_node=0,
        accelerator_model_name="",
        accelerator_memory_capacity_bytes=0,
        host_processor_model_name="a processor",
        host_processor_core_count=2,
        host_memory_capacity_bytes=2**34,
        operating_system="Linux",
        python="3.11.7",
    )
    return Record(
        schema="rlcore.bench/1",
        started_at="2026-11-20T12:00:00+00:00",
        rlcore="0.1.0",
        commit=None,
        system=system,
        dependencies={"torch": "2.13.0"},
        environment={"OMP_NUM_THREADS": "2"},
        num_threads=2,
        cases=[
            CaseResult(name="a", implementation="x", status="pass", params={"T": 4, "dtype": "f"}, metrics=[times]),
            CaseResult(name="a", implementation="y", status="oom", params={}, reason="too large"),
        ],
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(a_record(), tmp_path / "out.json")
    assert read(tmp_path / "out.json") == a_record()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_file_is_readable_json_with_its_schema_first(tmp_path: Path) -> None:
    write(a_record(), tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    assert text.splitlines()[1] == '  "schema": "rlcore.bench/1",'
    assert json.loads(text)["cases"][0]["metrics"][0]["samples"] == [0.5, 1.5, 2.5]


# ---------------------------------------------------------------------------------------------- wrong records


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    found: dict[str, Any] = json.loads(encode(a_record()))
    change(found)
    return json.dumps(found).encode()


def first_metric(found: dict[str, Any]) -> dict[str, Any]:
    metric: dict[str, Any] = found["cases"][0]["metrics"][0]
    return metric


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (encode(a_record())[:-20], "truncated"),
        (b"hello", "JSON is malformed: invalid character (byte 0)"),
        (b"[]", "Expected `object`, got `array`"),
        (changed(lambda r: r.pop("schema")), "missing required field `schema`"),
        (changed(lambda r: r.update(schema="asv/2")), "Invalid enum value 'asv/2' - at `$.schema`"),
        (
            changed(lambda r: r.update(schema="rlcore.bench/2")),
            "at `$.schema` (line 1); another version of rlcore wrote it, and reads it",
        ),
        (changed(lambda r: r.update(price=3)), "unknown field `price`"),
        (changed(lambda r: r["system"].pop("device")), "missing required field `device` - at `$.system`"),
        (changed(lambda r: r.update(num_threads="2")), "Expected `int`, got `str` - at `$.num_threads`"),
        (
            changed(lambda r: r["cases"][0].update(status="fast")),
            "Invalid enum value 'fast' - at `$.cases[0].status`",
        ),
        (
            changed(lambda r: r["cases"][0].update(metrics=[])),
            "'pass' must have a metric called 'time' - at `$.cases[0]`",
        ),
        (changed(lambda r: first_metric(r).update(name="speed")), "must have a metric called 'time' - at `$.cases[0]`"),
        (changed(lambda r: first_metric(r).update(unit="ms")), "time must be in s, and is in 'ms' - at `$.cases[0]`"),
        (
            changed(lambda r: r["cases"][0]["metrics"].append(first_metric(r))),
            "two metrics of a result are called 'time' - at `$.cases[0]`",
        ),
        (
            changed(lambda r: r["cases"][0].update(rounds=[2, 2])),
            "rounds of 4 samples in all, and 3 samples of the time - at `$.cases[0]`",
        ),
        (
            changed(lambda r: r["cases"].append(r["cases"][0])),
            "`$.cases[0]` is of the same case, implementation and params - at `$.cases[2]` (line 1)",
        ),
        (
            changed(lambda r: r["cases"][1].update(reason="")),
            "'oom' must have a reason and no metrics - at `$.cases[1]`",
        ),
        (
            changed(lambda r: r["cases"][0].update(status="fail", reason="x")),
            "'fail' must have a reason and no metrics",
        ),
        (
            changed(lambda r: r.update(num_threads="2")) + b"\xda",
            "Expected `int`, got `str` - at `$.num_threads` (line 1)",
        ),
        (changed(lambda r: first_metric(r).update(samples=[])), "length >= 1 - at `$.cases[0].metrics[0].samples`"),
        (
            changed(lambda r: first_metric(r).update(samples=[0.0])),
            "Expected `float` >= 1e-100 - at `$.cases[0].metrics[0].samples[0]`",
        ),
        (
            changed(lambda r: first_metric(r).update(samples=[5e-324])),
            "Expected `float` >= 1e-100 - at `$.cases[0].metrics[0].samples[0]`",
        ),
        (
            changed(lambda r: first_metric(r).update(samples=[1e300])),
            "Expected `float` <= 1e+100 - at `$.cases[0].metrics[0].samples[0]`",
        ),
        (
            changed(lambda r: first_metric(r).update(samples=[0.1] * 100_001)),
            "Expected `array` of length <= 100000 - at `$.cases[0].metrics[0].samples`",
        ),
    ],
)
def test_wrong_record_is_refused_by_file_and_field(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(data)
    with pytest.raises(BenchError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} is no rlcore.bench/1 record: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("reader", [read, read_any])
def test_a_file_that_is_too_large_for_a_record_is_not_read(tmp_path: Path, reader: Callable[[Path], Record]) -> None:
    path = tmp_path / "theirs.json"
    with path.open("wb") as file:
        file.truncate(260_000_000)  # a hole: no disk is taken
    tracemalloc.start()
    with pytest.raises(BenchError, match=r"theirs\.json has 260 MB; a record has at most 50 MB, so give a record$"):
        reader(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read the benchmark record .*absent.json: No such file or directory"):
        read(tmp_path / "absent.json")


# ----------------------------------------------------------------------------------------- disks and kills


def test_full_disk_is_named_and_the_earlier_record_survives(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write(a_record(), path)
    earlier = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(earlier), before[1]))
    try:
        with pytest.raises(BenchError, match=re.escape(f"cannot write the benchmark record {path}: File too large")):
            write(a_record(num_samples=10_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [path]


def test_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot write the benchmark record /proc/out\.json: "):
        write(a_record(), Path("/proc/out.json"))


@pytest.mark.slow
def test_kill_never_leaves_half_a_record(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_record as t, pathlib\n"
        f"path = pathlib.Path({str(path)!r})\n"
        "while True: t.write(t.a_record(20_000), path)"
    )
    for delay in (0.0, 0.013, 0.031):
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            deadline = time.monotonic() + 60
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(delay)
            os.kill(process.pid, signal.SIGKILL)
        assert read(path) == a_record(20_000)
        path.unlink()
