"""The choice of devices for an engine's workers. The same request gets the same devices.

A name such as "cuda:1" counts the devices that this process sees, in their order: where the vendor's variable
(CUDA_VISIBLE_DEVICES and its like) names physical devices 4 and 6, these are cuda:0 and cuda:1, here and in workers.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rlcore.device import Device
from rlcore.engines.launchers.base import Host
from rlcore.engines.launchers.ray.placement import Wishes, assign
from rlcore.engines.launchers.slurm import slurm_number, tasks_of_nodes
from rlcore.engines.launchers.torchrun import num_hosts as hosts_of_world
from rlcore.engines.runtime import current
from rlcore.errors import DeviceError, InvalidInputError, StateError
from rlcore.registry import get_device, launch, launcher_class, launcher_names
from rlcore.settings import named_device

_ASK_SLURM = (
    "; ranks of one program must see all devices of their host: use --gpus-per-node in place of --gpus-per-task, or "
    "--gpu-bind=none"
)


class PlacedEngine(Protocol):
    """The members of an engine that placement reads, to place workers on its devices or on others."""

    @property
    def label(self) -> str: ...

    @property
    def is_built(self) -> bool: ...

    @property
    def devices(self) -> list[str]:
        """The names of the devices that its workers hold."""


def place_workers(
    launcher: str | None,
    num_workers: int | None,
    *,
    devices: str | Sequence[str] | None = None,
    colocate_with: PlacedEngine | Iterable[PlacedEngine] | None = None,
    not_colocate_with: PlacedEngine | Iterable[PlacedEngine] | None = None,
    acceptable_node_ips: Sequence[str] | None = None,
    num_hosts: int | None = None,
    strategy: str | None = None,
    host_labels: Mapping[str, str] | None = None,
    group_size: int = 1,
) -> list[str]:
    """Return the names of one device for each worker, on the launcher's hosts if it has any; see ``choose_devices``.

    Args:
        num_hosts: as many hosts, with the same number of workers each; None leaves their number to ``strategy``.
        strategy: "pack" or "spread"; None is "pack".
        host_labels: labels that each host must have.
    """
    hosts = launcher_class(launcher).hosts() if launcher in launcher_names() else ()
    if not hosts:
        of_hosts = {
            "num_hosts": num_hosts if num_hosts != 1 else None,
            "strategy": strategy,
            "host_labels": host_labels,
        }
        if given := [f"{name}={value!r}" for name, value in of_hosts.items() if value is not None]:
            raise InvalidInputError(f"{given[0]} needs a launcher with several hosts: launcher='ray'")
        repeats = hosts_of_world(num_workers) if launcher == "torchrun" else 1
        found = choose_devices(
            num_workers and num_workers // repeats,
            *(devices, colocate_with, not_colocate_with, acceptable_node_ips),
            group_size=group_size,
            is_one_program=launcher != "torchrun",
        )
        return repeats * [device.name for device in found]
    if devices is not None and colocate_with is not None:
        raise InvalidInputError("build() takes devices or colocate_with, not both")
    shared = None if colocate_with is None else tuple(_held_by(colocate_with, "colocate_with"))
    named = current().devices if devices is None and shared is None else None
    if devices is not None:
        named = tuple(_listed(devices))
    kind = _kind_on(hosts)
    wishes = Wishes(
        kind=kind,
        is_host_kind=launch(kind).spec.is_host,
        num_workers=num_workers,
        group_size=group_size,
        devices=named,
        is_exact=devices is not None,
        shared=shared,
        held=_held_by(not_colocate_with, "not_colocate_with"),
        addresses=acceptable_node_ips,
        num_hosts=num_hosts,
        strategy=strategy,
        labels=host_labels,
    )
    return assign(hosts, wishes)


def _kind_on(hosts: Sequence[Host]) -> str:
    """Return ``RLCORE_DEVICE``, else the first kind of which a host has one; hosts name the best kind first."""
    if named := named_device():
        return named.partition(":")[0]
    kinds = [kind for host in hosts for kind, count in host.counts.items() if count]
    return next((kind for kind in kinds if not launch(kind).spec.is_host), kinds[0])


def choose_devices(
    num_workers: int | None,
    devices: str | Sequence[str] | None,
    colocate_with: PlacedEngine | Iterable[PlacedEngine] | None,
    not_colocate_with: PlacedEngine | Iterable[PlacedEngine] | None,
    acceptable_node_ips: Sequence[str] | None = None,
    *,
    group_size: int = 1,
    is_one_program: bool = True,
) -> list[Any]:
    """Return one device for each worker: those named, else the other engine's, else the first not excluded.

    ``num_workers`` None means all of these, in whole groups of ``group_size``. On a host, whose devices are one memory
    and the same processors, it means one group unless devices are named. When Slurm has started several tasks of a step
    on this host, each of them chooses from its own equal share, unless together they are the ranks of one program.

    Raises:
        InvalidInputError: ``devices`` and ``colocate_with`` at once, a wrong number of devices, or one twice.
        StateError: an engine to place by is not built.
        DeviceError: too few devices are left, and the message says who holds the others; or this host is not accepted.
    """
    _check_host(acceptable_node_ips)
    if devices is not None and colocate_with is not None:
        raise InvalidInputError("build() takes devices or colocate_with, not both")
    held = _held_by(not_colocate_with, "not_colocate_with")
    if colocate_with is not None:
        candidates = list(_held_by(colocate_with, "colocate_with"))
    elif devices is not None:
        candidates = _listed(devices)
    else:
        all_here = _all_like(get_device())
        candidates = list(current().devices or (_share_of_task(all_here, os.environ) if is_one_program else all_here))
    names = [get_device(name).name for name in candidates]
    free = [name for name in names if name not in held]
    if num_workers is None:
        is_named = devices is not None or colocate_with is not None
        is_one = not is_named and get_device(candidates[0]).spec.is_host
        num_workers = group_size * (1 if is_one else max(1, len(free) // group_size))
    if devices is not None and len(names) != num_workers:
        raise InvalidInputError(f"this engine has {num_workers} workers; devices names {len(names)}: {names}")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(f"each worker of an engine owns a device; devices names {repeated} more than once")
    if len(free) < num_workers:
        taken = "; ".join(f"{name} is held by {held[name]}" for name in names if name in held) or "none is held"
        taken += "" if is_one_program or "SLURM_PROCID" not in os.environ else _ASK_SLURM
        raise DeviceError(f"{num_workers} devices are needed and {len(free)} of {names} can be used: {taken}")
    return [get_device(name) for name in free[:num_workers]]


def _listed(devices: object) -> list[Any]:
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return list(devices)
    return [devices]  # get_device says what is no name of a device


def _held_by(engines: PlacedEngine | Iterable[PlacedEngine] | None, argument: str) -> dict[str, str]:
    """Return the label of the engine that holds each device."""
    if engines is None:
        return {}
    listed = list(engines) if isinstance(engines, Iterable) and not isinstance(engines, str) else [engines]
    for engine in listed:
        if not hasattr(engine, "is_built"):
            raise InvalidInputError(f"{argument} takes an engine or several, got {engine!r}")
        if not engine.is_built:
            raise StateError(f"{argument} names {engine.label}, which is not built; call its build() first")
    return {device: engine.label for engine in listed for device in engine.devices}


def _all_like(device: Device) -> list[str]:
    return [f"{device.spec.name}:{index}" for index in range(device.count())]


def _share_of_task(names: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return all names, unless Slurm runs several tasks of this step on the host and lets each see all devices."""
    counts = tasks_of_nodes(environment)
    node, task, num_gpus = (slurm_number(environment, n) for n in ("NODEID", "LOCALID", "GPUS_ON_NODE"))
    num_tasks = counts[node] if node < len(counts) else 1
    share = len(names) // num_tasks
    if len(names) < num_gpus or not share or num_tasks == 1:  # Slurm has bound each task to its own already
        return names
    if task >= num_tasks:
        raise DeviceError(
            f"SLURM_LOCALID is {task}, and SLURM_STEP_TASKS_PER_NODE says {num_tasks} tasks on this node; name the "
            "devices with build(devices=...)"
        )
    return names[task * share : (task + 1) * share]


def _check_host(acceptable_node_ips: Sequence[str] | None) -> None:
    """Raise unless the user accepts this host, the only one on which workers run."""
    if acceptable_node_ips is None:
        return
    if isinstance(acceptable_node_ips, str) or not isinstance(acceptable_node_ips, Sequence):
        raise InvalidInputError(f"acceptable_node_ips must be a list of addresses, got {acceptable_node_ips!r}")
    if not any(_is_own_address(address) for address in acceptable_node_ips):
        raise DeviceError(
            f"acceptable_node_ips {list(acceptable_node_ips)} names no address of this host ({socket.gethostname()}), "
            "and workers run on the host of the user's process; start the program on one of those, or leave it out"
        )


def _is_own_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(str(text))
    except ValueError as error:
        raise InvalidInputError(f"acceptable_node_ips must hold IP addresses, got {text!r}") from error
    if address.is_unspecified or address.is_multicast:  # they can be bound, and are no host's
        raise InvalidInputError(f"acceptable_node_ips must hold addresses of hosts, got {text!r}")
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:  # only an own address can be bound; a datagram socket listens to nobody before it is read
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((text, 0))
    except OSError:
        return False
    return True
