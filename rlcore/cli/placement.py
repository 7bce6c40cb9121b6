"""The devices that engines would get: the part of ``rlcore plan`` that is about hosts."""

from __future__ import annotations

import itertools
import re
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rlcore.engines.launchers.base import Host

_HOST = re.compile(r"([^/=]+)=([a-z0-9_]+):(\d{1,4})")
_LABEL = re.compile(r"([^=]+)=([^=]+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options about engines and hosts, as they were given."""

    train: int
    infer: int
    tensor_parallel: int
    apart: bool
    num_hosts: int | None
    strategy: str | None
    labels: list[str] | None
    kind: str | None
    hosts: list[str] | None
    address: str | None


def placement(asked: Asked) -> dict[str, Any]:
    """Return the hosts and the devices of each engine; the choice is that of ``build()``. Nothing is started."""
    from rlcore.engines.launchers.ray.placement import Wishes, assign
    from rlcore.registry import launch

    if asked.infer % asked.tensor_parallel:
        raise typer.BadParameter(f"it must be a multiple of --tensor-parallel, got {asked.infer}", param_hint="--infer")
    if asked.kind is not None and not asked.kind.isidentifier():
        raise typer.BadParameter(
            f"it must be a kind such as cuda, without an index, got {asked.kind!r}", param_hint="--device"
        )
    if asked.hosts and asked.address is not None:
        raise typer.BadParameter("give --host, or --address", param_hint="--host")
    hosts = _hosts_at(asked.address) if asked.address is not None else _given(asked.hosts) if asked.hosts else [_here()]
    pairs = [_parsed(_LABEL, one, "--label", "rack=r7") for one in asked.labels or ()]
    labels = {key: value for key, value in pairs} or None  # noqa: C416 - dict() takes no tuples of unknown length
    kind = asked.kind or _best_kind(hosts)
    launch(kind)  # raises for one that is not registered
    common: dict[str, Any] = {"kind": kind, "labels": labels}
    found: dict[str, list[str]] = {}
    if asked.train:
        wishes = Wishes(num_workers=asked.train, num_hosts=asked.num_hosts, strategy=asked.strategy, **common)
        found["train"] = assign(hosts, wishes)
    if asked.infer:
        trainers = dict.fromkeys(found.get("train", ()), "the train engine")
        shared = None if asked.apart or not asked.train else tuple(trainers)
        held = trainers if asked.apart else None
        wishes = Wishes(num_workers=asked.infer, group_size=asked.tensor_parallel, shared=shared, held=held, **common)
        found["inference"] = assign(hosts, wishes)
    return {"hosts": [asdict(one) for one in hosts], "placement": found}


def placement_rows(found: dict[str, list[str]]) -> list[list[str]]:
    """Return engine, host, ranks and devices for each run of ranks on one host."""
    return [[name, *row] for name, names in found.items() for row in _rows(names)]


def _hosts_at(address: str) -> list[Host]:
    from rlcore.engines.launchers.ray.cluster import joined
    from rlcore.engines.launchers.ray.hosts import hosts_of

    with joined(address) as ray:
        return [host for host, _ in hosts_of(ray.nodes())]


def _given(texts: list[str]) -> list[Host]:
    from rlcore.engines.launchers.base import Host
    from rlcore.registry import launch

    rows = [_parsed(_HOST, text, "--host", "host-a=cuda:8") for text in texts]
    for kind in dict.fromkeys(kind for _, kind, _ in rows):
        launch(kind)  # raises for a kind that is not registered
    if len({name for name, _, _ in rows}) < len(rows):
        raise typer.BadParameter(f"each host is named once, got {', '.join(texts)}", param_hint="--host")
    return [Host(name=name, address="", counts={kind: int(count)}) for name, kind, count in rows]


def _here() -> Host:
    from rlcore.engines.launchers.base import Host
    from rlcore.registry import get_device

    best = get_device()
    return Host(name=socket.gethostname(), address="", counts={best.spec.name: best.count()})


def _best_kind(hosts: list[Host]) -> str:
    """Return the first kind of which a host has a device; hosts name the best kind first."""
    return next((kind for host in hosts for kind, count in host.counts.items() if count), "cpu")


def _parsed(pattern: re.Pattern[str], text: str, option: str, example: str) -> tuple[str, ...]:
    if (found := pattern.fullmatch(text)) is None:
        raise typer.BadParameter(f"it must be such as {example}, got {text!r}", param_hint=option)
    return found.groups()


def _rows(names: list[str]) -> list[list[str]]:
    """Return host, ranks and devices for each run of ranks on one host."""
    rows = []
    by_host = itertools.groupby(enumerate(names), key=lambda item: item[1].partition("/")[0])
    for host, group in by_host:
        ranks, devices = zip(*group, strict=True)
        numbers = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        rows.append([host, numbers, ", ".join(device.partition("/")[2] for device in devices)])
    return rows
