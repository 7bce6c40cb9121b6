"""What the commands share: options, tables, JSON."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated, Any

import typer

PLAIN: dict[str, Any] = {"add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False}

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


_WIDEST_ALIGNED = 40  # of a column in a pipe: a longer cell would fill every other line with blanks


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A table as wide as the terminal; for a pipe, where grep and awk are to see each row whole, a line for each."""
    if not sys.stdout.isatty():
        _print_lines([header, *rows])
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, ""), overflow="fold") for cell in row))
    Console().print(table)


def _print_lines(rows: list[list[str]]) -> None:
    cells = [[cell.replace("\n", " ") for cell in row] for row in rows]
    widest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths = [width if width <= _WIDEST_ALIGNED else 0 for width in widest]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
