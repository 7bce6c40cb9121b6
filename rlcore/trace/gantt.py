"""A picture of who generated, trained, waited and synced: programs one above the other, on one scale.

A program is the folder of its trace, or the file that ``Timeline.save`` wrote.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlcore.atomic import write_file
from rlcore.errors import InvalidInputError, MissingDependencyError
from rlcore.trace.events import LaneSpan, read_trace

_COLORS = {
    "generate": "tab:blue",
    "train": "tab:green",
    "wait": "lightgray",
    "sync": "tab:red",
    "evaluate": "tab:orange",
}


class _TimelineSpan(msgspec.Struct):
    lane: str
    what: str
    begin_s: float
    end_s: float


def draw_gantt(sources: Sequence[Path], path: Path, *, seconds: float | None = None) -> None:
    """Draw what a ``RolloutController`` noted, into a file of any format that matplotlib writes, which is replaced.

    Args:
        sources: folders of traces, and files of timelines; each has the name of its folder or file, or its path where
            two are the same.
        seconds: how much of each program is drawn, from when its trainer first waited; None is the longest.

    Raises:
        InvalidInputError: a source has nothing of a controller, or the picture cannot be written.
        MissingDependencyError: matplotlib is absent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", needed_for="a picture of a trace", extra="bench") from error
    programs = dict(zip(_names(sources), map(_lanes, sources), strict=True))
    lengths = [max(span.end_ns for span in lanes) - _begin(lanes) for lanes in programs.values()]
    shown_s = seconds or max(lengths) / 1e9
    rows = [(name, lane) for name, lanes in programs.items() for lane in sorted({span.lane for span in lanes})][::-1]
    figure = Figure(figsize=(10, 0.9 + 0.42 * len(rows)), layout="constrained")
    axes: Any = figure.add_subplot()
    noted = {span.name for lanes in programs.values() for span in lanes}
    colors = {what: color for what, color in _COLORS.items() if what in noted}
    for what, color in colors.items():
        for row, (name, lane) in enumerate(rows):
            begin = _begin(programs[name])
            own = [
                ((span.begin_ns - begin) / 1e9, (span.end_ns - span.begin_ns) / 1e9)
                for span in programs[name]
                if (span.lane, span.name) == (lane, what)
            ]
            axes.broken_barh(own, (row - 0.4, 0.8), color=color, label=what if row == 0 else None)
    axes.set_yticks(range(len(rows)), [f"{name}: {lane}" for name, lane in rows])
    axes.set_xlim(0, shown_s)
    axes.set_xlabel("seconds")
    figure.legend(loc="outside upper center", ncols=len(colors), frameon=False)
    image = io.BytesIO()
    try:
        figure.savefig(image, format=path.suffix.removeprefix(".") or "png")
        write_file(path, image.getvalue())
    except (OSError, ValueError) as error:  # such as a format that it does not know
        raise InvalidInputError(f"the picture cannot be written to {path}: {error}") from error


def _names(sources: Sequence[Path]) -> list[str]:
    names = [source.name.removesuffix(".json") for source in sources]
    return names if len(set(names)) == len(names) else [str(source) for source in sources]


def _lanes(source: Path) -> list[LaneSpan]:
    found = _of_timeline(source) if source.is_file() else read_trace(source).lanes
    if not found:
        raise InvalidInputError(f"{source} has nothing of a RolloutController to draw")
    return found


def _of_timeline(file: Path) -> list[LaneSpan]:
    try:
        spans = msgspec.json.decode(file.read_bytes(), type=list[_TimelineSpan])
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file} is no timeline that Timeline.save() wrote: {error}") from error
    return [LaneSpan(one.lane, one.what, round(one.begin_s * 1e9), round(one.end_s * 1e9)) for one in spans]


def _begin(lanes: Sequence[LaneSpan]) -> int:
    """Return when the trainer first waited: what comes before is a start, or an evaluation."""
    waits = [span.begin_ns for span in lanes if span.name == "wait"]
    return min(waits or [span.begin_ns for span in lanes])
