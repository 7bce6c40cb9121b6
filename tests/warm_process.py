"""The two programs behind tests/warm.py: ``serve`` imports torch and forks for requests; ``ask`` makes one.

``ask`` sends its arguments, environment, folder and streams, passes signals on, and ends as the fork ends. If it is
killed, so is the fork. It imports little: it starts in 20 ms.

`request` is for who started ``serve``: the fork is a child of that process, and not of ``serve``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ALWAYS = ("torch", "typer", "rich.table", "pluggy", "msgspec", "pytest", "sympy")  # which torch.distributed imports
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KILL = signal.SIGUSR2  # is passed on as SIGKILL, which nobody can pass on


def room(*, is_larger: bool = False) -> dict[str, str]:
    """Return what makes the environment of ``serve`` large: that of a program takes its memory over.

    Args:
        is_larger: also for a program that is another ``serve``.
    """
    return {"_WARM_ROOM": "-" * (32768 if is_larger else 16384)}


@contextlib.contextmanager
def _address(folder: str) -> Iterator[str]:
    """The socket in the folder by a short path, as a socket's takes at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH)
    yield f"/proc/self/fd/{descriptor}/socket"
    os.close(descriptor)


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
    with _address(folder) as address:
        connection.connect(address)
    _ask(connection, [arguments, os.getcwd(), dict(os.environ)], {0: 0, 1: 1, 2: 2}, is_child=False)
    program.append(_receive(connection))
    for number in early:
        pass_on(number, None)
    _end_as(_receive(connection))


def _ask(connection: socket.socket, program: list[Any], streams: dict[int, int], *, is_child: bool) -> None:
    message = json.dumps([*program, list(streams), is_child]).encode()
    socket.send_fds(connection, [b"streams"], list(streams.values()))
    _send(connection, len(message))
    connection.sendall(message)


def request(folder: str, arguments: list[str], environment: dict[str, str], streams: dict[int, int]) -> int:
    """Return the process id of a new child of this process, in which ``arguments`` run as an interpreter's.

    It is -1 where the kernel makes no sibling of ``serve``, as some sandboxes do not.

    Args:
        folder: the folder with the socket of ``serve``, which this process has started.
        streams: the descriptors of the child, each with the one of this process that it is a copy of.
    """
    with socket.socket(socket.AF_UNIX) as connection, _address(folder) as address:
        connection.connect(address)
        _ask(connection, [arguments, os.getcwd(), environment], streams, is_child=True)
        return _receive(connection)


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
    with _address(folder) as address:
        listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    running: dict[socket.socket, tuple[int, int]] = {}  # who asked: the fork's process id and a descriptor of it
    while 0 not in (ready := _wait_for(listener, running)):
        _tell_ends(running, ready)
        if listener in ready:
            connection, _ = listener.accept()
            (*wanted, numbers, is_child), streams = _received(connection)
            if (pid := _fork_sibling() if is_child else os.fork()) == 0:
                _close([listener, connection, *running, *(descriptor for _, descriptor in running.values())])
                return _become(*wanted, streams=dict(zip(numbers, streams, strict=True)))
            _close(streams)
            _send(connection, pid)
            if is_child:
                connection.close()
            else:
                running[connection] = pid, os.pidfd_open(pid)
    os._exit(0)


def _fork_sibling() -> int:
    """As ``os.fork()``, and the new process is a child of this one's parent, which can wait for it; -1 if it cannot."""
    import ctypes
    import platform

    c = ctypes.PyDLL(None)
    c.pthread_self.restype = ctypes.c_void_p
    thread = c.pthread_self()
    words = list((ctypes.c_int * 512).from_address(thread))
    # Where glibc keeps the thread's id, which the kernel must set: abort() and recursive locks use it.
    place = ctypes.c_void_p(thread + 4 * words.index(os.getpid()))
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    parent, clear_id, set_id = 0x8000, 0x200000, 0x1000000
    flags = ctypes.c_ulong(parent | clear_id | set_id | signal.SIGCHLD)
    ctypes.pythonapi.PyOS_BeforeFork()
    # The place is the fourth or the fifth, by processor; the other one is not read.
    pid: int = c.syscall(clone, flags, None, None, place, place)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _wait_for(listener: socket.socket, running: dict[socket.socket, tuple[int, int]]) -> list[Any]:
    import select

    return select.select([listener, 0, *running, *(descriptor for _, descriptor in running.values())], [], [])[0]


def _tell_ends(running: dict[socket.socket, tuple[int, int]], ready: list[Any]) -> None:
    """Whoever asked is told how the fork has ended; where nobody asks any more, the fork is killed."""
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
    _, streams, _, _ = socket.recv_fds(connection, 7, 16)
    return json.loads(connection.recv(_receive(connection), socket.MSG_WAITALL)), streams


def _close(opened: list[Any]) -> None:
    for one in opened:
        os.close(one if isinstance(one, int) else one.detach())


def _become(arguments: list[str], folder: str, environment: dict[str, str], streams: dict[int, int]) -> list[str]:
    """This process has what the command was given, and an interpreter's path for it."""
    import fcntl

    os.setsid()
    os.chdir(folder)
    above = max(*streams, *streams.values()) + 1  # so that none is overwritten before it is copied
    copies = {number: fcntl.fcntl(stream, fcntl.F_DUPFD, above) for number, stream in streams.items()}
    _close([*streams.values()])
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    after = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ.clear()
    os.environ.update(environment)
    _show_in_proc(environment)
    sys.path[:] = [*after, *(entry for entry in sys.path[1:] if entry not in before)]
    return arguments


def _show_in_proc(environment: dict[str, str]) -> None:
    """Have /proc/PID/environ show this environment: workers are found by it. That of ``serve`` has ``room`` for it."""
    import ctypes

    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    if len(block) > end - start:
        raise OSError(f"an environment of {len(block)} bytes, and there is room for one of {end - start}")
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


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
