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

_MOST_THREADS = 16  # 16 GiB in 2.5 s; the kernel clears pages, and more threads only wait for memory
_LEAST_BYTES_PER_THREAD = 64 * 2**20


@final
class HostBuffer:
    """Made by ``device.memory.host_alloc``; it lives until ``host_free``, or until nothing looks at it any more."""

    def __init__(self, memory: Bytes, *, is_pinned: bool) -> None:
        self.nbytes = memory.nbytes
        self.is_pinned = is_pinned
        """Registered with the device, so that copies run at the link's speed and beside the host's work."""
        self._memory: Bytes | None = memory

    @property
    def tensor(self) -> torch.Tensor:
        """[nbytes] uint8, the buffer itself.

        Raises:
            StateError: it was freed.
        """
        return torch.from_numpy(self._held())

    def free(self) -> None:
        """Raises StateError if it was freed before, or if some tensor still looks at it."""
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
    """Private memory of this process at a page's start, in huge pages where the kernel has them, all of it present.

    It is unmapped when nothing looks at it any more.

    Raises:
        DeviceError: the machine has not so much memory.
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
    """One write a page, by many threads: a page is there only when it is first written, and clearing it takes time."""
    num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), memory.nbytes // _LEAST_BYTES_PER_THREAD))
    part = -(-memory.nbytes // num_threads // mmap.PAGESIZE) * mmap.PAGESIZE
    parts = [memory[start : start + part : mmap.PAGESIZE] for start in range(0, memory.nbytes, part)]
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(_clear, parts))


def _clear(part: Bytes) -> None:
    part.fill(0)
