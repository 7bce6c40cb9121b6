"""The tables of README.md, made from the records in ``bench/results``, the pages and the schema: ``make results``.

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results -->`` and has a column for each record
``NAME-<machine>.json``, or a part for each; nothing in it is typed by hand. The records of full runs and of the
operators make docs/report.html.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rlcore.bench.headlines import Run
from rlcore.bench.readme_tables import table
from rlcore.bench.report import render
from rlcore.bench.result import json_schema, read
from rlcore.bench.results_page import page

_REPORTED = "full", "kernels"
_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def rewritten(text: str, results: Path) -> str:
    """``text`` with the content of every block replaced by the table of today's records.

    Raises:
        BenchError: a block of an unknown name, without a record, or with a case that did not pass.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}\n{table(block[2], results)}\n{block[3]}", text)


def report(results: Path) -> str | None:
    """docs/report.html of the records ``<_REPORTED>-<machine>.json``; None while there are none."""
    paths = [path for name in _REPORTED for path in sorted(results.glob(f"{name}-*.json"))]
    runs = [Run(path.stem.removeprefix("full-"), read(path)) for path in paths]
    return render(runs) if runs else None


def main(readme: Path) -> None:
    """Everything that is made from code and records: README's tables, the pages of docs, the schema."""
    root = readme.parent
    results = root / "bench" / "results"
    readme.write_text(rewritten(readme.read_text(), results))
    (root / "docs" / "results.md").write_text(page(results))
    if (html := report(results)) is not None:
        (root / "docs" / "report.html").write_text(html)
    (root / "bench" / "record.schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
