"""``kind_of`` says which of a program's spans compute and which copy; ``public_name`` is what the program calls one."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlcore.bench.reports import text
from rlcore.trace.events import ProgramTrace, TracedSpan

COMPUTE, COPY, SYNC, SAVE, SETUP, OTHER = "compute", "copy", "sync", "save", "setup", "other"
GENERATES = ("generate", "collect")
_KINDS = {
    **dict.fromkeys((*GENERATES, "train_step", "score", "evaluate"), COMPUTE),
    **dict.fromkeys(("onload", "offload", "meta", "swap", "begin_swap", "swap_step", "reverse_swap", "end_swap"), COPY),
    **dict.fromkeys(("sync_weights", "sync_call", "read_weights", "take_weights"), SYNC),
    **dict.fromkeys(("save", "end_save", "load", "export", "state_dict", "load_state_dict"), SAVE),
    **dict.fromkeys(("start", "build", "close", "reserve_host_memory", "restore_host_limit"), SETUP),
}
RECORDING = "recording"
"""The start and the end of the profiler around a call whose kernels are recorded."""
_PUBLIC = {
    RECORDING: "the profiler",
    "train_step": "train_batch",
    "score": "forward_logprobs",
    "evaluate": "eval_batch",
    "collect": "generate",
    **dict.fromkeys(("begin_swap", "swap_step", "reverse_swap", "end_swap"), "swap"),
}


def kind_of(span: TracedSpan) -> str:
    if span.name.startswith("module."):
        return COMPUTE
    return _KINDS.get(span.name, OTHER)


def public_name(span: TracedSpan) -> str:
    """Return the name that the program calls it by, with the tag that moves."""
    name = _PUBLIC.get(span.name, span.name).removeprefix("module.")
    tag = span.facts.get("tag")
    return f"{name} {tag}" if tag else name


def described(span: TracedSpan, link: Mapping[str, float] | None = None) -> str:
    """Return the words for a span, of a copy with its bytes and rate; ``link`` has the limits of a bench record."""
    facts = span.facts
    if "moves" in facts:
        return " and ".join(_moved(f"{one['move']} of {one['tag']}", one, link) for one in facts["moves"])
    if "tag" in facts:
        return _moved(f"{span.name} of {facts['tag']}", facts, link)
    if span.name == "sync_weights" and "bytes" in facts:
        rate = f" at {text.rate(facts['bytes'] / span.seconds, 'B/s')}" if span.seconds > 0 else ""
        return f"the weight sync, by {facts.get('route')}: {text.rate(facts['bytes'], 'B')}{rate}"
    return public_name(span)


def _moved(what: str, facts: dict[str, Any], link: Mapping[str, float] | None) -> str:
    nbytes, seconds = facts.get("most_bytes", 0), facts.get("seconds", 0.0)
    if not nbytes or not seconds:
        return what
    rate = nbytes / seconds
    words = f"{what}: {text.rate(nbytes, 'B')} at {text.rate(rate, 'B/s')}"
    limit = (link or {}).get(limit_of(what))
    return words if limit is None else f"{words}, {rate / limit:.0%} of the link's {text.rate(limit, 'B/s')}"


def limit_of(move: str) -> str:
    """Return the name in a bench record of the limit of a move."""
    return "to_device/pinned" if move.startswith("onload") else "to_host/pinned"


class MeasuredSteps:
    """The steps of a program: its own spans "step", else what lies between the ends of two weight syncs.

    The first ones warm up, and are left out where others follow; so are those in which kernels were recorded.
    """

    def __init__(self, trace: ProgramTrace) -> None:
        own = [(span.begin_ns, span.end_ns) for span in trace.spans if (span.name, span.kind) == ("step", "program")]
        if not own:
            ends = [span.end_ns for span in trace.spans if span.name == "sync_weights" and not span.is_unfinished]
            own = list(pairwise(ends))
        self.all: Sequence[tuple[int, int]] = own or [(trace.begin_ns, trace.end_ns)]
        warm = self.all[2:] if len(self.all) > 3 else self.all[1:] if len(self.all) > 1 else self.all
        recordings = [span for span in trace.spans if span.name == RECORDING and span.is_of_worker]
        self.measured = [one for one in warm if not any(_touches(one, span) for span in recordings)] or warm
        """The steps that tables are about."""
        self.are_known = bool(own)

    @property
    def seconds(self) -> float:
        """The mean time of a measured step."""
        return sum(end - begin for begin, end in self.measured) / len(self.measured) / 1e9

    def share(self, begin_ns: int, end_ns: int) -> float:
        """Return the seconds of an interval that lie in measured steps, divided by their number."""
        inside_ns = 0
        for position in range(self._first_after(begin_ns), len(self.measured)):
            begin, end = self.measured[position]
            if begin >= end_ns:
                break
            inside_ns += max(0, min(end, end_ns) - max(begin, begin_ns))
        return inside_ns / len(self.measured) / 1e9

    def has(self, span: TracedSpan) -> bool:
        """The middle of a span is in a measured step."""
        middle = (span.begin_ns + span.end_ns) // 2
        position = self._first_after(middle)
        return position < len(self.measured) and self.measured[position][0] <= middle

    def _first_after(self, time_ns: int) -> int:
        """Return the position of the first measured step that ends after this."""
        return bisect.bisect_right(self.measured, time_ns, key=lambda step: step[1])


def _touches(step: tuple[int, int], span: TracedSpan) -> bool:
    return span.begin_ns < step[1] and span.end_ns > step[0]
