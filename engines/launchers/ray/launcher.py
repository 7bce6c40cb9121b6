"""Runs workers on the hosts of a Ray cluster: an agent on each, which runs them as the launcher "process" does."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

from rlcore.engines.launchers.base import Host, Launcher, LaunchOptions, WorkerPlacement, engine_numbers
from rlcore.engines.launchers.group import WorkerGroup, sending
from rlcore.engines.launchers.process import ProcessWorker
from rlcore.engines.launchers.ray.cluster import Cluster, connect
from rlcore.engines.launchers.ray.link import HostLink
from rlcore.engines.launchers.ray.meeting import BoardPlace, HostStore
from rlcore.engines.launchers.ray.placement import split_name
from rlcore.engines.launchers.ray.wire import Opening
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError

_OF_ONE_MACHINE = {"RLCORE_RUNTIME", "RLCORE_CACHE"}
"""Paths, which mean nothing on another machine."""


class RayLauncher(Launcher):
    """Starts workers on the hosts with which the names of their devices begin."""

    gives_processes: ClassVar[bool] = True

    @classmethod
    def hosts(cls) -> Sequence[Host]:
        return connect().hosts()

    def start(
        self, worker_class: type[Any], placements: Sequence[WorkerPlacement], options: LaunchOptions
    ) -> WorkerGroup:
        hosts = [_host_of(placement) for placement in placements]
        cluster = connect()
        links = {host: cluster.link(host) for host in dict.fromkeys(hosts)}
        meeting = _meeting(cluster, links)
        group = WorkerGroup(options.engine, options.timeout_s)
        if len(cluster.hosts()) > 1:
            group.meet = cluster.meet
        group.keep_until_end(meeting)
        number, on_host = next(engine_numbers), _by_host(placements)
        try:
            with sending:
                for rank, (host, placement) in enumerate(zip(hosts, placements, strict=True)):
                    opening = Opening(
                        engine=options.engine,
                        number=number,
                        rank=rank,
                        world_size=len(placements),
                        devices=placement.devices,
                        on_this_host=on_host[host],
                        owns_process=options.owns_process,
                        python=options.python,
                        environment=_carried(links[host]),
                        interface=_address(cluster, host),
                    )
                    group.workers.append(_started(links[host], opening, worker_class, meeting.path, options))
            group.wait_until_started([worker.started for worker in group.workers])
        except BaseException:  # Ctrl-C too: no worker is left
            group.stop()
            raise
        return group


def _started(
    link: HostLink, opening: Opening, worker_class: type[Any], store: str, options: LaunchOptions
) -> ProcessWorker:
    process, opened = link.open(opening)
    context = WorkerContext(
        opening.engine,
        opening.rank,
        opening.world_size,
        opening.devices[0],
        opening.number,
        opening.devices,
        opened.local_name,
        store,
        host=link.host,
    )
    try:
        started = process.start(opened.worker, worker_class, context, options.timeout_s)
    except BaseException:  # such as a class that cannot be pickled
        process.forget(opened.worker)
        raise
    return ProcessWorker(worker_class, context, options.timeout_s, process, number=opened.worker, started=started)


def _meeting(cluster: Cluster, links: dict[str, HostLink]) -> HostStore | BoardPlace:
    if len(links) > 1:
        return cluster.meet()
    (link,) = links.values()
    return HostStore(link)


def _host_of(placement: WorkerPlacement) -> str:
    found = {split_name(name)[0] for name in placement.devices}
    if len(found) > 1:
        raise InvalidInputError(
            f"one worker drives {', '.join(placement.devices)}, which are of {len(found)} hosts; give it devices of one"
        )
    if not (host := found.pop()):
        raise InvalidInputError(
            f"launcher 'ray' takes devices with their host, such as '{socket.gethostname()}/{placement.devices[0]}', "
            f"got {placement.devices[0]!r}"
        )
    return host


def _by_host(placements: Sequence[WorkerPlacement]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for placement in placements:
        found[_host_of(placement)] += [split_name(name)[1] for name in placement.devices]
    return found


def _address(cluster: Cluster, name: str) -> str:
    """Return the address at which the workers of this host can be reached; "" where the cluster has no other host."""
    hosts = cluster.hosts()
    return "" if len(hosts) == 1 else next(host.address for host in hosts if host.name == name)


def _carried(link: HostLink) -> dict[str, str]:
    """Return the variables of the program that its workers get: all on its own machine, elsewhere those of rlcore."""
    if link.is_here:
        return dict(os.environ)
    ours = {name: value for name, value in os.environ.items() if name.startswith("RLCORE_")}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    return {name: value for name, value in (ours | threads).items() if name not in _OF_ONE_MACHINE}
