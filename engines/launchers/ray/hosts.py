"""The hosts of a Ray cluster, from what Ray says of its nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlcore.engines.launchers.base import Host
from rlcore.registry import get_device, registry


def hosts_of(nodes: Sequence[dict[str, Any]]) -> list[tuple[Host, dict[str, Any]]]:
    """Return the hosts that are alive, by name, each with Ray's own description of its node.

    A host has the name that its ``ray start --node-name`` gave, else its host name. Of two alike the second gets "-2".
    """
    alive = sorted((node for node in nodes if node["Alive"]), key=_order)
    names = _unique([_given_name(node) for node in alive])
    found = [
        Host(
            name=name,
            address=node["NodeManagerAddress"],
            counts=counts_of(node["Resources"]),
            labels=dict(node.get("Labels") or {}),
        )
        for name, node in zip(names, alive, strict=True)
    ]
    return list(zip(found, alive, strict=True))


def _order(node: dict[str, Any]) -> tuple[list[tuple[int, str]], str]:
    """Sort host-2 before host-10."""
    parts = re.findall(r"\d+|\D+", _given_name(node))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], node["NodeID"]


def _given_name(node: dict[str, Any]) -> str:
    given = str(node.get("NodeName") or "")
    name = given if given and given != node["NodeManagerAddress"] else str(node["NodeManagerHostname"])
    return name.replace("/", "-")  # a "/" ends the host in names of devices


def _unique(names: list[str]) -> list[str]:
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return found


def counts_of(resources: dict[str, float]) -> dict[str, int]:
    """Return the number of devices of each kind that Ray counts; a host's own memory can be shared by many workers."""
    found = {}
    for spec, _ in sorted(registry().devices.values(), key=lambda entry: -entry[0].priority):
        count = int(resources.get(spec.ray_resource or "", 0))
        found[spec.name] = max(count, get_device(spec.name).count()) if spec.is_host else count
    return found
