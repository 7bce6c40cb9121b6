"""Runs workers in processes of their own, those of one device in one child of the user's process."""

from __future__ import annotations

import functools
import logging
import os
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from rlcore.engines.launchers.base import HostedProcess, Launcher, LaunchOptions, WorkerPlacement, engine_numbers
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.messages import Kind, WorkerReference
from rlcore.engines.launchers.pending_calls import PendingCall
from rlcore.engines.launchers.runtime_files import new_store
from rlcore.engines.launchers.worker import CurrentCall, WorkerContext
from rlcore.engines.launchers.worker_process import joining, process_for
from rlcore.errors import InvalidInputError, WorkerDiedError
from rlcore.process.network_interface import INTERFACE_VARIABLES, without_chosen
from rlcore.registry import get_device, launch

_log = logging.getLogger(__name__)


class ProcessLauncher(Launcher):
    """Starts workers in child processes: one for each device of this host, or one for each worker that asks for it."""

    gives_processes: ClassVar[bool] = True

    def start(
        self, worker_class: type[Any], placements: Sequence[WorkerPlacement], options: LaunchOptions
    ) -> WorkerGroup:
        number, all_devices = next(engine_numbers), [name for placement in placements for name in placement.devices]
        own = worker_environment(all_devices, owns_process=options.owns_process)
        environment = own | without_chosen(os.environ)
        group = WorkerGroup(options.engine, options.timeout_s, str(new_store()))
        with group.starting():
            for rank, placement in enumerate(placements):
                local, order = in_front(placement.devices) if options.owns_process else ("", {})
                context = WorkerContext(
                    options.engine,
                    rank,
                    len(placements),
                    placement.devices[0],
                    number,
                    placement.devices,
                    local,
                    group.store,
                )
                group.workers.append(start_in_child(worker_class, context, environment | order, options))
        return group


def worker_environment(device_names: list[str], *, owns_process: bool) -> dict[str, str]:
    """Return the variables of a worker process, where the user's own do not say otherwise."""
    environment = dict.fromkeys(INTERFACE_VARIABLES, "lo")
    on_host = all(launch(name).spec.is_host for name in device_names)
    if on_host or not owns_process:  # vLLM sets its own beside an accelerator
        # The workers divide the host's processors: a worker with as many threads as processors slows down the others,
        # also those that only feed an accelerator.
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(device_names)))
    return environment


def in_front(device_names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the name of the first of these devices in a process that numbers them first, and the variable for that.

    The process sees the other devices too, after these: memory that it reads may lie on them.
    """
    kind = device_names[0].partition(":")[0]
    facts = launch(kind)
    first = [get_device(name).index for name in device_names]
    others = [index for index in range(get_device(device_names[0]).count()) if index not in first]
    order = facts.worker_environment(first if facts.spec.visible_devices_rise else [*first, *others])
    return (f"{kind}:0" if order else ""), order


def start_in_child(
    worker_class: type[Any], context: WorkerContext, environment: dict[str, str], options: LaunchOptions
) -> ProcessWorker:
    """Begin to start a worker in the child for its device; return its handle, whose ``started`` tells when it is ready.

    The child is started with ``environment``, unless it runs already for workers of other engines.
    """
    with joining:
        owner = owner_of(context) if options.owns_process else ""
        process = process_for(context.device_name, environment, owner, options.python)
        number, started = process.start(worker_class, context, options.timeout_s)
    return ProcessWorker(worker_class, context, options.timeout_s, process, number=number, started=started)


def owner_of(context: WorkerContext) -> str:
    """Return the name of a worker that has a process of its own."""
    return f"worker {context.rank} of engine {context.number}"


class ProcessWorker:
    """The handle of a worker that has been sent to a process of workers, which may be on another host.

    Args:
        number: of the worker in its process.
        started: ends when the worker is ready.
    """

    def __init__(
        self,
        worker_class: type[Any],
        context: WorkerContext,
        timeout_s: float,
        process: HostedProcess,
        *,
        number: int,
        started: Future[Any],
    ) -> None:
        self.context = context
        self.started = started
        self._worker_class: Any = worker_class
        self._timeout_s = timeout_s
        self._closed: Future[Any] | None = None
        self._process = process
        self._number = number

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def process(self) -> str:
        return self._process.name

    @property
    def is_stopped(self) -> bool:
        return self._process.is_stopped

    @property
    def current(self) -> CurrentCall | None:
        return self._process.current

    def call(self, method: str, *args: object, **kwargs: object) -> Future[Any]:
        """See ``WorkerHandle``. The future raises WorkerDiedError when the process ends first."""
        made = self.prepare(method, args, kwargs, timeout_s=self._timeout_s)()
        self._process.flush()
        return made

    def prepare(
        self,
        method: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        on_event: Callable[[Any], None] | None = None,
        timeout_s: float,
        kind: Kind = "call",
    ) -> Callable[[], Future[Any]]:
        sent = [WorkerReference(arg._number) if isinstance(arg, ProcessWorker) else arg for arg in args]
        pending = PendingCall(self.context, method, timeout_s, returned_type(self._worker_class, method), on_event)
        return self._process.prepare(kind, self._number, (sent, dict(kwargs)), pending)

    def cancel(self, answer: Future[Any]) -> None:
        self._process.cancel(answer)

    def stack(self) -> str:
        return self._process.stack()

    def ask_to_stop(self) -> None:
        if self.started.done() and self.started.exception():
            self._closed = self.started
        else:
            self._closed = self.prepare("close", (), {}, timeout_s=self._timeout_s, kind="close")()
        self._process.forget(self._number)

    def kill(self, because: str) -> None:
        self._process.kill(because)

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if self._closed is not None:
            try:
                error = self._closed.exception(timeout_s)
            except TimeoutError:
                return False
            if error is not None and self._closed is not self.started and not isinstance(error, WorkerDiedError):
                _log.warning("close() failed on %s: %s", self.context.where, error)
        return self._process.join(max(0.0, deadline - time.monotonic()))


@functools.cache
def returned_type(worker_class: Any, method: str) -> Any:
    """Return the annotated type of a worker method's result: the contract by which its answer is decoded.

    It is a base class's where an override leaves the annotation out.
    """
    if "." in method:  # of the user's module
        return Any
    getattr(worker_class, method)  # an AttributeError here says more than one of the worker
    owners = [owner for owner in worker_class.__mro__ if method in vars(owner)]
    try:
        found = (typing.get_type_hints(getattr(owner, method)).get("return", Any) for owner in owners)
        return next((kind for kind in found if kind is not Any), Any)
    except NameError as error:
        raise InvalidInputError(
            f"the annotations of {worker_class.__name__}.{method}() cannot be read: {error}; import the name where "
            "the class is defined, not only under TYPE_CHECKING"
        ) from error
