"""The record of a benchmark run, schema ``rlcore.bench/1``: what was measured, on what, with what.

Raw samples are kept; whoever reads computes. A result that did not pass has a reason and no number.
``record.schema.json`` beside this file says the same to other programs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec

from rlcore.atomic import write_file
from rlcore.errors import BenchError

SCHEMA: Final = "rlcore.bench/1"

Status = Literal["pass", "fail", "oom", "blocked", "skipped"]
"""pass: measured and right. fail: wrong, raised, hung or was killed; the reason says which. oom: out of memory.
blocked: this device or installation cannot. skipped: the run was ended before, or its kind leaves the case out."""

Effort = Literal["quick", "standard", "full"]

Positive = Annotated[float, msgspec.Meta(ge=1e-100, le=1e100)]
"""Far from where a ratio or a square of two is 0 or infinite."""
Whole = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]

CROWDED: Final = "shared: others left no processor of the host free"
"""A mark: work of the host then waits, and finds caches and memory in use, so that even its processor time differs."""

CUT_SHORT: Final = "cut short"
"""The kind of a mark: the run was ended before the case had made all of its runs."""

_LARGEST_BYTES = 50_000_000
"""Size of a file: a hundred times the largest record of this project. What it takes to read one is many times that."""

_TIMES = ("time", "device_time", "processor_time", "queueing_in_device_time", "first_run")
"""See ``Metric.name``."""


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """"time" is the wall clock's, "device_time" that of events on the device, "processor_time" that of the host's
    processors in this process; "queueing_in_device_time" is what of ``device_time`` may be the host's; "first_run" is
    reported apart."""
    unit: str
    samples: Annotated[list[Positive], msgspec.Meta(min_length=1, max_length=100_000)]
    """In the order measured, none left out."""


class Readings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure of a device, read between the samples."""

    min: float
    median: float
    max: float


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures that device and host told while a case ran. None: they do not tell."""

    clock_mhz: Readings | None = None
    memory_clock_mhz: Readings | None = None
    power_w: Readings | None = None
    """The power of the device, not of the machine."""
    power_limit_w: float | None = None
    temperature_c: Readings | None = None
    throttle_reasons: list[str] | None = None
    """All that were seen."""
    other_processes: int | None = None
    """Processes with memory on the device before this one had any."""
    host_share_of_others: float | None = None
    """The share of the host's processor time that neither this process nor its children used."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One contender of one case."""

    name: str
    implementation: str
    """The implementation that ran; empty when the case could not be prepared."""
    status: Status
    params: dict[str, int | float | str]
    reason: str = ""
    """Why there is no number."""
    metrics: list[Metric] = []
    num_warmup: int = 0
    """Runs before the first sample, after the first run."""
    runs_per_sample: AtLeastOne = 1
    flops: Whole | None = None
    """Operations one run cannot do without."""
    bytes: Whole | None = None
    """Bytes of device memory that one run cannot avoid to move."""
    limits: dict[str, int] = {}
    """The need of one run for each measured limit, by its name in ``Calibration.limits``."""
    rounds: list[AtLeastOne] = []
    """How many samples each process took, in order; empty: one process took all."""
    rounds_at: list[float] = []
    """When each process began to measure, in seconds since 1970 (UTC); empty: not recorded."""
    cache: Literal["", "cold", "warm"] = ""
    """"cold": the device's cache was overwritten before each sample."""
    telemetry: Telemetry | None = None
    marks: list[str] = []
    """Why these numbers may be too bad, such as "throttled: software power cap"."""

    def __post_init__(self) -> None:
        if self.status == "pass" and not self.has("time"):
            raise ValueError("a result with status 'pass' must have a metric called 'time'")
        if wrong := [metric for metric in self.metrics if metric.name in _TIMES and metric.unit != "s"]:
            raise ValueError(f"{wrong[0].name} must be in s, and is in {wrong[0].unit!r}")
        counts = Counter(metric.name for metric in self.metrics)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two metrics of a result are called {twice[0]!r}")
        if self.rounds and sum(self.rounds) != (count := len(self.samples("time")) if self.metrics else 0):
            raise ValueError(f"rounds of {sum(self.rounds)} samples in all, and {count} samples of the time")
        if self.rounds_at and len(self.rounds_at) != (count := len(self.rounds) or 1):
            raise ValueError(f"times of {len(self.rounds_at)} rounds, and {count} rounds")
        if self.status != "pass" and (self.metrics or not self.reason):
            raise ValueError(f"a result with status {self.status!r} must have a reason and no metrics")

    @property
    def is_repeated(self) -> bool:
        """Measured again in later rounds; what states its number of runs is not, nor what failed."""
        return self.has("first_run")

    def identity_values(self) -> dict[str, int | float | str]:
        """Return the implementation and the params, by name."""
        return {**self.params, "implementation": self.implementation}

    def kinds_of_marks(self) -> list[str]:
        """Return the words before the colons of the marks, each once."""
        return list(dict.fromkeys(mark.partition(":")[0] for mark in self.marks))

    def has(self, metric: str) -> bool:
        return any(found.name == metric for found in self.metrics)

    def unit(self, metric: str) -> str:
        return next(found.unit for found in self.metrics if found.name == metric)

    def samples(self, metric: str) -> list[float]:
        return next(found.samples for found in self.metrics if found.name == metric)


def no_number(
    case: str,
    status: Status,
    reason: str,
    implementation: str = "",
    params: Mapping[str, int | float | str] = MappingProxyType({}),
) -> CaseResult:
    """Return a result that says why there is no number."""
    return CaseResult(name=case, implementation=implementation, status=status, params=dict(params), reason=reason)


def identity(result: CaseResult) -> tuple[object, ...]:
    """Return a key that is equal for results that measure the same in the same way."""
    return result.name, result.implementation, tuple(sorted(result.params.items()))


def by_case(results: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    found: dict[str, list[CaseResult]] = {}
    for result in results:
        found.setdefault(result.name, []).append(result)
    return found


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine; names as in MLPerf's system description."""

    device: str
    """As ``rlcore.get_device`` knows it, such as "cuda:0"."""
    number_of_nodes: int = 1
    accelerators_per_node: int
    """Visible devices of that kind; 0 for the CPU."""
    accelerator_model_name: str
    accelerator_memory_capacity_bytes: int
    accelerator_interconnect: str = ""
    host_processor_model_name: str
    host_processors_per_node: int = 1
    """Sockets."""
    host_processor_core_count: int
    """Cores this process may use."""
    host_memory_capacity_bytes: int
    operating_system: str
    python: str
    framework: str = ""
    other_software_stack: dict[str, str] = {}
    """Driver and libraries that no Python package brings."""
    hw_notes: str = ""
    """The text of ``--note``, such as that others use the machine."""
    sw_notes: str = ""

    @property
    def host(self) -> str:
        """The host's processor and number of cores."""
        return f"{self.host_processor_model_name}, {self.host_processor_core_count} cores"


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that this machine was measured to reach."""

    measured_at: str
    """UTC, ISO 8601."""
    limits: dict[str, Positive]
    """FLOP/s of "product/<dtype>"; bytes a second of "memory", "to_device/pinned" and the like."""
    blocked: dict[str, str] = {}
    """Limits that could not be measured, and why."""
    marks: list[str] = []
    """Why they may be too low, such as other work on the machine meanwhile."""


class BenchCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of ``rlcore bench run``, which may continue a record."""

    started_at: str
    """UTC, ISO 8601."""
    commit: str | None
    rounds: dict[str, list[Positive]]
    """Seconds of each round of each case that it ran, all contenders and the start of the process included."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that ``rlcore bench run`` measured on one machine."""

    schema: Literal["rlcore.bench/1"]
    started_at: str
    """UTC, ISO 8601."""
    rlcore: str
    commit: str | None
    """The commit of the git checkout that ran first, "-modified" when its files differ; None without a checkout."""
    effort: Effort = "standard"
    system: System
    dependencies: dict[str, str]
    environment: dict[str, str]
    """Variables that change what is measured, by allow-list."""
    num_threads: AtLeastOne
    """Threads torch computes with on the host."""
    calibration: Calibration | None = None
    calls: list[BenchCall] = []
    """That measured it, in order; records before these were kept have none."""
    cases: list[CaseResult]

    @property
    def device_name(self) -> str:
        """The name of the device that was measured."""
        return self.system.accelerator_model_name or self.system.host

    def software(self) -> list[str]:
        """Return torch, the libraries under it and Python, with their versions."""
        torch = self.system.framework or f"torch {self.dependencies.get('torch', 'unknown')}"
        stack = [f"{name} {version}" for name, version in self.system.other_software_stack.items()]
        return [torch, *stack, f"Python {self.system.python}"]

    def passed(self) -> list[CaseResult]:
        return [result for result in self.cases if result.status == "pass"]

    def by_case(self) -> dict[str, list[CaseResult]]:
        return by_case(self.cases)

    def commits(self) -> str:
        """Return the commits that the results were measured with, shortened."""
        calls = [call.commit for call in self.calls if call.rounds] or [self.commit]
        return ", ".join(dict.fromkeys(map(short_commit, calls)))


def short_commit(name: str | None) -> str:
    """Shortened; None is unknown."""
    found, _, changes = (name or "unknown").partition("-")
    return f"{found[:12]}{' with changes' if changes else ''}"


def encode(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def write(record: Record, path: Path) -> None:
    """Write the whole file or nothing: an earlier record at ``path`` survives a full disk and a kill.

    Raises:
        BenchError: the file cannot be written; says why.
    """
    try:
        write_file(path, encode(record))
    except OSError as error:
        raise BenchError(f"cannot write the benchmark record {path}: {error.strerror}") from error


def read_bytes(path: Path) -> bytes:
    """Raises BenchError where the file cannot be read, or is so large that it is of something else."""
    try:
        _check_size(path, path.stat().st_size)
        with path.open("rb") as file:  # of a device or a pipe nobody knows the size
            data = file.read(_LARGEST_BYTES + 1_000_000)
    except OSError as error:
        raise BenchError(f"cannot read the benchmark record {path}: {error.strerror}") from error
    _check_size(path, len(data))
    return data


def _check_size(path: Path, size: int) -> None:
    if size > _LARGEST_BYTES:
        raise BenchError(
            f"{path} has {size / 1e6:.0f} MB; a record has at most {_LARGEST_BYTES / 1e6:.0f} MB, so give a record"
        )


def read(path: Path) -> Record:
    """Read and check a record.

    Raises:
        BenchError: the file is absent, not JSON, or not of this schema; names the file, the field and the line.
    """
    data = read_bytes(path)
    try:
        return _without_repeats(msgspec.json.decode(data, type=Record))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        is_of_another = "enum value 'rlcore.bench/" in str(error)
        advice = "; another version of rlcore wrote it, and reads it" if is_of_another else ""
        raise BenchError(f"{path} is no {SCHEMA} record: {error} (line {_line(data, error)}){advice}") from error


def _without_repeats(record: Record) -> Record:
    """Raises ValidationError: which of two results of the same would be the number?"""
    seen: dict[tuple[object, ...], int] = {}
    for index, result in enumerate(record.cases):
        first = seen.setdefault(identity(result), index)
        if first != index:
            what = f"`$.cases[{first}]` is of the same case, implementation and params"
            raise msgspec.ValidationError(f"{what} - at `$.cases[{index}]`")
    return record


def _line(data: bytes, error: Exception) -> int:
    if isinstance(error, msgspec.ValidationError):
        place = re.search(r"`(\$[^`]*)`$", str(error))
        unknown = re.search(r"unknown field `([^`]*)`", str(error))
        return line_of(data, (place[1] if place else "$") + (f".{unknown[1]}" if unknown else ""))
    byte = re.search(r"\(byte (\d+)\)", str(error))
    return data[: int(byte[1]) if byte else len(data)].count(b"\n") + 1


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def line_of(data: bytes, path: str) -> int:
    """Return the line, from 1, on which the value at ``path`` ("$.cases[0].name") begins.

    Where the path leads to nothing, or to what is no JSON, it is the line of the last value on the way.
    """
    value: bytes | msgspec.Raw = data
    for name, index in _STEP.findall(path):
        try:
            if name:
                value = msgspec.json.decode(value, type=dict[str, msgspec.Raw])[name]
            else:
                value = msgspec.json.decode(value, type=list[msgspec.Raw])[int(index)]
        except (LookupError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break
    return data.count(b"\n", 0, _address(value) - _address(data)) + 1


def _address(value: bytes | msgspec.Raw) -> int:
    """Return where the bytes lie in memory: a ``Raw`` is a view of those that it was decoded from."""
    import numpy as np

    return int(np.frombuffer(value, np.uint8).ctypes.data)


# ---------------------------------------------------------------------------------------------------- the schema


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a record, the rules of ``CaseResult.__post_init__`` included."""
    schema = msgspec.json.schema(Record)
    time = {"properties": {"name": {"const": "time"}}}
    has_metrics = {"required": ["metrics"], "properties": {"metrics": {"contains": time}}}
    has_reason = {
        "required": ["reason"],
        "properties": {"reason": {"minLength": 1}, "metrics": {"maxItems": 0}},
    }
    passed = {"properties": {"status": {"const": "pass"}}}
    schema["$defs"]["CaseResult"] |= {"if": passed, "then": has_metrics, "else": has_reason}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **schema}
