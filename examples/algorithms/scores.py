"""Runs the programs of this folder with several seeds, and makes tables of what they do to the score.

    python -m rlcore.examples.algorithms.scores run --seeds 5 --at-once 16 -o scores.json
    python -m rlcore.examples.algorithms.scores table engines scores.json --into docs/deepspeed.md

Each run is a process with one thread, to which ``run`` hands further flags, such as --rate=1e-3. A table is of
programs, with one trainer and sampler, or of engines, with one program.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.measurement.system import installed_versions, source_commit
from rlcore.conformance.table import into
from rlcore.errors import InvalidInputError

SCHEMA = "rlcore.scores/1"
PACKAGE = "rlcore.examples.algorithms"
PROGRAMS = ("cpgd", "dapo", "dr_grpo", "grpo", "gspo", "high_entropy", "ppo", "reinforce_plus_plus", "rloo", "ttrl")
SCORES = ("before", "after", "before_sampled", "after_sampled")
SHOWN_STEPS = (1, 5, 10, 15, 20, 25)


class Asked(NamedTuple):
    """One run."""

    program: str
    trainer: str
    sampler: str
    seed: int
    steps: int
    flags: tuple[str, ...] = ()

    def run(self) -> dict[str, Any]:
        """Return what it did; raises CalledProcessError with the output of a program that failed."""
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record.json")
            options = {"trainer": self.trainer, "sampler": self.sampler, "seed": self.seed, "steps": self.steps}
            flags = [*(f"--{name}={value}" for name, value in options.items()), *self.flags]
            command = [sys.executable, "-m", f"{PACKAGE}.{self.program}", *flags, f"--record={record}"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            outcome: dict[str, Any] = json.loads(record.read_text())
            return self._asdict() | outcome


def run_all(asked: Sequence[Asked], at_once: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what came of each run, and what was said of those that failed."""
    failures: list[str] = []

    def one(run: Asked) -> dict[str, Any] | None:
        try:
            found = run.run()
        except subprocess.CalledProcessError as error:
            failures.append(f"{run} failed:\n{error.stderr[-4000:]}")
            return None
        scores = " ".join(f"{name} {found[name]:.3f}" for name in SCORES)
        print(f"{run.program} {run.trainer} {run.sampler} {run.seed}: {scores}", flush=True)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        return [found for found in pool.map(one, asked) if found is not None], failures


def record_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    device = rlcore.get_device()
    return {
        "schema": SCHEMA,
        "commit": source_commit(),
        "device": {"type": device.type, "product": device.properties().name},
        "versions": installed_versions(),
        "runs": runs,
    }


# -------------------------------------------------------------------------------------------------- tables


def programs_table(records: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each program, the best first."""
    expect_one(records, "trainer", "sampler")
    rows = []
    for (program, steps), runs in grouped(records, lambda record, run: (run["program"], run["steps"])):
        if any(name not in run for run in runs for name in SCORES):
            raise InvalidInputError(f"a run of {program} has no {SCORES[-1]}; run it again, with this version")
        before, after = ([run[name] for run in runs] for name in ("before_sampled", "after_sampled"))
        cells = " | ".join(_mean([run[name] for run in runs]) for name in SCORES)
        each = ", ".join(f"{_short(one)} to {_short(other)}" for one, other in zip(before, after, strict=True))
        rows.append((statistics.mean(after), f"| `{program}.py` | {steps} | {cells} | {each} |"))
    head = "| program | steps | greedy before, mean | after | sampled before, mean | after | sampled, each seed |"
    return "\n".join([head, "|" + " --- |" * 7, *(row for _, row in sorted(rows, reverse=True)), "", *footers(records)])


def engines_table(records: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of one program with a row for each device, trainer and sampler."""
    expect_one(records, "program", "steps")
    shown = [step for step in SHOWN_STEPS if step <= records[0]["runs"][0]["steps"]]
    names = " | ".join(f"step {step}" for step in shown)
    head = f"| device | trainer | sampler | seeds | {names} | score before | after | off the first |"
    lines = [head, "|" + " --- |" * (len(shown) + 7)]
    first: dict[tuple[str, str], list[float]] = {}
    for (device, sampler, trainer), runs in grouped(
        records, lambda record, run: (record["device"]["type"], run["sampler"], run["trainer"])
    ):
        curve = [statistics.mean(rewards) for rewards in zip(*(run["rewards"] for run in runs), strict=True)]
        others = first.setdefault((device, sampler), curve)
        distance = max(abs(one - other) for one, other in zip(curve, others, strict=True))
        cells = " | ".join(f"{curve[step - 1]:.3f}" for step in shown)
        scores = " | ".join(_mean([run[name] for run in runs]) for name in ("before", "after"))
        lines.append(f"| {device} | `{trainer}` | `{sampler}` | {len(runs)} | {cells} | {scores} | {distance:.3f} |")
    return "\n".join([*lines, "", *footers(records)])


def grouped(records: Iterable[dict[str, Any]], key: Callable[[Any, Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Return the runs of the records by this key, each group in the order of seeds, groups in the order of records."""
    found: dict[Any, list[Any]] = {}
    for record in records:
        if record.get("schema") != SCHEMA:
            raise InvalidInputError(f"a record of scores has schema {SCHEMA!r}, this one {record.get('schema')!r}")
        for run in record["runs"]:
            found.setdefault(key(record, run), []).append(run)
    return [(name, sorted(runs, key=lambda run: run["seed"])) for name, runs in found.items()]


def expect_one(records: Sequence[dict[str, Any]], *names: str) -> None:
    """Raise InvalidInputError unless all runs have the same of each of these."""
    for name in names:
        found = sorted({str(run[name]) for record in records for run in record["runs"]})
        if len(found) != 1:
            have = ", ".join(found)
            raise InvalidInputError(f"this table is of runs with the same {name}, and the records have {have}")


def footers(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each record: where it was made, and of which versions."""
    lines = []
    for record in records:
        used = ("torch", "transformers", "deepspeed", "vllm")
        versions = [f"{name} {record['versions'][name]}" for name in used if name in record["versions"]]
        number, dash, mark = (record["commit"] or "").partition("-")
        commit = [f"commit {number[:12]}{dash}{mark}"] if number else []
        lines.append(f"{record['device']['product']}: {', '.join([*versions, *commit])}.")
    return lines


def _mean(scores: Sequence[float]) -> str:
    return _short(statistics.mean(scores))


def _short(score: float) -> str:
    return f"{score:.3f}".lstrip("0")


TABLES = {"programs": programs_table, "engines": engines_table}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("programs", nargs="*", default=PROGRAMS, metavar="PROGRAM")
    run.add_argument("--trainers", nargs="+", default=["fsdp2"])
    run.add_argument("--samplers", nargs="+", default=["hf"])
    for name, number in {"seeds": 5, "steps": 25, "at-once": 1}.items():
        run.add_argument(f"--{name}", type=int, default=number)
    run.add_argument("-o", "--output", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("kind", choices=TABLES)
    table.add_argument("records", nargs="+", type=Path)
    table.add_argument(
        "--into", type=Path, help="a page with lines <!-- scores of KIND --> and <!-- /scores of KIND -->"
    )
    options, flags = parser.parse_known_args(argv)
    if options.command == "table":
        text = TABLES[options.kind]([json.loads(path.read_text()) for path in options.records])
        if options.into is None:
            print(text)
        else:
            page = into(options.into.read_text(), text, f"scores of {options.kind}")
            write_file(options.into, page.encode())
        return 0
    asked = [
        Asked(program, trainer, sampler, seed, options.steps, tuple(flags))
        for seed, program, trainer, sampler in itertools.product(
            range(options.seeds), options.programs, options.trainers, options.samplers
        )
    ]
    runs, failures = run_all(asked, options.at_once)
    write_file(options.output, json.dumps(record_of(runs), indent=1).encode())
    print(*failures, sep="\n", file=sys.stderr)
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
