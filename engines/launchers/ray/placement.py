"""The choice of devices on several hosts: pure functions from hosts and wishes to names such as "host-a/cuda:0"."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.engines.launchers.base import Host
from rlcore.errors import DeviceError, InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The devices that an engine asks for."""

    kind: str
    """The kind of device where none is named."""
    is_host_kind: bool = False
    """Devices of that kind are the host's own memory and processors."""
    num_workers: int | None = None
    """The number of devices; None means all that are left, in whole groups."""
    group_size: int = 1
    """Devices that must be of one host."""
    devices: tuple[str, ...] | None = None
    """The devices to choose from."""
    is_exact: bool = False
    """``devices`` names one for each worker."""
    shared: tuple[str, ...] | None = None
    """The devices of the engines to be colocated with."""
    held: Mapping[str, str] | None = None
    """Device -> label of the engine that holds it and is to be avoided."""
    addresses: Sequence[str] | None = None
    """Addresses of the hosts that are accepted; None accepts all."""
    num_hosts: int | None = None
    """Spread over so many hosts, alike on each; None fills one host after the other."""


def assign(hosts: Sequence[Host], wishes: Wishes) -> list[str]:
    """Return one device for each worker: those named, else those shared, else the first that are not held.

    Raises:
        InvalidInputError: a device that no host has, one twice, or numbers that do not go together.
        DeviceError: no host is accepted, or too few devices are left: says what each host has, and who holds it.
    """
    accepted = _accepted(hosts, wishes.addresses)
    held = wishes.held or {}
    by_host = _candidates(hosts, accepted, wishes)
    free = {host: [name for name in names if name not in held] for host, names in by_host.items()}
    if wishes.num_hosts is not None:
        return _spread(free, by_host, wishes)
    num_workers = _number(free, wishes)
    if wishes.devices is not None and wishes.is_exact:
        _check_named([name for names in by_host.values() for name in names], num_workers)
        found = [name for name in _resolved(hosts, wishes.devices) if name not in held]
    else:
        found = _packed(free, num_workers, wishes.group_size)
    if len(found) < num_workers:
        raise DeviceError(f"{num_workers} devices are needed and {len(found)} can be used: {_who(by_host, held)}")
    return found[:num_workers]


def split_name(name: str) -> tuple[str, str]:
    """Return the host and the host's own name of a device: ("host-a", "cuda:0"); ("", "cuda:0") without a host."""
    host, _, device = name.rpartition("/")
    return host, device


def _accepted(hosts: Sequence[Host], addresses: Sequence[str] | None) -> list[Host]:
    if addresses is None:
        return list(hosts)
    if isinstance(addresses, str) or not isinstance(addresses, Sequence):
        raise InvalidInputError(f"acceptable_node_ips must be a list of addresses, got {addresses!r}")
    wanted = {_address(one) for one in addresses}
    found = [host for host in hosts if ipaddress.ip_address(host.address) in wanted]
    if not found:
        known = ", ".join(f"{host.name} {host.address}" for host in hosts)
        raise DeviceError(f"acceptable_node_ips {list(addresses)} names no host of this cluster, which has {known}")
    return found


def _address(text: str) -> object:
    try:
        return ipaddress.ip_address(str(text))
    except ValueError as error:
        raise InvalidInputError(f"acceptable_node_ips must hold IP addresses, got {text!r}") from error


def _candidates(hosts: Sequence[Host], accepted: Sequence[Host], wishes: Wishes) -> dict[str, list[str]]:
    """Return the devices that come into question, by host."""
    found: dict[str, list[str]] = {host.name: [] for host in accepted}
    if wishes.devices is None and wishes.shared is None:
        return {host.name: _all_of(host, wishes.kind) for host in accepted}
    names = wishes.shared if wishes.devices is None else _resolved(hosts, wishes.devices)
    for name in names or ():
        host = split_name(name)[0]
        if host not in found and wishes.devices is not None:
            raise DeviceError(f"devices names {name}, and acceptable_node_ips {wishes.addresses} leaves {host} out")
        if host in found:
            found[host].append(name)
    return found


def _all_of(host: Host, kind: str) -> list[str]:
    return [f"{host.name}/{kind}:{index}" for index in range(host.counts.get(kind, 0))]


def _resolved(hosts: Sequence[Host], names: Sequence[str]) -> list[str]:
    """Return the full names of devices; a name without a host is one of the only host."""
    known = {host.name: host for host in hosts}
    found = []
    for name in names:
        host, device = split_name(str(name))
        if not host and len(hosts) > 1:
            raise InvalidInputError(
                f"devices names {name!r}, and the cluster has {len(hosts)} hosts: say which, such as "
                f"{hosts[0].name + '/' + device!r}; they are {', '.join(known)}"
            )
        if (host or hosts[0].name) not in known:
            raise InvalidInputError(f"devices names {name!r}, and the hosts of the cluster are {', '.join(known)}")
        found.append(_checked_device(known[host or hosts[0].name], device))
    return found


def _checked_device(host: Host, device: str) -> str:
    kind, _, index = device.partition(":")
    count = host.counts.get(kind, 0)
    if (index and not index.isdecimal()) or int(index or 0) >= count:
        raise InvalidInputError(f"{host.name} has no device {device!r}; it has {_counts(host.counts)}")
    return f"{host.name}/{kind}:{int(index or 0)}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


def _number(free: Mapping[str, Sequence[str]], wishes: Wishes) -> int:
    """Return the number of devices; "all" of a host's own memory means one group unless devices are named."""
    if wishes.num_workers is not None:
        return wishes.num_workers
    is_named = wishes.devices is not None or wishes.shared is not None
    groups = sum(len(names) // wishes.group_size for names in free.values())
    return wishes.group_size * (1 if wishes.is_host_kind and not is_named else max(1, groups))


def _check_named(names: Sequence[str], num_workers: int) -> None:
    if len(names) != num_workers:
        raise InvalidInputError(f"this engine has {num_workers} workers; devices names {len(names)}: {list(names)}")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(f"each worker of an engine owns a device; devices names {repeated} more than once")


def _packed(free: Mapping[str, Sequence[str]], num_workers: int, group_size: int) -> list[str]:
    """Return the devices of the first host that has enough, else of one host after the other, in whole groups."""
    whole = [list(names[: len(names) // group_size * group_size]) for names in free.values()]
    alone = next((names for names in whole if len(names) >= num_workers), None)
    return alone[:num_workers] if alone is not None else [name for names in whole for name in names][:num_workers]


def _spread(free: Mapping[str, Sequence[str]], by_host: Mapping[str, Sequence[str]], wishes: Wishes) -> list[str]:
    if wishes.devices is not None or wishes.shared is not None:
        raise InvalidInputError("build() takes num_hosts, or devices or colocate_with, which say the hosts themselves")
    num_hosts, num_workers = wishes.num_hosts, wishes.num_workers
    if type(num_hosts) is not int or num_hosts < 1:
        raise InvalidInputError(f"num_hosts must be a whole number of at least 1, got {num_hosts!r}")
    if num_workers is None:
        raise InvalidInputError("num_hosts needs the number of workers: give data_parallel_size")
    if num_workers % (num_hosts * wishes.group_size):
        raise InvalidInputError(
            f"{num_workers} workers in groups of {wishes.group_size} cannot be spread alike over num_hosts={num_hosts}"
        )
    each = num_workers // num_hosts
    chosen = [list(names[:each]) for names in free.values() if len(names) >= each][:num_hosts]
    if len(chosen) < num_hosts:
        raise DeviceError(
            f"{num_hosts} hosts with {each} free devices each are needed and {len(chosen)} have so many: "
            f"{_who(by_host, wishes.held or {})}"
        )
    return [name for names in chosen for name in names]


def _who(by_host: Mapping[str, Sequence[str]], held: Mapping[str, str]) -> str:
    """Say what each host has, and who holds it."""
    told = []
    for host, names in by_host.items():
        taken = ", ".join(f"{name} is held by {held[name]}" for name in names if name in held)
        what = ", ".join(split_name(name)[1] for name in names) or "none"
        told.append(f"{host} has {what} ({taken or 'none is held'})")
    return "; ".join(told) or "no host is there"
