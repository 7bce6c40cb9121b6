"""The identity of an engine: what decides how its loader, and what it does after loading, lays weights out.

A plan that has passed its self-test serves later programs whose engine has the same (``Target.identity``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist
from torch import nn

from rlcore.device import Device
from rlcore.engines.weight_sync.planning.module_identity import module_identity

_PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "compressed-tensors")
_OF_A_PROCESS = ("_IP", "_PORT", "_PATH", "_DIR", "_ROOT", "_IDENT", "_BUFFER_NAME", "_RUN_ID")


def engine_identity(
    model: nn.Module, device: Device, *, packages: Iterable[str], variables: tuple[str, ...], arguments: object = ()
) -> str:
    """Return a text that differs wherever a plan for this model might.

    Args:
        packages: of the engine, whose kernels decide how weights lie, beside those that every engine may have.
        variables: the beginnings of names of environment variables that choose kernels.
        arguments: that the engine was made with.
    """
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ()
    kind = device.properties().name, device.versions()
    installed = list(_installed((*packages, *_PACKAGES)))
    return repr((installed, environment(variables), arguments, ranks, kind, module_identity(model)))


def _installed(packages: Iterable[str]) -> Iterator[str]:
    for name in packages:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def environment(variables: tuple[str, ...]) -> list[str]:
    """Return the variables that choose kernels. Addresses and names that each process draws choose nothing."""
    named = {name: value for name, value in os.environ.items() if name.startswith(variables)}
    return sorted(f"{name}={value}" for name, value in named.items() if not name.endswith(_OF_A_PROCESS))
