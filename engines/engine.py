"""The base of both engines: builds workers on devices, moves its parts between device and host, closes.

An engine lives in the user's process; its executors hold one full set of weights each, over workers that own one
device each.
"""

from __future__ import annotations

import contextlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from rlcore import spans
from rlcore.arguments import COUNT, FLAG, optional, takes
from rlcore.engines.executors.options import check_executor_options
from rlcore.engines.executors.worker import MemoryReport, Worker
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.interpreter import checked_interpreter
from rlcore.engines.launchers.launch import choose_launcher, start_workers
from rlcore.engines.launchers.traced_calls import note_workers
from rlcore.engines.offload.host_limits import physical_bytes
from rlcore.engines.placement import place_workers
from rlcore.engines.residency import MOVE_TO, Move, Residency, State
from rlcore.engines.runtime import current
from rlcore.errors import DeviceError, InvalidInputError, RlcoreError, StateError, UnsupportedError
from rlcore.registry import executor_class, launch
from rlcore.types import OffloadReport

P = ParamSpec("P")
R = TypeVar("R")
_CALLS = {Move.ONLOAD: Worker.onload, Move.OFFLOAD: Worker.offload, Move.META: Worker.meta}
Reports = dict[str, list[OffloadReport]]
"""Tag -> the report of each worker. A tag that did not have to move is absent."""
Tags = str | list[str] | tuple[str, ...]
"""One tag or several, as RLite's programs give them."""


class Engine(ABC):
    """Base of ``TrainEngine`` and ``InferenceEngine``."""

    kind: ClassVar[str]
    """The kind of registered executors that the engine takes: "train" or "inference"."""
    tags: ClassVar[tuple[str, ...]]
    takes_all_devices: ClassVar[bool] = False
    """``data_parallel_size=-1`` means as many copies as the devices hold."""

    def __init__(self, executor: str) -> None:
        self._executor_class = executor_class(self.kind, executor)
        self._executor_name = executor
        self._group: WorkerGroup | None = None
        self._residency = Residency(self.label, self.tags, self._refill)
        self._is_closed = False
        self._was_built = False
        self._start: Callable[[], WorkerGroup]
        self._options: dict[str, Any] = {}
        self._host_memory: tuple[int | None, int | None] = (None, None)

    # ---------------------------------------------------------------------------------------------- life

    @takes("build()", onload=FLAG, host_memory_bytes=optional(COUNT), reserve_host_bytes=optional(COUNT))
    def build(
        self,
        *,
        devices: str | Sequence[str] | None = None,
        launcher: str | None = None,
        colocate_with: Engine | Iterable[Engine] | None = None,
        not_colocate_with: Engine | Iterable[Engine] | None = None,
        acceptable_node_ips: Sequence[str] | None = None,
        num_hosts: int | None = None,
        strategy: str | None = None,
        host_labels: Mapping[str, str] | None = None,
        python: str | os.PathLike[str] | None = None,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        onload: bool = True,
        host_memory_bytes: int | None = None,
        reserve_host_bytes: int | None = None,
        timeout_s: float = 3600.0,
        **executor_options: Any,
    ) -> Self:
        """Start the workers and load the weights.

        Args:
            data_parallel_size: of an inference engine the replicas; -1 means as many as the devices hold.
            launcher: "inline", "process", "ray" or "torchrun"; None follows ``rlcore.init``, then the number of
                workers.
            devices: names of devices, under "ray" with their host, such as "host-a/cuda:0", else of this host; None
                follows ``colocate_with``, then ``rlcore.init``, then ``get_device()``.
            colocate_with: share the devices of these engines, one engine computing at a time.
            not_colocate_with: avoid the devices of these engines.
            acceptable_node_ips: addresses of the hosts that workers may run on; one must be this host's, except under
                "ray".
            num_hosts: under "ray" the number of hosts, with as many workers on each, near each other where there are so
                many.
            strategy: under "ray", without ``num_hosts``: "pack", as None, takes as few hosts as will do, near each
                other; "spread" takes as many as there are, with about as many workers on each.
            host_labels: under "ray" labels that each host must have, such as {"rack": "r7"}.
            python: another interpreter for the workers, such as "envs/vllm/bin/python", where this version of rlcore is
                installed. Workers are sent plain data and import paths, and no code.
            onload: False leaves the engine in host memory until ``onload()``.
            host_memory_bytes: the most host memory for everything offloaded from one device of this process, besides
                the limits of the control group; None keeps the limit of an earlier build, also of a closed engine.
            reserve_host_bytes: host memory for each worker to allocate in the background while the engine is built, so
                that its first offload is as fast as the later ones; at most what the host has.
            timeout_s: the longest that one call of a worker may take.
            executor_options: the options of the executor.

        Raises:
            InvalidInputError: an unknown option (names the nearest known one), or a value that is not accepted; no
                worker has started.
            StateError: already built or closed.
            DeviceError: no device is left; names the engine that holds each.
            CheckpointError: the model folder is missing, damaged or does not fit.
        """
        if self._group is not None or self._is_closed:
            raise StateError(f"{self.label} is already {'closed' if self._is_closed else 'built'}; make a new engine")
        wanted = self._count_devices(tensor_parallel_size, data_parallel_size)
        _check_timeout(timeout_s)
        _check_reserve(reserve_host_bytes)
        check_executor_options(self.label, self._executor_name, self._executor_class, executor_options)
        owns_process, drives_replica = self._executor_class.owns_process, self._executor_class.drives_replica
        is_apart = owns_process or python is not None
        launcher = launcher or current().launcher
        places = place_workers(
            launcher,
            wanted,
            devices=devices,
            colocate_with=colocate_with,
            not_colocate_with=not_colocate_with,
            acceptable_node_ips=acceptable_node_ips,
            num_hosts=num_hosts,
            strategy=strategy,
            host_labels=host_labels,
            group_size=tensor_parallel_size,
        )
        launcher = choose_launcher(
            launcher,
            len(places),
            owns_process=is_apart,
            joins_torchrun=self._executor_class.joins_torchrun and python is None,
        )
        self._check(executor_options, python)
        self._start = partial(
            start_workers,
            self._executor_class,
            self.label,
            places,
            launcher=launcher,
            timeout_s=timeout_s,
            devices_each=tensor_parallel_size if drives_replica else 1,
            owns_process=owns_process,
            python=self._checked_interpreter(python),
        )
        self._options = executor_options
        self._host_memory = host_memory_bytes, reserve_host_bytes
        self._bring_up(onload)
        self._was_built = True
        return self

    def _checked_interpreter(self, python: str | os.PathLike[str] | None) -> str:
        if python is None:
            return ""
        if self._executor_class.runs_user_code:
            raise UnsupportedError(
                f"python= for the executor {self._executor_name!r}",
                "its workers run your module, and code does not travel to another interpreter; inference engines can",
            )
        return checked_interpreter(python)

    def _bring_up(self, onload: bool) -> None:
        self._group = self._start()
        self._residency = Residency(self.label, self.tags, self._refill)
        try:
            if self._host_memory != (None, None):
                self._call(Worker.reserve_host_memory, *self._host_memory)
            self._build_workers(self._options)
            if spans.recorder is not None:
                self._note_in_trace()
            if not onload:
                self.offload()
        except BaseException:
            self._restore_host_limit()
            self._discard_workers()
            raise

    def _note_in_trace(self) -> None:
        group = self._built_group()
        note_workers(group)
        weights = sum(report["tags"]["weights"]["device_bytes"] for report in self.memory_report())
        spans.note(
            "engine",
            number=group.workers[0].context.number,
            kind=self.kind,
            devices=self.devices,
            weights_bytes=weights,
            num_parameters=self._num_parameters,
            can_swap=self.can_swap,
        )

    @property
    def _num_parameters(self) -> int | None:
        """The number of the parameters of a module that is trained."""
        return None

    def _restore_host_limit(self) -> None:
        """Take back ``host_memory_bytes`` after a failed build: later builds in these processes must not find it."""
        if self._host_memory[0] is not None:
            with contextlib.suppress(RlcoreError):  # the workers may have ended
                self._call(Worker.restore_host_limit)

    def restart(self) -> Self:
        """End the workers, start new ones on the same devices, and bring them to the last checkpoint.

        It is the checkpoint that this engine last saved or loaded; without one, they get the model folder's weights.
        After a restart that failed, such as for a host that is gone, it can be called again.
        """
        if self._is_closed or not self._was_built:
            self._built_group()
        self._discard_workers()
        self._bring_up(onload=True)
        return self

    def _count_devices(self, tensor_parallel_size: int, data_parallel_size: int) -> int | None:
        """Return the number of devices; None means all that can be had."""
        takes_all = data_parallel_size == -1 and self.takes_all_devices
        if takes_all:
            data_parallel_size = 1
        for name, size in (("tensor_parallel_size", tensor_parallel_size), ("data_parallel_size", data_parallel_size)):
            if type(size) is not int or size < 1:
                raise InvalidInputError(f"{name} must be a whole number of at least 1, got {size!r}")
        num_devices = tensor_parallel_size * data_parallel_size
        if num_devices > 1 and not self._executor_class.runs_on_many_devices:
            raise UnsupportedError(
                f"{num_devices} workers (tensor_parallel_size {tensor_parallel_size} x data_parallel_size "
                f"{data_parallel_size}) for executor {self._executor_name!r}",
                "it runs on one device",
            )
        return None if takes_all and self._executor_class.runs_on_many_devices else num_devices

    def _check(self, options: dict[str, Any], python: str | os.PathLike[str] | None) -> None:  # noqa: B027
        """Refuse, before a worker starts, options that the user's process can see to be wrong."""

    @abstractmethod
    def _build_workers(self, options: dict[str, Any]) -> None:
        """Call ``build`` of the workers."""

    def close(self) -> None:
        """End the workers and free all their memory. Closing twice does nothing."""
        self._discard_workers()
        self._is_closed = True

    def _discard_workers(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- identity

    @property
    def label(self) -> str:
        return f"the {self.kind} engine"

    @property
    def can_swap(self) -> bool:
        """``rlcore.swap`` can move its tags; else call ``offload`` and ``onload``."""
        return bool(self._executor_class.can_swap)

    @property
    def is_built(self) -> bool:
        return self._group is not None

    @property
    def executors(self) -> list[WorkerGroup]:
        """The groups of workers that hold one full set of weights each; ``workers`` are by rank."""
        return [] if self._group is None else [self._group]

    @property
    def devices(self) -> list[str]:
        """The devices of each worker, such as "cuda:0", by rank."""
        contexts = [worker.context for worker in self._built_group().workers]
        return [name for context in contexts for name in context.devices or (context.device_name,)]

    @property
    def device(self) -> str:
        """The device it computes on; with several workers, the first one's."""
        return self.devices[0]

    def _built_group(self) -> WorkerGroup:
        if self._group is None:
            if self._is_closed:
                state = "is closed"
            elif self._was_built:
                state = "has no workers since its restart failed; call restart() again"
            else:
                state = "is not built; call build() first"
            raise StateError(f"{self.label} {state}")
        return self._group

    def _call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of the executor's class on every worker with the same arguments; results by rank."""
        group = self._built_group()
        return group.call(method.__name__, [(args, kwargs)] * len(group.workers))

    # ------------------------------------------------------------------------------------------ residency

    @property
    def state(self) -> dict[str, State]:
        """Tag -> loaded, offloaded, released or empty."""
        return self._residency.states

    def onload(self, *tags: Tags) -> Reports:
        """Bring tags (all when none is named) back to the device; what is there already is left alone."""
        return self._move(Move.ONLOAD, tags)

    def offload(self, *tags: Tags) -> Reports:
        """Move tags (all when none is named) to host memory and free their device memory."""
        return self._move(Move.OFFLOAD, tags)

    def meta(self, *tags: Tags) -> Reports:
        """Release tags (all when none is named) everywhere, without copying."""
        return self._move(Move.META, tags)

    def _move(self, move: Move, tags: tuple[Tags, ...]) -> Reports:
        reports: Reports = {}
        for tag, state in self._planned(move, _each(tags)).items():
            before = self._residency.states[tag]
            try:
                reports[tag] = self._call(_CALLS[move], tag)
            except BaseException:
                self._take_back(tag, before)
                raise
            self._residency.set(tag, state)
        return reports

    def _planned(self, move: Move, tags: tuple[str, ...]) -> dict[str, State]:
        """Return the new state of each tag that has to move; raise StateError for a call in the wrong order."""
        self._built_group()
        return self._residency.plan(move, tags)

    @property
    @abstractmethod
    def _refill(self) -> str:
        """The calls that give empty weights values, in words for errors."""

    def _require(self, tag: str, purpose: str, *, may_be_empty: bool = False) -> None:
        """Raise StateError unless the engine is built and ``tag`` on the device, with values or ``may_be_empty``."""
        self._built_group()
        if not (may_be_empty and self._residency.states[tag] is State.EMPTY):
            self._residency.require(tag, purpose)

    def _take_back(self, tag: str, state: State) -> None:
        """Bring all workers back to ``state``: a move failed on one of them, which has undone it."""
        with contextlib.suppress(RlcoreError):  # the workers may have ended
            self._call(_CALLS[MOVE_TO[state]], tag)

    # RLite's names for the same moves. `cuda` and `npu` mean "to the engine's own device", whichever it is.

    def cuda(self, *tags: Tags) -> Reports:
        return self.onload(*tags)

    npu = cuda

    def cpu(self, *tags: Tags) -> Reports:
        return self.offload(*tags)

    def to(self, device: str, *tags: Tags) -> Reports:
        """Move by the name of a registered device: that of the host is ``offload``, that of any other ``onload``.

        ``to("meta")`` is ``meta``. An engine stays with the devices of its build, so ``to("cuda")`` in a program that
        was written for CUDA brings it to its NPU.

        Raises:
            InvalidInputError: no such device is registered, or the name has an index.
        """
        if device == "meta":
            return self.meta(*tags)
        if not isinstance(device, str) or ":" in device:
            raise InvalidInputError(
                "to() takes the name of a kind of device, such as 'cpu' or 'cuda', or 'meta'; the devices themselves "
                f"are those of build(devices=...); got {device!r}"
            )
        try:
            is_host = launch(device).spec.is_host
        except DeviceError as error:
            raise InvalidInputError(f"to() takes 'meta' or the name of a registered device: {error}") from error
        return (self.offload if is_host else self.onload)(*tags)

    def memory_report(self) -> list[MemoryReport]:
        """Return for each worker the bytes of each tag on the device and on the host, and the device's memory."""
        return self._call(Worker.memory_report)


def _each(tags: tuple[Tags, ...]) -> tuple[str, ...]:
    named: list[str] = []
    for given in tags:
        named += given if isinstance(given, list | tuple) else [given]
    return tuple(named)


def _check_reserve(reserve_host_bytes: int | None) -> None:
    if reserve_host_bytes is not None and reserve_host_bytes > (most := physical_bytes()):
        raise InvalidInputError(
            f"reserve_host_bytes must be at most {most}, the memory of this host, or None; got {reserve_host_bytes}"
        )


def _check_timeout(timeout_s: float) -> None:
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InvalidInputError(f"timeout_s must be a positive number of seconds, got {timeout_s!r}")
