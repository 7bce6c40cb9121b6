"""What the commands share: options, tables, JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # boxes, which are as wide as 80 columns also in a pipe
}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
DeviceName = Annotated[str | None, typer.Option("--device", help='Such as "cpu" or "cuda:1"; else the default one.')]

_GOOD = ("available", "native", "OK", "pass", "runs", "faster")
_BAD = ("fail", "FAIL", "oom", "slower")
_MISSING = ("blocked", "emulated", "skipped", "unsupported", "WARN")
_COLOURS = dict.fromkeys(_GOOD, "green") | dict.fromkeys(_BAD, "red") | dict.fromkeys(_MISSING, "yellow")


def print_json(value: Any) -> None:
    """What is infinite, or no number, is null: JSON has no other word for it."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console_of(stream: TextIO) -> Console:
    """NO_COLOR takes bold letters away too."""
    from rich.console import Console

    return Console(file=stream, color_system=None if os.environ.get("NO_COLOR") else "auto")


_WIDEST_ALIGNED = 40  # of a column in a pipe: a longer cell would fill every other line with blanks


def print_text(text: str) -> None:
    """A line, which a terminal folds between words."""
    if sys.stdout.isatty():
        console_of(sys.stdout).print(text, markup=False, highlight=False)
    else:
        print(text)


_NARROWEST_FOLDED = 30
"""Columns in which the last cell of a row may be folded."""


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal, in which no cell but the last is folded; where that is too narrow, the cells of a row one
    after the other; for a pipe, where grep and awk are to see each row whole, a line for each."""
    if not sys.stdout.isatty():
        _print_lines([header, *rows])
        return
    console = console_of(sys.stdout)
    widths = _widths([header, *rows])
    needed = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], _NARROWEST_FOLDED)
    if needed <= console.width:
        console.print(_table(header, rows))
        return
    for row in rows:
        console.print(_block(header, row, console.width))


def _table(header: list[str], rows: list[list[str]]) -> Table:
    from rich import box
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=True) for name in header[:-1]]
    table = Table(*columns, header[-1], box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _block(header: list[str], row: list[str], width: int) -> Text:
    """The first cell, and indented below it the others with their names."""
    from rich.text import Text

    shown = [
        Text.assemble(f"{name} " if name else "", _cell(cell))
        for name, cell in zip(header[1:], row[1:], strict=True)
        if cell
    ]
    found, left = _cell(row[0]), 0
    for part in shown:
        is_on_new_line = part.cell_len > left
        found.append("\n    " if is_on_new_line else "  ").append_text(part)
        left = (width - 4 if is_on_new_line else left) - part.cell_len - 2
    return found


def _cell(text: str) -> Text:
    from rich.text import Text

    return Text(text, style=_COLOURS.get(text, ""), overflow="fold")


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _print_lines(rows: list[list[str]]) -> None:
    cells = [[cell.replace("\n", " ") for cell in row] for row in rows]
    widths = [width if width <= _WIDEST_ALIGNED else 0 for width in _widths(cells)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
