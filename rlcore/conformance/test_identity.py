"""Which device it is; the default random generator; that asking does not initialise anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlcore.conformance.peer import Peer
from rlcore.device import Device
from rlcore.registry import get_device, list_devices


@pytest.mark.covers("identity.name")
def test_a_device_says_which_it_is(device: Device) -> None:
    assert device.name == f"{device.spec.name}:{device.index}"
    assert device.vendor == device.spec.vendor
    assert device.type == device.spec.torch_type == device.torch_device.type
    assert device.name in repr(device)
    assert get_device(device.name) is device


@pytest.mark.covers("identity.name")
def test_a_tensor_made_there_is_there(device: Device) -> None:
    assert torch.ones(1, device=device.torch_device).device == device.torch_device


@pytest.mark.covers("identity.count")
def test_count_is_what_the_list_of_devices_says(device: Device) -> None:
    (listed,) = [info.count for info in list_devices() if info.name == device.spec.name]
    assert device.count() == listed
    assert 0 <= device.index < device.count()


@pytest.mark.covers("identity.properties")
def test_properties_describe_the_device_and_stay(device: Device) -> None:
    found = device.properties()
    assert found == device.properties()
    assert found.name.strip()
    assert found.uuid.strip()
    assert found.cores >= 0
    assert found.total_bytes == pytest.approx(device.memory.info().total_bytes, rel=0.05)


@pytest.mark.covers("identity.properties")
def test_devices_with_memory_of_their_own_have_uuids_of_their_own(device: Device) -> None:
    if device.spec.is_host or device.count() == 1:
        pytest.skip(f"{device.spec.name} has one memory here")
    uuids = [get_device(f"{device.spec.name}:{index}").properties().uuid for index in range(device.count())]
    assert len(set(uuids)) == len(uuids)


@pytest.mark.covers("identity.properties")
def test_another_process_knows_the_device_by_the_same_uuid(device: Device, peer: Peer) -> None:
    _, uuids = peer.ask("rlcore.conformance.launch_tasks:count_and_uuids")
    assert uuids[device.index] == device.properties().uuid


@pytest.mark.covers("identity.activate")
def test_the_active_device_is_where_tensors_land_that_name_only_its_type(device: Device) -> None:
    last = get_device(f"{device.spec.name}:{device.count() - 1}")
    try:
        last.activate()
        assert torch.ones(1, device=device.type).device == last.torch_device
    finally:
        device.activate()
    assert torch.ones(1, device=device.type).device == device.torch_device


@pytest.mark.covers("identity.seed")
def test_a_seed_decides_what_is_drawn(device: Device) -> None:
    first, second, other = (_seeded(device, seed) for seed in (7, 7, 8))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not torch.equal(first, torch.rand(8, device=device.torch_device))


@pytest.mark.covers("identity.seed", "identity.rng_state")
def test_all_64_bits_of_a_seed_count(device: Device) -> None:
    """By the state: the CPU's generator takes the seed whole into it, and draws by 32 bits of it."""
    states = []
    for seed in (7, 7 + 2**32, 7 + 2**63):
        device.seed(seed)
        states.append(bytes(device.rng_state().tolist()))
    assert len(set(states)) == 3, "seeds that differ in their upper 32 bits made the same state"


@pytest.mark.covers("identity.rng_state", "identity.set_rng_state")
def test_a_random_state_continues_where_it_was_taken(device: Device) -> None:
    device.seed(7)
    torch.rand(3, device=device.torch_device)
    state = device.rng_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    drawn = [torch.rand(8, device=device.torch_device), torch.randn(8, device=device.torch_device)]
    device.set_rng_state(state)
    again = [torch.rand(8, device=device.torch_device), torch.randn(8, device=device.torch_device)]
    assert all(map(torch.equal, drawn, again))


@pytest.mark.covers("identity.seed", "identity.rng_state")
def test_the_host_and_other_devices_draw_for_themselves(device: Device) -> None:
    if device.spec.is_host:
        pytest.skip("the host's generator is its own")
    other = get_device(f"{device.spec.name}:{(device.index + 1) % device.count()}")
    of_host, of_other = torch.get_rng_state(), other.rng_state()
    device.seed(11)
    device.set_rng_state(device.rng_state())
    torch.rand(8, device=device.torch_device)
    assert torch.equal(torch.get_rng_state(), of_host)
    assert other is device or torch.equal(other.rng_state(), of_other)


@pytest.mark.covers("identity.count", "capabilities")
def test_probing_listing_and_capabilities_initialise_nothing(device: Device) -> None:
    if device.spec.is_host:
        pytest.skip("the host is always initialised")
    code = f"""
import rlcore, torch
device = None
def is_initialized():
    module = torch.get_device_module({device.type!r})
    return module.is_initialized() if hasattr(module, "is_initialized") else None
before = is_initialized()
rlcore.list_devices()
device = rlcore.get_device({device.name!r})
device.count(), device.capabilities(), device.launch.worker_environment([0])
print(before, is_initialized())
"""
    answer = _python(code)
    if answer == "None None":
        pytest.skip(f"torch.{device.type} has no is_initialized()")
    if answer == "True True":
        pytest.skip(f"torch.{device.type} is always initialised")
    assert answer == "False False"


def _seeded(device: Device, seed: int) -> torch.Tensor:
    device.seed(seed)
    return torch.rand(8, device=device.torch_device)


def _python(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()
