"""``torch.simdev``: the module that torch and its users ask about the device type."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import uuid
from pathlib import Path

import torch

from rlcore_simdev.faults import has_fault


def register() -> None:
    """Make the device type known to torch; called by torch at the end of ``import torch``."""
    if torch._C._get_privateuse1_backend_name() == "simdev":
        return
    (library,) = Path(__file__).parent.glob("_C*.so")
    torch.utils.rename_privateuse1_backend("simdev")
    torch.ops.load_library(library)
    torch._register_device_module("simdev", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    from rlcore_simdev import simccl  # now, as torch.distributed asks which device types there are

    simccl.register()


@dataclasses.dataclass(frozen=True)
class Properties:
    name: str
    uuid: str
    total_memory: int
    major: int = 1
    minor: int = 0
    multi_processor_count: int = 1


def get_device_properties(device=None) -> Properties:
    physical = torch.ops.simdev.visible_devices()[_index(device)]
    boot_id = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    whose = os.getpid() if has_fault("uuid_of_this_process") else ""
    name = uuid.uuid5(boot_id, f"simdev {physical}{whose}")
    return Properties("Simulated accelerator", str(name), mem_get_info(device)[1])


def is_initialized() -> bool:
    """Whether any device was used by this process."""
    return torch.ops.simdev.is_initialized()


def init() -> None:
    torch.ops.simdev.initialize(current_device())


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return len(torch.ops.simdev.visible_devices())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(torch.accelerator.device_index):  # noqa: N801 - torch.load enters it
    """Context in which another device is the current one."""

    def __init__(self, device) -> None:
        super().__init__(_index(device))


def synchronize(device=None) -> None:
    torch.accelerator.synchronize(_index(device))


def mem_get_info(device=None) -> tuple[int, int]:
    """(free, total) bytes of the device, whoever uses it."""
    return torch.accelerator.get_memory_info(_index(device))


def manual_seed_all(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)


def get_rng_state(device=None) -> torch.Tensor:
    return _generators()[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device=None) -> None:
    _generators()[_index(device)].set_state(state)


class MemPool:
    """Device memory kept apart: ``with use_mem_pool(pool):`` this thread allocates from it."""

    _ids = itertools.count(1)

    def __init__(self) -> None:
        self.id = next(self._ids)

    def snapshot(self) -> list[dict]:
        numbers = torch.ops.simdev.segments_of_pool(self.id)
        keys = ("device", "allocated_size", "total_size")
        return [dict(zip(keys, numbers[i : i + 3], strict=True)) for i in range(0, len(numbers), 3)]

    def __del__(self) -> None:
        torch.ops.simdev.release_pool(self.id)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device=None):
    before = torch.ops.simdev.exchange_pool(pool.id)
    try:
        yield
    finally:
        torch.ops.simdev.exchange_pool(before)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


def _index(device) -> int:
    index = device if isinstance(device, int) else torch.device("simdev" if device is None else device).index
    return current_device() if index is None else index


def _generators() -> tuple[torch.Generator, ...]:
    return tuple(torch.ops.simdev.default_generator(index) for index in range(device_count()))


def __getattr__(name: str):
    if name == "default_generators":  # torch.cuda has it as a tuple, and so have those who write for all devices
        return _generators()
    raise AttributeError(f"module 'torch.simdev' has no attribute {name!r}")
