"""The tables of README.md, made from the records in ``bench/results``, the pages and the schema: ``make results``.

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results -->`` and has a column for each record
``NAME-<machine>.json``, or a part for each; nothing in it is typed by hand. The records of full runs and of the
operators, of training and of offload make docs/report.html; those of one machine are one column of it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec

from rlcore.bench.compare import NOTES, what_differs
from rlcore.bench.headlines import Run
from rlcore.bench.readme_tables import table
from rlcore.bench.report import render
from rlcore.bench.result import Record, json_schema, read
from rlcore.bench.results_page import page
from rlcore.bench.runner import calls_of, noted

_REPORTED = "full", "kernels", "train", "offload"
_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def rewritten(text: str, results: Path) -> str:
    """``text`` with the content of every block replaced by the table of today's records.

    Raises:
        BenchError: a block of an unknown name, without a record, or with a case that did not pass.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}\n{table(block[2], results)}\n{block[3]}", text)


def report(results: Path) -> str | None:
    """docs/report.html of the records ``<_REPORTED>-<machine>.json``; None while there are none."""
    runs: dict[str, Record] = {}
    for name in _REPORTED:
        for path in sorted(results.glob(f"{name}-*.json")):
            machine, record = path.stem.removeprefix(f"{name}-"), read(path)
            same = next((known for known, run in runs.items() if _is_same_machine(run, record)), None)
            if same is not None:
                runs[same] = _joined(runs[same], record)
            else:
                runs[machine if machine not in runs else path.stem] = record
    return render([Run(name, record) for name, record in runs.items()]) if runs else None


def _is_same_machine(a: Record, b: Record) -> bool:
    """With the same software, too."""
    about_the_run = ("rlcore", "commit", "kind of run", "host threads", *NOTES)
    return all(name in about_the_run or name.startswith("$") for name in what_differs(a, b))


def _joined(record: Record, more: Record) -> Record:
    """With what ``more`` measured and ``record`` did not."""
    measured = {case.name for case in record.cases if case.status == "pass"}
    found = {case.name for case in more.cases if case.status == "pass"} - measured
    cases = [case for case in record.cases if case.name not in found]
    cases += [case for case in more.cases if case.name in found]
    both = msgspec.structs.replace(record, cases=cases, calls=[*calls_of(record), *calls_of(more)])
    return noted(both, more.system.hw_notes)


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
