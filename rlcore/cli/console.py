"""Options, tables and JSON output that the commands share."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from rlcore.errors import InvalidInputError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PLAIN: dict[str, Any] = {
    "add_completion": False,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # no boxes: they are 80 columns wide in a pipe too
}


_kept: list[TextIO] = []
"""The standard output, while it is for the JSON alone."""


def keep_for_json(context: typer.Context, is_asked: bool) -> bool:
    """Keep the standard output for the JSON: what plugins and libraries print goes to standard error.

    The descriptor stays so until the process ends, because a plugin may print even then.
    """
    if is_asked:
        # Not of `context`, which nothing closes when an option after this one is wrong.
        context.find_root().with_resource(_keep())
    return is_asked


@contextlib.contextmanager
def _keep() -> Iterator[None]:
    stream = kept = sys.stdout
    with contextlib.suppress(OSError, ValueError):  # of a stream without a descriptor, as a test's is
        if stream.fileno() == 1:
            stream.flush()
            kept = os.fdopen(os.dup(1), "w", encoding=stream.encoding, errors=stream.errors)
            os.dup2(_standard_error(), 1)
    if kept is stream:
        sys.stdout = sys.stderr
    _kept.append(kept)
    try:
        yield
    finally:
        _kept.remove(kept)
        kept.flush()
        sys.stdout = stream


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:  # it is closed
        return os.open(os.devnull, os.O_WRONLY)
    return 2


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", callback=keep_for_json)]
DeviceName = Annotated[str | None, typer.Option("--device", help='Such as "cpu" or "cuda:1"; else the default one.')]

_GOOD = ("available", "native", "OK", "pass", "runs", "faster")
_BAD = ("fail", "FAIL", "oom", "slower")
_MISSING = ("blocked", "emulated", "skipped", "unsupported", "WARN")
_COLOURS = dict.fromkeys(_GOOD, "green") | dict.fromkeys(_BAD, "red") | dict.fromkeys(_MISSING, "yellow")


def given_path(text: str) -> Path:
    """Return the path that an option names. An empty one is a shell variable without a value, not this folder."""
    if not text:
        raise typer.BadParameter("the path is empty; give a name, or . for this folder")
    return Path(text)


def check_free(option: str, path: Path, *, force: bool, others: str = "") -> None:
    """Raise InvalidInputError if ``path``, which ``option`` names, is a file that ``--force`` was not given for."""
    if path.is_file() and not force:
        raise InvalidInputError(f"{option} {path} exists; give another file, or {others}--force to replace it")


def print_json(value: Any) -> None:
    """Print JSON; infinite values and NaN become null, because JSON has no word for them."""
    write_json(f"{json.dumps(_finite(value), indent=2, allow_nan=False)}\n")


def write_json(text: str) -> None:
    """Write what is JSON already to the standard output."""
    stream = _kept[-1] if _kept else sys.stdout
    stream.write(text)
    stream.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console_of(stream: TextIO) -> Console:
    """Return a console for a stream; NO_COLOR removes colours and bold letters."""
    from rich.console import Console

    return Console(file=stream, color_system=None if os.environ.get("NO_COLOR") else "auto")


Row = Sequence[str]

_WIDEST_ALIGNED = 40  # characters: in a pipe a wider column would fill the other lines with blanks


def print_text(text: str) -> None:
    """Print a line; on a terminal it is folded between words."""
    if sys.stdout.isatty():
        console_of(sys.stdout).print(text, markup=False, highlight=False)
    else:
        print(text)


_NARROWEST_FOLDED = 30
"""The least width, in characters, into which the last cell of a row is folded."""


def print_table(header: Row, rows: Sequence[Row]) -> None:
    """Print a table.

    On a terminal only the last column is folded. A terminal that is too narrow for that gets each row as a block of
    its cells. A pipe gets one line a row, for grep and awk.
    """
    header, *rows = [[printable(cell) for cell in row] for row in (header, *rows)]
    if not sys.stdout.isatty():
        lines = [[cell.replace("\n", " ") for cell in row] for row in (header, *rows)]
        print(*aligned(lines, _WIDEST_ALIGNED), sep="\n")
        return
    console = console_of(sys.stdout)
    widths = _widths([header, *rows])
    needed = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], _NARROWEST_FOLDED)
    if needed <= console.width:
        console.print(_table(header, rows))
        return
    for row in rows:
        console.print(_block(header, row, console))


def _table(header: Row, rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=True) for name in header[:-1]]
    table = Table(*columns, header[-1], box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _block(header: Row, row: Row, console: Console) -> Text:
    """Return the first cell of a row, and indented below it the other cells with their column names."""
    from rich.text import Text

    shown = [
        Text.assemble(f"{name} " if name else "", _cell(cell))
        for name, cell in zip(header[1:], row[1:], strict=True)
        if cell
    ]
    found, left = _cell(row[0]), 0
    for one in shown:
        is_whole = one.cell_len <= console.width - 4
        part = one if is_whole else Text("\n      ").join(one.wrap(console, console.width - 6))
        is_on_new_line = part.cell_len > left
        found.append("\n    " if is_on_new_line else "  ").append_text(part)
        left = (console.width - 4 if is_on_new_line else left) - part.cell_len - 2
    return found


def _cell(text: str) -> Text:
    from rich.text import Text

    return Text(text, style=_COLOURS.get(text, ""), overflow="fold")


def _widths(rows: Sequence[Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def aligned(rows: Sequence[Row], widest: float = math.inf) -> list[str]:
    """Return a line for each row, in which columns begin below each other but for those behind a wider one."""
    widths = [width if width <= widest else 0 for width in _widths(rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
