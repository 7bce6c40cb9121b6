"""The two programs behind tests/warm.py: ``serve`` imports torch and forks for requests; ``ask`` makes one.

``ask`` sends its arguments, environment, folder and streams, passes signals on, and ends as the fork ends. If it is
killed, so is the fork. It imports little: it starts in 20 ms.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ALWAYS = ("torch", "typer", "rich.table", "pluggy", "msgspec", "pytest", "sympy")  # which torch.distributed imports
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KILL = signal.SIGUSR2  # is passed on as SIGKILL, which nobody can pass on


def _address(folder: str) -> str:
    """The socket in the folder by a short path, as a socket's takes at most 107 bytes."""
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}/socket"


def _send(connection: socket.socket, number: int) -> None:
    connection.sendall(number.to_bytes(8, "little", signed=True))


def _receive(connection: socket.socket) -> int:
    return int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little", signed=True)


# ------------------------------------------------------------------------------------------------------ ask


def ask(folder: str, arguments: list[str]) -> None:
    """Have ``arguments`` run as an interpreter's, and end as they do."""
    program: list[int] = []  # its process id, once that is known
    early: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if not program:
            early.append(number)
            return
        try:
            os.kill(program[0], signal.SIGKILL if number == KILL else number)
        except ProcessLookupError:
            return  # it has just ended

    for number in (*SIGNALS, KILL):
        signal.signal(number, pass_on)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_address(folder))
    request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [b"streams"], [0, 1, 2])
    _send(connection, len(request))
    connection.sendall(request)
    program.append(_receive(connection))
    for number in early:
        pass_on(number, None)
    _end_as(_receive(connection))


def _end_as(code: int) -> None:
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---------------------------------------------------------------------------------------------------- serve


def serve(folder: str, modules: list[str]) -> list[str]:
    """Import ``modules`` and fork for each request until standard input ends.

    Returns in the forks, with the arguments to run there.
    """
    import gc
    import importlib

    for module in (*ALWAYS, *modules):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the forks neither look through what is here nor copy it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(folder))
    listener.listen(64)
    os.write(1, b"ready\n")
    running: dict[socket.socket, tuple[int, int]] = {}  # who asked: the fork's process id and a descriptor of it
    while 0 not in (ready := _wait_for(listener, running)):
        _tell_ends(running, ready)
        if listener in ready:
            connection, _ = listener.accept()
            request, streams = _received(connection)
            if (pid := os.fork()) == 0:
                _close([listener, connection, *running, *(descriptor for _, descriptor in running.values())])
                return _become(*request, streams=streams)
            _close(streams)
            running[connection] = pid, os.pidfd_open(pid)
            _send(connection, pid)
    os._exit(0)


def _wait_for(listener: socket.socket, running: dict[socket.socket, tuple[int, int]]) -> list[Any]:
    import select

    return select.select([listener, 0, *running, *(descriptor for _, descriptor in running.values())], [], [])[0]


def _tell_ends(running: dict[socket.socket, tuple[int, int]], ready: list[Any]) -> None:
    """Whoever asked is told how the fork has ended; where nobody asks any more, the fork is killed."""
    import contextlib

    for connection, (pid, descriptor) in list(running.items()):
        if descriptor in ready:
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):  # whoever asked has ended
                _send(connection, os.waitstatus_to_exitcode(status))
            _close([connection, descriptor])
            del running[connection]
        elif connection in ready:
            os.kill(pid, signal.SIGKILL)


def _received(connection: socket.socket) -> tuple[list[Any], list[int]]:
    _, streams, _, _ = socket.recv_fds(connection, 7, 3)
    return json.loads(connection.recv(_receive(connection), socket.MSG_WAITALL)), streams


def _close(opened: list[Any]) -> None:
    for one in opened:
        os.close(one if isinstance(one, int) else one.detach())


def _become(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> list[str]:
    """This process has what the command was given, and an interpreter's path for it."""
    os.setsid()
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    after = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*after, *(entry for entry in sys.path[1:] if entry not in before)]
    return arguments


def run(arguments: list[str]) -> None:
    """As ``python arguments``, without taking torch to pieces at the end."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        _leave(end.code or 0)
    _leave(0)


def _leave(code: int) -> None:
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(arguments: list[str]) -> None:
    import importlib
    import runpy
    import types

    importlib.invalidate_caches()
    kind, *sys.argv = arguments
    if kind == "-c":
        (code, *sys.argv[1:]), sys.argv[:1] = sys.argv, ["-c"]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    command, folder, *arguments = sys.argv[1:]
    if command == "ask":
        ask(folder, arguments)
    run(serve(folder, arguments))
