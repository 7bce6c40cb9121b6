"""A rank that saves its rows of a tensor, and opens them again, in each of some folders; prints a line for each.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m tests.engines.checkpointing_ranks /shared/run /own/run
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlcore.engines.checkpoints.loading import agreed
from rlcore.engines.checkpoints.saving import Saver
from rlcore.engines.checkpoints.train_state import Captured
from rlcore.errors import CheckpointError
from rlcore.process.framing import take_standard_output
from rlcore.registry import get_device


def error_of(work: Callable[[], object]) -> str:
    """Return the error that the work raises, "" for none."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def main() -> None:
    answers = take_standard_output()  # torch 2.10's gloo prints there
    cpu = get_device("cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {"w": distribute_tensor(torch.arange(1000.0), mesh, [Shard(0)])}

    def save(folder: Path) -> None:
        Saver(cpu).save(folder, Captured({"weights": weights}, {}), blocking=True)

    def load(folder: Path) -> None:
        agreed(folder, cpu, lambda _: None)

    def save_alone(folder: Path) -> None:
        """Leave a checkpoint on this host, as an earlier run of one process would."""
        everyone, dist.is_initialized = dist.is_initialized, lambda: False
        Saver(cpu).save(folder, Captured({"weights": {"w": torch.ones(3)}}, {}), blocking=True)
        dist.is_initialized = everyone

    for folder in map(Path, sys.argv[1:]):
        found: dict[str, object] = {"saved": error_of(partial(save, folder)), "loaded": error_of(partial(load, folder))}
        found["left"] = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        alone = folder.with_name("alone")
        save_alone(alone)
        found["loaded_alone"] = error_of(partial(load, alone))
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
