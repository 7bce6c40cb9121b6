"""``Timeline``: when samplers generated, when the trainer trained or waited, and when weights were synced.

A traced program has its spans in the trace, too: ``rlcore trace --picture`` draws them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import NamedTuple

from rlcore import spans
from rlcore.arguments import PATH, takes
from rlcore.atomic import write_file
from rlcore.errors import InvalidInputError


class Span(NamedTuple):
    """Something that one lane did, in seconds since the timeline began."""

    lane: str
    what: str
    begin_s: float
    end_s: float


class Timeline:
    """Records spans: a lane does one thing at a time, and nothing in between.

    Args:
        max_spans: the most that are kept, the latest; the sums in ``seconds`` count all.
    """

    def __init__(self, max_spans: int = 10_000) -> None:
        self._lock = threading.Lock()
        self._origin = time.monotonic()
        self._open: dict[str, tuple[str, float]] = {}
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def begin(self, lane: str, what: str) -> None:
        """Note that a lane does something from now on, and no longer what it did; the same goes on."""
        with self._lock:
            if self._open.get(lane, ("", 0.0))[0] != what:
                self._end(lane)
                self._open[lane] = what, time.monotonic() - self._origin

    def end(self, lane: str) -> None:
        """Note that a lane does nothing from now on."""
        with self._lock:
            self._end(lane)

    def _end(self, lane: str) -> None:
        if lane in self._open:
            what, begin_s = self._open.pop(lane)
            span = Span(lane, what, begin_s, time.monotonic() - self._origin)
            self._spans.append(span)
            self._seconds[lane, what] += span.end_s - span.begin_s
            spans.note_lane(lane, what, self._origin + span.begin_s, self._origin + span.end_s)

    def clear(self) -> None:
        """Forget all spans and sums so far, such as those of an evaluation; what is under way begins now."""
        with self._lock:
            self._origin = time.monotonic()
            self._open = {lane: (what, 0.0) for lane, (what, _) in self._open.items()}
            self._spans.clear()
            self._seconds.clear()

    @property
    def total_s(self) -> float:
        """The time since the timeline began."""
        return time.monotonic() - self._origin

    @property
    def spans(self) -> list[Span]:
        """The spans that have ended, the latest ``max_spans``."""
        with self._lock:
            return list(self._spans)

    def seconds(self, lane: str, what: str) -> float:
        """Return the time that a lane spent on something, of the span that is open too."""
        with self._lock:
            opened, begin_s = self._open.get(lane, ("", 0.0))
            now_s = time.monotonic() - self._origin
            return self._seconds[lane, what] + (now_s - begin_s if opened == what else 0.0)

    def seconds_together(self, lane: str, what: str, other_lane: str, other_what: str) -> float:
        """Return the time in which two lanes did these things at once, of the spans that are kept or open."""
        with self._lock:
            now_s = time.monotonic() - self._origin
            ours, theirs = self._kept(lane, what, now_s), self._kept(other_lane, other_what, now_s)
        found, first = 0.0, 0
        for span in ours:
            while first < len(theirs) and theirs[first].end_s <= span.begin_s:
                first += 1
            for index in range(first, len(theirs)):
                other = theirs[index]
                if other.begin_s >= span.end_s:
                    break
                found += min(span.end_s, other.end_s) - max(span.begin_s, other.begin_s)
        return found

    def _kept(self, lane: str, what: str, now_s: float) -> list[Span]:
        """Return a lane's spans of this kind in order; one that is open ends now. It is called with the lock held."""
        kept = [one for one in self._spans if (one.lane, one.what) == (lane, what)]
        opened, begin_s = self._open.get(lane, ("", 0.0))
        return [*kept, Span(lane, what, begin_s, now_s)] if opened == what else kept

    @takes("Timeline.save()", path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the spans as JSON: ``[{"lane", "what", "begin_s", "end_s"}, ...]``.

        Raises:
            InvalidInputError: it cannot be written there.
        """
        try:
            write_file(Path(path), json.dumps([span._asdict() for span in self.spans], indent=0).encode())
        except OSError as error:
            raise InvalidInputError(f"cannot write the timeline {path}: {error.strerror}") from error
