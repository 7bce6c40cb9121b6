"""The display of a quickstart run: live on a terminal, else a line every few steps.

It goes to stderr except for the last table, so that stdout can be JSON.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlcore.cli.console import console_of
from rlcore.quickstart.output import PHASES, RunFolder

_LINE_EVERY, _IMITATION_LINE_EVERY = 10, 50  # steps, where there is no terminal
_LONG_S = 180
_ECHO = len("^C")
"""Columns that a terminal echoes at the cursor: a line that they push over the edge would remain visible."""


class _Pace:
    """The speed of the steps of one kind in this process."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None  # step, and when it was done
        self._last = (0.0, 0.0)

    def at(self, step: float) -> None:
        self._last = step, time.monotonic()
        self._first = self._first or self._last

    def left(self, end: float) -> str:
        """Return the estimated time until step ``end``, such as "35 s"; "" after fewer than two steps."""
        (first, began), (last, now) = self._first or self._last, self._last
        if last == first:
            return ""
        seconds = max(0.0, end - last) * (now - began) / (last - first)
        return f"{seconds:.0f} s" if seconds < _LONG_S else f"{seconds / 60:.0f} min"


@final
class Display:
    """Shows a run while it goes on; use with ``with``, which also puts the terminal back after Ctrl-C.

    Args:
        steps: number of the last step.
        stream: where to; None is stderr. Live if it is a terminal and the variable NO_COLOR is not set.
    """

    def __init__(self, *, steps: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._latest: dict[str, float] = {"step": 0}
        self._doing, self._stopping = ["starting"], ""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._started = time.monotonic()
        self._imitation, self._learning = _Pace(), _Pace()
        self._console = console_of(sys.stderr if stream is None else stream)
        self._live = Live(console=self._console, get_renderable=self._panel) if _is_live(self._console) else None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print a line that stays, about work other than steps."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def doing(self, what: str) -> None:
        """Show on a terminal the work until the next step."""
        self._doing = [what]
        self._refresh()

    def stopping(self, text: str) -> None:
        """Show that the run is about to stop. A signal handler may call it at any moment, so on a terminal the text
        appears at the next refresh only."""
        self._stopping = text
        if not self._live:
            try:
                self.note(text)
            except RuntimeError:  # the signal came amid a write to this very stream, whose buffer is closed to others
                os.write(self._console.file.fileno(), f"{text}\n".encode())

    def imitating(self, step: int, accuracy: float, *, wanted: float, usual: tuple[int, int]) -> None:
        """Show how far the warm-start is: the share of sampled answers that were right when last measured, at which it
        ends, and between which numbers of steps that usually is."""
        told = f"sampled accuracy {accuracy:.1%} of {wanted:.0%} wanted"
        self._imitation.at(step)
        soonest, latest = map(self._imitation.left, usual)
        estimate = f", {f'{soonest} to' if step < usual[0] else 'up to'} {latest} left" if latest else ""
        self._doing = [f"warm-start step {step} of {usual[0]} to {usual[1]}{estimate}", told]
        if not self._live and (step % _IMITATION_LINE_EVERY == 0 or accuracy >= wanted):
            self.note(f"warm-start step {step}  {told}")
        self._refresh()

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show a step that is done; its metrics are those of ``RunFolder.append``.

        A metric that is not measured in every step, such as "accuracy", keeps its last value.
        """
        self._latest |= metrics
        self._learning.at(self._latest["step"])
        self._doing = []
        for phase in PHASES:
            self._seconds[phase] += metrics.get(f"{phase}_s", 0.0)
        self._refresh()
        if not self._live and (self._latest["step"] % _LINE_EVERY == 0 or self._latest["step"] == self._steps):
            self.note(self._line())

    def _refresh(self) -> None:
        if self._live:
            self._live.refresh()

    def _line(self) -> str:
        spent = "  ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._seconds.items())
        done = f"step {self._latest['step']:.0f}/{self._steps}  {'  '.join(self._figures())}"
        is_too_wide = self._console.file.isatty() and len(f"{done}  {spent}") > self._console.width
        return f"{done}\n    {spent}" if is_too_wide else f"{done}  {spent}"

    def _figures(self) -> list[str]:
        shown = (
            ("reward", "reward {:.3f}"),
            ("accuracy", "accuracy {:.1%}"),
            ("parity", "parity {:.0e}"),
            ("tokens_per_s", "{:,.0f} tokens/s"),
        )
        return [text.format(self._latest[name]) for name, text in shown if name in self._latest]

    def _panel(self) -> RenderableType:
        width = self._console.width - _ECHO - 1
        lines = [*self._doing, *([self._stopping] if self._stopping else [])]
        if self._doing:
            lines[0] += f"  {time.monotonic() - self._started:.0f} s"
            return Group(*(_one_line(line, width) for line in lines))
        total = sum(self._seconds.values()) or 1.0
        spent = "  ".join(f"{name} {part:.0f} s ({part / total:.0%})" for name, part in self._seconds.items())
        return Group(self._bar(), *(_one_line(line, width) for line in ["  ".join(self._figures()), spent, *lines]))

    def _bar(self) -> RenderableType:
        step, bar = self._latest["step"], Table.grid(padding=(0, 1))
        left = self._learning.left(self._steps)
        bar.add_row(
            f"step {step:.0f}/{self._steps}",
            ProgressBar(total=self._steps, completed=step, width=30),
            f"{time.monotonic() - self._started:.0f} s" + (f", about {left} left" if left else ""),
        )
        return bar


def _one_line(text: str, width: int) -> Text:
    found = Text(text, no_wrap=True)
    found.truncate(width, overflow="ellipsis")
    return found


def print_table(title: str, rows: Mapping[str, str], *, stream: TextIO | None = None) -> None:
    """Print two columns of plain text to ``stream`` (None: stdout); the terminal folds no path in it."""
    width = max(map(len, rows), default=0)
    lines = (f"{name:<{width}}  {value}".rstrip() for name, value in rows.items())
    print("\n".join([title, *lines]), file=stream)


def summary(folder: RunFolder) -> dict[str, str]:
    """Return the results of a run that has ended, for ``print_table``."""
    steps = folder.read()
    learning = [metrics for metrics in steps if "reward" in metrics]
    spent = {phase: sum(metrics[f"{phase}_s"] for metrics in learning) for phase in PHASES}
    measured = [metrics["accuracy"] for metrics in steps if "accuracy" in metrics]
    return {
        "held-out accuracy, greedy": f"{measured[0]:.1%} before GRPO, {measured[-1]:.1%} after {len(learning)} steps",
        "sampler against trainer": f"log-probs differ by at most {max(m['parity'] for m in learning):.1e}",
        "seconds": ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in spent.items()),
        "picture": str(folder.picture),
        "metrics": str(folder.metrics),
        "checkpoint": str(folder.checkpoint),
        "model": str(folder.model),
    }


def _is_live(console: Console) -> bool:
    return console.file.isatty() and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")
