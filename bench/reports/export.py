"""Records in other programs' formats: pytest-benchmark's JSON, both ways, and CSV."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from rlcore.bench.record import CaseResult, Record, read, read_bytes
from rlcore.bench.reports.summary import p10_p90
from rlcore.bench.reports.tables import ResultTable
from rlcore.errors import BenchError, MissingDependencyError

HEADER = "rlcore"
"""Where a record without its cases stands in the machine info of pytest-benchmark."""

_RESULT = "rlcore_result"
"""Where a whole result stands in the extra info of its benchmark: it is read back with nothing lost."""

_COLUMNS = (
    "case", "implementation", "params", "status", "reason", "metric", "unit", "median", "p10", "p90", "n", "device",
    "framework", "commit", "started_at",
)  # fmt: skip


def to_csv(record: Record) -> str:
    """Return a line for each metric of each result, and one for each result without a number."""
    about = [record.device_name, record.system.framework, record.commit or "", record.started_at]
    rows = []
    for result in record.cases:
        params = " ".join(f"{name}={value}" for name, value in sorted(result.params.items()))
        first = [result.name, result.implementation, params, result.status, result.reason]
        for metric in result.metrics:
            numbers = [statistics.median(metric.samples), *p10_p90(metric.samples)]
            rows.append([*first, metric.name, metric.unit, *map(str, numbers), str(len(metric.samples)), *about])
        if not result.metrics:
            rows.append([*first, *[""] * 6, *about])
    return ResultTable(_COLUMNS, rows).csv()


def header(record: Record) -> dict[str, Any]:
    """Return a record without its cases, as JSON has it."""
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(record, cases=[]))
    return found


def to_pytest_benchmark(record: Record) -> str:
    """Return the JSON that ``pytest-benchmark compare`` reads; it has no results without a number.

    Raises:
        MissingDependencyError: pytest-benchmark is not installed.
    """
    try:
        from pytest_benchmark import __version__
    except ImportError as error:
        raise MissingDependencyError("pytest-benchmark", needed_for="exporting to it", extra="bench") from error
    system = record.system
    found = {
        "machine_info": {"machine": record.device_name, "python_version": system.python, HEADER: header(record)},
        "commit_info": {"id": record.commit or "unknown", "dirty": (record.commit or "").endswith("-modified")},
        "benchmarks": [_benchmark(result) for result in record.cases if result.status == "pass"],
        "datetime": record.started_at,
        "version": __version__,
    }
    return json.dumps(found, indent=2) + "\n"


def _benchmark(result: CaseResult) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    stats: Any = Stats()  # type: ignore[no-untyped-call]
    for sample in result.samples("time"):
        stats.update(sample)
    param = "-".join([result.implementation, *(f"{name}={value}" for name, value in sorted(result.params.items()))])
    return {
        "group": result.name,
        "name": f"{result.name}[{param}]",
        "fullname": f"{result.name}[{param}]",
        "params": dict(result.params),
        "param": param,
        "extra_info": {"implementation": result.implementation, _RESULT: msgspec.to_builtins(result)},
        "options": {},
        "stats": {**stats.as_dict(), "data": result.samples("time"), "iterations": result.runs_per_sample},
    }


def read_any(path: Path) -> Record:
    """Read a record, or the JSON of pytest-benchmark run with ``rlcore.bench.pytest_plugin``.

    Raises:
        BenchError: it is neither, or its samples were not saved.
    """
    try:
        data = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        return read(path)  # which says what is wrong with it
    if not isinstance(data, dict) or "benchmarks" not in data:
        return read(path)
    try:
        record = msgspec.convert(data["machine_info"][HEADER], Record)
        cases = [_case(benchmark) for benchmark in data["benchmarks"]]
    except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise BenchError(
            f"{path} is of pytest-benchmark, but not of a run with -p rlcore.bench.pytest_plugin and the samples of "
            f"--benchmark-json or --benchmark-save-data: {type(error).__name__}: {error}"
        ) from error
    return msgspec.structs.replace(record, cases=cases)


def _case(benchmark: dict[str, Any]) -> CaseResult:
    extra, stats = benchmark["extra_info"], benchmark["stats"]
    samples = stats["data"]
    if _RESULT in extra:
        return msgspec.convert(extra[_RESULT], CaseResult)
    found = {
        "name": benchmark["fullname"],
        "implementation": str(extra.get("implementation", "")),
        "status": "pass",
        "params": {},
        "metrics": [{"name": "time", "unit": "s", "samples": samples}],
        "runs_per_sample": stats["iterations"],
    }
    return msgspec.convert(found, CaseResult)
