"""How the ranks of a group find each other, through a folder or a torch Store, before any library connects them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from rlcore.errors import CollectiveError, CollectiveTimeoutError, InvalidInputError
from rlcore.process.status import boot_id, start_time

_NAME = re.compile(r"[\w.-]+")
_POLL_S = 0.002

_num_met: Counter[tuple[str, str]] = Counter()
"""Groups that this process has joined, by folder and name: the next one must not read the addresses of the last."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others about itself."""

    world_size: int
    library: str
    pid: int
    started: int | None
    """When, by which the process is known from a later one of the same number."""
    network: str
    """Ranks with equal ones share a loopback interface."""
    processes: str
    """Ranks with equal ones can see each other's processes."""


class Meeting:
    """All ranks of a group, met in one place.

    Attributes:
        store: of this group alone, for the collective library.
        cards: of each rank.
    """

    def __init__(
        self, rendezvous: Path | str | Store, name: str, *, rank: int, world_size: int, library: str, timeout_s: float
    ) -> None:
        """Wait for all ranks.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not come.
            CollectiveError: another rank has this one's number, or another idea of the group.
        """
        self._rank = rank
        self._label = f"group {name!r}"
        self._folder = _new_folder(rendezvous, name)
        self.store = self._folder_store(timeout_s) if self._folder else _part_of_store(rendezvous, name, rank)
        self.cards = {rank: _own_card(world_size, library)}
        if self.store.add(f"joined/{rank}", 1) > 1:
            raise CollectiveError(
                f"rank {rank} of {self._label} has joined already through {rendezvous}: two processes were given the "
                "same rank, or a run before has ended there without destroying it; give each run a new folder or name",
                ranks=(rank,),
            )
        try:
            self.store.set(f"card/{rank}", msgspec.json.encode(self.cards[rank]).decode())
            self._read_cards(set(range(world_size)) - {rank}, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self, ended: Iterable[int] = ()) -> None:
        """Leave, also for ranks that have ended without; the last one removes what was written to the folder.

        Notes cannot be read any more.
        """
        del self.store
        if self._folder is None:
            return
        for rank in {self._rank, *ended}:
            self._member(rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank is removing it too, or has just come
            if not list(self._folder.glob("member-*")):
                (self._folder / "store").unlink(missing_ok=True)
                self._folder.rmdir()

    def _folder_store(self, timeout_s: float) -> Store:
        # Torch's own way of removing the file can leave it when two ranks end at once.
        assert self._folder
        self._member(self._rank).touch(mode=0o600)
        store = FileStore(str(self._folder / "store"))
        store.set_timeout(timedelta(seconds=timeout_s))
        return store

    def _member(self, rank: int) -> Path:
        """There as long as the rank takes part."""
        assert self._folder
        return self._folder / f"member-{rank}"

    @property
    def is_one_host(self) -> bool:
        return len({card.network for card in self.cards.values()}) == 1

    def peers(self) -> Mapping[int, Card]:
        """The other ranks."""
        return {rank: card for rank, card in sorted(self.cards.items()) if rank != self._rank}

    def shares_processes_with(self, card: Card) -> bool:
        return card.processes == self.cards[self._rank].processes

    def write(self, key: str, text: str) -> None:
        """Leave a note of this rank."""
        self.store.set(f"{key}/{self._rank}", text)

    def read(self, key: str) -> dict[int, str]:
        """The notes of the other ranks, of those that left one."""
        found = [rank for rank in self.peers() if self.store.check([f"{key}/{rank}"])]
        return {rank: self.store.get(f"{key}/{rank}").decode() for rank in found}

    def _read_cards(self, missing: set[int], timeout_s: float) -> None:
        own = self.cards[self._rank]
        deadline = time.monotonic() + timeout_s
        while missing:
            for rank in [rank for rank in missing if self.store.check([f"card/{rank}"])]:
                card = msgspec.json.decode(self.store.get(f"card/{rank}"), type=Card)
                self._check_same(rank, card, own)
                self.cards[rank] = card
                missing.remove(rank)
            if missing and time.monotonic() > deadline:
                who = ", ".join(map(str, sorted(missing)))
                raise CollectiveTimeoutError(
                    f"rank {self._rank} of {self._label} waited {timeout_s:g} s for rank(s) {who} of {own.world_size}, "
                    "which did not join; check that they were started, and with the same rendezvous and name",
                    ranks=tuple(sorted(missing)),
                )
            time.sleep(_POLL_S if missing else 0)

    def _check_same(self, rank: int, card: Card, own: Card) -> None:
        for what in ("world_size", "library"):
            theirs, ours = getattr(card, what), getattr(own, what)
            if theirs != ours:
                raise CollectiveError(
                    f"{self._label}: rank {rank} was given {what} {theirs!r}, and rank {self._rank} {ours!r}; "
                    "all ranks must be given the same",
                    ranks=(rank,),
                )


def _new_folder(rendezvous: Any, name: str) -> Path | None:
    """A folder for one group, as often as this process has joined one of that name; None where there is a store."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"name of a group must be letters, digits, '_', '.' and '-', got {name!r}")
    if isinstance(rendezvous, Store):
        return None
    if not isinstance(rendezvous, Path | str):
        raise InvalidInputError(f"rendezvous must be a folder or a torch.distributed Store, got {rendezvous!r}")
    place = str(Path(rendezvous).resolve())
    _num_met[place, name] += 1
    folder = Path(place, f"{name}-{_num_met[place, name]}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"rendezvous must be a folder that this rank can write, got {place!r}: {error.strerror}"
        ) from error
    return folder


def _part_of_store(store: Any, name: str, rank: int) -> Store:
    number = store.add(f"rlcore/{name}/num_joined/{rank}", 1)
    return PrefixStore(f"rlcore/{name}/{number}", store)


def _own_card(world_size: int, library: str) -> Card:
    spaces = {space: os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid")}
    return Card(
        world_size=world_size,
        library=library,
        pid=os.getpid(),
        started=start_time(os.getpid()),
        network=f"{boot_id()} {spaces['net']}",
        processes=f"{boot_id()} {spaces['pid']}",
    )
