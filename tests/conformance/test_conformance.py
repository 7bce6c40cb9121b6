"""The suite passes on devices as they are, and fails on each planted fault, at the test it is for.

The faults of faulty_devices.py are planted in one run for each device, those in the sources of simdev, a device in C++,
in a run each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlcore.bench.measurement.system import source_commit
from tests.conformance import faulty_devices
from tests.conformance.faulty_devices import Fault

REPORTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "conformance"

pytestmark = pytest.mark.timeout(900)  # a test waits for its run, and that for those before it


@dataclass(frozen=True)
class Run:
    """One run of the suite, in an empty folder."""

    device: str
    tests: tuple[str, ...] = ()
    """Such as "test_ipc::test_a_killed_importer_has_closed"; none means all."""
    options: tuple[str, ...] = ()
    fault: str = ""

    @property
    def arguments(self) -> list[str]:
        named = [f"rlcore.conformance.{test}" for test in self.tests] or ["rlcore.conformance"]
        return ["--pyargs", *named, "--device", self.device, "--conformance-json", "report.json", *self.options]


WHOLE = {
    "cpu": Run("cpu", options=("--require", "ipc")),
    "simdev": Run("simdev", options=("--require", "ipc,pool,host_alloc")),
}

FAULTS = {
    "waits_are_ignored": "test_streams::test_what_waits_sees_what_it_waited_for[wait_event-a new stream]",
    "stream_query_lies": "test_streams::test_a_stream_that_has_work_says_so",
    "record_stream_is_ignored": "test_streams::test_freed_memory_waits_for_the_stream_that_it_was_recorded_on",
    "uuid_of_this_process": "test_identity::test_another_process_knows_the_device_by_the_same_uuid",
    "synchronize_does_nothing": "test_streams::test_synchronize_leaves_no_stream_with_work",
    "events_tell_no_time": "test_streams::test_elapsed_time_grows_with_the_work_between",
    "events_tell_seconds": "test_streams::test_elapsed_time_is_in_milliseconds",
    "constant_statistics": "test_memory::test_allocated_and_reserved_bytes_follow_a_tensor",
    "reset_peak_does_nothing": "test_memory::test_the_peak_remembers_what_was_freed_until_it_is_reset",
    "reset_peak_forgets_what_is_there": "test_memory::test_a_reset_peak_is_what_is_there",
    "statistics_of_another_device": "test_memory::test_statistics_are_of_this_device_alone",
    "host_memory_is_pageable": "test_host_memory::test_a_host_buffer_has_exactly_its_size_and_travels_there_and_"
    "back[4097]",
    "empty_cache_does_nothing": "test_memory::test_empty_cache_gives_freed_memory_back_and_keeps_what_is_used",
    "rng_state_is_lost": "test_identity::test_a_random_state_continues_where_it_was_taken",
    "probe_initializes": "test_identity::test_probing_listing_and_capabilities_initialise_nothing",
    "import_copies": "test_ipc::test_values_go_both_ways_through_one_memory[torch.float32]",
    "revoke_does_nothing": "test_ipc::test_revoke_has_importers_close_and_lets_the_memory_go",
    "close_does_nothing": "test_ipc::test_cycles_leave_memory_descriptors_and_shared_memory_as_they_were",
    "export_leaks": "test_ipc::test_cycles_leave_memory_descriptors_and_shared_memory_as_they_were",
    "capabilities_lie": "test_capabilities::test_a_member_is_refused_exactly_where_capabilities_say_so_and_for_that_"
    "reason[streams.export_event]",
    "seed_reaches_other_devices": "test_identity::test_the_host_and_other_devices_draw_for_themselves",
    "all_reduce_always_sums": "test_collectives::test_every_reduction_is_right_or_refused_as_declared",
    "reduce_scatter_always_sums": "test_collectives::test_every_reduction_is_right_or_refused_as_declared",
    "barrier_does_nothing": "test_collectives::test_torchs_default_group_is_made_with_init_kwargs",
    "groups_leak": "test_collectives::test_destroying_and_forming_a_group_leaves_nothing",
    "collectives_do_not_wait": "test_collectives::test_a_collective_comes_after_what_was_queued_before_it"
    "[the first stream]",
    "fused_adamw_does_nothing": "test_training::test_adamw_steps_are_those_of_the_cpu[fused]",
}
"""A fault of simdev (csrc/faults.h, rlcore_simdev/faults.py) -> the test that has to fail."""


def planting(device: str, faults: Mapping[str, Fault]) -> Run:
    """All of them in one run, in which a test runs once for each that it has to find."""
    return Run(device, tuple(sorted({fault.test for fault in faults.values()})), ("-p", "faulty_devices"))


PLANTED = [
    ("cpu", faulty_devices.CPU, ()),
    ("cpu", faulty_devices.CPU_COLLECTIVES, pytest.mark.slow),
    ("simdev", faulty_devices.SIMDEV, pytest.mark.slow),
]

AS_IT_IS = pytest.mark.parametrize(
    "run", [pytest.param(run, id=name, marks=[pytest.mark.slow] * (name != "cpu")) for name, run in WHOLE.items()]
)
"""simdev takes half a minute to build."""


@AS_IT_IS
def test_a_device_as_it_is_passes(runs: Any, run: Run) -> None:
    outcome = runs.outcome(run)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.tests("failed")
    results = {member: found["result"] for member, found in outcome.report["members"].items()}
    assert set(results.values()) <= {"passed", "skipped"}, results
    assert {member for member, result in results.items() if result == "passed"} >= {"memory.import_ipc", "streams.use"}


@pytest.mark.gpu
@pytest.mark.parametrize("run", [Run("cuda", options=("--require", "ipc,pool,host_alloc"))], ids=["cuda"])
def test_a_gpu_passes(runs: Any, run: Run) -> None:
    """What ``tests/devices`` adds is what the suite does not ask of every device."""
    outcome = runs.outcome(run)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.tests("failed")


@AS_IT_IS
def test_a_skip_names_the_capability_and_the_reason_or_what_is_not_there(runs: Any, run: Run) -> None:
    report = runs.outcome(run).report
    skipped = {test: found for test, found in report["tests"].items() if found["result"] == "skipped"}
    assert skipped
    for test, found in skipped.items():
        unsupported = [m for m in found["members"] if report["members"][m]["support"] == "unsupported"]
        for member in unsupported[:1]:
            reason = report["members"][member]["reason"]
            assert found["reason"] == f"{member} is unsupported on {report['device']['name']}: {reason}", test
        assert found["reason"], test


@AS_IT_IS
def test_the_report_says_of_each_member_what_is_known(runs: Any, run: Run) -> None:
    report = runs.outcome(run).report
    assert report["schema"] == "rlcore.conformance/1"
    assert report["device"]["name"] == f"{run.device}:0"
    assert report["simulation"] is None  # nothing says that it stands in for a vendor's libraries
    assert set(report["versions"]) == {"rlcore", "torch", "python"}
    assert report["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-modified)?", report["commit"])
    assert (report["commit"] is None) == (source_commit() is None)
    for member, found in report["members"].items():
        assert found["support"] in ("native", "emulated", "unsupported"), member
        assert found["evidence"] == ("simulated" if run.device == "simdev" else "hardware"), member
        assert bool(found["reason"]) == (found["support"] != "native"), member
        assert (found["result"] == "skipped") <= (found["support"] == "unsupported" or member.startswith("launch."))


@AS_IT_IS
def test_the_repositorys_report_says_what_members_do_now(runs: Any, run: Run) -> None:
    """The table of docs/devices.md is made of it. It names its commit: tests may have come since."""
    kept = json.loads((REPORTS / f"{run.device}.json").read_text())
    found = runs.outcome(run).report
    again = f"pytest --pyargs rlcore.conformance --device {run.device} --conformance-json {REPORTS}/{run.device}.json"
    assert kept["members"] == found["members"], f"run: {again}; make results"


@AS_IT_IS
def test_what_a_fault_breaks_passes_without_it(runs: Any, run: Run) -> None:
    passed = runs.outcome(run).tests("passed")
    planted = faulty_devices.FAULTS[run.device].values()
    assert {test.partition("[")[0] for test in passed} >= {fault.test for fault in planted}
    assert run.device == "cpu" or passed >= set(FAULTS.values())


@pytest.mark.parametrize(
    ("run", "fault", "test"),
    [
        pytest.param(planting(device, faults), name, fault.test, id=f"{device}-{name}", marks=marks)
        for device, faults, marks in PLANTED
        for name, fault in faults.items()
    ],
)
def test_a_fault_planted_from_outside_is_caught(runs: Any, run: Run, fault: str, test: str) -> None:
    outcome = runs.outcome(run)
    assert outcome.returncode == 1, outcome.output
    failed = [name.partition("[") for name in outcome.tests("failed")]
    assert any(name == test and fault in ids.rstrip("]").split("-") for name, _, ids in failed), outcome.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "test"),
    [pytest.param(Run("simdev", (test,), fault=fault), test, id=fault) for fault, test in FAULTS.items()],
)
def test_a_planted_fault_is_caught(runs: Any, run: Run, test: str) -> None:
    outcome = runs.outcome(run)
    assert outcome.returncode == 1, outcome.output
    assert test in outcome.tests("failed"), outcome.output
    members = {member for found in outcome.report["tests"].values() for member in found["members"]}
    for member in members:
        assert outcome.report["members"][member]["result"] == "failed"


def test_every_fault_of_simdev_has_a_test(simdev_sources: str) -> None:
    assert set(re.findall(r'has_fault\("(\w+)"\)', simdev_sources)) == set(FAULTS)


SLOW_EXPORTER = (
    "test_ipc::test_importing_twice_opens_once_and_closing_one_leaves_the_other",  # the other process has started
    "test_ipc::test_a_parameter_stays_what_it_is",
    "test_ipc::test_views_of_one_storage_are_one_export_and_keep_their_strides",
    "test_ipc::test_two_tensors_of_one_block_of_memory_are_closed_and_revoked_each_by_itself",
)


@pytest.mark.slow
@pytest.mark.parametrize("run", [Run("simdev", SLOW_EXPORTER, ("-p", "slow_device"))], ids=["simdev"])
def test_a_device_that_is_slow_and_right_passes(runs: Any, run: Run) -> None:
    outcome = runs.outcome(run)
    assert outcome.returncode == 0, outcome.output
    assert len(outcome.tests("passed")) == len(SLOW_EXPORTER)


POOL = ("test_memory::test_pools_of_two_tags_are_apart",)


@pytest.mark.parametrize("run", [Run("cpu", POOL)], ids=["cpu"])
def test_a_member_that_the_device_lacks_is_skipped(runs: Any, run: Run) -> None:
    assert runs.outcome(run).returncode == 0
    assert len(runs.outcome(run).tests("skipped")) == 1


@pytest.mark.parametrize("run", [Run("cpu", POOL, ("--require", "pool"))], ids=["cpu"])
def test_a_member_that_is_required_and_lacking_is_a_failure(runs: Any, run: Run) -> None:
    outcome = runs.outcome(run)
    assert outcome.returncode == 1
    assert "memory.pool is required, and unsupported on cpu:0: torch.cpu has no MemPool" in outcome.output


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("gpu9000"), "no device 'gpu9000'; registered: "),
        (Run("cpu", options=("--require", "levitation")), "--require levitation: names 0 members; accepted are ipc, "),
    ],
    ids=["no such device", "no such member"],
)
def test_what_cannot_be_run_is_a_usage_error(runs: Any, run: Run, message: str) -> None:
    outcome = runs.outcome(run)
    assert outcome.returncode == 4
    assert message in outcome.output
