"""Programs that begin with torch imported: a warm process, which has imported it, forks itself for each of them.

To import torch is most of what a test's process costs, about 2 s of a processor. ``[*warm(), "-m", "rlcore"]`` is a
command as ``[sys.executable, "-m", "rlcore"]`` is: for `subprocess`, with its environment, folder and streams, signals
and exit code. What differs: the program's process id is not that of the command, it computes with one thread, and what
is read while torch is imported is not read again (``TORCH_DEVICE_BACKEND_AUTOLOAD``, a broken torch on the path).
Nothing of rlcore is imported before the fork. tests/warm_process.py is what runs there.

Inside ``warm_workers()`` the process launcher starts its workers so, and they are children of this process as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm_process

ENGINES = (
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
)
"""What programs with engines, and the quickstart, import of others; as long again as torch."""

LIMIT_S = 570
"""How long a program of a test may take: a little less than a test (``timeout`` in pyproject.toml), so that a program
that hangs is killed and named, and a busy machine fails nothing."""

_PROGRAM = str(Path(warm_process.__file__))


def warm(*modules: str, python: str | Path = sys.executable) -> list[str]:
    """Return the command for programs that find torch, and also ``modules``, imported.

    The first call with these arguments starts the process that the programs are forked of.
    """
    return [str(python), "-IS", _PROGRAM, "ask", _started(str(python), modules)]


def run_warm(
    code: str | list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None, modules: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run code, or ``["-m", "module", ...]``, as the fixture run_python does, with ``env`` added to the environment."""
    command = [*warm(*modules), *(["-c", code] if isinstance(code, str) else code)]
    everything = without_settings() | (env or {})
    return subprocess.run(
        command, env=everything, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill the program of a warm command; it has ended when this returns.

    ``process.kill()`` ends the command, and the program soon after.
    """
    process.send_signal(warm_process.KILL)
    process.wait()


def without_settings() -> dict[str, str]:
    """Return the environment without the user's RLCORE_*, which fixtures of modules would pass on."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RLCORE_")}


class WarmPopen(subprocess.Popen[bytes]):
    """A process of this interpreter that finds ``ENGINES`` imported: as any other child of this process."""

    modules = ENGINES

    def _folder(self) -> str:
        return _started(sys.executable, self.modules)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """The arguments are those of `subprocess.Popen` in Python 3.11 to 3.14."""
        pass_fds, env, pipes = rest[3], rest[5], rest[9:15]
        given = dict(enumerate((pipes[0], pipes[3], pipes[5]))) | {number: number for number in pass_fds}
        streams = {number: number if stream == -1 else stream for number, stream in given.items()}
        self.pid = warm_process.request(self._folder(), args[1:], env, streams)
        if self.pid == -1:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        self._child_created = True
        self._close_pipe_fds(*pipes)


class TorchPopen(WarmPopen):
    """One that finds torch imported."""

    modules = ()


def starting(kind: type[subprocess.Popen[bytes]]) -> types.SimpleNamespace:
    """What a module imports as ``subprocess`` for its processes of this interpreter to be of that kind."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return (kind if command[0] == sys.executable else subprocess.Popen)(command, **options)

    return types.SimpleNamespace(**vars(subprocess) | {"Popen": start})


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Workers of this process begin as warm programs do."""
    from rlcore.engines.launchers import worker_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "subprocess", starting(WarmPopen))
        yield


def fork_server() -> str:
    """Return the folder with the socket of a warm process that this one forks, with what is imported here by now.

    For a program that is itself warm, and has no thread yet. The fork ends with this process.
    """
    folder = tempfile.mkdtemp(prefix="warm-")
    input_ends, output_ends = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.dup2(input_ends[0], 0)
        os.dup2(output_ends[1], 1)
        for descriptor in (*input_ends, *output_ends):
            os.close(descriptor)
        warm_process.run(warm_process.serve(folder, []))
    os.close(input_ends[0])
    os.close(output_ends[1])
    if not os.read(output_ends[0], 1):
        raise RuntimeError("the fork of this process did not become a warm process; its error is above")
    os.close(output_ends[0])
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _started(python: str, modules: tuple[str, ...]) -> str:
    """The folder with the socket of a warm process, which ends when its standard input does."""
    folder = tempfile.mkdtemp(prefix="warm-")
    is_ours = python == sys.executable
    process = (TorchPopen if modules and is_ours else subprocess.Popen)(  # torch has been imported once, then
        [python, _PROGRAM, "serve", folder, *modules],
        env=without_settings() | {"OMP_NUM_THREADS": "1"} | warm_process.room(is_larger=not modules),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for the tests
    )
    atexit.register(_end, process, folder)
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"{python} could not import what a warm process imports; its error is above")
    return folder


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)
