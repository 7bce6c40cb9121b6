"""Standalone process groups: any processes can form one, beside torch's default group or without it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from rlcore._torch_private import ProcessGroup, Store
from rlcore.collectives.connecting import Connecting
from rlcore.collectives.operations import Operations
from rlcore.collectives.peers import PeerMonitor
from rlcore.collectives.process_group import TorchGroups
from rlcore.collectives.rendezvous import Rendezvous
from rlcore.device import Device
from rlcore.errors import CollectiveError, InvalidInputError, StateError, UnsupportedError
from rlcore.registry import get_device

_DESTROY_WAIT_S = 5.0
"""``destroy()`` waits so long for ranks that do not come."""

_formed: set[Group] = set()
"""The groups of this process that are alive. A program that ends lets go of its variables before ``atexit``."""
_inherited: set[Group] = set()
"""The groups of a parent that forked. They are kept: to free one would wait for threads that only the parent has."""


def _leave_to_parent() -> None:
    _inherited.update(_formed)
    _formed.clear()  # the end of a child is not that of the rank


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _leave_at_exit() -> None:
    for group in list(_formed):
        group._leave_at_exit()


def new_group(
    device: Device | torch.device | str | None,
    *,
    rank: int,
    world_size: int,
    rendezvous: Path | str | Store,
    timeout_s: float = 300.0,
    is_high_priority: bool = False,
    name: str = "group",
) -> Group:
    """Form a group; all ranks call this together. The default group of torch.distributed is left as it is.

    Args:
        device: this rank's device, its name, or a torch.device. Tensors on it go through its collective library, host
            tensors through gloo.
        rendezvous: a folder that all ranks see and nobody else can write, made if absent; or a torch Store.
        timeout_s: for forming the group, and for each operation.
        is_high_priority: the library's kernels run on a stream that goes before others.
        name: the same on all ranks; of groups that share a rendezvous at one time, each has its own.

    Raises:
        InvalidInputError: a rank, world size, name, timeout or folder outside what is accepted.
        UnsupportedError: the library has no high-priority streams, or is not there.
        CollectiveTimeoutError: some ranks did not come; they are named.
        CollectiveError: a rank was given twice, or ranks were told different world sizes or libraries.
    """
    bound = cast(Device, device) if hasattr(device, "collectives") else get_device(cast("str", device))
    if type(world_size) is not int or world_size < 1:
        raise InvalidInputError(
            f"world_size of group {name!r} must be a whole number of at least 1, got {world_size!r}"
        )
    if type(rank) is not int or not 0 <= rank < world_size:
        raise InvalidInputError(
            f"rank of group {name!r} must be 0 to {world_size - 1} for a world_size of {world_size}, got {rank!r}"
        )
    bound.collectives.init_kwargs(timeout_s=timeout_s, is_high_priority=is_high_priority)  # refuses before others wait
    options = {"rank": rank, "world_size": world_size, "timeout_s": timeout_s, "is_high_priority": is_high_priority}
    return Group(bound, rendezvous, options | {"name": name})


class Group(Operations):
    """Ranks with collective operations on tensors. All ranks call every operation, in the same order.

    Operations on host tensors end before they return, within the group's timeout. Those on device tensors are queued
    on the current stream, as in torch.distributed, and the library's watchdog ends them.
    After an error the group can only be destroyed or rebuilt.
    """

    def __init__(self, device: Device, rendezvous: Path | str | Store, options: dict[str, Any]) -> None:
        self.device = device
        self.rank: int = options["rank"]
        self.world_size: int = options["world_size"]
        self.name: str = options["name"]
        self._rendezvous = rendezvous
        self._options = options
        self._timeout_s: float = options["timeout_s"]
        cpu = get_device("cpu")
        self._host = device if device.torch_device == cpu.torch_device else cpu
        self._groups: TorchGroups | None = None
        self._has_sent = False
        self._form()

    def _form(self) -> None:
        rendezvous = Rendezvous(
            self._rendezvous,
            self.name,
            rank=self.rank,
            world_size=self.world_size,
            library=self.device.collectives.backend,
            timeout_s=self._timeout_s,
        )
        self._error = ""
        self._agreed = set()
        self._is_debugging = any(info.is_debugging for info in rendezvous.infos.values())
        self._peers = PeerMonitor(rendezvous, repr(self))
        try:
            self._peers.check_alive()
            self._groups = self._connected(rendezvous)
            if self._groups.connect is not None:
                self._peers.wait(Connecting(self._groups.connect), "forming", self._timeout_s)
            listener = self._groups.gloo_listener()
            if listener:
                listener.wait_until_connected(self._timeout_s)
            self.barrier()  # none may leave while another still connects
            if listener:
                listener.close()
        except BaseException as error:
            self._fail(repr(error))
            self._abandon()
            raise
        _formed.add(self)

    def _connected(self, rendezvous: Rendezvous) -> TorchGroups:
        options = self._options | {"is_one_host": rendezvous.is_one_host}
        try:
            return TorchGroups(self._host, self.device, rendezvous.store, options)
        except UnsupportedError:  # a RuntimeError too, which other ranks did not cause
            raise
        except RuntimeError as error:
            raise self._peers.explain(error, "forming") from error

    @property
    def process_group(self) -> Any:
        """The ``torch.distributed.ProcessGroup``, for ``group=`` of torch's functions and of operators.

        Name other ranks by ``group_src=`` and ``group_dst=``. Do not keep it beyond ``destroy()``.
        """
        return self._usable("process_group").for_device

    @property
    def is_alive(self) -> bool:
        """True while the group is formed and not destroyed."""
        return self._groups is not None

    # ------------------------------------------------------------------------------------------- life

    def destroy(self) -> None:
        """Release connections, threads and device memory. All ranks call it.

        A rank waits some seconds for the others to finish their last operation; one of a failed group does not.

        Raises:
            StateError: it was destroyed before.
        """
        if self._groups is None:
            raise StateError(f"{self!r} was destroyed already; rebuild() forms it again")
        if not self._error:
            with contextlib.suppress(CollectiveError):
                self.barrier(timeout_s=min(_DESTROY_WAIT_S, self._timeout_s))
        self._abandon()

    def _abandon(self) -> None:
        _formed.discard(self)
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.close(is_broken=bool(self._error))
        self._peers.close()

    def _leave_at_exit(self) -> None:
        """Tell the others before connections close, for which they would blame each other."""
        error = getattr(sys, "last_value", None)  # what ended the program, where that was an error
        self._error = "its process ended"
        self._peers.notify_failure("" if error is None else f"by {error!r}", is_end=True)
        with contextlib.suppress(Exception):
            self._abandon()

    def rebuild(self) -> None:
        """Form the group again after ``destroy()``; all ranks call it together. Raises as ``new_group`` does."""
        if self.is_alive:
            raise StateError(f"{self!r} is alive; destroy() it before rebuild()")
        self._form()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(repr(error))  # the other ranks may be in other code: do not wait for them
        if self.is_alive:
            self.destroy()

    def __repr__(self) -> str:
        return f"group {self.name!r} (rank {self.rank} of {self.world_size}, {self.device.name})"

    # ------------------------------------------------------------------------------------------- work

    @contextlib.contextmanager
    def _operation(self, what: str, among: str = "all") -> Iterator[None]:
        self._has_sent = False
        self._peers.begin(among)
        try:
            yield
        except CollectiveError:
            raise  # the other ranks have it too, or know
        except BaseException as error:
            if self._groups is not None and not self._error:
                why = f"{type(error).__name__}: {error}"
                if self._has_sent:
                    self._fail(f"{what}: {why}")
                else:
                    self._peers.notify_refusal(why)
            raise

    def _run(
        self,
        what: str,
        tensor: Tensor,
        start: Callable[[Any], Any],
        *,
        peer: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start work on the group that serves ``tensor``, and wait for it as that kind of tensor asks."""
        groups = self._usable(what)
        is_on_host = self._is_on_host(tensor)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._has_sent = True
            work = self._started(what, start, groups.for_host if is_on_host else groups.for_device, peer)
            if not is_on_host:
                work.wait()
            elif peer is None:
                self._peers.wait(work, what, timeout_s)
            else:
                self._peers.wait_for(peer, work, what, timeout_s)
        except BaseException as error:  # Ctrl-C too: the other ranks' operations no longer match ours
            self._fail(f"{what}: {str(error) or type(error).__name__}")
            if peer is not None and is_on_host:
                groups.break_connections()  # or the thread that waits for the peer would wait on
            raise

    def _fail(self, why: str) -> None:
        self._error = self._error or why
        self._peers.notify_failure(why)

    def _started(self, what: str, start: Callable[[Any], Any], group: ProcessGroup, peer: int | None) -> Any:
        try:
            return start(group)
        except RuntimeError as error:  # work of all ranks has not touched the network yet
            raise self._peers.explain(error, what, () if peer is not None else (self.rank,)) from error

    def _usable(self, what: str) -> TorchGroups:
        if self._groups is None:
            raise StateError(f"{what} of {self!r}, which was destroyed; call rebuild() on all ranks first")
        if self._error:
            raise StateError(
                f"{what} of {self!r}, which has failed ({self._error}); call destroy(), then rebuild() on all ranks"
            )
        return self._groups
