"""The behaviour of NCCL alone: memory that a destroyed group gives back, priorities, barriers that time out."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from rlcore.errors import CollectiveTimeoutError
from rlcore.registry import get_device


def sleep_and_wake(rank: Any) -> tuple[int, int]:
    place = get_device(f"cuda:{rank.rank}")
    keep = rank.group("cuda", 2)
    values = torch.ones(1 << 20, device=place.torch_device)
    keep.all_reduce(values)
    keep.barrier()
    free = lambda: torch.cuda.mem_get_info(place.torch_device)[0]  # noqa: E731
    group = rank.new_group("cuda", 2, "sleeper")
    group.all_reduce(values)
    group.barrier()
    awake = free()
    keep.barrier()
    group.destroy()
    keep.barrier()
    asleep = free()
    keep.barrier()
    group.rebuild()
    values.fill_(1.0)
    assert group.all_reduce(values)[0].item() == 2.0
    group.destroy()
    return awake, asleep


@pytest.mark.multigpu
def test_a_destroyed_group_gives_device_memory_back(on_ranks: Any) -> None:
    for awake, asleep in on_ranks(sleep_and_wake, 2):
        print(f"freed by destroy: {asleep - awake} bytes")
        assert asleep > awake


def form_with_priority(rank: Any) -> tuple[bool, float]:
    with rank.new_group("cuda", 2, "urgent", is_high_priority=True, timeout_s=45.0) as group:
        ones = torch.ones(4, device=group.device.torch_device)
        group.all_reduce(ones)
        options = group.process_group._get_backend(group.device.torch_device).options
        assert ones.tolist() == [2.0] * 4
        return options.is_high_priority_stream, options._timeout.total_seconds()


@pytest.mark.multigpu
def test_a_group_on_a_high_priority_stream(on_ranks: Any) -> None:
    assert on_ranks(form_with_priority, 2) == [(True, 45.0)] * 2


def fail_to_arrive_on_gpu(rank: Any) -> str:
    group = rank.new_group("cuda", 2, "late-gpu")
    if rank.rank == 1:
        time.sleep(4.0)
        text = ""
    else:
        with pytest.raises(CollectiveTimeoutError) as error:
            group.barrier(timeout_s=1.5)
        text = str(error.value)
    group._error = group._error or "the other rank gave up"
    group.destroy()
    return text


@pytest.mark.multigpu
def test_a_barrier_of_gpus_names_the_rank_that_did_not_come(on_ranks: Any) -> None:
    assert "did not end within 1.5 s: rank 1 did not arrive" in on_ranks(fail_to_arrive_on_gpu, 2)[0]
