"""The choice of a transport: their order, and why one cannot be taken or should not be.

It is made from what the two sides say of themselves, and from whether receivers could open a sample of each sender's
memory, before anything of the weights is opened.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.engines.weight_sync.endpoint import EndpointInfo
from rlcore.engines.weight_sync.transports.base import Route, Transport
from rlcore.engines.weight_sync.transports.collective import CollectiveTransport
from rlcore.engines.weight_sync.transports.in_place import DirectTransport, LocalTransport
from rlcore.engines.weight_sync.transports.packed import PackedOnHostTransport, PackedTransport
from rlcore.engines.weight_sync.transports.relayed import RelayedTransport

TRANSPORTS: tuple[type[Transport], ...] = (
    LocalTransport,
    DirectTransport,
    PackedTransport,
    CollectiveTransport,
    RelayedTransport,
    PackedOnHostTransport,
)
"""In the order in which they are tried."""


def refusal(
    route: Route,
    is_on_host: bool,
    senders: Sequence[EndpointInfo],
    receivers: Sequence[EndpointInfo],
    unreached: Sequence[str],
    *,
    reached: Sequence[Sequence[bool]],
    meets_anywhere: bool,
) -> str:
    """Return why a route cannot be taken between these; "" if it can.

    Args:
        is_on_host: it goes through the host's memory.
        unreached: ``PlanSummary.unreached`` of each receiver.
        reached: ``PlanSummary.are_reached`` of each receiver.
        meets_anywhere: senders and receivers find each other wherever they are, not only where they share a folder.
    """
    processes = {one.process for one in senders}
    if route == "local":
        apart = [one for one in receivers if processes != {one.process}]
        return f"{apart[0].device_name} of the receivers is not in one process with every trainer rank" if apart else ""
    if route == "collective":
        return _refusal_of_group(senders, receivers, "" if meets_anywhere else next(filter(None, unreached), ""))
    if route == "relayed":
        why = _refusal_of_relays(senders, receivers, reached, meets_anywhere=meets_anywhere)
        return why or _refusal_of_sharing(senders, receivers)
    for one, why in zip(receivers, unreached, strict=True):
        if why:
            return f"it shares memory, and the receiver on {one.device_name} cannot open that of {why}"
    if is_on_host and len({one.device for one in [*senders, *receivers]}) == 1:
        return "its staging buffers are on the host anyway" if any(one.is_host for one in senders) else ""
    return _refusal_of_sharing(senders, receivers)


def _refusal_of_sharing(senders: Sequence[EndpointInfo], receivers: Sequence[EndpointInfo]) -> str:
    """Return why receivers cannot open memory of the senders' devices."""
    if len({one.device for one in [*senders, *receivers]}) > 1:
        return "it shares memory, and these are on more than one kind of device"
    return next((one.unshared for one in senders if one.unshared), "")


def _refusal_of_relays(
    senders: Sequence[EndpointInfo],
    receivers: Sequence[EndpointInfo],
    reached: Sequence[Sequence[bool]],
    *,
    meets_anywhere: bool,
) -> str:
    """Return why trainer ranks cannot pass on what receivers do not reach."""
    for one, own in zip(receivers, reached, strict=True):
        if not any(own):
            return f"the receiver on {one.device_name} can open the memory of no trainer rank"
    if len({one.process for one in senders}) < len(senders):
        return "it takes a process for each trainer rank, and some share one"
    if len({one.machine for one in senders}) > 1 and not meets_anywhere:
        return "its ranks meet through a folder, and they are on several machines"
    return ""


def _refusal_of_group(senders: Sequence[EndpointInfo], receivers: Sequence[EndpointInfo], apart: str) -> str:
    """Return why these cannot form one process group: its library takes a device once, and blocks its process."""
    if common := {one.process for one in senders} & {one.process for one in receivers}:
        return f"it takes a process for each, and {len(common)} hold both a trainer rank and a receiver"
    shared = {one.device_uuid for one in senders if not one.is_host} & {one.device_uuid for one in receivers}
    if shared:
        return f"its library takes a device once, and {len(shared)} hold both a trainer rank and a receiver"
    return f"its ranks meet through a folder, and a receiver does not reach {apart}" if apart else ""


def is_unwise(route: Route, senders: Sequence[EndpointInfo]) -> str:
    """Return why a route that works is not taken unless the caller asks for it; "" if it may be."""
    if route == "direct" and any(one.is_host for one in senders):
        return "it would turn the trainer's weights into shared memory of the host, which cannot be offloaded"
    return ""
