"""The tables of README.md, made from the records in ``bench/results``, the pages and the schema: ``make results``.

A table stands between ``<!-- results:NAME -->`` and ``<!-- /results -->`` and has a column for each record
``NAME-<machine>.json``, or that of the operators a part for each; nothing in it is typed by hand. The records of full
runs and of the operators make docs/report.html.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from rlcore.bench.compare import device_of
from rlcore.bench.headlines import Run
from rlcore.bench.limits import times, unit
from rlcore.bench.report import render
from rlcore.bench.result import CaseResult, Record, json_schema, read
from rlcore.bench.results_page import page
from rlcore.bench.rivals import is_ours
from rlcore.bench.text import rate
from rlcore.errors import BenchError

_REPORTED = "full", "kernels"
_BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)

Cell = Callable[[Record], str]


def rewritten(text: str, results: Path) -> str:
    """``text`` with the content of every block replaced by the table of today's records.

    Raises:
        BenchError: a block of an unknown name, without a record, or with a case that did not pass.
    """
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_table(block[2], results)}\n{block[3]}", text)


def _table(name: str, results: Path) -> str:
    if name not in (_BESIDE_PEERS, *_ROWS):
        raise BenchError(f"no table {name!r} for the README; known: {', '.join(sorted((_BESIDE_PEERS, *_ROWS)))}")
    paths = sorted(results.glob(f"{name}-*.json"))
    if not paths:
        raise BenchError(f"no record {name}-*.json in {results}; make one with: rlcore bench run -o")
    records = [read(path) for path in paths]
    if name == _BESIDE_PEERS:
        return "\n".join(map(_beside_peers, records))
    lines = [[label, *map(cell, records)] for label, cell in _ROWS[name].items()]
    return _lines(["", *map(_machine, records)], lines)


def _lines(header: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *lines))


def _beside_peers(record: Record) -> str:
    lines = [[label, *_ours_and_best(record, *what)] for label, what in _RACES.items()]
    lines += [[label, cell(record), "", ""] for label, cell in _MADE_WITH.items()]
    return _lines([_machine(record), "rlcore", "best of the others", "ratio"], lines)


def _ours_and_best(record: Record, case: str, metric: str) -> list[str]:
    """The least of each, with the name of the contender, and how many times as much as ours the other is."""
    sides: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for one in record.cases:
        if one.name == case and one.status == "pass":
            samples = times(one) if metric == "time" else one.samples(metric)
            sides[is_ours(one)].append((statistics.median(samples), one.implementation))
    if not all(sides.values()):
        _case(record, case)
        raise BenchError(f"{case} passed for one side alone in the record of {_machine(record)}")
    ours, other = min(sides[True]), min(sides[False])
    form = _seconds if metric == "time" else "{:.1e}".format
    return [*(f"{form(value)}, {name}" for value, name in (ours, other)), f"{other[0] / ours[0]:.2f}"]


def _machine(record: Record) -> str:
    several = record.system.accelerators_per_node
    return f"{several} x {device_of(record)}" if several > 1 else device_of(record)


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


def _if_measured(case: str, metric: str, form: Callable[[float], str]) -> Cell:
    """Of a run that need not have the case; what it has must have passed."""
    cell = _median(case, metric, form)
    return lambda record: cell(record) if any(found.name == case for found in record.cases) else "not measured"


def _limit(name: str) -> Cell:
    """What the machine was measured to reach."""

    def cell(record: Record) -> str:
        limits = record.calibration.limits if record.calibration else {}
        return rate(limits[name], unit(name)) if name in limits else "not measured"

    return cell


def _model(record: Record) -> str:
    found = next((case for case in record.cases if case.name == "rl/step"), None)
    return str(found.params["model"]) if found else "not measured"


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


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _gigabytes(per_second: float) -> str:
    return f"{per_second / 1e9:.1f} GB/s"


def report(results: Path) -> str | None:
    """docs/report.html of the records ``<_REPORTED>-<machine>.json``; None while there are none."""
    paths = [path for name in _REPORTED for path in sorted(results.glob(f"{name}-*.json"))]
    runs = [Run(path.stem.removeprefix("full-"), read(path)) for path in paths]
    return render(runs) if runs else None


_BESIDE_PEERS = "kernels"
_RACES = {
    "`token_logprob`, 16k x 152k, forward": ("kernels/token_logprob_forward", "time"),
    "`token_logprob`, forward and backward": ("kernels/token_logprob", "time"),
    "`linear_logprob`, 8B, forward": ("kernels/linear_logprob_forward/8b", "time"),
    "`linear_logprob`, 8B, forward and backward": ("kernels/linear_logprob/8b", "time"),
    "`linear_logprob`, 0.5B, forward": ("kernels/linear_logprob_forward/0.5b", "time"),
    "`linear_logprob`, 0.5B, forward and backward": ("kernels/linear_logprob/0.5b", "time"),
    "`linear_loss`, 8B, forward and backward": ("kernels/linear_loss/8b", "time"),
    "greatest error of a log-prob, logits of unit scale": ("kernels/linear_logprob_accuracy", "logprob_error"),
    "greatest error of a log-prob, logits up to 80": ("kernels/linear_logprob_accuracy", "peaked_logprob_error"),
}
_LEARNS = "quickstart/learns"
_PRODUCT = "matrix product attained, {}"
_MADE_WITH: dict[str, Cell] = {"made with": _software, "commit": Record.commits}
_ROWS: dict[str, dict[str, Cell]] = {
    "full": {
        "model of the step of RL": _model,
        "one step of RL, trainer and sampler in turns, median": _if_measured("rl/step", "time", _seconds),
        "tokens trained a second, whole step": _if_measured("rl/step", "trained_tokens", "{:,.0f}".format),
        "bubble: neither sampling, scoring nor training": _if_measured("rl/step", "bubble", _percent),
        "tokens sampled a second": _if_measured("rollout/hf", "new_tokens", "{:,.0f}".format),
        "one train step, median": _if_measured("train/step", "time", _seconds),
        **{_PRODUCT.format(dtype): _limit(f"product/{dtype}") for dtype in ("float32", "bfloat16")},
        "memory, read and written": _limit("memory"),
        "host to device, pinned": _limit("to_device/pinned"),
        "device to device": _limit("link"),
        **_MADE_WITH,
    },
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
