"""The table of docs/devices.md, member x device, from reports of the suite.

python -m rlcore.conformance.table cpu.json cuda.json [--into docs/devices.md]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rlcore.atomic import write_file
from rlcore.bench.record import short_commit
from rlcore.conformance.report import SCHEMA
from rlcore.errors import InvalidInputError

SECTION = "members"
"""Name of the section of a document that holds the table: <!-- members --> to <!-- /members -->."""


def table(reports: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each member; reasons are footnotes.

    Raises:
        InvalidInputError: one of ``reports`` is not a report of the suite.
    """
    for report in reports:
        if report.get("schema") != SCHEMA:
            raise InvalidInputError(f"a report of the suite has schema {SCHEMA!r}, this one {report.get('schema')!r}")
    reasons: dict[str, int] = {}
    members = dict.fromkeys(member for report in reports for member in report["members"])
    head = "| member | " + " | ".join(map(_column, reports)) + " |"
    lines = [head, "| --- |" + " --- |" * len(reports)]
    for member in members:
        cells = [_cell(report["members"].get(member), reasons) for report in reports]
        lines.append(f"| `{member}` | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    versions = [_footer(report) for report in reports]
    return "\n".join([*lines, "", *notes, "", *versions])


def into(document: str, text: str, section: str = SECTION) -> str:
    """Return ``document`` with ``text`` between its lines <!-- section --> and <!-- /section -->.

    Raises:
        InvalidInputError: it does not have these lines.
    """
    first, last = f"<!-- {section} -->", f"<!-- /{section} -->"
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise InvalidInputError(f"the document needs a line {first} and after it a line {last}")
    return f"{before}{first}\n{text}\n{last}{after}"


def _column(report: dict[str, Any]) -> str:
    kind = str(report["device"]["name"]).partition(":")[0]
    simulation = report.get("simulation")
    return f"{kind} ({simulation['name']})" if simulation else kind


def _cell(member: dict[str, str] | None, reasons: dict[str, int]) -> str:
    if member is None:
        return "absent"
    text = member["support"] if member["result"] != "failed" else f"{member['support']}, **failed**"
    if member["result"] in ("skipped", "untested") and member["support"] != "unsupported":
        text += f", {member['result']}"
    if not member["reason"]:
        return text
    return f"{text} ({reasons.setdefault(member['reason'], len(reasons) + 1)})"


def _footer(report: dict[str, Any]) -> str:
    results = [member["result"] for member in report["members"].values()]
    versions = [f"{name} {version}" for name, version in report["versions"].items() if name not in ("rlcore", "python")]
    if report.get("commit") is not None:  # reports from before it was recorded have none
        versions.append(f"commit {short_commit(report['commit'])}")
    evidence = sorted({member["evidence"] for member in report["members"].values()})
    return (
        f"* {report['device']['name']}: {report['device']['product']}, {', '.join(versions)}, "
        f"evidence {' and '.join(evidence)}{_simulated(report.get('simulation'))}; "
        f"by {len(report['tests'])} tests {results.count('passed')} members passed, "
        f"{results.count('failed')} failed, {results.count('skipped')} skipped, {results.count('untested')} untested"
    )


def _simulated(found: dict[str, Any] | None) -> str:
    """Return the words about a simulation; None means that the vendor's own libraries ran, or an older report."""
    if found is None:
        return ""
    return f", {found['operators_simulated']} operators simulated, refused: {', '.join(found['refused']) or 'none'}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rlcore.conformance.table", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="put the table into its section of this file")
    options = parser.parse_args(arguments)
    text = table([json.loads(path.read_text()) for path in options.reports])
    if options.into is None:
        print(text)
    else:
        write_file(options.into, into(options.into.read_text(), text).encode())


if __name__ == "__main__":
    main()
