"""The command ``rlcore plan``: what a program would get, before anything starts."""

from __future__ import annotations

import itertools
import re
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcore.cli.console import AsJson, print_json, print_table
from rlcore.torch_import import import_torch

if TYPE_CHECKING:
    from rlcore.engines.launchers.base import Host

_HOST = re.compile(r"([^/=]+)=([a-z0-9_]+):(\d{1,4})")
_LABEL = re.compile(r"([^=]+)=([^=]+)")


def plan(
    train: Annotated[int, typer.Option(min=0, help="Workers of the train engine.")] = 0,
    infer: Annotated[int, typer.Option(min=0, help="Devices of the inference engine.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices of a replica, which are of one host.")] = 1,
    apart: Annotated[
        bool, typer.Option("--apart", help="The inference engine avoids the trainer's devices; else it shares them.")
    ] = False,
    num_hosts: Annotated[int | None, typer.Option(min=1, help="Hosts of the train engine, alike on each.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Of the train engine: pack or spread.", show_default="pack")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label that hosts must have; repeat.", metavar="KEY=VALUE")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help='Kind of devices, such as "cuda"; else the best that a host has.')
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help='A host to plan for, such as "host-a=cuda:8"; repeat.', metavar="NAME=KIND:COUNT"),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help='The Ray cluster to plan for; "auto" is that of this host.')
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the devices that engines would get. Nothing is started, and no device is used.

    Without --host and --address it plans for this host. The choice is that of ``build()`` with the same numbers.
    """
    import_torch()
    from rlcore.engines.launchers.ray.placement import Wishes, assign
    from rlcore.registry import launch

    if not train and not infer:
        raise typer.BadParameter("give the size of an engine, --train or --infer", param_hint="--train")
    if infer % tensor_parallel:
        raise typer.BadParameter(f"it must be a multiple of --tensor-parallel, got {infer}", param_hint="--infer")
    if device is not None and not device.isidentifier():
        raise typer.BadParameter(
            f"it must be a kind such as cuda, without an index, got {device!r}", param_hint="--device"
        )
    if host and address is not None:
        raise typer.BadParameter("give --host, or --address", param_hint="--host")
    hosts = _hosts_at(address) if address is not None else _given(host) if host else [_this_host()]
    pairs = [_parsed(_LABEL, one, "--label", "rack=r7") for one in label or ()]
    labels = {key: value for key, value in pairs} or None  # noqa: C416 - dict() takes no tuples of unknown length
    kind = device or _best_kind(hosts)
    launch(kind)  # raises for one that is not registered
    common: dict[str, Any] = {"kind": kind, "labels": labels}
    found: dict[str, list[str]] = {}
    if train:
        found["train"] = assign(hosts, Wishes(num_workers=train, num_hosts=num_hosts, strategy=strategy, **common))
    if infer:
        trainers = dict.fromkeys(found.get("train", ()), "the train engine")
        shared = None if apart or not train else tuple(trainers)
        wishes = Wishes(
            num_workers=infer, group_size=tensor_parallel, shared=shared, held=trainers if apart else None, **common
        )
        found["inference"] = assign(hosts, wishes)
    if as_json:
        print_json({"hosts": [asdict(one) for one in hosts], "placement": found})
    else:
        rows = [[name, *row] for name, names in found.items() for row in _rows(names)]
        print_table(["engine", "host", "ranks", "devices"], rows)


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


def _this_host() -> Host:
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
