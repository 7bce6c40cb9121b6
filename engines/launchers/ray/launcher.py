"""Runs workers on the hosts of a Ray cluster: an agent on each, which runs them as the launcher "process" does."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from rlcore.engines.launchers.base import Host, Launcher, LaunchOptions, WorkerPlacement, engine_numbers
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.process import ProcessWorker
from rlcore.engines.launchers.ray.cluster import Cluster, connect
from rlcore.engines.launchers.ray.link import HostLink
from rlcore.engines.launchers.ray.placement import split_name
from rlcore.engines.launchers.ray.remote_process import RemoteProcess
from rlcore.engines.launchers.ray.rendezvous import FolderRendezvous, StoreRendezvous
from rlcore.engines.launchers.ray.wire import Opened, Opening
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
        ranks = _ranks_by_host(placements)
        cluster = connect()
        links = cluster.links(list(ranks))
        rendezvous = _rendezvous(cluster, links)
        group = WorkerGroup(options.engine, options.timeout_s)
        group.flush = partial(_flush, links)
        addresses = {host.name: host.address for host in cluster.hosts()}
        if len(addresses) > 1:
            group.new_rendezvous = cluster.new_rendezvous
        group.keep_until_end(rendezvous)
        openings = _openings(placements, ranks, options, links, addresses if len(addresses) > 1 else {})
        opened: dict[int, tuple[RemoteProcess, Opened]] = {}
        with group.starting():
            try:
                for host, on_host in ranks.items():
                    opened |= zip(on_host, links[host].open([openings[rank] for rank in on_host]), strict=True)
                for rank, opening in enumerate(openings):
                    process, told = opened[rank]
                    context = _context(opening, told, rendezvous.path)
                    started = process.start(told.worker, worker_class, context, options.timeout_s)
                    group.workers.append(
                        ProcessWorker(
                            worker_class, context, options.timeout_s, process, number=told.worker, started=started
                        )
                    )
            except BaseException:  # such as of a class that cannot be pickled; Ctrl-C too
                for rank in opened.keys() - set(range(len(group.workers))):
                    process, told = opened[rank]
                    process.forget(told.worker)
                raise
        return group


def _flush(links: dict[str, HostLink]) -> None:
    for link in links.values():
        link.flush()


def _openings(
    placements: Sequence[WorkerPlacement],
    ranks: dict[str, list[int]],
    options: LaunchOptions,
    links: dict[str, HostLink],
    addresses: dict[str, str],
) -> list[Opening]:
    """Return what is asked of the agents, by rank. Without addresses workers talk through the loopback interface."""
    number = next(engine_numbers)
    return [
        Opening(
            engine=options.engine,
            number=number,
            rank=rank,
            world_size=len(placements),
            devices=placement.devices,
            on_this_host=[split_name(name)[1] for one in ranks[host] for name in placements[one].devices],
            owns_process=options.owns_process,
            python=options.python,
            environment=_carried(links[host]),
            interface=addresses.get(host, ""),
        )
        for rank, placement in enumerate(placements)
        for host in [_host_of(placement)]
    ]


def _context(opening: Opening, opened: Opened, store: str) -> WorkerContext:
    return WorkerContext(
        opening.engine,
        opening.rank,
        opening.world_size,
        opening.devices[0],
        opening.number,
        opening.devices,
        opened.local_name,
        store,
        host=split_name(opening.devices[0])[0],
    )


def _rendezvous(cluster: Cluster, links: dict[str, HostLink]) -> FolderRendezvous | StoreRendezvous:
    if len(links) > 1:
        return cluster.new_rendezvous()
    (link,) = links.values()
    return FolderRendezvous(link)


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


def _ranks_by_host(placements: Sequence[WorkerPlacement]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank, placement in enumerate(placements):
        found[_host_of(placement)].append(rank)
    return found


def _carried(link: HostLink) -> dict[str, str]:
    """Return the variables of the program that its workers get: all on its own machine, elsewhere those of rlcore."""
    if link.is_here:
        return dict(os.environ)
    ours = {name: value for name, value in os.environ.items() if name.startswith("RLCORE_")}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    return {name: value for name, value in (ours | threads).items() if name not in _OF_ONE_MACHINE}
