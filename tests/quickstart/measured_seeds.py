"""Where runs of the quickstart end: seed after seed, under each number of threads and instruction set.

    python -m tests.quickstart.measured_seeds run FILE --seeds 30 --threads 1 2 --instructions avx512 avx2
    python -m tests.quickstart.measured_seeds table FILE...

FILE is JSON, written anew after each run: the machine, the versions and the runs. As many runs go on beside each other
as have a processor for each of their threads. The table is that of docs/quickstart.md; ``bench/results/quickstart/``
has its records.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.cases.quickstart import accuracies, quickstart
from rlcore.bench.measurement.system import new_record

Record = dict[str, Any]


def measure(given: argparse.Namespace, file: Path) -> Record:
    made = msgspec.to_builtins(new_record(rlcore.get_device("cpu:0")))
    record: Record = {name: made[name] for name in ("started_at", "rlcore", "commit", "system", "dependencies")}
    record["runs"] = runs = []
    file.parent.mkdir(parents=True, exist_ok=True)
    for instructions, threads in product(given.instructions, given.threads):
        os.environ["ATEN_CPU_CAPABILITY"] = instructions  # the runs' processes inherit it
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // threads)) as pool:
            seeds = range(given.first, given.first + given.seeds)
            for future in as_completed([pool.submit(run, seed, threads) for seed in seeds]):
                runs.append({"instructions": instructions} | future.result())
                runs.sort(key=lambda run: (run["instructions"], run["threads"], run["seed"]))
                write_file(file, json.dumps(record, indent=1).encode())
    return record


def run(seed: int, threads: int) -> dict[str, Any]:
    started = time.monotonic()
    # An option: the quickstart takes one thread whatever OMP_NUM_THREADS says.
    before, after = accuracies(quickstart("cpu:0", seed, "--threads", str(threads)).steps)
    seconds = round(time.monotonic() - started, 1)
    return {"seed": seed, "threads": threads, "accuracy_before": before, "accuracy": after, "seconds": seconds}


def table(records: Sequence[Record]) -> list[str]:
    """Return the lines of a table in Markdown: a row for each version of torch, number of threads, instruction set."""
    ends: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for record in records:
        for one in record["runs"]:
            ends[record["dependencies"]["torch"], one["threads"], one["instructions"]].append(one["accuracy"])
    lines = ["| torch | threads | `ATEN_CPU_CAPABILITY` | runs | worst | mean |", f"|{' --- |' * 6}"]
    for (torch, threads, instructions), row in sorted(ends.items()):
        worst, mean = 100 * min(row), 100 * sum(row) / len(row)
        lines.append(f"| {torch} | {threads} | {instructions} | {len(row)} | {worst:.1f} % | {mean:.2f} % |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    shown = kinds.add_parser("table")
    shown.add_argument("files", type=Path, nargs="+")
    measured = kinds.add_parser("run")
    measured.add_argument("file", type=Path)
    measured.add_argument("--first", type=int, default=0, help="seed")
    measured.add_argument("--seeds", type=int, default=30)
    measured.add_argument("--threads", type=int, nargs="+", default=[1])
    # torch ignores other words, with a warning, and the record would be wrong.
    measured.add_argument("--instructions", nargs="+", default=["avx512"], choices=("avx512", "avx2", "default"))
    given = parser.parse_args(argv)
    if given.what == "table":
        records = [json.loads(file.read_bytes()) for file in given.files]
    else:
        records = [measure(given, given.file)]
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
