"""The choice of a transport: their order, and why one cannot be taken or should not be.

It is made from what the two sides say of themselves, before anything is opened.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.engines.weight_sync.endpoint import EndpointInfo
from rlcore.engines.weight_sync.transports.base import Route, Transport
from rlcore.engines.weight_sync.transports.collective import CollectiveTransport
from rlcore.engines.weight_sync.transports.in_place import DirectTransport, LocalTransport
from rlcore.engines.weight_sync.transports.packed import PackedOnHostTransport, PackedTransport

TRANSPORTS: tuple[type[Transport], ...] = (
    LocalTransport,
    DirectTransport,
    PackedTransport,
    CollectiveTransport,
    PackedOnHostTransport,
)
"""In the order in which they are tried."""


def refusal(route: Route, is_on_host: bool, senders: Sequence[EndpointInfo], receivers: Sequence[EndpointInfo]) -> str:
    """Return why a route cannot be taken between these, through the host's memory or not; "" if it can."""
    processes = {one.process for one in senders}
    if route == "local":
        apart = [one for one in receivers if processes != {one.process}]
        return f"{apart[0].device_name} of the receivers is not in one process with every trainer rank" if apart else ""
    if route == "collective":
        return _refusal_of_group(senders, receivers)
    everyone = [*senders, *receivers]
    for what in ("machine", "device"):
        if len({getattr(one, what) for one in everyone}) > 1:
            return f"it shares memory, and these are on more than one {what}"
    if is_on_host:
        return "its staging buffers are on the host anyway" if any(one.is_host for one in senders) else ""
    return next((one.unshared for one in senders if one.unshared), "")


def _refusal_of_group(senders: Sequence[EndpointInfo], receivers: Sequence[EndpointInfo]) -> str:
    """Return why these cannot form one process group: its library takes a device once, and blocks its process."""
    if common := {one.process for one in senders} & {one.process for one in receivers}:
        return f"it takes a process for each, and {len(common)} hold both a trainer rank and a receiver"
    shared = {one.device_uuid for one in senders if not one.is_host} & {one.device_uuid for one in receivers}
    if shared:
        return f"its library takes a device once, and {len(shared)} hold both a trainer rank and a receiver"
    if len({one.machine for one in [*senders, *receivers]}) > 1:
        return "its ranks meet through a folder, and these are on more than one machine"
    return ""


def is_unwise(route: Route, senders: Sequence[EndpointInfo]) -> str:
    """Return why a route that works is not taken unless the caller asks for it; "" if it may be."""
    if route == "direct" and any(one.is_host for one in senders):
        return "it would turn the trainer's weights into shared memory of the host, which cannot be offloaded"
    return ""
