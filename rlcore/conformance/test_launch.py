"""Facts for starting processes: string work, and what the processes then see."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlcore.conformance.peer import Peer
from rlcore.device import Device
from rlcore.errors import DeviceError, InvalidInputError
from rlcore.registry import get_device, launch

COUNT_AND_UUIDS = "rlcore.conformance.launch_tasks:count_and_uuids"


@pytest.mark.covers("launch.ray_resource", "launch.visible_devices_variable")
def test_launch_facts_can_be_had_without_the_device(device: Device) -> None:
    assert launch(device.spec.name) == device.launch
    code = f"from rlcore.registry import launch; f = launch({device.spec.name!r}); " + (
        "print(f.ray_resource, f.visible_devices_variable, f.worker_environment([0]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    expected = (device.launch.ray_resource, device.launch.visible_devices_variable)
    assert found.stdout.startswith("{} {} ".format(*expected)), found.stderr


@pytest.mark.covers("launch.worker_environment", "launch.visible_devices")
def test_a_worker_sees_the_devices_it_was_given_under_numbers_of_its_own(device: Device) -> None:
    if device.launch.visible_devices_variable is None:
        pytest.skip(f"{device.spec.name} has no variable that restricts what a process sees")
    count = device.count()
    indices = [count - 1, 0][: max(1, count - 1)]  # not all of them, and not in order
    environment = device.launch.worker_environment(indices)
    assert device.launch.visible_devices(environment) == [device.launch.physical_id(index) for index in indices]
    uuids = [get_device(f"{device.spec.name}:{index}").properties().uuid for index in indices]
    with Peer(f"{device.spec.name}:0", environment) as peer:
        assert peer.ask(COUNT_AND_UUIDS) == [len(indices), uuids]


@pytest.mark.covers("launch.worker_environment")
def test_indices_that_repeat_or_are_none_are_refused(device: Device) -> None:
    with pytest.raises(InvalidInputError, match="these indices repeat"):
        device.launch.worker_environment([0, 0])
    with pytest.raises(InvalidInputError, match="a whole number of at least 0, got -1"):
        device.launch.worker_environment([-1])
    variable = device.launch.visible_devices_variable
    if variable is not None:
        with pytest.raises(DeviceError, match="is not visible"):
            device.launch.worker_environment([1], {variable: "0"})
