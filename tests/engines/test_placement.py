"""Which devices an engine's workers get."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.engines.placement import choose_devices
from rlcore.errors import DeviceError, InvalidInputError
from tests.warm import LIMIT_S


def names(found: list[Any]) -> list[str]:
    return [device.name for device in found]


def engine_on(*devices: str, label: str = "the other engine") -> Any:
    return SimpleNamespace(is_built=True, devices=list(devices), label=label)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEVICE", "cpu")


def test_the_same_request_gets_the_same_devices() -> None:
    assert names(choose_devices(3, None, None, None)) == ["cpu:0", "cpu:1", "cpu:2"]
    assert names(choose_devices(2, ["cpu:5", "cpu:2"], None, None)) == ["cpu:5", "cpu:2"], "in the order asked for"
    assert names(choose_devices(1, None, engine_on("cpu:3", "cpu:1"), None)) == ["cpu:3"]
    assert names(choose_devices(2, None, None, [engine_on("cpu:0"), engine_on("cpu:2")])) == ["cpu:1", "cpu:3"]


def test_all_that_is_left_is_whole_groups_of_the_devices_that_are_named_or_shared() -> None:
    def found(devices: Any, shared: Any = None, avoided: Any = None, group_size: int = 1) -> list[str]:
        return names(choose_devices(None, devices, shared, avoided, group_size=group_size))

    assert found(["cpu:5", "cpu:2"]) == ["cpu:5", "cpu:2"]
    assert found(None, engine_on("cpu:0", "cpu:1", "cpu:2", "cpu:3", "cpu:4"), group_size=2) == [
        f"cpu:{index}" for index in range(4)
    ]
    assert found(None, engine_on("cpu:0", "cpu:1"), engine_on("cpu:0")) == ["cpu:1"]
    assert found(None) == ["cpu:0"], "a host's devices are one machine"
    with pytest.raises(InvalidInputError, match="this engine has 2 workers; devices names 3"):
        found(["cpu:0", "cpu:1", "cpu:2"], group_size=2)
    with pytest.raises(DeviceError, match=r"4 devices are needed and 2 of"):
        found(None, engine_on("cpu:0", "cpu:1"), group_size=4)


def test_an_impossible_request_says_which_device_is_held_by_whom() -> None:
    others = [engine_on("cpu:0", label="the train engine"), engine_on("cpu:1", label="the inference engine")]
    with pytest.raises(
        DeviceError,
        match=r"2 devices are needed and 0 of \['cpu:0', 'cpu:1'\] can be used: "
        "cpu:0 is held by the train engine; cpu:1 is held by the inference engine",
    ):
        choose_devices(2, ["cpu:0", "cpu:1"], None, others)
    with pytest.raises(DeviceError, match=r"2 devices are needed and 1 of \['cpu:4'\] can be used: none is held"):
        choose_devices(2, None, engine_on("cpu:4"), None)
    with pytest.raises(InvalidInputError, match="this engine has 2 workers; devices names 1"):
        choose_devices(2, "cpu", None, None)
    with pytest.raises(InvalidInputError, match=r"owns a device; devices names \['cpu:1'\] more than once"):
        choose_devices(2, ["cpu:1", "cpu:1"], None, None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["cpu:0", "cpu:1"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3"}, ["cpu:6", "cpu:7"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),4", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, ["cpu:2", "cpu:3"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),4", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, ["cpu:0", "cpu:1"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "100", "SLURM_LOCALID": "7"}, ["cpu:0", "cpu:1"]),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, ["cpu:0", "cpu:1"]),
        # 16 on the node and 8 seen: Slurm has divided them.
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "16"}, ["cpu:0", "cpu:1"]),
    ],
    ids=str,
)
def test_tasks_of_a_slurm_step_share_the_devices(
    variables: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.devices.cpu.device.os.sched_getaffinity", lambda pid: set(range(8)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert names(choose_devices(2, None, None, None)) == expected


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        ({"SLURM_LOCALID": "9"}, DeviceError, "SLURM_LOCALID is 9, and SLURM_STEP_TASKS_PER_NODE says 2 tasks"),
        ({"SLURM_LOCALID": "one"}, InvalidInputError, "SLURM_LOCALID must be a whole number, got 'one'"),
        ({"SLURM_GPUS_ON_NODE": "gpu:2"}, InvalidInputError, "SLURM_GPUS_ON_NODE must be a whole number"),
    ],
    ids=str,
)
def test_variables_of_slurm_that_cannot_be_are_named(
    variables: dict[str, str], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"SLURM_STEP_TASKS_PER_NODE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=text):
        choose_devices(1, None, None, None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 0, None, None), "a device is"),
        ((1, [b"cpu:0"], None, None), "a device is"),
        ((1, None, "cpu:0", None), "colocate_with takes an engine or several, got 'cpu:0'"),
        ((1, None, None, [3]), "not_colocate_with takes an engine or several, got 3"),
        ((1, None, None, None, 7), "acceptable_node_ips must be a list of addresses, got 7"),
        ((1, None, None, None, ["0.0.0.0"]), "acceptable_node_ips must hold addresses of hosts, got '0.0.0.0'"),
        ((1, None, None, None, ["224.0.0.1"]), "acceptable_node_ips must hold addresses of hosts"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        choose_devices(*arguments)


@pytest.mark.multigpu
def test_names_count_the_visible_devices() -> None:
    """cuda:0 is the first device that the variable names, here and in workers."""
    code = textwrap.dedent("""
        import rlcore, torch
        from rlcore.engines.launchers.launch import start_workers
        class Worker:
            def __init__(self, context):
                self.context = context
            def uuid(self) -> str:
                return self.context.device.properties().uuid
            def close(self) -> None:
                pass
        group = start_workers(Worker, "the engine", ["cuda:0"], launcher="process", timeout_s=60)
        print(group.workers[0].call("uuid").result(), rlcore.get_device("cuda:0").properties().uuid)
        group.stop()
    """)
    found = []
    for visible in ("0", "1", "1,0"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        ours, theirs = done.stdout.split()
        assert ours == theirs
        found.append(ours)
    assert found[0] != found[1] == found[2]
