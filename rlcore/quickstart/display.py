"""What a person sees of a quickstart run: live on a terminal, else a line every few steps.

All of it goes to stderr but the last table, so that stdout can be JSON.
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

from rlcore.quickstart.output import PHASES, RunFolder

_LINE_EVERY, _IMITATION_LINE_EVERY = 10, 50  # steps, where there is no terminal


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
        self._imitation = ""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._started = time.monotonic()
        self._console = _console(sys.stderr if stream is None else stream)
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
        """One line that stays: what the run does besides steps."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def imitating(self, step: int, accuracy: float, *, wanted: float) -> None:
        """Show how far the warm-start is: the share of sampled answers that are right, and at which it ends."""
        self._imitation = f"warm-start step {step}  sampled accuracy {accuracy:.1%} of {wanted:.0%} wanted"
        if self._live:
            self._live.refresh()
        elif step % _IMITATION_LINE_EVERY == 0 or accuracy >= wanted:
            self.note(self._imitation)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show a step that is done; its metrics are those of ``RunFolder.append``.

        A metric that is not measured in every step, such as "accuracy", keeps its last value.
        """
        self._latest |= metrics
        self._imitation = ""
        for phase in PHASES:
            self._seconds[phase] += metrics.get(f"{phase}_s", 0.0)
        if self._live:
            self._live.refresh()
        elif self._latest["step"] % _LINE_EVERY == 0 or self._latest["step"] == self._steps:
            self.note(self._line())

    def _line(self) -> str:
        spent = "  ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._seconds.items())
        return f"step {self._latest['step']:.0f}/{self._steps}  {'  '.join(self._figures())}  {spent}"

    def _figures(self) -> list[str]:
        shown = (
            ("reward", "reward {:.3f}"),
            ("accuracy", "accuracy {:.1%}"),
            ("parity", "parity {:.0e}"),
            ("tokens_per_s", "{:,.0f} tokens/s"),
        )
        return [text.format(self._latest[name]) for name, text in shown if name in self._latest]

    def _panel(self) -> RenderableType:
        if self._imitation:
            return Text(f"{self._imitation}  {time.monotonic() - self._started:.0f} s")
        step = self._latest["step"]
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            f"step {step:.0f}/{self._steps}",
            ProgressBar(total=self._steps, completed=step, width=40),
            f"{time.monotonic() - self._started:.0f} s",
        )
        figures = Table.grid(padding=(0, 3))
        figures.add_row(*self._figures())
        total = sum(self._seconds.values()) or 1.0
        spent = Table.grid(padding=(0, 3))
        spent.add_row(*(f"{name} {part:.1f} s ({part / total:.0%})" for name, part in self._seconds.items()))
        return Group(bar, figures, spent)


def print_table(title: str, rows: Mapping[str, str], *, stream: TextIO | None = None) -> None:
    """Print two columns to ``stream`` (None: stdout), framed on a terminal, aligned plain text elsewhere."""
    console = _console(sys.stdout if stream is None else stream)
    if not _is_live(console):
        width = max(map(len, rows), default=0)
        lines = (f"{name:<{width}}  {value}".rstrip() for name, value in rows.items())
        console.print("\n".join([title, *lines]), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, markup=False)


def summary(folder: RunFolder) -> dict[str, str]:
    """What a run that has ended came to, for ``print_table``."""
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


def _console(stream: TextIO) -> Console:
    return Console(file=stream)


def _is_live(console: Console) -> bool:
    return console.file.isatty() and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")
