"""The Ray cluster of this program: one that exists, or a local one that goes with the program."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rlcore import __version__
from rlcore.engines.launchers.base import Host
from rlcore.engines.launchers.ray._ray_private import plain_bytes
from rlcore.engines.launchers.ray.agent import Agent
from rlcore.engines.launchers.ray.hosts import hosts_of
from rlcore.engines.launchers.ray.link import ASK_S, HostLink
from rlcore.engines.launchers.ray.rendezvous import StoreRendezvous
from rlcore.engines.launchers.ray.store_actor import ActorStoreRequest, StoreActor
from rlcore.engines.launchers.ray.tokens import warn_of_readable_token
from rlcore.engines.launchers.ray.watchdog import MARK
from rlcore.engines.launchers.ray.wire import encoded
from rlcore.errors import DeviceError, InvalidInputError, MissingDependencyError, StateError, first_line
from rlcore.process.python_command import python_command
from rlcore.registry import registry

_lock = threading.RLock()
_clusters: list[Cluster] = []
"""The cluster of this program, once there is one. A fork of the program has none, and cannot use its threads."""
os.register_at_fork(after_in_child=_clusters.clear)
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]

_ANSWERS_S = 5.0
"""How long a cluster may take to accept a connection."""
_WAITING_RANKS = 100_000
"""How many questions the store actor may hold at one time; one that waits costs no thread."""
_LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # Ray would end an agent with all its workers to free memory
    "RAY_raylet_start_wait_time_s": "300",  # Ray's own times, of 30 s each, are too short for a busy host
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_niceness": "0",  # an agent's workers inherit it, and Ray's own 15 gives way to all else on the host
}
"""The variables of a local cluster, where the user's own do not say otherwise."""


class Cluster:
    """The cluster, and the links to the agents that this program has started in it.

    Args:
        is_own: rlcore has connected to it, and not the user's program itself.
        is_insecure: the user accepts a cluster that anybody may enter.
    """

    def __init__(self, ray: Any, *, is_own: bool, is_insecure: bool) -> None:
        self._is_own = is_own
        self._ray = ray
        self._is_insecure = is_insecure
        self._links: dict[str, HostLink] = {}
        self._store: Any = None

    def hosts(self) -> list[Host]:
        return [host for host, _ in hosts_of(self._ray.nodes())]

    def link(self, name: str) -> HostLink:
        """Return the link to the agent of a host; see ``links``."""
        return self.links([name])[name]

    def links(self, names: Sequence[str]) -> dict[str, HostLink]:
        """Return the links to the agents of hosts; start those that are missing, all at once.

        Raises:
            DeviceError: the cluster has no such host, or the agent does not start there.
            StateError: the cluster has no token mode.
            InvalidInputError: the host has another version of rlcore.
        """
        with _lock:
            missing = [name for name in names if name not in self._links]
            hosts = {host.name: (host, node) for host, node in hosts_of(self._ray.nodes())} if missing else {}
            if absent := [name for name in missing if name not in hosts]:
                raise DeviceError(
                    f"the cluster has no host {absent[0]!r} any more; it has {', '.join(hosts) or 'none'}"
                )
            actors = {name: _agent_actor(self._ray, hosts[name][1]) for name in missing}
            try:
                while actors:
                    name = next(iter(actors))
                    self._links[name] = self._link(*hosts[name], actors[name])
                    del actors[name]
            finally:
                for actor in actors.values():  # of a host that was not reached
                    self._ray.kill(actor)
            return {name: self._links[name] for name in names}

    def _link(self, host: Host, node: dict[str, Any], actor: Any) -> HostLink:
        is_own_node = node["NodeID"] == self._ray.get_runtime_context().get_node_id()
        try:
            link = HostLink(host.name, actor, self._forget, is_own_node=is_own_node)
        except StateError as error:
            raise DeviceError(
                f"no agent started on host {host.name} ({host.address}): {first_line(error)}. It takes all "
                "accelerators of its host, so that another program of the cluster that holds some keeps it waiting "
                "(`ray status`); or rlcore is not installed there, as Ray's log says (/tmp/ray/session_latest/logs)"
            ) from error
        try:
            self._check(link)
        except BaseException:
            link.lose("it is refused")
            raise
        return link

    def _check(self, link: HostLink) -> None:
        if link.facts.rlcore_version != __version__:
            raise InvalidInputError(
                f"host {link.host} has rlcore {link.facts.rlcore_version}, and this is {__version__}; install "
                "the same version on all hosts"
            )
        if not link.facts.has_token and not self._is_insecure:
            raise StateError(
                f"the Ray cluster lets everybody in who reaches its ports, and so run code on host {link.host}: "
                "start it with RAY_AUTH_MODE=token on every host (docs/clusters.md); in a network that nobody else "
                "reaches, rlcore.init(insecure_cluster=True) accepts it"
            )

    def new_rendezvous(self) -> StoreRendezvous:
        """Return a new part of the store actor, on the program's own host, which workers of all hosts reach."""
        with _lock:
            if self._store is None or not _answers(self._store):
                self._store = _store_actor(self._ray)
            for link in list(self._links.values()):
                try:
                    link.use_store(self._store)
                except StateError:
                    if not link.why_lost:
                        raise  # of a host that is lost those will say so who are called there
            return StoreRendezvous(self._store)

    def _forget(self, link: HostLink) -> None:
        if self._links.get(link.host) is link:
            del self._links[link.host]

    def close(self) -> None:
        """End all agents, and with them their workers; leave the cluster, and end a local one."""
        for link in list(self._links.values()):
            link.lose("the user's program ends")
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(self._store)
        if self._is_own:
            with contextlib.suppress(Exception):
                self._ray.shutdown()


def _agent_actor(ray: Any, node: dict[str, Any]) -> Any:
    """Start an agent on a node. It takes the node's accelerators whole, as Ray does not say which of them are free."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    specs = [spec for spec, _ in registry().devices.values()]
    names = {spec.ray_resource for spec in specs if spec.ray_resource and not spec.is_host}
    resources = {name: node["Resources"][name] for name in names if node["Resources"].get(name)}
    variables = {
        f"RAY_EXPERIMENTAL_NOSET_{spec.visible_devices_variable}": "1"
        for spec in specs
        if spec.visible_devices_variable
    }
    options = {
        "num_cpus": 0,
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 32,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        "runtime_env": {"env_vars": variables},
    }
    return ray.remote(Agent).options(**options).remote()


def _store_actor(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": here}
    return ray.remote(StoreActor).options(**options, max_concurrency=_WAITING_RANKS).remote()


def _answers(store: Any) -> bool:
    """Return True if the store actor lives."""
    try:
        plain_bytes(store.ask.remote(encoded(ActorStoreRequest("check", []))), ASK_S)
    except Exception:  # Ray says it in many ways
        return False
    return True


def connect(address: str | None = None, *, is_insecure: bool = False) -> Cluster:
    """Join the cluster at ``address``, "auto" for one of this host, or start a local one; return it.

    A program has one cluster: a second call returns it.

    Raises:
        InvalidInputError: the address of Ray's client.
        MissingDependencyError: Ray is not installed.
        DeviceError: no cluster is there.
    """
    if address is not None:
        _check_address(address)
    with _lock:
        if _clusters:
            return _clusters[0]
        if address is None:
            set_local_variables()
        ray = _import_ray()
        is_own = not ray.is_initialized()
        if is_own and address is None:
            _start_local(ray)
        elif is_own:
            _join(ray, str(address), waits=True)
        warn_of_readable_token()
        cluster = Cluster(ray, is_own=is_own, is_insecure=is_insecure)
        _clusters.append(cluster)
        atexit.register(disconnect)  # after Ray's own, and so called before it
        return cluster


@contextlib.contextmanager
def joined(address: str) -> Iterator[Any]:
    """Join the cluster at ``address`` for the block, which gets the module ``ray``. Raises as ``connect``.

    It is for a command: nothing else may write to the standard error meanwhile, which Ray's lines are kept from.
    """
    _check_address(address)
    ray = _import_ray()
    with _without_stderr():
        _join(ray, address, waits=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def disconnect() -> None:
    """End this program's agents; afterwards it can connect to another cluster."""
    with _lock:
        while _clusters:
            _clusters.pop().close()


def set_local_variables() -> None:
    """Set the variables of a local cluster, and choose a token for it, which no file has.

    Ray reads those of the token when it is imported: a program that has imported it keeps the token that Ray has.
    """
    variables = dict(_LOCAL)
    if "ray" not in sys.modules:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update({name: os.environ.get(name, value) for name, value in variables.items()})


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("ray", needed_for="launcher='ray'", extra="ray") from error
    return ray


def _check_address(address: str) -> None:
    if "://" in address:
        raise InvalidInputError(
            f"address is that of a cluster, such as '10.0.0.1:6379', or 'auto', got {address!r}; start the program on "
            "a host of the cluster, as Ray's client cannot tell of a host that is lost"
        )


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Keep what Ray's library in C++ says from the standard error: it writes to the descriptor."""
    sys.stderr.flush()
    with open(os.devnull, "wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _check_answers(address: str) -> None:
    """Raise OSError if nobody listens there. Ray itself asks again and again, for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        with contextlib.suppress(OverflowError):  # no port: Ray says so
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()


def _join(ray: Any, address: str, *, waits: bool) -> None:
    """Join a cluster.

    Args:
        waits: where nobody listens, let Ray wait for a head that is starting; False fails at once.
    """
    try:
        if not waits:
            _check_answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise DeviceError(
            f"no Ray cluster can be joined at {address!r}: {first_line(error)}; start one with `ray start --head`, or "
            "leave the address out for one of this host alone"
        ) from error


def _start_local(ray: Any) -> None:
    """Start a cluster of this host alone, with a token that no file has, and what ends it with the program."""
    mark = secrets.token_hex(8)
    os.environ[MARK] = mark
    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    except Exception as error:  # Ray raises no class of its own
        raise DeviceError(
            f"no Ray cluster of this host has started: {first_line(error)}; on a host under much load set "
            "RAY_agent_register_timeout_ms=600000, or join a cluster that `ray start --head` has started"
        ) from error
    finally:
        del os.environ[MARK]
    subprocess.Popen(
        python_command("rlcore.engines.launchers.ray.watchdog:end_cluster", os.getpid(), mark),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
