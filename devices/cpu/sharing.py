"""IPC of host memory: POSIX shared memory without a name, so that a killed process leaves nothing behind."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path
from typing import final

import torch

from rlcore.devices._torch_private import share_by_descriptor, storage_of_descriptor
from rlcore.devices.ipc.sharing import SharedMemory, Sharing
from rlcore.errors import DeviceError

_FILE = re.compile(r"file </(torch_\w+)>")


@final
class CpuSharing(Sharing):
    """A storage moves into shared memory in place, and its descriptor travels over the exporter's socket."""

    def share(self, storage: torch.UntypedStorage) -> SharedMemory:
        try:
            descriptor = share_by_descriptor(storage)
            return SharedMemory(descriptor=os.dup(descriptor))  # torch closes its own when the storage is resized
        except (RuntimeError, OSError) as error:  # torch reserves all of it, so that a full /dev/shm fails here
            _remove_what_torch_leaves(str(error))
            is_open_limit = os.strerror(errno.EMFILE) in str(error)
            advice = "raise ulimit -n" if is_open_limit else "make /dev/shm larger (docker run --shm-size)"
            raise DeviceError(
                f"{storage.nbytes()} bytes could not be moved to shared memory: {error}; {advice}"
            ) from error

    def open(self, memory: SharedMemory, storage_bytes: int) -> torch.UntypedStorage:
        if memory.descriptor is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise DeviceError(
                "no descriptor of the exporter's memory has arrived: this process may have open all of the "
                f"{limit} files that it may have (raise ulimit -n), or the exporter runs another rlcore"
            )
        return storage_of_descriptor(memory.descriptor, storage_bytes)

    def close(self, memory: SharedMemory) -> None:
        """Do nothing: torch unmaps the memory when no tensor refers to it any more."""


def _remove_what_torch_leaves(error: str) -> None:
    """Remove the empty file that torch leaves behind when it cannot map it."""
    if named := _FILE.search(error):
        Path("/dev/shm", named[1]).unlink(missing_ok=True)
