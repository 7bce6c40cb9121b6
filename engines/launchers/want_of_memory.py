"""The allocation that failed behind an exception: what was asked for, and what holds the memory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from rlcore.device import Device
from rlcore.engines._torch_private import dump_allocator
from rlcore.engines.offload.host_limits import cgroup_limits
from rlcore.held_memory import held
from rlcore.settings import Settings

_UNITS = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5, "EiB": 6}
_ASKED = re.compile(rf"(?:you tried to allocate|Tried to allocate|Unable to allocate) ([\d.]+) ({'|'.join(_UNITS)})\b")
"""The words of torch for the host's memory, of torch for a device's, and of numpy."""
_SNAPSHOTS = 4
_REFUSED = re.compile(r"error: out of memory\b|_STATUS_ALLOC_FAILED\b|Error \[\w+\]: out of memory\b")
"""The words of a device's driver as torch hands them on, of the libraries on top of it, and of Triton: no numbers."""


def want_of_memory(error: BaseException, device: Device | None) -> str:
    """Return the facts as sentences, "" if no allocation has failed.

    Args:
        device: the worker's; None before it has one.
    """
    failed = next((one for one in _chain(error) if _is_failed_allocation(one)), None)
    if failed is None:
        return ""
    return " ".join([_asked(failed), *_facts(device)])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _is_failed_allocation(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_ASKED.search(str(error)) or _REFUSED.search(str(error)))


def _asked(error: BaseException) -> str:
    found = _ASKED.search(str(error))
    if found is None:
        return "Memory was asked for, and the error does not say how much."
    if found[2] == "bytes":
        return f"{found[1]} bytes were asked for."
    about = round(float(found[1]) * 1024 ** _UNITS[found[2]])  # the library has rounded it
    return f"About {about} bytes were asked for ({found[1]} {found[2]})."


def _facts(device: Device | None) -> Iterator[str]:
    # No fact is worth a second error.
    with contextlib.suppress(Exception):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield f"This process has {pages * os.sysconf('SC_PAGE_SIZE')} bytes of the host's memory (resident)."
    with contextlib.suppress(Exception):
        yield from (f"{str(limit).capitalize()}." for limit in cgroup_limits())
    if device is not None:
        with contextlib.suppress(Exception):
            info = device.memory.info()
            yield f"{device.name} has {info.free_bytes} bytes free of {info.total_bytes}."
        with contextlib.suppress(Exception):
            stats = device.memory.stats()
            if not device.spec.is_host:
                cached = stats.reserved_bytes - stats.allocated_bytes
                yield (
                    f"This process's allocator has {stats.allocated_bytes} bytes of it in tensors and {cached} cached."
                )
        with contextlib.suppress(Exception):
            yield from _snapshot(device)
    parts = ", ".join(f"{what} {nbytes}" for what, nbytes in held().items())
    yield f"Held by rlcore here, in bytes: {parts or 'nothing'}."


def _snapshot(device: Device) -> Iterator[str]:
    """Write what the device's allocator holds, block by block, to rlcore's cache folder, where the newest few stay."""
    folder = Settings.from_env().cache / "out_of_memory"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{device.type}-{device.index}-{os.getpid()}.pickle"
    if dump_allocator(device.type, file):
        for older in sorted(folder.glob("*.pickle"), key=lambda one: -one.stat().st_mtime)[_SNAPSHOTS:]:
            older.unlink(missing_ok=True)
        yield f"A snapshot of its allocator is in {file}: open it at https://pytorch.org/memory_viz."
