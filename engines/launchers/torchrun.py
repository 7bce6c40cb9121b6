"""Runs this rank's worker of a world that torchrun or Slurm's srun started, in the user's process."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from rlcore.engines.launchers.base import Launcher, LaunchOptions, WorkerPlacement, engine_numbers
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.inline import start_inline
from rlcore.engines.launchers.slurm import use_slurm_variables
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError
from rlcore.process.network_interface import address_in_world, use_interface_of

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class TorchrunLauncher(Launcher):
    """Each rank of the world runs the user's program, and starts its own worker in it."""

    def start(
        self, worker_class: type[Any], placements: Sequence[WorkerPlacement], options: LaunchOptions
    ) -> WorkerGroup:
        use_slurm_variables(os.environ)
        if _num_ranks_here() < int(os.environ.get("WORLD_SIZE", "1")):
            use_interface_of(address_in_world())
        context = _context(options.engine, [name for placement in placements for name in placement.devices])
        context.device.activate()
        return start_inline(worker_class, context, options.timeout_s)


def num_hosts(num_workers: int | None) -> int:
    """Return over how many hosts the workers of an engine are spread: an engine of one rank alone is on its host.

    Raises:
        InvalidInputError: the hosts of the world have different numbers of ranks.
    """
    use_slurm_variables(os.environ)
    size, here = int(os.environ.get("WORLD_SIZE", "1")), _num_ranks_here()
    if num_workers != size or size == here:
        return 1
    if size % here:
        raise InvalidInputError(
            f"launcher 'torchrun' takes as many ranks on each host; this world has {size}, and {here} of them are on "
            f"{socket.gethostname()}"
        )
    return size // here


def _num_ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _context(engine: str, device_names: list[str]) -> WorkerContext:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise InvalidInputError(
            f"launcher 'torchrun' needs the variables that torchrun sets, or srun for several tasks; absent: "
            f"{', '.join(missing)}"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in _VARIABLES)
    if len(device_names) not in (1, world_size):
        raise InvalidInputError(
            f"launcher 'torchrun' runs one worker a rank: {engine} has {len(device_names)} workers, this world has "
            f"{world_size} ranks"
        )
    if len(device_names) == 1:  # an engine of this rank alone
        kind = device_names[0].partition(":")[0]
        return WorkerContext(engine, 0, 1, f"{kind}:{local_rank}", next(engine_numbers))
    return WorkerContext(engine, rank, world_size, device_names[local_rank], next(engine_numbers))
