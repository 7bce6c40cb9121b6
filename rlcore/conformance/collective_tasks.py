"""Functions that each rank runs in tests of collectives. Each rank compares its results with plain torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from rlcore._torch_private import FileStore
from rlcore.collectives.groups import Group, new_group
from rlcore.conformance.accuracy import is_rounded
from rlcore.conformance.work import BusyWork
from rlcore.device import Device
from rlcore.errors import UnsupportedError

_groups: dict[str, Group] = {}
_SHAPE = (3, 4)
_LARGE = (5 << 20) + 4
_WITH_INFINITY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TRIES = 3
_LATE_S = 0.3


def form(device: Device, rank: int, world_size: int, folder: str) -> None:
    _groups["one"] = new_group(device, rank=rank, world_size=world_size, rendezvous=Path(folder), timeout_s=60)


def destroy(device: Device) -> None:
    _groups.pop("one").destroy()


def reductions(device: Device) -> dict[str, str]:
    """Return "op dtype" -> "ok", the error, or "unsupported", for every operator and dtype of the device."""
    pairs = [(op, dtype) for op in device.collectives.reduce_ops() for dtype in device.collectives.dtypes()]
    return {f"{op} {str(dtype).removeprefix('torch.')}": _reduction(device, op, dtype) for op, dtype in pairs}


def not_finite(device: Device) -> dict[str, str]:
    """Return "op dtype" -> "ok" or the error, of values with a NaN of one rank and infinities of two."""
    pairs = [(op, dtype) for op in ("sum", "avg", "product", "min", "max") for dtype in _WITH_INFINITY]
    return {f"{op} {str(dtype).removeprefix('torch.')}": _not_finite(device, op, dtype) for op, dtype in pairs}


def of_many_elements(device: Device) -> dict[str, str]:
    """Return operation -> "ok", or the first place where a tensor of some million elements is wrong."""
    group, where = _groups["one"], device.torch_device
    rank, size = group.rank, group.world_size
    base = (torch.arange(_LARGE) % 251).float()
    mine, ranks = (base + rank).to(where), torch.arange(size)
    total = base * size + ranks.sum()
    found = {
        "all_gather": (torch.cat(group.all_gather(mine)), torch.cat([base + r for r in range(size)])),
        "broadcast": (group.broadcast(mine.clone(), size - 1), base + (size - 1)),
        "reduce_scatter": (group.reduce_scatter(mine), total.tensor_split(size)[rank]),
        "all_to_all": (
            torch.cat(group.all_to_all(list(mine.tensor_split(size)))),
            torch.cat([base.tensor_split(size)[rank] + r for r in range(size)]),
        ),
        "all_reduce": (group.all_reduce(mine), total),
    }
    return {name: _first_difference(*pair) for name, pair in found.items()}


def of_no_elements(device: Device) -> dict[str, bool]:
    """Return operation -> True if its result is right for tensors without elements, of all ranks and of some."""
    group, where = _groups["one"], device.torch_device
    rank, size = group.rank, group.world_size
    none = torch.empty(0, 3, device=where)
    gathered = group.all_gather(torch.full((rank, 2), float(rank), device=where))
    swapped = group.all_to_all([torch.full((rank,), float(rank), device=where) for _ in range(size)])
    return {
        "all_reduce": tuple(group.all_reduce(none.clone()).shape) == (0, 3),
        "reduce_scatter": tuple(group.reduce_scatter(none).shape) == (0, 3),
        "broadcast": tuple(group.broadcast(none.clone(), 0).shape) == (0, 3),
        "all_gather": [part.tolist() for part in gathered] == [[[float(r)] * 2] * r for r in range(size)],
        "all_gather of nothing": [tuple(part.shape) for part in group.all_gather(none)] == [(0, 3)] * size,
        "all_to_all": [part.tolist() for part in swapped] == [[float(r)] * r for r in range(size)],
        "all_reduce afterwards": group.all_reduce(torch.ones(2, device=where)).tolist() == [size] * 2,
    }


def movements(device: Device) -> dict[str, bool]:
    """Return operation -> True if its result is right."""
    group, where = _groups["one"], device.torch_device
    rank, size = group.rank, group.world_size
    mine = torch.full((rank + 1, 2), float(rank), device=where)
    gathered = group.all_gather(mine)
    sent = group.broadcast(torch.arange(5.0, device=where) * (1 if rank == size - 1 else 0), size - 1)
    swapped = group.all_to_all([torch.full((rank + to + 1,), 10.0 * rank + to, device=where) for to in range(size)])
    scattered = group.reduce_scatter(torch.arange(2.0 * size, device=where).view(size, 2) * (rank + 1))
    total = size * (size + 1) / 2
    if size > 1 and rank == 0:
        group.send(torch.full((3,), 42.0, device=where), 1)
    received = group.recv(torch.zeros(3, device=where), 0) if rank == 1 else torch.full((3,), 42.0)
    group.barrier()
    return {
        "all_gather": [part.tolist() for part in gathered] == [[[float(r)] * 2] * (r + 1) for r in range(size)],
        "broadcast": sent.tolist() == [0, 1, 2, 3, 4],
        "all_to_all": [part.tolist() for part in swapped] == [[10.0 * r + rank] * (r + rank + 1) for r in range(size)],
        "reduce_scatter": scattered.flatten().tolist() == [2 * rank * total, (2 * rank + 1) * total],
        "send and recv": received.tolist() == [42] * 3,
        "exchange": group.exchange(bytes([rank]) * 3000) == [bytes([r]) * 3000 for r in range(size)],
    }


def collective_follows_the_stream(device: Device, is_new: bool) -> list[float]:
    """Return the distinct values of all-reduces, whose inputs were queued right before and not waited for.

    Args:
        is_new: on a stream of its own, not on the first one.
    """
    values = torch.zeros(1 << 20, device=device.torch_device)
    busy = BusyWork.of(device)
    found: set[float] = set()
    for _ in range(_TRIES):
        values.zero_()
        device.synchronize()
        with device.streams.use(device.streams.new()) if is_new else contextlib.nullcontext():
            busy.queue()
            values.fill_(3)
            _groups["one"].all_reduce(values)
            values.mul_(2)
            found.update(values.unique().tolist())
    return sorted(found)


def cycles(device: Device, times: int) -> dict[str, int]:
    """Destroy and form the group ``times`` times; return the resources that this process holds then."""
    for _ in range(times):
        rebuild(device)
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "allocated bytes": int(device.memory.stats().allocated_bytes),
    }


def default_group(device: Device, rank: int, world_size: int, folder: str) -> tuple[list[float], bool]:
    """Sum over torch's default group, made with ``init_kwargs``; return it, and True if its barrier waited for all."""
    device.activate()
    dist.init_process_group(
        **device.collectives.init_kwargs(timeout_s=60),
        store=FileStore(f"{folder}/default", world_size),
        rank=rank,
        world_size=world_size,
    )
    values = torch.arange(3.0, device=device.torch_device) + rank
    dist.all_reduce(values)
    total = list(values.tolist())
    time.sleep(_LATE_S * rank)
    Path(folder, f"rank {rank} came").touch()
    dist.barrier()
    have_come = all(Path(folder, f"rank {other} came").exists() for other in range(world_size))
    dist.destroy_process_group()
    return total, have_come


def rebuild(device: Device) -> list[float]:
    group = _groups["one"]
    group.destroy()
    group.rebuild()
    return list(group.all_reduce(torch.ones(2, device=device.torch_device)).tolist())


def _reduction(device: Device, op: str, dtype: torch.dtype) -> str:
    group = _groups["one"]
    ranks = [_values(rank, op, dtype) for rank in range(group.world_size)]
    factor = 0.5 if op == "premul_sum" else None
    mine = ranks[group.rank].to(device.torch_device, copy=True)
    how = device.collectives.reduction(op, dtype)
    try:
        share = group.reduce_scatter(mine.flatten(), op, factor=factor)
        group.all_reduce(mine, op, factor=factor)
    except UnsupportedError as error:
        return "unsupported" if how.support == "unsupported" and error.reason == how.reason else f"refused: {error}"
    if how.support == "unsupported":
        return "was said to be unsupported, and worked"
    expected = _expected(ranks, op, factor).flatten()
    own = expected.tensor_split(group.world_size)[group.rank]
    for what, found, right in (("all_reduce", mine.cpu().flatten(), expected), ("reduce_scatter", share.cpu(), own)):
        if not _is_right(found, right, roundings=group.world_size):
            return f"{how.support}: {what} gave {found[:4].tolist()}, not {right[:4].tolist()}"
    return "ok"


def _not_finite(device: Device, op: str, dtype: torch.dtype) -> str:
    group = _groups["one"]
    ranks = [_values(rank, op, dtype) for rank in range(group.world_size)]
    ranks[0][0, 1], ranks[0][2, 2] = torch.nan, -torch.inf
    ranks[-1][1, 0] = torch.inf
    found = group.all_reduce(ranks[group.rank].to(device.torch_device, copy=True), op).cpu()
    expected = _expected(ranks, op, None)
    is_finite = expected.isfinite()
    if not _same_or_nan(found.double()[~is_finite], expected[~is_finite]):
        return f"gave {found[~is_finite].tolist()}, not {expected[~is_finite].tolist()}"
    is_right = _is_right(found[is_finite], expected[is_finite], roundings=group.world_size)
    return "ok" if is_right else f"gave {found.tolist()}, not {expected.tolist()}"


def _same_or_nan(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def _first_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    there = found.cpu()
    wrong = (there != expected).nonzero()
    if not len(wrong):
        return "ok"
    place = int(wrong[0])
    return f"{len(wrong)} of {len(expected)} wrong, the first is {place}: {there[place]}, not {expected[place]}"


def _is_right(found: torch.Tensor, expected: torch.Tensor, roundings: int) -> bool:
    """Compare; an operation over n ranks rounds n - 1 times, and a mean or a factor once more."""
    if found.dtype.is_floating_point or found.dtype.is_complex:
        return is_rounded(found, expected, roundings)
    return torch.equal(found.to(torch.int64), expected.to(torch.int64))


def _values(rank: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """Return small numbers for which the operators give different results; of one sign in the same place of all ranks.

    Those that are not whole have more bits than a narrower dtype holds.
    """
    base = torch.arange(12).view(_SHAPE)
    if dtype == torch.bool:
        return ((base + rank) % 2).to(dtype)
    values = (base * (rank + 2)) % 5 + 1
    if dtype.is_signed:
        values = torch.where(base % 3 == 1, -values, values)
    return (values.double() / 3 if dtype.is_floating_point or dtype.is_complex else values).to(dtype)


def _expected(ranks: list[torch.Tensor], op: str, factor: float | None) -> torch.Tensor:
    stacked = torch.stack(ranks)
    if op in ("band", "bor", "bxor"):
        return functools.reduce(getattr(torch, f"bitwise_{op.removeprefix('b')}"), ranks)
    if stacked.dtype == torch.bool:
        return stacked.all(0) if op in ("product", "min") else stacked.any(0)
    is_whole = not (stacked.is_floating_point() or stacked.is_complex())
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
    if op == "avg":
        return wide.mean(0).trunc() if is_whole else wide.mean(0)
    if op == "premul_sum" and factor is not None:
        return (wide * factor).sum(0)
    reduce: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.sum,
        "product": torch.prod,
        "min": torch.amin,
        "max": torch.amax,
    }
    return reduce[op](wide, 0)
