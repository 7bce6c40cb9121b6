"""The choice of devices on several hosts: pure functions from hosts and wishes to names such as "host-a/cuda:0"."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlcore.engines.launchers.base import Host
from rlcore.errors import DeviceError, InvalidInputError

STRATEGIES = ("pack", "spread")
NEAR_BY = ("ray.io/gpu-domain", "rack")
"""Labels whose equal values mean that hosts are near each other, the nearest first: Ray's name for an NVLink domain,
and the user's own for a rack."""


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
    """So many hosts, alike on each; None leaves the number to ``strategy``."""
    strategy: str | None = None
    """"pack", the usual one: as few hosts as will do, near each other; "spread": as many as there are, about alike."""
    labels: Mapping[str, str] | None = None
    """Labels that each host must have; None accepts all."""


def assign(hosts: Sequence[Host], wishes: Wishes) -> list[str]:
    """Return one device for each worker: those named, else those shared, else the first that are not held.

    Raises:
        InvalidInputError: a device that no host has, one twice, or numbers that do not go together.
        DeviceError: no host is accepted, or too few devices are left: says what each host has, and who holds it.
    """
    _check_strategy(wishes)
    accepted = _labelled(_accepted(hosts, wishes.addresses), wishes.labels)
    held = wishes.held or {}
    by_host = _candidates(hosts, accepted, wishes)
    free = {host: [name for name in names if name not in held] for host, names in by_host.items()}
    if wishes.num_hosts is not None:
        return _alike(accepted, free, by_host, wishes)
    num_workers = _number(free, wishes)
    if wishes.devices is not None and wishes.is_exact:
        _check_named([name for names in by_host.values() for name in names], num_workers)
        found = [name for name in _resolved(hosts, wishes.devices) if name not in held]
    elif wishes.strategy == "spread":
        found = _spread(free, num_workers, wishes.group_size)
    else:
        found = _packed(accepted, free, num_workers, wishes.group_size)
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


def _labelled(hosts: Sequence[Host], labels: Mapping[str, str] | None) -> list[Host]:
    if labels is None:
        return list(hosts)
    if not isinstance(labels, Mapping) or not all(isinstance(one, str) for pair in labels.items() for one in pair):
        raise InvalidInputError(f"host_labels must be a dict of words such as {{'rack': 'r7'}}, got {labels!r}")
    found = [host for host in hosts if labels.items() <= host.labels.items()]
    if not found:
        known = "; ".join(f"{host.name} has {_shown(host.labels)}" for host in hosts)
        raise DeviceError(f"no accepted host has host_labels {_shown(labels)}: {known}")
    return found


def _shown(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"


def _check_strategy(wishes: Wishes) -> None:
    if wishes.strategy is None:
        return
    if wishes.strategy not in STRATEGIES:
        raise InvalidInputError(f"strategy must be one of {', '.join(STRATEGIES)}, got {wishes.strategy!r}")
    if wishes.is_exact or wishes.shared is not None:
        raise InvalidInputError("build() takes strategy, or devices or colocate_with, which say the hosts themselves")
    if wishes.num_hosts is not None and wishes.strategy == "pack":
        raise InvalidInputError(f"build() takes strategy='pack' or num_hosts={wishes.num_hosts!r}, which spreads")


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
            limits = {"acceptable_node_ips": wishes.addresses, "host_labels": wishes.labels}
            by = " and ".join(f"{limit} {value}" for limit, value in limits.items() if value is not None)
            raise DeviceError(f"devices names {name}, and {by} leaves {host} out")
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


def _packed(hosts: Sequence[Host], free: Mapping[str, Sequence[str]], num_workers: int, group_size: int) -> list[str]:
    """Return devices, in whole groups, of one host that has enough, else of hosts near each other, else of all.

    Of such hosts those that have the most come first, so that they are few.
    """
    whole = {host: [name for group in _groups(names, group_size) for name in group] for host, names in free.items()}
    found: list[str] = []
    for near in _neighbourhoods(hosts):
        chosen: list[str] = []
        for host in sorted(near, key=lambda one: -len(whole[one])):
            if sum(len(whole[one]) for one in chosen) < num_workers:
                chosen.append(host)
        found = [name for host in near if host in chosen for name in whole[host]]
        if len(found) >= num_workers:
            break
    return found[:num_workers]


def _neighbourhoods(hosts: Sequence[Host]) -> Iterator[list[str]]:
    """Yield the names of hosts that are near each other, the nearest first: each alone, at last all."""
    for host in hosts:
        yield [host.name]
    for key in NEAR_BY:
        for value in dict.fromkeys(host.labels[key] for host in hosts if key in host.labels):
            yield [host.name for host in hosts if host.labels.get(key) == value]
    yield [host.name for host in hosts]


def _spread(free: Mapping[str, Sequence[str]], num_workers: int, group_size: int) -> list[str]:
    """Return devices, a group of each host in turn, and those of a host beside each other."""
    whole = {host: _groups(names, group_size) for host, names in free.items()}
    deepest = max(map(len, whole.values()), default=0)
    dealt = [(host, groups[turn]) for turn in range(deepest) for host, groups in whole.items() if turn < len(groups)]
    chosen = dealt[: -(-num_workers // group_size)]
    return [name for host in whole for of_host, group in chosen if of_host == host for name in group][:num_workers]


def _groups(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[at : at + size] for at in range(0, len(names) - size + 1, size)]


def _alike(
    hosts: Sequence[Host], free: Mapping[str, Sequence[str]], by_host: Mapping[str, Sequence[str]], wishes: Wishes
) -> list[str]:
    """Return devices of so many hosts, which are near each other where they can be."""
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
            f"; give a num_hosts that divides {num_workers // wishes.group_size}, or none"
        )
    each = num_workers // num_hosts
    chosen: list[Sequence[str]] = []
    for near in _neighbourhoods(hosts):
        chosen = [free[host][:each] for host in near if len(free[host]) >= each][:num_hosts]
        if len(chosen) == num_hosts:
            break
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
