"""Host memory of exactly the size asked for, to copy to and from a device."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
import torch

from rlcore.errors import DeviceError, InvalidInputError, StateError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MOST_THREADS = 16  # 16 GiB in 2.5 s: the kernel clears pages, and more threads would only wait for memory
_LEAST_BYTES_PER_THREAD = 64 * 2**20


@final
class HostBuffer:
    """A buffer of ``device.memory.host_alloc``; it lives until ``host_free``, or until nothing refers to it."""

    def __init__(self, memory: Bytes, *, is_pinned: bool) -> None:
        self.nbytes = memory.nbytes
        self.is_pinned = is_pinned
        """It is page-locked for the device: copies run at the link's speed, and the host can work meanwhile."""
        self._memory: Bytes | None = memory

    @property
    def tensor(self) -> torch.Tensor:
        """Return the buffer itself, [nbytes] uint8.

        Raises:
            StateError: it was freed.
        """
        return torch.from_numpy(self._held())

    def free(self) -> None:
        """Free the buffer. Raises StateError if it was freed before, or if a tensor still refers to it."""
        used = weakref.ref(self._held())
        self._memory = None
        if (memory := used()) is not None:
            self._memory = memory
            raise StateError(
                f"a host buffer of {self.nbytes} bytes cannot be freed while a tensor looks at it; "
                "delete the tensor first"
            )

    def _held(self) -> Bytes:
        if self._memory is None:
            raise StateError(f"this host buffer of {self.nbytes} bytes was freed; host_alloc another")
        return self._memory

    def __repr__(self) -> str:
        state = "freed" if self._memory is None else "pinned" if self.is_pinned else "pageable"
        return f"<{state} host buffer of {self.nbytes} bytes>"


def check_nbytes(nbytes: int) -> None:
    if type(nbytes) is not int or nbytes < 1:
        raise InvalidInputError(f"host_alloc takes a whole number of at least 1 byte, got {nbytes!r}")


def map_pages(nbytes: int) -> Bytes:
    """Return private memory of this process, page-aligned, in huge pages if the kernel has them, all pages present.

    It is unmapped when nothing refers to it any more.

    Raises:
        DeviceError: the machine has too little memory.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise DeviceError(f"{nbytes} bytes of host memory could not be had: {error}; ask for less") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(pages, dtype=np.uint8)
    _touch(memory)
    return memory


def _touch(memory: Bytes) -> None:
    """Write each page by several threads: the kernel allocates and clears a page at its first write."""
    num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), memory.nbytes // _LEAST_BYTES_PER_THREAD))
    part = -(-memory.nbytes // num_threads // mmap.PAGESIZE) * mmap.PAGESIZE
    parts = [memory[start : start + part : mmap.PAGESIZE] for start in range(0, memory.nbytes, part)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda part: part.fill(0), parts))
