"""Lines that worker processes print, on the user's stderr: each with rank and device, the same of many ranks once."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from subprocess import Popen
from typing import TextIO

_WINDOW_S = 5.0  # ranks that say the same within this time are taken to mean the same event
_END = re.compile(rb"[\r\n]")


class LogMerger:
    """Prints a line at once, and swallows it when another worker repeats it soon after."""

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
        for text, (said, _) in list(self._recent.items()):
            if now - said > _WINDOW_S:
                del self._recent[text]


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
            rest += data
            while found := _END.search(rest):
                text, end, rest = rest[: found.start()], found.group().decode(), rest[found.end() :]
                if text:
                    _merger.line(label(), text.decode(errors="replace"), end)
    if rest:
        _merger.line(label(), rest.decode(errors="replace"))
