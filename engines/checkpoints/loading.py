"""The agreement of all workers on a checkpoint: it is loaded only after each of them has checked it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed as dist

from rlcore.collectives.default_group import all_gather_bytes, rank_and_size
from rlcore.device import Device
from rlcore.engines.checkpoints import checkpoint
from rlcore.engines.checkpoints.checkpoint import Checkpoint
from rlcore.engines.checkpoints.damage import DamageError
from rlcore.errors import CheckpointError

T = TypeVar("T")


class _RankCheck(msgspec.Struct):
    """The result of one worker's check."""

    data: str
    """The name of its data; "" if it has gone, because another save replaced it meanwhile."""
    error: str


def agreed(folder: Path, device: Device, look: Callable[[Checkpoint], T]) -> T:
    """Open the checkpoint and check its data, each worker some files; return what ``look`` returns for it.

    All workers call it together; when one of them raises, all do. ``look`` changes nothing.

    Raises:
        CheckpointError: missing, damaged, or what ``look`` raised.
    """
    before: list[str] = []
    while True:
        result: T | None = None
        failure: Exception | None = None
        data = ""
        try:
            found = checkpoint.read(folder)
            result = look(found)
            found.check_data(*rank_and_size())
            data = found.manifest.data
        except FileNotFoundError:
            pass
        except DamageError as error:
            failure = checkpoint.damaged(folder, error)
        except Exception as error:  # of whatever kind: the others must not wait for this one
            failure = error
        checks = _exchanged(_RankCheck(data, failure_text(failure)), device)
        if failure is not None:
            raise failure
        if errors := [check.error for check in checks if check.error]:
            raise CheckpointError(errors[0])
        if data and all(check.data == data for check in checks):
            return result  # type: ignore[return-value]  # it has been set
        names = [check.data for check in checks]
        if names == before and all(names):  # not replaced meanwhile: they would have changed
            other = next(rank for rank, name in enumerate(names) if name != names[0])
            raise CheckpointError(
                f"{folder} is not one folder for all ranks: rank 0 finds {names[0]} in it, and rank {other} finds "
                f"{names[other]}; give a folder on a file system that all hosts share"
            )
        before = names


def failure_text(failure: Exception | None) -> str:
    """Return what one worker tells the others of its failure, "" for none."""
    if failure is None:
        return ""
    text = str(failure) or type(failure).__name__
    return text.encode(errors="replace").decode()  # a path need not be Unicode


def _exchanged(own: _RankCheck, device: Device) -> list[_RankCheck]:
    """Return the results of all workers."""
    if not dist.is_initialized():
        return [own]
    sent = all_gather_bytes(msgspec.json.encode(own), device.torch_device)
    return [msgspec.json.decode(data, type=_RankCheck) for data in sent]


def half_loaded(folder: Path, error: Exception) -> CheckpointError:
    """Return the error of a worker that failed while it took a checkpoint that was checked."""
    return CheckpointError(
        f"the checkpoint {folder} is right, and yet this worker could not take all of it: "
        f"{type(error).__name__}: {error}; call load() again, or restart(): until then some of its weights and "
        "optimizer states are the checkpoint's and some are not"
    )
