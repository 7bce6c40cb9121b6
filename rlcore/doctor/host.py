"""Checks of the machine and of this process's environment, which need no torch."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from rlcore.doctor.check import CheckVerdict, fail, ok, warn
from rlcore.doctor.secrets import shown_environment
from rlcore.engines.launchers.running import read_record
from rlcore.engines.launchers.runtime_files import is_stale_store
from rlcore.process.runtime_folder import RuntimeFolder, runtime_folder
from rlcore.process.status import maker_of_shared_memory, start_time

_LEAST_PYTHON = (3, 11)
_LEAST_SHARED_BYTES = 1 << 30
"""Containers have 64 MiB unless told otherwise; gloo, NCCL and data loaders use it too."""
_LEAST_FILES = 4096
_MOST_NAMES, _MOST_REMOVED = 5, 20
_SOCKET = re.compile(r"ipc-(\d+)-(\d+)\b.*")
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")


def python() -> CheckVerdict:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= _LEAST_PYTHON:
        return ok(found)
    return fail(found, f"install Python {'.'.join(map(str, _LEAST_PYTHON))} or newer")


def shared_memory(folder: Path = Path("/dev/shm")) -> CheckVerdict:
    """Check the free bytes of POSIX shared memory."""
    enlarge = "mount -o remount,size=16G /dev/shm, or in a container: docker run --shm-size=16g (or --ipc=host)"
    if not folder.is_dir():
        return fail(f"there is no {folder}", "mount -t tmpfs -o size=16G tmpfs /dev/shm")
    if not os.access(folder, os.W_OK):
        return fail(f"{folder} is not writable by this user", f"chmod 1777 {folder}")
    space = os.statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    found = f"{_size(free)} free of {_size(total)}"
    return ok(found) if free >= _LEAST_SHARED_BYTES else warn(found, enlarge)


def locked_memory(infiniband: Path = Path("/sys/class/infiniband")) -> CheckVerdict:
    """Check the limit of locked memory, which binds InfiniBand; GPU drivers lock pages beyond it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited")
    if infiniband.is_dir() and any(infiniband.iterdir()):
        remedy = "ulimit -l unlimited, or in a container: docker run --ulimit memlock=-1"
        return warn(f"{_size(limit)}, and this machine has InfiniBand, which registers memory", remedy)
    return ok(_size(limit))


def open_files() -> CheckVerdict:
    """Check the limit of this process, and the hard one, to which worker processes raise theirs."""
    limit, most = (_limit(number) for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    uses = "each shared segment, socket and worker takes some"
    if most < _LEAST_FILES:
        enlarge = "as root: prlimit --nofile=65536:65536 --pid $$, or in a container: docker run --ulimit nofile=65536"
        return warn(f"{limit}, at most {most} in worker processes; {uses}, and so do others that connect", enlarge)
    if limit < _LEAST_FILES:
        return warn(f"{limit}; {uses}", f"ulimit -n {65_536 if most == math.inf else most}")
    return ok("unlimited" if limit == math.inf else str(limit))


def leftovers(shared: Path = Path("/dev/shm")) -> CheckVerdict:
    """Find files, sockets and shared memory that ended processes of this user left behind."""
    with runtime_folder() as folder:
        dead = [folder.path / name for name in folder.names() if _is_left_behind(folder, name)]
    dead += [
        path
        for path in (shared.iterdir() if shared.is_dir() else ())
        if (pid := maker_of_shared_memory(path.name)) and start_time(pid) is None and _is_own(path)
    ]
    if not dead:
        return ok("none")
    names = [path.name for path in sorted(dead)]
    rest = f" and {len(dead) - _MOST_NAMES} more" if len(dead) > _MOST_NAMES else ""
    again = "; rlcore doctor  # for the rest" if len(dead) > _MOST_REMOVED else ""
    return warn(
        f"{len(dead)} of dead processes: {', '.join(names[:_MOST_NAMES])}{rest}",
        f"rm -r {shlex.join(map(str, sorted(dead)[:_MOST_REMOVED]))}{again}",
    )


def allocator(environ: Mapping[str, str] = os.environ) -> CheckVerdict:
    """Check the allocator's variables: torch reads some settings from the first that is set, others from the second."""
    given = {name: environ[name] for name in _ALLOCATORS if name in environ}
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "no variable is set"
    if len(given) > 1:
        is_refused = "PYTORCH_NPU_ALLOC_CONF" in given
        return (fail if is_refused else warn)(
            f"{shown}: {'torch-npu refuses two of them' if is_refused else 'each holds for a part of the settings'}",
            f"unset {' '.join(name for name in given if name != 'PYTORCH_ALLOC_CONF') or 'one of them'}",
        )
    if re.search(r"expandable_segments\s*:\s*true", shown, re.IGNORECASE):
        return warn(
            f"{shown}: other processes cannot open expandable segments, so weights cannot be shared by IPC",
            f"unset {next(iter(given))}, or give it expandable_segments:False",
        )
    return ok(shown)


def environment(environ: Mapping[str, str] = os.environ) -> CheckVerdict:
    """Show the variables of an allow-list, which explain most surprises."""
    shown = shown_environment(environ)
    found = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none of the known variables is set"
    if shown.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return warn(f"{found}: every kernel is waited for", "unset CUDA_LAUNCH_BLOCKING")
    return ok(found)


def _is_left_behind(folder: RuntimeFolder, name: str) -> bool:
    if named := _SOCKET.fullmatch(name):
        return str(start_time(int(named[1]))) != named[2]
    process = read_record(folder, name)
    return is_stale_store(name) if process is None else start_time(process.pid) != process.started


def _limit(number: int) -> float:
    return math.inf if number == resource.RLIM_INFINITY else number


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
