"""A table of texts. Markdown and CSV are written here, HTML by the report's template, a terminal by the console."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple, Self


class ResultTable(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def compact(self) -> Self:
        """Return the table without the columns in which no row has anything."""
        kept = [column for column in range(len(self.header)) if any(row[column] for row in self.rows)]
        header, *rows = ([row[column] for column in kept] for row in (self.header, *self.rows))
        return type(self)(header, rows)

    def markdown(self) -> str:
        lines = (self.header, ["---"] * len(self.header), *self.rows)
        return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)

    def csv(self) -> str:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.header, *self.rows])
        return file.getvalue()
