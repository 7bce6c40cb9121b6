"""The trial by which a receiver finds out whether it can open a sender's memory, before a transport is chosen.

Nothing that the two say of themselves tells. Containers of one machine have one boot id, and may or may not see each
other's sockets. So a sender shows memory without a byte, and each receiver opens it as it would open the weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from rlcore.engines.weight_sync.endpoint import EndpointInfo
from rlcore.engines.weight_sync.messages import decoded
from rlcore.engines.weight_sync.transports.exports import Exports
from rlcore.engines.weight_sync.transports.staging_buffers import host_device
from rlcore.errors import RlcoreError, first_line
from rlcore.types import IpcHandle

_TRIAL_S = 5.0
"""The longest that a receiver waits for the answers of all senders to its trial. They answer in milliseconds."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a sender shows, or the reason why it cannot show any."""

    handle: IpcHandle | None = None
    why_not: str = ""


class SampleMemory:
    """The memory of one sender that receivers open for a trial. It is shared while it is shown."""

    def __init__(self) -> None:
        self._exports = Exports(host_device())
        self._handle: IpcHandle | None = None

    def show(self) -> bytes:
        """Return a ``Sample``, encoded."""
        try:
            if self._handle is None:
                self._handle = host_device().memory.export_ipc(torch.empty(0, dtype=torch.uint8))
                self._exports.add([self._handle])
        except RlcoreError as error:
            return msgspec.msgpack.encode(Sample(why_not=first_line(error)))
        return msgspec.msgpack.encode(Sample(handle=self._handle))

    def hide(self, timeout_s: float = 30.0) -> None:
        """Take the memory back, if it is shown; raises StateError when a receiver does not let go."""
        self._handle = None
        self._exports.take_back(timeout_s)


def are_samples_needed(senders: Sequence[EndpointInfo], receivers: Sequence[EndpointInfo]) -> bool:
    """Return True if some sender and receiver are in two processes of one machine: the others need no trial."""
    return any(one.machine == other.machine and one.process != other.process for one in senders for other in receivers)


def why_unreached(
    senders: Sequence[EndpointInfo], receiver: EndpointInfo, samples: Sequence[bytes] | None
) -> list[str]:
    """Return for each sender why ``receiver``, which is in this process, cannot open its memory; "" if it can.

    Args:
        samples: as each sender's ``SampleMemory.show`` returned it; None where they were not asked for.
    """
    deadline = time.monotonic() + _TRIAL_S
    shown = [None] * len(senders) if samples is None else samples
    return [
        _why_unreached(sender, receiver, sample, max(0.0, deadline - time.monotonic()))
        for sender, sample in zip(senders, shown, strict=True)
    ]


def _why_unreached(sender: EndpointInfo, receiver: EndpointInfo, sample: bytes | None, timeout_s: float) -> str:
    if sender.process == receiver.process:
        return ""
    if sender.machine != receiver.machine:
        return "it is on another machine"
    shown = Sample(why_not="it has shown none") if sample is None else decoded(sample, Sample, "sample of memory")
    if shown.handle is None:
        return shown.why_not
    try:
        host_device().memory.import_ipc(shown.handle, timeout_s=timeout_s).close()
    except RlcoreError as error:
        return (
            f"it is on this machine, and a trial to open its memory failed: {first_line(error)}; containers share "
            f"memory if they see one folder as {Path(shown.handle.exporter).parent}"
        )
    return ""
