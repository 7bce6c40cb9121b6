"""The result of a run of a suite for each member of a device, or method of an executor: ``rlcore.conformance/1``."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.measurement.system import source_commit
from rlcore.device import Device
from rlcore.types import Capability

SCHEMA = "rlcore.conformance/1"
TEST = "conformance"
"""Name of the test property that holds its id and the members that it covers."""
LACKING = "conformance lacks"
"""Name of the test property that holds the reason of an executor's UnsupportedError."""
PROMISE = "conformance promise"
"""Name of the property of a failed test of an executor that holds the promise."""
_WORST_FIRST = ("failed", "passed", "skipped")


@dataclass(slots=True)
class _Outcome:
    result: str
    members: list[str]
    reason: str = ""
    lacking: str = ""
    """The reason why the executor cannot do what the test is about."""
    promise: str = ""
    """The promise that was broken."""


@dataclass(slots=True, eq=False)
class SuiteReport:
    """One run on one device. It is a pytest plugin, which receives the report of every test."""

    device: Device
    support: Mapping[str, Capability]
    executor: Mapping[str, str] | None = None
    """The ``kind`` and ``name`` of an executor under test; None when it is the device."""
    outcomes: dict[str, _Outcome] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The name of what is tested."""
        if self.executor is None:
            return self.device_name
        return f"{self.executor['kind']} executor {self.executor['name']} on {self.device_name}"

    @property
    def device_name(self) -> str:
        return str(self.device.name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record one phase of one test; a failure in any phase is a failure of the test."""
        if report.when != "call" and report.passed:
            return
        properties: dict[str, Any] = dict(report.user_properties)
        test, *members = properties.get(TEST, [report.nodeid])  # the report of a crashed pytest-xdist process has none
        if test not in self.outcomes or report.failed:
            lacking, promise = (properties.get(name, "") for name in (LACKING, PROMISE))
            self.outcomes[test] = _Outcome(report.outcome, members, _reason(report), lacking, promise)

    def results(self) -> dict[str, str]:
        """Return member -> "passed", "failed", "skipped", or "untested" where no test of the run covers it."""
        found = {}
        for member in self.support:
            results = {outcome.result for outcome in self.outcomes.values() if member in outcome.members}
            found[member] = next((result for result in _WORST_FIRST if result in results), "untested")
        return found

    def summary(self) -> Iterator[str]:
        if (simulation := self.device.simulation()) is not None:
            yield str(simulation)
        width = max(33, *map(len, self.support)) + 1
        for member, result in self.results().items():
            how = self.how(member, result)
            reason = f": {how.reason}" if how.reason else ""
            yield f"{result:9}{member:{width}}{how.support}{reason}"
        for outcome in self.outcomes.values():
            if outcome.promise:
                yield f"broken: {outcome.promise}"

    def how(self, member: str, result: str) -> Capability:
        """Return the declared support of a member, or that which the tests of an executor met."""
        lacking = [one.lacking for one in self.outcomes.values() if member in one.members and one.lacking]
        if result == "skipped" and lacking:
            return Capability("unsupported", self.device.evidence, lacking[0])
        return self.support[member]

    def as_json(self) -> dict[str, Any]:
        device, results = self.device, self.results()
        hows = {member: self.how(member, result) for member, result in results.items()}
        simulation = device.simulation()
        own = {"rlcore": rlcore.__version__, "torch": torch.__version__, "python": platform.python_version()}
        return {
            "schema": SCHEMA,
            "commit": source_commit(),
            "device": {"name": device.name, "vendor": device.vendor, "product": device.properties().name},
            "simulation": None if simulation is None else simulation.counted(),
            "versions": own | device.versions(),
            "members": {
                member: {
                    "support": how.support,
                    "reason": how.reason,
                    "evidence": how.evidence,
                    "result": results[member],
                }
                for member, how in hows.items()
            },
            "tests": {
                test: {"result": outcome.result, "members": outcome.members, "reason": outcome.reason}
                for test, outcome in self.outcomes.items()
            },
        } | ({"executor": dict(self.executor)} if self.executor else {})

    def write(self, path: Path) -> None:
        write_file(path, (json.dumps(self.as_json(), indent=1) + "\n").encode())


def _reason(phase: pytest.TestReport) -> str:
    """Return the reason of a skip or failure in one line."""
    if phase.skipped and isinstance(phase.longrepr, tuple):
        return phase.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(phase.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else str(phase.longrepr or "").strip().rpartition("\n")[2]
