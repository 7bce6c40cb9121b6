"""Where a sender or a receiver is, and by which routes the one can reach the other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from rlcore.device import Device
from rlcore.errors import SyncError
from rlcore.process.status import boot_id, pid_namespace, start_time

Route = Literal["local", "direct", "packed", "collective"]
ROUTES: tuple[Route, ...] = ("local", "direct", "packed", "collective")

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Of a sender or a receiver, as plain data."""

    epoch: str
    """Of this very sender or receiver: after a restart it is another one."""
    process: str
    machine: str
    device: str
    """Registered name of the kind of device."""
    device_name: str
    device_uuid: str
    is_host: bool
    """The device is the machine itself."""
    unshared: str
    """Why other processes cannot open its memory; "" if they can."""


def place_of(device: Device) -> Place:
    """Of a new sender or receiver in this process."""
    pid = os.getpid()
    limit = device.memory.limits().get("export_ipc")
    return Place(
        epoch=secrets.token_hex(8),
        process=f"{boot_id()}/{pid_namespace()}/{pid}/{start_time(pid)}",
        machine=boot_id(),
        device=device.spec.name,
        device_name=device.name,
        device_uuid=device.properties().uuid,
        is_host=device.spec.is_host,
        unshared=limit.reason if limit is not None and limit.support == "unsupported" else "",
    )


def decoded(data: bytes, kind: type[T], what: str) -> T:
    """What the other side has sent.

    Raises:
        SyncError: it is something else.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, TypeError) as error:
        raise SyncError(f"these {len(data)} bytes are no {what}: {error}") from error


def refusal(route: Route, is_on_host: bool, senders: Sequence[Place], receivers: Sequence[Place]) -> str:
    """Why a route cannot be taken between these, through memory of the host or not, or ""."""
    processes = {place.process for place in senders}
    if route == "local":
        apart = [place for place in receivers if processes != {place.process}]
        return f"{apart[0].device_name} of the receivers is not in one process with every trainer rank" if apart else ""
    if route == "collective":
        return _meeting(senders, receivers)
    everyone = [*senders, *receivers]
    for what in ("machine", "device"):
        if len({getattr(place, what) for place in everyone}) > 1:
            return f"it shares memory, and these are on more than one {what}"
    if is_on_host:
        return "its slabs are on the host anyway" if any(place.is_host for place in senders) else ""
    return next((place.unshared for place in senders if place.unshared), "")


def _meeting(senders: Sequence[Place], receivers: Sequence[Place]) -> str:
    """A collective library takes a device once, and blocks its process."""
    if common := {place.process for place in senders} & {place.process for place in receivers}:
        return f"it takes a process for each, and {len(common)} hold both a trainer rank and a receiver"
    shared = {place.device_uuid for place in senders if not place.is_host} & {place.device_uuid for place in receivers}
    if shared:
        return f"its library takes a device once, and {len(shared)} hold both a trainer rank and a receiver"
    if len({place.machine for place in [*senders, *receivers]}) > 1:
        return "its ranks meet through a folder, and these are on more than one machine"
    return ""


def is_unwise(route: Route, senders: Sequence[Place]) -> str:
    """Why a route that works is not taken unless it is asked for, or ""."""
    if route == "direct" and any(place.is_host for place in senders):
        return "it would turn the trainer's weights into shared memory of the host, which cannot be offloaded"
    return ""
