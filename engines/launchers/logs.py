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


def forward_logs(process: Popen[bytes], label: Callable[[], str]) -> threading.Thread:
    """Print what ``process`` writes, until it ends. A line that ends in a carriage return is a progress bar's."""
    thread = threading.Thread(target=_forward, args=(process, label), name="rlcore-logs", daemon=True)
    thread.start()
    return thread


def _forward(process: Popen[bytes], label: Callable[[], str]) -> None:
    assert process.stdout is not None
    rest = b""
    with process.stdout as stream:
        while data := stream.read1(65536):  # type: ignore[attr-defined]
            *lines, rest = _lines(rest + data)
            for text, end in lines:
                if text:
                    _merger.line(label(), text.decode(errors="replace"), end)
    if rest:
        _merger.line(label(), rest.decode(errors="replace"))


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
