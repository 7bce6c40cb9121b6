"""The table of kernels in docs/ascend.md, from a report of ``lowering``.

python -m tests.devices.ascend.lowering_table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlcore.conformance.table import into

REPORT = Path(__file__).with_name("lowering.json")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "ascend.md"
MARK = "kernels"


def table(report: dict[str, Any]) -> str:
    """Markdown: a row for each kernel, a note for each that no implementation offers on an NPU."""
    notes: dict[str, int] = {}
    lines = [
        "| kernel | lowers | tile | bytes at once | the lint says | offered on an NPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, entry in report["kernels"].items():
        tile = ", ".join(f"{key} {value}" for key, value in entry["tile"].items())
        nbytes = "" if entry["live_bytes"] is None else f"{entry['live_bytes']:,}"
        lowers = f"no: `{entry['message']}`" if entry["message"] else "yes"
        said = "; ".join(entry["findings"]) or ("" if entry["message"] else "nothing")
        offered = _offered(entry["file"], report["implementations"], notes)
        lines.append(f"| {name} | {lowers} | {tile} | {nbytes} | {said} | {offered} |")
    numbered = [f"{number}. {reason}" for reason, number in notes.items()]
    made = f"By {report['compiler']} for {report['architecture']}; a program may hold {report['tile_bytes']:,} bytes."
    return "\n".join([*lines, "", *numbered, "", made])


def _offered(file: str, implementations: list[dict[str, Any]], notes: dict[str, int]) -> str:
    users = [entry for entry in implementations if file in entry["files"]]
    if offered := [f"`{entry['op']}`" for entry in users if entry["refusal"] is None]:
        return ", ".join(offered)
    numbers = dict.fromkeys(notes.setdefault(entry["refusal"], len(notes) + 1) for entry in users)
    return f"no ({', '.join(map(str, numbers))})"


if __name__ == "__main__":
    PAGE.write_text(into(PAGE.read_text(), table(json.loads(REPORT.read_text())), MARK))
