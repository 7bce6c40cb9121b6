"""The facts that the two sides of a session know of each other, and the round that both still have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.engines.weight_sync.endpoint import EndpointInfo
from rlcore.engines.weight_sync.messages import PlanSummary
from rlcore.engines.weight_sync.planning.manifest import WeightManifest
from rlcore.engines.weight_sync.transports.base import Transport

_STAGING_BYTES, _HOST_STAGING_BYTES = 256 << 20, 8 << 20
"""The largest staging buffer that is chosen: containers often limit a host's shared memory to 64 MiB."""
_SMALLEST_STAGING_BYTES = 1 << 16


@dataclass(frozen=True)
class Agreement:
    """The facts that both sides of a session know of each other; void once a sender or a receiver is another one."""

    key: tuple[Any, ...]
    manifest: WeightManifest
    senders: list[EndpointInfo]
    receivers: list[EndpointInfo]
    summaries: list[PlanSummary]

    @property
    def is_tested(self) -> bool:
        return all(summary.is_tested for summary in self.summaries)

    @property
    def digests(self) -> list[str]:
        return [summary.digest for summary in self.summaries]

    @functools.cached_property
    def fallback(self) -> list[int]:
        """Numbers of the weights that some receiver leaves to its engine's own loader."""
        names = {name for summary in self.summaries for name in summary.fallback}
        return [number for number, weight in enumerate(self.manifest.weights) if weight.name in names]

    def nbytes(self, weights: Sequence[int]) -> int:
        return sum(self.manifest.weights[number].nbytes for number in weights)

    def staging_bytes(self, is_on_host: bool) -> int:
        """Return the size of a staging buffer: a power of two up to twice what one sender gives."""
        most = max(self._of_sender(sender) for sender in range(len(self.senders)))
        is_on_host |= any(one.is_host for one in self.senders)
        largest = _HOST_STAGING_BYTES if is_on_host else _STAGING_BYTES
        size = _SMALLEST_STAGING_BYTES
        while size < min(2 * most, largest):
            size *= 2
        return size

    @property
    def why_unreadable(self) -> str:
        """The reason why a receiver cannot tell what it was sent, so that changes do not do; "" if all can."""
        for one, summary in zip(self.receivers, self.summaries, strict=True):
            if summary.unreadable:
                return f"the receiver on {one.device_name} cannot tell what it was sent: {summary.unreadable}"
        return ""

    def _of_sender(self, sender: int) -> int:
        return sum(summary.needed_bytes[sender] for summary in self.summaries)


@dataclass(frozen=True)
class SentRound:
    """A round whose buckets senders keep, as the base of the next round's changes."""

    round_id: int
    version: int
    kind: type[Transport]
    digests: list[str]
    staging_bytes: int


def why_no_base(
    base: SentRound | None, now: SentRound, kept: Sequence[int | None], agreed: Agreement, held: Sequence[int]
) -> str:
    """Return why changes since the last round do not do; "" if they do.

    Args:
        kept: for each sender the round of which it has kept what it sent; None where it sends nothing.
        held: for each receiver the round of this trainer whose weights it has.
    """
    if all(one is None for one in kept):
        return "no weight goes by plan: the engine's own loader takes all of them, whole"
    if base is None:
        return "there is no base yet: the round before was none with delta=True between these, or it failed"
    if (base.kind, base.digests, base.staging_bytes) != (now.kind, now.digests, now.staging_bytes):
        return f"version {base.version} was sent by another plan or route, or in staging buffers of another size"
    if any(one not in {None, base.round_id} for one in kept):
        return f"a trainer rank has not kept what it sent as version {base.version}"
    for one, round_id in zip(agreed.receivers, held, strict=True):
        if round_id != base.round_id:
            return f"the receiver on {one.device_name} does not hold version {base.version} as this trainer sent it"
    return ""
