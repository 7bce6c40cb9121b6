"""Lines that worker processes print, on the user's stderr: each with its rank, the same from many ranks once."""

from __future__ import annotations

import re
import sys
import threading
import time
from subprocess import Popen
from typing import IO

from rlcore.engines.launchers.worker import WorkerContext

_WINDOW_S = 5.0  # ranks that say the same within this time are taken to mean the same event
_END = re.compile(rb"[\r\n]")


class LogMerger:
    """Prints a line at once, and swallows it when another rank repeats it soon after."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._recent: dict[tuple[str, str], tuple[float, set[int]]] = {}

    def line(self, context: WorkerContext, text: str, end: str = "\n") -> None:
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            _, ranks = self._recent.setdefault((context.engine, text), (now, set()))
            is_repeated = bool(ranks) and context.rank not in ranks
            ranks.add(context.rank)
            if not is_repeated and (end == "\n" or self._out.isatty()):
                self._out.write(f"[{context.rank} {context.device_name}] {text}{end}")
                self._out.flush()

    def _forget(self, now: float) -> None:
        for key, (said, _) in list(self._recent.items()):
            if now - said > _WINDOW_S:
                del self._recent[key]


_merger = LogMerger(sys.stderr)


def forward_logs(process: Popen[bytes], context: WorkerContext) -> None:
    """Print what ``process`` writes, until it ends. A line that ends in a carriage return is a progress bar's."""
    threading.Thread(target=_forward, args=(process, context), name="rlcore-logs", daemon=True).start()


def _forward(process: Popen[bytes], context: WorkerContext) -> None:
    assert process.stdout is not None
    rest = b""
    with process.stdout as stream:
        while data := stream.read1(65536):  # type: ignore[attr-defined]
            rest += data
            while found := _END.search(rest):
                text, end, rest = rest[: found.start()], found.group().decode(), rest[found.end() :]
                if text:
                    _merger.line(context, text.decode(errors="replace"), end)
    if rest:
        _merger.line(context, rest.decode(errors="replace"))
