"""That capabilities() tells the truth: every member is in it, and what it calls unsupported refuses for that reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from rlcore.conformance.members import IDENTITY
from rlcore.device import Device, DevicePart
from rlcore.errors import UnsupportedError
from rlcore.types import EventHandle, Evidence, IpcHandle, Support

_HANDLE = {
    "exporter": "/nowhere",
    "export_id": "0",
    "payload": b"",
    "storage_bytes": 4,
    "storage_offset_bytes": 0,
    "dtype": "float32",
    "shape": (1,),
    "stride": (1,),
}


def _ipc_handle(device: Device) -> IpcHandle:
    return IpcHandle(device=device.spec.name, device_uuid="", boot_id="", **_HANDLE)  # type: ignore[arg-type]


def _event_handle(device: Device) -> EventHandle:
    return EventHandle(device=device.spec.name, device_uuid="", boot_id="", payload=b"")


def _ones(device: Device) -> torch.Tensor:
    return torch.ones(1, device=device.torch_device)


USES: dict[str, Callable[[Any], Any]] = {
    "memory.info": lambda device: device.memory.info(),
    "memory.stats": lambda device: device.memory.stats(),
    "memory.reset_peak": lambda device: device.memory.reset_peak(),
    "memory.empty_cache": lambda device: device.memory.empty_cache(),
    "memory.pool": lambda device: device.memory.pool("conformance"),
    "memory.host_alloc": lambda device: device.memory.host_alloc(1),
    "memory.host_free": lambda device: device.memory.host_free(device.memory.host_alloc(1)),
    "memory.copy_batch": lambda device: device.memory.copy_batch([_ones(device)], [_ones(device)]),
    "memory.export_ipc": lambda device: device.memory.revoke(device.memory.export_ipc(_ones(device))),
    "memory.import_ipc": lambda device: device.memory.import_ipc(_ipc_handle(device)),
    "memory.revoke": lambda device: device.memory.revoke(_ipc_handle(device)),
    "memory.ledger": lambda device: device.memory.ledger(),
    "streams.new": lambda device: device.streams.new(),
    "streams.current": lambda device: device.streams.current(),
    "streams.use": lambda device: device.streams.use(device.streams.current()),
    "streams.event": lambda device: device.streams.event(),
    "streams.export_event": lambda device: device.streams.export_event(device.streams.event(interprocess=True)),
    "streams.import_event": lambda device: device.streams.import_event(_event_handle(device)),
    "collectives.backend": lambda device: device.collectives.backend,
    "collectives.init_kwargs": lambda device: device.collectives.init_kwargs(),
    "collectives.reduce_ops": lambda device: device.collectives.reduce_ops(),
    "collectives.dtypes": lambda device: device.collectives.dtypes(),
    "profiler.range": lambda device: device.profiler.range("conformance"),
    "profiler.start": lambda device: device.profiler.start("/nowhere/trace.json"),
    "profiler.stop": lambda device: device.profiler.stop(),
}
"""A use of every member. A member that needs another process's handle is given one that no process made."""


def _parts(device: Device) -> list[DevicePart]:
    return [device.memory, device.streams, device.collectives, device.profiler]


@pytest.mark.covers("capabilities")
def test_every_member_has_a_capability_and_every_capability_is_a_member(device: Device) -> None:
    members = {f"{part.name}.{member}" for part in _parts(device) for member in type(part).members}
    limited = {f"identity.{member}" for member in IDENTITY}  # which say it only where they are not native
    assert members <= set(device.capabilities()) <= members | limited
    assert members >= set(USES), "a part left out members that every device has"
    for part in _parts(device):
        for member in type(part).members:
            assert hasattr(type(part), member), f"{part.name}.{member} does not exist"


@pytest.mark.covers("capabilities")
def test_a_capability_says_how_it_is_known_and_why_it_is_not_native(device: Device) -> None:
    for member, how in device.capabilities().items():
        assert how.support in get_args(Support), member
        assert how.evidence in get_args(Evidence), member
        assert how.support == "native" or how.reason.strip(), f"{member} is {how.support} without a reason"


@pytest.mark.covers("capabilities")
def test_capabilities_are_plain_data_and_stay(device: Device) -> None:
    found = device.capabilities()
    assert json.loads(json.dumps({member: dataclasses.asdict(how) for member, how in found.items()}))
    assert device.capabilities() == found


@pytest.mark.covers("capabilities")
@pytest.mark.parametrize("member", USES)
def test_a_member_is_refused_exactly_where_capabilities_say_so_and_for_that_reason(device: Device, member: str) -> None:
    how = device.capabilities()[member]
    try:
        USES[member](device)
    except UnsupportedError as error:
        assert how.support == "unsupported", f"{member} is said to be {how.support}, but: {error}"
        assert error.reason == how.reason
        assert member in error.feature, f"the refusal does not name {member}: {error}"
        assert device.name in error.feature, f"the refusal does not name {device.name}: {error}"
    except Exception as error:  # of a use that the member refuses for what it was given
        assert how.support != "unsupported", f"{member} is said to be unsupported, but raised {error!r}"
    else:
        assert how.support != "unsupported", f"{member} is said to be unsupported, but worked"
