"""The record of a benchmark run, schema ``rlcore.bench/1``: what was measured, on what, with what.

Raw samples are kept; whoever reads computes. A result that did not pass has a reason and no number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from rlcore.atomic import write_file
from rlcore.errors import BenchError

SCHEMA: Final = "rlcore.bench/1"

Status = Literal["pass", "fail", "oom", "blocked", "skipped"]
"""pass: measured and right. fail: wrong or raised. oom: out of memory. blocked: this device or installation
cannot. skipped: the run was ended before."""


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    unit: str
    samples: Annotated[list[Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]
    """In the order measured, none left out."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One contender of one case."""

    name: str
    implementation: str
    """What ran; empty when the case could not be prepared."""
    status: Status
    params: dict[str, int | float | str]
    reason: str = ""
    """Why there is no number."""
    metrics: list[Metric] = []
    num_warmup: int = 0
    """Runs before the first sample, after the first run."""
    runs_per_sample: int = 1
    flops: int | None = None
    """Operations one run cannot do without."""
    bytes: int | None = None
    """Bytes of device memory that one run cannot avoid to move."""

    def __post_init__(self) -> None:
        if self.status == "pass" and not self.metrics:
            raise ValueError("a result with status 'pass' must have metrics")
        if self.status != "pass" and (self.metrics or not self.reason):
            raise ValueError(f"a result with status {self.status!r} must have a reason and no metrics")

    def samples(self, metric: str) -> list[float]:
        return next(found.samples for found in self.metrics if found.name == metric)


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine; names as in MLPerf's system description."""

    device: str
    """As ``rlcore.get_device`` knows it, such as "cuda:0"."""
    accelerators_per_node: int
    """Visible devices of that kind; 0 for the CPU."""
    accelerator_model_name: str
    accelerator_memory_capacity_bytes: int
    host_processor_model_name: str
    host_processor_core_count: int
    """Cores this process may use."""
    host_memory_capacity_bytes: int
    operating_system: str
    python: str


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of ``rlcore bench run``."""

    schema: Literal["rlcore.bench/1"]
    started_at: str
    """UTC, ISO 8601."""
    rlcore: str
    commit: str | None
    """Of the git checkout that ran, "-modified" when its files differ; None without a checkout."""
    system: System
    dependencies: dict[str, str]
    environment: dict[str, str]
    """Variables that change what is measured, by allow-list."""
    num_threads: int
    """Threads torch computes with on the host."""
    cases: list[CaseResult]


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


def read(path: Path) -> Record:
    """Read and check a record.

    Raises:
        BenchError: the file is absent, not JSON, or not of this schema; names the file and the field.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise BenchError(f"cannot read the benchmark record {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is no {SCHEMA} record: {error}") from error
