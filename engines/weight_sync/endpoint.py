"""The process, machine and device of a sender or a receiver, as the other side is told."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

import msgspec

from rlcore import __version__
from rlcore.device import Device
from rlcore.errors import SyncError
from rlcore.process.status import boot_id, process_name


class EndpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sender or a receiver, described by plain data."""

    epoch: str
    """Unlike that of any other sender or receiver: after a restart it is another one."""
    process: str
    """Its ``process_name``."""
    machine: str
    """The boot id of its host."""
    device: str
    """Registered name of the kind of device."""
    device_name: str
    device_uuid: str
    is_host: bool
    """The device is the machine itself."""
    unshared: str
    """The reason why other processes cannot open the device's memory; "" if they can."""
    rlcore: str
    """The version of rlcore there."""


def endpoint_info(device: Device) -> EndpointInfo:
    """Describe a new sender or receiver of this process, whose tensors are on ``device``."""
    limit = device.memory.limits().get("export_ipc")
    return EndpointInfo(
        epoch=secrets.token_hex(8),
        process=process_name(os.getpid()),
        machine=boot_id(),
        device=device.spec.name,
        device_name=device.name,
        device_uuid=device.properties().uuid,
        is_host=device.spec.is_host,
        unshared=limit.reason if limit is not None and limit.support == "unsupported" else "",
        rlcore=__version__,
    )


def check_versions(ends: Iterable[EndpointInfo]) -> None:
    """Raise SyncError unless all ends have one version of rlcore: another one may cut weights into other buckets."""
    versions = sorted({one.rlcore for one in ends})
    if len(versions) > 1:
        raise SyncError(f"the processes of this sync have rlcore {' and '.join(versions)}; install one version in all")
