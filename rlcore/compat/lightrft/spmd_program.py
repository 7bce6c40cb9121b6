"""``SpmdProgram``: a program that runs on every rank alike, and what its ranks tell each other."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import rlcore
from rlcore.collectives.default_group import rank_and_size
from rlcore.device import Device
from rlcore.errors import InvalidInputError


class SpmdProgram:
    """This rank with its device, and the others. Without torchrun's variables the program is a world of one rank."""

    seed: int
    device: Device
    world_size: int
    is_torchrun: bool

    def set_seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Join the other ranks, and take the device of this one. Without torchrun this rank is alone."""
        self.set_seed(self.seed)
        self.is_torchrun = "RANK" in os.environ
        kind = rlcore.get_device().name.partition(":")[0]
        self.device = rlcore.get_device(f"{kind}:{os.environ.get('LOCAL_RANK', '0')}")
        self.device.activate()
        if self.is_torchrun and not dist.is_initialized():
            dist.init_process_group(self.device.collectives.backend, timeout=timeout)
        _, self.world_size = rank_and_size()

    @classmethod
    def is_rank_0(cls) -> bool:
        return rank_and_size()[0] == 0

    def get_rank(self) -> int:
        return rank_and_size()[0]

    @classmethod
    def print(cls, *msg: object) -> None:
        """Print on rank 0."""
        if cls.is_rank_0():
            print(f"[{datetime.now():%m-%d %H:%M:%S}]", *msg, flush=True)

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Return the mean, sum or maximum over the ranks, of a tensor, a number, or each value of a dict."""
        if op not in ("mean", "max", "sum"):
            raise InvalidInputError(f"all_reduce() takes op='mean', 'max' or 'sum', got {op!r}")
        if isinstance(data, Mapping):
            return {name: self.all_reduce(value, op) for name, value in data.items()}
        if not isinstance(data, Tensor):
            return self.all_reduce(torch.tensor([float(data)]), op).item()
        reduced = data.to(self.device.torch_device, copy=True)
        if self.world_size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        if op == "mean":
            reduced = reduced / self.world_size
        return reduced.to(data.device)

    def all_gather(self, data: Any) -> Any:
        """Return the tensors of all ranks, joined; a number counts as a tensor of one; of a dict each value."""
        if isinstance(data, Mapping):
            return {name: self.all_gather(value) for name, value in data.items()}
        own = data if isinstance(data, Tensor) else torch.tensor(float(data))
        own = own if own.dim() else own[None]
        if self.world_size == 1:
            return own.clone()
        sent = own.to(self.device.torch_device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(parts, sent)
        return torch.cat(parts).to(own.device)

    def sync_and_clear_cache(self) -> None:
        """Wait for the device and for all ranks; give unused memory back."""
        self.device.synchronize()
        if self.world_size > 1:
            dist.barrier()
        self.device.memory.empty_cache()

    def report_memory(self, prefix: str = "") -> None:
        """Print how much of the device's memory is in use."""
        info = self.device.memory.info()
        self.print(f"MEMORY STATUS: {prefix}, USED={(info.total_bytes - info.free_bytes) / 1e9:.2f} GB")
