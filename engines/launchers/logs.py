"""The lines that worker processes print, on the user's stderr: each with rank and device, and repeated ones once."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from subprocess import Popen
from typing import Any, TextIO

_WINDOW_S = 5.0  # equal lines of several ranks within this time are taken for one event
_END = re.compile(rb"[\r\n]")
_UNCAUGHT = "  what():"
"""Begins the line in which the C++ runtime shows the error that it ends the process for."""
_LONGEST_LINE = 64 << 10  # bytes; the rest is a line of its own


class LogMerger:
    """Prints each line at once, but not the same line of another worker soon after."""

    def __init__(self, out: Callable[[], TextIO]) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._recent: dict[str, tuple[float, set[str]]] = {}

    def line(self, label: str, text: str, end: str = "\n") -> None:
        now, out = time.monotonic(), self._out()
        with self._lock:
            self._forget(now)
            _, labels = self._recent.setdefault(text, (now, set()))
            is_repeated = bool(labels) and label not in labels
            labels.add(label)
            if not is_repeated:
                _print(f"[{label}] {text}{end}", out)

    def _forget(self, now: float) -> None:
        # The dict is in the order of first lines: the oldest are in front.
        while self._recent and now - next(iter(self._recent.values()))[0] > _WINDOW_S:
            del self._recent[next(iter(self._recent))]


def _print(line: str, out: TextIO) -> None:
    # A closed stderr must not end the reading: the worker would wait for ever to print.
    with contextlib.suppress(OSError, ValueError):
        if line.endswith("\n") or out.isatty():
            out.write(line)
            out.flush()


_merger = LogMerger(lambda: sys.stderr)
PrintLine = Callable[[str, str, str], None]
"""Takes the label of a process, a line that it has printed, and the character that ended the line."""


def print_line(label: str, text: str, end: str) -> None:
    """Print a line on the user's stderr, as ``LogMerger`` does."""
    _merger.line(label, text, end)


class LogForwarder:
    """Prints what a process writes, until it ends. A line that ends in a carriage return is a progress bar's.

    Attributes:
        cause_of_abort: the error of C++ that nobody caught, which ends a process by SIGABRT; "" until there is one.
    """

    def __init__(self, process: Popen[bytes], label: Callable[[], str], print_line: PrintLine = print_line) -> None:
        self.cause_of_abort = ""
        self._process, self._label, self._print_line = process, label, print_line
        self._thread = threading.Thread(target=self._forward, name="rlcore-logs", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all is printed that the process has written."""
        self._thread.join(timeout_s)

    def _forward(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as stream:
            while data := stream.read1(65536):  # type: ignore[attr-defined]
                *lines, rest = _lines(rest + data)
                for text, end in lines:
                    if text:
                        self._line(text, end)
        if rest:
            self._line(rest, "\n")

    def _line(self, data: bytes, end: str) -> None:
        text = data.decode(errors="replace")
        if text.startswith(_UNCAUGHT):
            self.cause_of_abort = text.removeprefix(_UNCAUGHT).strip()
        self._print_line(self._label(), text, end)


def _lines(data: bytes) -> Iterator[Any]:
    """(text, end) of each line, and last the bytes after them."""
    start = 0
    for found in _END.finditer(data):
        yield data[start : found.start()], found.group().decode()
        start = found.end()
    while len(data) - start > _LONGEST_LINE:
        yield data[start : start + _LONGEST_LINE], "\n"
        start += _LONGEST_LINE
    yield data[start:]
