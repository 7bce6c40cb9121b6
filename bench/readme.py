"""The tables of README.md, made from the records in ``bench/results``, and the schema: ``make results``.

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results -->`` and has a column for each record
``NAME-<machine>.json``; nothing in it is typed by hand.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from rlcore.bench.result import CaseResult, Record, json_schema, read
from rlcore.bench.results_page import page
from rlcore.errors import BenchError

_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)

Cell = Callable[[Record], str]


def rewritten(text: str, results: Path) -> str:
    """``text`` with the content of every block replaced by the table of today's records.

    Raises:
        BenchError: a block of an unknown name, without a record, or with a case that did not pass.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_table(block[2], results)}\n{block[3]}", text)


def _table(name: str, results: Path) -> str:
    if name not in _ROWS:
        raise BenchError(f"no table {name!r} for the README; known: {', '.join(_ROWS)}")
    paths = sorted(results.glob(f"{name}-*.json"))
    if not paths:
        raise BenchError(f"no record {name}-*.json in {results}; make one with: rlcore bench run -o")
    records = [read(path) for path in paths]
    lines = [["", *map(_machine, records)], ["---"] * (len(records) + 1)]
    lines += [[label, *map(cell, records)] for label, cell in _ROWS[name].items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _machine(record: Record) -> str:
    system = record.system
    return (
        system.accelerator_model_name or f"{system.host_processor_model_name}, {system.host_processor_core_count} cores"
    )


def _case(record: Record, name: str) -> CaseResult:
    found = next((case for case in record.cases if case.name == name), None)
    if found is None or found.status != "pass":
        why = "is missing" if found is None else f"has the status {found.status!r}: {found.reason}"
        raise BenchError(f"{name} {why} in the record of {_machine(record)}; the README shows only what passed")
    return found


def _range(case: str, metric: str, form: Callable[[float], str]) -> Cell:
    """Lowest to highest sample."""

    def cell(record: Record) -> str:
        samples = _case(record, case).samples(metric)
        low, high = form(min(samples)), form(max(samples))
        return low if low == high else f"{low} to {high}"

    return cell


def _median(case: str, metric: str, form: Callable[[float], str]) -> Cell:
    return lambda record: form(statistics.median(_case(record, case).samples(metric)))


def _control(record: Record) -> str:
    case = _case(record, "quickstart/control")
    return " to ".join(_percent(*case.samples(f"accuracy_{when}")) for when in ("before", "after"))


def _rest(record: Record) -> str:
    """What a run spends outside the four phases."""
    case = _case(record, "quickstart/learns")
    phases = [case.samples(phase) for phase in ("generate", "train", "sync", "offload")]
    return _seconds(
        statistics.median(time - sum(spent) for time, *spent in zip(case.samples("time"), *phases, strict=True))
    )


def _software(record: Record) -> str:
    return f"torch {record.dependencies['torch']}, Python {record.system.python}, host threads: {record.num_threads}"


def _commit(record: Record) -> str:
    commit, _, modified = (record.commit or "unknown").partition("-")
    return f"{commit[:12]}{' with changes' if modified else ''}"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _gigabytes(per_second: float) -> str:
    return f"{per_second / 1e9:.1f} GB/s"


_LEARNS = "quickstart/learns"
_MADE_WITH: dict[str, Cell] = {"made with": _software, "commit": _commit}
_ROWS: dict[str, dict[str, Cell]] = {
    "quickstart": {
        "the whole command, five seeds": _range(_LEARNS, "time", _seconds),
        "processor time of it": _range(_LEARNS, "processor", _seconds),
        "held-out accuracy before GRPO": _range(_LEARNS, "accuracy_before", _percent),
        "held-out accuracy after 100 steps": _range(_LEARNS, "accuracy_after", _percent),
        "the same with shuffled rewards, one seed": _control,
        "log-probs, sampler against trainer, at most": _range(_LEARNS, "parity_max", "{:.1e}".format),
        "tokens generated a second": _range(_LEARNS, "generated_tokens_per_s", "{:,.0f}".format),
        "generate, median": _median(_LEARNS, "generate", _seconds),
        "train, median": _median(_LEARNS, "train", _seconds),
        "weight sync, median": _median(_LEARNS, "sync", _seconds),
        "offload and onload, median": _median(_LEARNS, "offload", _seconds),
        "the rest (start, imitation, evaluation, checkpoints), median": _rest,
        **_MADE_WITH,
    },
    "startup": {
        "`import rlcore` in a new process, median": _median("startup/import", "time", _seconds),
        "`rlcore --help` from start to end, median": _median("startup/help", "time", _seconds),
        "`rlcore.get_device(name)`, median": _median("dispatch/device", "time", _seconds),
        "choosing an operator's implementation, median": _median("dispatch/op", "time", _seconds),
        **_MADE_WITH,
    },
    "workers": {
        "a call of a worker process and its answer, median": _median("workers/call", "time", _seconds),
        "a tensor of 256 MiB as argument, median": _median("workers/send", "throughput", _gigabytes),
        "a tensor of 256 MiB as answer, median": _median("workers/receive", "throughput", _gigabytes),
        "four workers until all answer, median": _median("workers/start_4", "time", _seconds),
        "the same, in bare `import torch` processes": _median(
            "workers/start_4", "ratio_to_bare_import", "{:.2f}".format
        ),
        **_MADE_WITH,
    },
}


def main(readme: Path) -> None:
    """Everything that is made from code and records: README's tables, docs/results.md, the schema."""
    root = readme.parent
    readme.write_text(rewritten(readme.read_text(), root / "bench" / "results"))
    (root / "docs" / "results.md").write_text(page(root / "bench" / "results"))
    (root / "bench" / "record.schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
