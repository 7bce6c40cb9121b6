"""Spans: each process of a program notes what it does in a file of its own; ``rlcore trace`` shows them.

A span is written twice, when it begins and when it ends, with one system call each, so that a process that is killed
leaves all that it did, and what it was doing. Times are those of CLOCK_MONOTONIC, which all processes of a host share.
Nothing is noted, and one attribute is all that is looked at, unless ``RLCORE_TRACE`` names a folder, as it does under
``rlcore trace`` and after ``rlcore.init(trace=)``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec

from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.process import status
from rlcore.settings import TRACE_FILES, traced

SCHEMA: Final = "rlcore.trace/1"
Kind = Literal["program", "call", "worker"]
"""The kinds of spans: named by the program; asked by it of an engine; done by a worker."""
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Recorder:
    """Writes the spans of this process into ``folder``, as ``rlcore.trace.events`` reads them.

    Args:
        records_kernels: one call of each method of a worker is recorded by the device's profiler, too.

    Raises:
        InvalidInputError: the folder cannot be made, or nothing can be written there.
    """

    def __init__(self, folder: Path, *, records_kernels: bool = False) -> None:
        self.folder, self.records_kernels = folder, records_kernels
        name = TRACE_FILES.replace("*", f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(folder / name, flags, 0o600)
        except OSError as error:
            raise InvalidInputError(
                f"a trace is a folder that can be written, got {str(folder)!r}: {error.strerror}; give another one"
            ) from error
        self._threads = threading.local()
        self.write(
            {
                "schema": SCHEMA,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "command": sys.argv,
                "boot": boot_id(),
                "monotonic_ns": time.monotonic_ns(),
                "utc_ns": time.time_ns(),
            }
        )

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Where that fails, such as on a full disk, this process notes nothing any more."""
        global recorder  # noqa: PLW0603 - the one recorder of the process
        try:
            os.write(self._descriptor, _encode(line) + b"\n")
        except OSError as error:
            if recorder is self:
                recorder = None
                with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                    print(f"rlcore: the trace in {self.folder} ends here: {error.strerror}", file=sys.stderr)

    def thread(self) -> int:
        """Return the number of this thread; its name is noted before its first span."""
        number: int | None = getattr(self._threads, "number", None)
        if number is None:
            number = self._threads.number = threading.get_native_id()
            self.write({"thread": number, "name": threading.current_thread().name})
        return number


class OpenSpan:
    """Something that this thread does inside a ``with`` statement. ``add`` notes facts that are known at its end."""

    __slots__ = ("_ended", "_facts", "_kind", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, facts: dict[str, Any], kind: Kind = "program") -> None:
        self._recorder, self._name, self._facts, self._kind = recorder, name, facts, kind
        self._ended: dict[str, Any] = {}

    def __enter__(self) -> Self:
        line = {"begin": self._name, "kind": self._kind, "thread": self._recorder.thread(), "facts": self._facts}
        self._recorder.write(line | {"at": time.monotonic_ns()})
        return self

    def add(self, facts: dict[str, Any]) -> None:
        self._ended |= facts

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        now = time.monotonic_ns()
        facts = self._ended if kind is None else self._ended | {"error": kind.__name__}
        self._recorder.write({"end": now, "thread": self._recorder.thread(), "facts": facts})


class _NoSpan:
    """A span that is entered while nothing is recorded."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def add(self, facts: dict[str, Any]) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


NO_SPAN: Final = _NoSpan()
recorder: Recorder | None = None
"""The recorder of this process; None: nothing is noted."""


def span(name: str, **facts: Any) -> OpenSpan | _NoSpan:
    """Name what the program does inside a ``with`` statement: ``with rlcore.span("rewards"):``.

    It stands in the trace of ``rlcore trace``; without one it costs nothing.

    Args:
        facts: plain data about it, shown beside it.
    """
    return NO_SPAN if recorder is None else OpenSpan(recorder, name, facts)


def call_span(name: str, **facts: Any) -> OpenSpan | _NoSpan:
    """Name what the program asks of an engine, as ``span`` names what it does."""
    return NO_SPAN if recorder is None else OpenSpan(recorder, name, facts, "call")


def note(event: str, **facts: Any) -> None:
    """Note a fact about this program, such as the devices of an engine."""
    if recorder is not None:
        recorder.write({"event": event, "at": time.monotonic_ns(), "facts": facts})


def note_lane(lane: str, name: str, begin_s: float, end_s: float) -> None:
    """Note something that has ended, of what is no thread; times are those of ``time.monotonic()``."""
    if recorder is not None:
        recorder.write({"lane": lane, "name": name, "at": round(begin_s * 1e9), "end": round(end_s * 1e9)})


def start(folder: Path, *, records_kernels: bool = False) -> Recorder:
    """Record this process from now on, and the worker processes that it starts. A second call changes nothing.

    Raises:
        InvalidInputError: nothing can be written in the folder.
    """
    global recorder  # noqa: PLW0603 - the one recorder of the process
    if recorder is None:
        recorder = Recorder(folder.absolute(), records_kernels=records_kernels)
        os.environ["RLCORE_TRACE"] = str(folder.absolute())
        if records_kernels:
            os.environ["RLCORE_TRACE_KERNELS"] = "1"
    return recorder


def boot_id() -> str:
    """Return the name of this start of the host's kernel: processes that have the same share CLOCK_MONOTONIC."""
    with contextlib.suppress(OSError, UnsupportedError):
        return status.boot_id()
    return socket.gethostname()


def _forget_parent() -> None:
    """A fork has the parent's file open, and notes nothing: its spans would stand among the parent's."""
    global recorder  # noqa: PLW0603 - the one recorder of the process
    recorder = None


os.register_at_fork(after_in_child=_forget_parent)
_folder, _records_kernels = traced()
if _folder is not None:
    start(_folder, records_kernels=_records_kernels)
