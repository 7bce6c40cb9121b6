"""A plan as its receiver carries it out: the tensors it writes, and what of it is done in the present round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch import Tensor

from rlcore.engines.weight_sync.planning.copies import Mover
from rlcore.engines.weight_sync.transports.slabs import Bucket, Piece, fill, unpacking


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver has found out about a manifest."""

    digest: str
    """Of its plan; receivers with equal ones are sent the same bytes."""
    needed_bytes: list[int]
    """From each sender, in the senders' dtypes."""
    fallback: list[str]
    """Weights that only the engine's own loader can place."""
    is_proven: bool


def source_name(sender: int, number: int | str) -> str:
    """Of a sender's tensor, among those of all senders."""
    return f"{sender}/{number}"


class Planned:
    """The pieces of a plan by sender; how they are cut and made ready is kept from round to round."""

    def __init__(
        self,
        digest: str,
        pieces: Sequence[list[Piece]],
        destinations: Callable[[], Mapping[str, Tensor]],
        *,
        read_bytes: int,
        is_scratch: bool,
    ) -> None:
        self.digest = digest
        self.pieces = pieces
        self.destinations = destinations
        self.read_bytes = read_bytes
        """Of the senders' tensors, in their dtypes."""
        self.is_scratch = is_scratch
        """It writes nothing that the engine uses."""
        self._slot_bytes = 0
        self._buckets: list[list[Bucket]] = []
        self._movers: dict[tuple[int, int], Mover] = {}
        self._whole: Mover | None = None
        self.forget_round()

    def forget_round(self) -> None:
        self.done: set[tuple[int, int]] = set()
        """(sender, bucket) that have come."""
        self.is_pulled = False
        self.is_wanted = not self.is_scratch
        """The round is not complete without it."""

    def want_again(self) -> None:
        """What has come of it, perhaps for another purpose, does not count."""
        self.forget_round()
        self.is_wanted = True

    def let_go(self) -> None:
        """Hold none of the tensors that it has copied between; the next copies are made ready anew."""
        self._movers, self._whole = {}, None

    def buckets(self, slot_bytes: int) -> list[list[Bucket]]:
        """Of each sender, cut as the senders cut them."""
        if self._slot_bytes != slot_bytes:
            self._buckets = [fill(own, slot_bytes) for own in self.pieces]
            self._movers, self._slot_bytes = {}, slot_bytes
        return self._buckets

    def unpacker(self, sender: int, bucket: int) -> Mover:
        """From a slot to the destinations."""
        if (sender, bucket) not in self._movers:
            self._movers[sender, bucket] = Mover(unpacking(self._buckets[sender][bucket]))
        return self._movers[sender, bucket]

    def whole(self) -> Mover:
        """From all senders' own tensors, by their ``source_name``, to the destinations."""
        if self._whole is None:
            named = [
                piece._replace(source=source_name(sender, piece.source))
                for sender, own in enumerate(self.pieces)
                for piece in own
            ]
            self._whole = Mover(named)
        return self._whole

    def missing(self) -> int:
        """Buckets that have not come in this round."""
        if self.is_pulled or not self.is_wanted or not self.read_bytes:
            return 0
        return sum(map(len, self._buckets)) - len(self.done) if self._buckets else 1
