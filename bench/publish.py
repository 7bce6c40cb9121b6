"""``make results``: README's table, docs/results.md, docs/report.html and the schema, from code and records."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rlcore.bench.compare import NOTES, what_differs
from rlcore.bench.record import CaseResult, Record, by_case, json_schema, read
from rlcore.bench.reports.answers import ReportRun
from rlcore.bench.reports.page import render
from rlcore.bench.reports.summary import Selector, is_of_machine, is_ours, median, selected, value_of
from rlcore.bench.reports.tables import (
    ResultTable,
    missing_table,
    results_table,
    shared_sizes,
    sizes_told,
    targets_table,
)
from rlcore.bench.reports.text import quantity
from rlcore.bench.run import calls_of, noted
from rlcore.errors import BenchError

# -------------------------------------------------------------------------------------------- README's table

_BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
_FASTEST: Selector = {}


class ReadmeRow(NamedTuple):
    """One row: a number of rlcore, and what stands beside it."""

    label: str
    record: str
    """The file in ``bench/results``, without ".json"."""
    case: str
    ours: Selector = _FASTEST
    """Empty: the fastest of rlcore."""
    beside: Selector | None = None
    """Empty: the fastest of the others. None: nothing stands beside it."""
    metric: str = "time"


_ENGINE = {"implementation": "engine", "lengths": "equal"}, {"implementation": "torch FSDP2", "lengths": "equal"}
_ARENA = {"implementation": "arena_reserved"}, {"implementation": "torch_pin_memory"}
_SWAP = {"implementation": "swap"}, {"implementation": "one_after_the_other"}
_SYNC = {"implementation": "turn"}, {"implementation": "vllm_ipc_packed"}
_RACE = {"implementation": "rlcore"}, {"implementation": "trl"}
SHOWN = (
    ReadmeRow("a step of GRPO with vLLM, 1.5B", "race-h200", "race/1.5b", *_RACE),
    ReadmeRow("a step of GRPO with vLLM, 7B", "race-7b-h200", "race/7b", *_RACE),
    ReadmeRow("`token_logprob`, forward", "kernels-h200", "kernels/token_logprob_forward", beside={}),
    ReadmeRow("`token_logprob`, forward and backward", "kernels-h200", "kernels/token_logprob", beside={}),
    ReadmeRow("`linear_logprob`, 8B, forward", "kernels-h200", "kernels/linear_logprob_forward/8b", beside={}),
    ReadmeRow("`linear_logprob`, 8B, forward and backward", "kernels-h200", "kernels/linear_logprob/8b", beside={}),
    ReadmeRow("`linear_loss`, 8B, forward and backward", "kernels-h200", "kernels/linear_loss/8b", beside={}),
    ReadmeRow("training a 1.5B", "train-h200", "train/dense_1.5b", *_ENGINE, "tokens_a_device"),
    ReadmeRow("training a 1.5B, each of two", "train-2xh200", "train/dense_1.5b", *_ENGINE, "tokens_a_device"),
    ReadmeRow("training a 7B", "train-h200", "train/dense_7b", *_ENGINE, "tokens_a_device"),
    ReadmeRow("training a 7B, each of two", "train-2xh200", "train/dense_7b", *_ENGINE, "tokens_a_device"),
    ReadmeRow("the first offload of 25 GB, host memory reserved", "offload-h200", "offload/first", *_ARENA),
    ReadmeRow("two sets of 45 GB change places", "offload-h200", "offload/swap", *_SWAP),
    ReadmeRow("new weights for vLLM, 7B", "vllm-h200", "weight_sync/vllm/7b", *_SYNC),
    ReadmeRow("the whole quickstart", "quickstart-h200", "quickstart/learns"),
    ReadmeRow("the whole quickstart", "quickstart-cpu", "quickstart/learns"),
    ReadmeRow("`import rlcore` in a new process", "startup-cpu", "startup/import"),
    ReadmeRow("a call of a worker process and its answer", "workers-cpu", "workers/call"),
)


def rewritten(text: str, results: Path, shown: Sequence[ReadmeRow] = SHOWN) -> str:
    """Return ``text`` with the table of today's records in every block ``<!-- results -->``.

    Raises:
        BenchError: there is no record, or the case has no number in it.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}\n{readme_table(results, shown).markdown()}\n{block[2]}", text)


def readme_table(results: Path, shown: Sequence[ReadmeRow] = SHOWN) -> ResultTable:
    rows = [_shown_row(one, read(results / f"{one.record}.json")) for one in shown]
    return ResultTable(["", "rlcore", "beside it", "ratio", "measured on"], rows)


def _shown_row(shown: ReadmeRow, record: Record) -> list[str]:
    """Return a row of the table; a ratio above 1 is in favour of rlcore."""
    ours = _chosen(shown, record, shown.ours, "of rlcore")
    cells = [shown.label, _told(ours, shown), "", "", _machine(record)]
    if shown.beside is not None:
        other = _chosen(shown, record, shown.beside, "of another")
        ratio = value_of(ours, shown.metric) / value_of(other, shown.metric)
        is_rate = ours.unit(shown.metric).endswith("/s")
        cells[2:4] = _told(other, shown), f"{ratio if is_rate else 1 / ratio:.2f}"
    return cells


def _chosen(shown: ReadmeRow, record: Record, selector: Selector, whose: str) -> CaseResult:
    """Return the result that the selector names; an empty one takes the fastest of that side, where there are two."""
    results = record.by_case().get(shown.case, [])
    found = selected(results, selector)
    if not selector and shown.beside is not None:
        found = [one for one in found if is_ours(one) is (whose == "of rlcore")]
    if found:
        return min(found, key=lambda one: median(one) if shown.metric == "time" else 0.0)
    which = f" for {', '.join(map(str, selector.values()))}" if selector else f" {whose}" if shown.beside == {} else ""
    why = f"has no number{which} in" if results else "is not in"
    broken = "; ".join(f"{one.implementation}: {one.status}: {one.reason}" for one in results if one.reason)
    reasons = f" ({broken})" if broken else ""
    raise BenchError(f"{shown.case} {why} {shown.record}.json{reasons}; the README shows only what passed")


def _told(result: CaseResult, shown: ReadmeRow) -> str:
    number = quantity(value_of(result, shown.metric), result.unit(shown.metric))
    return number if shown.beside is None else f"{number}, {result.implementation}"


def _machine(record: Record) -> str:
    several = record.system.accelerators_per_node
    return f"{several} x {record.device_name}" if several > 1 else record.device_name


# ---------------------------------------------------------------------------------------------- docs/results.md

_HEAD = """\
# Results

Made by `make results` from the records in `bench/results`; nothing here is typed by hand. Medians, with the tenth and
the ninetieth percentile of n samples; every number was checked in the run that was timed. A share is that of the limit
measured on the same machine, where the case states what it needs of one. What the columns and marks mean:
[bench.md](bench.md). Reasons are shortened; the record has them whole. Sizes that all results of a table or a case have
stand above it or with its name; a cell is empty where it is as above, and a column in which nothing would stand is
left out.
"""
_COLUMNS = ("case", "implementation", "sizes", "median", "p10 to p90", "n", "share", "also")
_LONG = 12
"""Rows from which on a table of the machine, size by size, is folded."""


def page(results: Path) -> str:
    return _HEAD + "".join(_section(path.stem, read(path)) for path in sorted(results.glob("*.json")))


def _section(name: str, record: Record) -> str:
    system, passed = record.system, record.passed()
    parts = [
        f"\n## {name}: {record.device_name}\n",
        f"{record.started_at[:10]}, {', '.join(record.software())}; rlcore {record.rlcore}, commit {record.commits()}; "
        f"host: {system.host}.\n",
        *(f"Notes: {note}.\n" for name in NOTES if (note := getattr(system, name))),
    ]
    if marks := dict.fromkeys(mark for result in passed for mark in result.marks):
        parts.append(f"Marks: {'; '.join(marks)}.\n")
    for folder in dict.fromkeys(result.name.partition("/")[0] for result in passed):
        parts += _folder(folder, [one for one in passed if one.name.partition("/")[0] == folder], record)
    for title, table in {
        "What is meant to be reached:": targets_table(record),
        "Without a number:": missing_table(record),
    }.items():
        parts += [f"{title}\n", table.markdown()] if table.rows else []
    return "\n".join(parts)


def _folder(folder: str, results: list[CaseResult], record: Record) -> list[str]:
    common = shared_sizes([result.params for result in results]) if len(results) > 1 else {}
    rows = [row for case in by_case(results).values() for row in _case_rows(case, common, record)]
    body = [f"All: {sizes_told(common)}.\n"] * bool(common) + [ResultTable(_COLUMNS, rows).compact().markdown()]
    if len(rows) >= _LONG and is_of_machine(results[0]):
        body = [f"<details><summary>{len(rows)} results</summary>\n", *body, "</details>\n"]
    return [f"### {folder}\n", *body]


def _case_rows(results: list[CaseResult], common: Mapping[str, object], record: Record) -> list[list[str]]:
    """Sizes that all have stand with the case's name; a cell that is as in the row above is empty."""
    case = results[0].name
    rows = [list(row) for row in results_table(results, record.calibration).only(*_COLUMNS).rows]
    own = sizes_told(shared_sizes([result.params for result in results]), case, leave_out=common)
    if len(rows) == 1:
        rows[0][2] = own
    elif own:
        rows[0][0] = f"{case} ({own})"
    names = [row[1] for row in rows]
    for row, above in zip(rows[1:], names, strict=False):
        row[:2] = "", "" if row[1] == above else row[1]
    return rows


# -------------------------------------------------------------------------------------------- docs/report.html

_REPORTED = "full", "kernels", "train", "offload"


def report(results: Path) -> str | None:
    """Return one page of the records ``<_REPORTED>-<machine>.json``, or None where there are none.

    The records of one machine are one column of it.
    """
    runs: dict[str, Record] = {}
    for path in (path for name in _REPORTED for path in sorted(results.glob(f"{name}-*.json"))):
        machine, record = path.stem.partition("-")[2], read(path)
        same = next((known for known, run in runs.items() if _is_same_machine(run, record)), None)
        if same is not None:
            runs[same] = _joined(runs[same], record)
        else:
            runs[machine if machine not in runs else path.stem] = record
    return render([ReportRun(name, record) for name, record in runs.items()]) if runs else None


def _is_same_machine(a: Record, b: Record) -> bool:
    """Return True if machine and software are the same."""
    about_the_run = ("rlcore", "commit", "kind of run", "host threads", *NOTES)
    return all(name in about_the_run or name.startswith("$") for name in what_differs(a, b))


def _joined(record: Record, more: Record) -> Record:
    """Add what ``more`` measured and ``record`` did not."""
    found = {case.name for case in more.passed()} - {case.name for case in record.passed()}
    cases = [case for case in record.cases if case.name not in found]
    cases += [case for case in more.cases if case.name in found]
    both = msgspec.structs.replace(record, cases=cases, calls=[*calls_of(record), *calls_of(more)])
    return noted(both, more.system.hw_notes)


def main(readme: Path) -> None:
    root = readme.parent
    results = root / "bench" / "results"
    readme.write_text(rewritten(readme.read_text(), results))
    (root / "docs" / "results.md").write_text(page(results))
    if (html := report(results)) is not None:
        (root / "docs" / "report.html").write_text(html)
    (root / "bench" / "record.schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
