"""The worker processes of this user on all hosts of a Ray cluster, for another program than theirs."""

from __future__ import annotations

from typing import Any

import msgspec

from rlcore.engines.launchers import running
from rlcore.engines.launchers.ray._ray_private import plain_bytes
from rlcore.engines.launchers.ray.cluster import joined
from rlcore.engines.launchers.ray.hosts import hosts_of
from rlcore.engines.launchers.ray.wire import decoded
from rlcore.errors import RlcoreError, first_line

_LONGEST_S = 60.0
"""How long a host may take: Ray starts a process there, which imports rlcore."""


class ListedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process, as its host describes it."""

    pid: int
    parent: int
    device: str
    engines: list[str]
    resident_bytes: int
    age_s: float


class HostListing(msgspec.Struct, frozen=True, kw_only=True):
    """The worker processes of a host; or why it could not be asked."""

    host: str
    processes: list[ListedProcess] = []
    error: str = ""


def processes_here() -> list[ListedProcess]:
    """Return the worker processes of this host, oldest first."""
    return [
        ListedProcess(
            pid=process.pid,
            parent=process.parent,
            device=process.device,
            engines=process.engines,
            resident_bytes=process.resident_bytes,
            age_s=round(process.age_s, 1),
        )
        for process in running.running_processes()
    ]


def processes_of_cluster(address: str) -> list[HostListing]:
    """Return the worker processes of each host of the cluster at ``address``; "auto" is that of this host.

    Raises:
        MissingDependencyError: Ray is not installed.
        DeviceError: no cluster is there.
    """
    with joined(address) as ray:
        asked = [(host.name, _ask(ray, node["NodeID"])) for host, node in hosts_of(ray.nodes())]
        return [_listing(name, ref) for name, ref in asked]


def _ask(ray: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    return ray.remote(_encoded_processes).options(**options).remote()


def _encoded_processes() -> bytes:
    return msgspec.msgpack.encode(processes_here())


def _listing(host: str, ref: Any) -> HostListing:
    try:
        return HostListing(host=host, processes=decoded(plain_bytes(ref, _LONGEST_S), list[ListedProcess], "list"))
    except TimeoutError:
        return HostListing(host=host, error=f"it did not answer within {_LONGEST_S:g} s")
    except RlcoreError as error:  # such as a host without rlcore
        return HostListing(host=host, error=first_line(error))
