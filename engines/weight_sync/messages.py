"""The messages that the two sides of a weight sync send each other: plain data as msgpack, checked on arrival."""

from __future__ import annotations

import functools
import hashlib
from typing import ClassVar, Self, TypeVar

import msgspec

from rlcore.decoding import decode
from rlcore.errors import SyncError
from rlcore.types import IpcHandle

T = TypeVar("T")


def decoded(data: bytes | memoryview, kind: type[T], what: str) -> T:
    """Return the ``kind`` that the other side has sent; ``what`` names it in the error.

    Raises:
        SyncError: the bytes are something else.
    """
    return decode(data, kind, what, error=SyncError)


class Message(msgspec.Struct, frozen=True, dict=True):
    """Plain data with a digest, by which two sides compare it without sending it."""

    label: ClassVar[str]
    """Its name in errors."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what ``to_bytes`` wrote; raises SyncError for anything else."""
        return decoded(data, cls, f"{cls.label} of a weight sync")

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of ``to_bytes()``, in hexadecimal: fields have one order, and numbers one encoding."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a receiver's planning for one manifest."""

    digest: str
    """Digest of the receiver's plan; receivers with equal ones are sent the same bytes."""
    needed_bytes: list[int]
    """Bytes from each sender, in the senders' dtypes."""
    fallback: list[str]
    """Weights that only the engine's own loader can place."""
    is_tested: bool
    """The plan has passed its self-test, or needs none."""
    unreached: str = ""
    """The reason why this receiver cannot have all weights by opening the senders' memory; "" if it can."""
    are_reached: list[bool] = []
    """For each sender True if this receiver can open its memory."""
    unreadable: str = ""
    """The reason why what was sent cannot be read back here, so that changes alone do not do; "" if it can."""


class OfferedTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The position of one tensor in the memory that is offered."""

    number: int
    """The tensor's key in ``Sender.tensors``."""
    handle: int
    """Index in ``Offer.handles``."""
    offset_bytes: int
    numel: int
    dtype: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of one sender, to be opened by a receiver; in the sender's own process it needs no handles."""

    epoch: str
    handles: list[IpcHandle] | None = None
    """Handles of blocks of memory, as bytes; None: other processes cannot open it."""
    tensors: list[OfferedTensor] = []
    """Tensors that are not empty."""


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket that a sender has to pack into a slot, or a receiver to unpack from it."""

    round_id: int
    digest: str
    """Digest of the plan."""
    slot_bytes: int
    bucket: int
    slot: int
    is_checked: bool
    """The bucket carries a checksum."""
    is_kept: bool = False
    """The sender keeps a copy of the bucket, as the base for the changes of a later round."""
    base: int = 0
    """The round since which the bucket's changes are told; 0: it is told whole."""
    waits_by_event: bool = False
    """The two sides' devices wait for each other (``SlotEvents``), not each process for its own device."""
    session: str = ""
    """The name of the session whose events they are: a sender has others for the receivers of another one."""
    sender: int = 0
    """The position among all of the sender whose bucket it is, for receivers."""
    holder: int = 0
    """The position of the sender in whose slot it lies: another one where it was relayed."""

    @property
    def is_size_known(self) -> bool:
        """Its receivers know the size of its message beforehand: all of the bucket, and not changes alone."""
        return not self.base


class Reception(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket that comes to a member of a process group."""

    packing: Packing
    source: int
    """The rank that it comes from: the sender's, or that of a receiver of this host that has passed it on."""
    relays: list[int] = []
    """The ranks that it is passed on to."""


class Relaying(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one trainer rank in a step of the route "relayed": it packs its slot, or is sent what is in it."""

    rendezvous: str
    slot_bytes: int
    slot: int
    packing: Packing | None = None
    """The bucket that it packs; None: ``source`` sends it one."""
    targets: list[int] = []
    """The ranks that it sends the bucket to, which hold it for receivers of theirs."""
    source: int = -1


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """All buckets that a sender sends through a process group, in order."""

    rendezvous: str
    """Folder of the group."""
    packings: list[Packing]
    receivers: list[list[int]]
    """For each packing the ranks that receive it."""
