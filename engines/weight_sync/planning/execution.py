"""The execution of a plan: its copies, bound to the tensors of this round, and a record of the buckets that came."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlcore.engines.weight_sync.planning.bound_tensors import BoundTensors
from rlcore.engines.weight_sync.planning.buckets import Bucket, BucketPiece, buckets_of, repacking, unpacking
from rlcore.engines.weight_sync.planning.quantized import QuantizedExecution
from rlcore.errors import SyncError
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece


def source_name(sender: int, number: int | str) -> str:
    """Return the name of a sender's tensor among those of all senders."""
    return f"{sender}/{number}"


class PlanExecution:
    """One plan of a receiver, by sender: its buckets, its copies and what has come of it in this round.

    Buckets and copies are kept from round to round.

    Args:
        digest: the plan's.
        pieces: for each sender what it gives.
        destinations: returns the tensors that are written, by name.
        read_bytes: bytes that are read of the senders' tensors, in their dtypes.
        is_scratch: it writes nothing that the engine uses.
        quantized: names of the destinations that are quantised on the way.
    """

    def __init__(
        self,
        digest: str,
        pieces: Sequence[list[BucketPiece]],
        destinations: Callable[[], Mapping[str, Tensor]],
        *,
        read_bytes: int,
        is_scratch: bool,
        quantized: Container[str] = (),
    ) -> None:
        self._quantized = quantized
        self.digest = digest
        self.pieces = pieces
        self.destinations = destinations
        self.read_bytes = read_bytes
        self.is_scratch = is_scratch
        self._slot_bytes = 0
        self._buckets: list[list[Bucket]] = []
        self._unpackers: dict[tuple[int, int], CopyExecution] = {}
        self._repackers: dict[tuple[int, int], CopyExecution] = {}
        self._whole: CopyExecution | None = None
        self._quantizing: QuantizedExecution | None = None
        self.forget_round()

    def forget_round(self) -> None:
        self.done: set[tuple[int, int]] = set()
        """(sender, bucket) that have come."""
        self.is_pulled = False
        self.is_wanted = not self.is_scratch
        """The round is not complete without it."""

    def want_again(self) -> None:
        """Expect all of it once more: what has come, perhaps for another purpose, does not count."""
        self.forget_round()
        self.is_wanted = True

    def let_go(self) -> None:
        """Hold none of the tensors between which it has copied; the next copies are made ready anew."""
        self._unpackers, self._repackers, self._whole, self._quantizing = {}, {}, None, None

    def buckets(self, slot_bytes: int) -> list[list[Bucket]]:
        """Return the buckets of each sender, cut as the senders cut them.

        Raises:
            SyncError: buckets of another cut have come in this round; the two could not be counted together.
        """
        if self._slot_bytes != slot_bytes:
            if self.done:
                raise SyncError(
                    f"a bucket came that was cut for slots of {slot_bytes} bytes, and those before it for "
                    f"{self._slot_bytes}"
                )
            self._buckets = [buckets_of(own, slot_bytes) for own in self.pieces]
            self._unpackers, self._repackers, self._slot_bytes = {}, {}, slot_bytes
        return self._buckets

    def bucket(self, slot_bytes: int, sender: int, number: int) -> Bucket:
        """Return one of the ``buckets``; raises SyncError if the plan has no such."""
        buckets = self.buckets(slot_bytes)
        if sender not in range(len(buckets)) or number not in range(len(buckets[sender])):
            raise SyncError(f"plan {self.digest} has no bucket {number} of sender {sender}")
        return buckets[sender][number]

    def unpacker(self, sender: int, bucket: int) -> CopyExecution:
        """Return the copies from a slot to the destinations."""
        if (sender, bucket) not in self._unpackers:
            self._unpackers[sender, bucket] = CopyExecution(unpacking(self._buckets[sender][bucket]))
        return self._unpackers[sender, bucket]

    def repacker(self, sender: int, bucket: int) -> CopyExecution:
        """Return the copies from the destinations back into a slot."""
        if (sender, bucket) not in self._repackers:
            self._repackers[sender, bucket] = CopyExecution(repacking(self._buckets[sender][bucket]))
        return self._repackers[sender, bucket]

    def whole(self) -> CopyExecution:
        """Return the copies from all senders' own tensors, by their ``source_name``, to the destinations."""
        if self._whole is None:
            self._whole = CopyExecution([one for one in self._named() if one.destination not in self._quantized])
        return self._whole

    def quantizing(self) -> QuantizedExecution:
        """Return the copies, from the same tensors, to what the engine has in float8."""
        if self._quantizing is None:
            quantized = (one for one in self._named() if one.destination in self._quantized)
            self._quantizing = QuantizedExecution([(one.source, one.destination, one.copy) for one in quantized])
        return self._quantizing

    def _named(self) -> Iterator[BucketPiece]:
        for sender, own in enumerate(self.pieces):
            yield from (piece._replace(source=source_name(sender, piece.source)) for piece in own)

    def missing(self) -> int:
        """Return how many buckets have not come in this round."""
        if self.is_pulled or not self.is_wanted or not self.read_bytes:
            return 0
        return sum(map(len, self._buckets)) - len(self.done) if self._buckets else 1


class CopyExecution:
    """The copies of one list of pieces: made ready by the first run, and again only where a tensor has moved."""

    def __init__(self, pieces: Sequence[BucketPiece]) -> None:
        sources: dict[Any, int] = {}
        destinations: dict[str, int] = {}
        self._pieces = [
            StridedPiece(
                sources.setdefault(piece.source, len(sources)),
                destinations.setdefault(piece.destination, len(destinations)),
                *piece.copy,
            )
            for piece in pieces
        ]
        self._from, self._to = BoundTensors(list(sources)), BoundTensors(list(destinations))
        self._copies: StridedCopies | None = None

    def run(self, sources: Mapping[Any, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Queue all copies on the current stream.

        Args:
            sources: by the pieces' ``source``. The very mapping of the last run says that no tensor has moved.
            destinations: by the pieces' ``destination``; likewise.
        """
        if not self._pieces:
            return
        have_moved = [self._from.find(sources), self._to.find(destinations)]
        copies, self._copies = self._copies, None  # they are kept only if they could be made ready
        if copies is None:
            copies = StridedCopies(self._pieces, self._from.tensors, self._to.tensors)
        elif any(have_moved):
            copies.bind(self._from.tensors, self._to.tensors)
        self._copies = copies
        copies.run()
