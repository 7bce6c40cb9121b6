"""The rendezvous of a group: its ranks find each other through a folder or a torch Store, before they connect."""

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

from rlcore._torch_private import FileStore, PrefixStore, Store, TCPStore
from rlcore.deadline import begin
from rlcore.errors import CollectiveError, CollectiveTimeoutError, InvalidInputError
from rlcore.process.status import boot_id, start_time
from rlcore.settings import is_debugging

_NAME = re.compile(r"[\w.-]+")
_POLL_S = 0.002
_ANSWER_S = 5.0
"""How long a store on another host has for an answer."""

_num_joined: Counter[tuple[str, str]] = Counter()
"""Groups that this process has joined, by folder and name. The next one must not read the addresses of the last."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a rank publishes about itself."""

    world_size: int
    library: str
    pid: int
    started: int | None
    """Start time, which tells the process from a later one with the same pid."""
    network: str
    """Ranks with an equal value share a loopback interface."""
    processes: str
    """Ranks with an equal value can see each other's processes."""
    is_debugging: bool


class Rendezvous:
    """All ranks of a group, and the store that they share.

    Attributes:
        store: of this group alone, for the collective library.
        rank: of this process.
        infos: by rank.
    """

    def __init__(
        self, rendezvous: Path | str | Store, name: str, *, rank: int, world_size: int, library: str, timeout_s: float
    ) -> None:
        """Wait for all ranks.

        Raises:
            CollectiveTimeoutError: naming the ranks that did not come.
            CollectiveError: another rank has this one's number, or another idea of the group.
        """
        self.rank = rank
        self._label = f"group {name!r}"
        self._folder = _new_folder(rendezvous, name)
        self.store = self._folder_store(timeout_s) if self._folder else _part_of_store(rendezvous, name, rank)
        self._is_cut = False
        self.infos = {rank: _own_info(world_size, library)}
        if self.store.add(f"joined/{rank}", 1) > 1:
            raise CollectiveError(
                f"rank {rank} of {self._label} has joined already through {rendezvous}: two processes were given the "
                "same rank, or a run before has ended there without destroying it; give each run a new folder or name",
                ranks=(rank,),
            )
        try:
            self.store.set(f"info/{rank}", msgspec.json.encode(self.infos[rank]).decode())
            self._read_infos(set(range(world_size)) - {rank}, timeout_s)
        except BaseException:
            self.close()
            raise
        self._is_elsewhere = not self.is_one_host and _is_over_network(self.store)

    def close(self, ended: Iterable[int] = ()) -> None:
        """Leave, also in the name of the ranks in ``ended``; the last rank removes what was written to the folder.

        Notes cannot be read any more.
        """
        del self.store
        if self._folder is None:
            return
        for rank in {self.rank, *ended}:
            self._member(rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank is removing it too, or has just come
            if not list(self._folder.glob("member-*")):
                (self._folder / "store").unlink(missing_ok=True)
                self._folder.rmdir()

    def _folder_store(self, timeout_s: float) -> Store:
        # Torch's own way of removing the file can leave it when two ranks end at once.
        assert self._folder
        self._member(self.rank).touch(mode=0o600)
        store = FileStore(str(self._folder / "store"))
        store.set_timeout(timedelta(seconds=timeout_s))
        return store

    def _member(self, rank: int) -> Path:
        """Return the file that exists as long as the rank takes part."""
        assert self._folder
        return self._folder / f"member-{rank}"

    @property
    def is_one_host(self) -> bool:
        return len({info.network for info in self.infos.values()}) == 1

    def peers(self) -> Mapping[int, RankInfo]:
        """Return the facts about the other ranks, by rank."""
        return {rank: info for rank, info in sorted(self.infos.items()) if rank != self.rank}

    def shares_processes_with(self, info: RankInfo) -> bool:
        return info.processes == self.infos[self.rank].processes

    def write(self, key: str, text: str) -> None:
        """Publish a note of this rank."""
        if self._is_there():
            self.store.set(f"{key}/{self.rank}", text)
            self.store.set(key, "written")

    def read(self, key: str) -> dict[int, str]:
        """Return the notes of the other ranks, of those that wrote one; none once a far store does not answer."""
        if not self._is_there():
            return {}
        if not self._is_elsewhere:
            return self._read(key)
        thread, outcomes = begin(lambda: self._read(key))
        thread.join(_ANSWER_S)
        if not outcomes:  # over a link that is down torch waits without end, and the thread has the store's lock
            self._is_cut = True
            return {}
        return outcomes[0].get()

    def _read(self, key: str) -> dict[int, str]:
        if not self.store.check([key]):  # one question, however many ranks there are
            return {}
        found = [rank for rank in self.peers() if self.store.check([f"{key}/{rank}"])]
        return {rank: self.store.get(f"{key}/{rank}").decode() for rank in found}

    def _is_there(self) -> bool:
        """Return False where somebody has removed the file, or a link is cut: torch would wait until the timeout."""
        return not self._is_cut and (self._folder is None or (self._folder / "store").exists())

    def _read_infos(self, missing: set[int], timeout_s: float) -> None:
        own = self.infos[self.rank]
        deadline = time.monotonic() + timeout_s
        while missing:
            for rank in [rank for rank in missing if self.store.check([f"info/{rank}"])]:
                info = msgspec.json.decode(self.store.get(f"info/{rank}"), type=RankInfo)
                self._check_same(rank, info, own)
                self.infos[rank] = info
                missing.remove(rank)
            if missing and time.monotonic() > deadline:
                who = ", ".join(map(str, sorted(missing)))
                raise CollectiveTimeoutError(
                    f"rank {self.rank} of {self._label} waited {timeout_s:g} s for rank(s) {who} of {own.world_size}, "
                    "which did not join; check that they were started, and with the same rendezvous and name",
                    ranks=tuple(sorted(missing)),
                )
            time.sleep(_POLL_S if missing else 0)

    def _check_same(self, rank: int, info: RankInfo, own: RankInfo) -> None:
        for what in ("world_size", "library"):
            theirs, ours = getattr(info, what), getattr(own, what)
            if theirs != ours:
                raise CollectiveError(
                    f"{self._label}: rank {rank} was given {what} {theirs!r}, and rank {self.rank} {ours!r}; "
                    "all ranks must be given the same",
                    ranks=(rank,),
                )


def _new_folder(rendezvous: object, name: str) -> Path | None:
    """Return a new folder for each group of that name that this process joins; None where ``rendezvous`` is a store."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"name of a group must be letters, digits, '_', '.' and '-', got {name!r}")
    if isinstance(rendezvous, Store):
        return None
    if not isinstance(rendezvous, Path | str):
        raise InvalidInputError(f"rendezvous must be a folder or a torch.distributed Store, got {rendezvous!r}")
    place = str(Path(rendezvous).resolve())
    _num_joined[place, name] += 1
    folder = Path(place, f"{name}-{_num_joined[place, name]}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"rendezvous must be a folder that this rank can write, got {place!r}: {error.strerror}"
        ) from error
    return folder


def _is_over_network(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _part_of_store(store: Any, name: str, rank: int) -> Store:
    number = store.add(f"rlcore/{name}/num_joined/{rank}", 1)
    return PrefixStore(f"rlcore/{name}/{number}", store)


def _own_info(world_size: int, library: str) -> RankInfo:
    spaces = {space: os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid")}
    return RankInfo(
        world_size=world_size,
        library=library,
        pid=os.getpid(),
        started=start_time(os.getpid()),
        network=f"{boot_id()} {spaces['net']}",
        processes=f"{boot_id()} {spaces['pid']}",
        is_debugging=is_debugging(),
    )
