"""Where runs of the quickstart end: seed after seed, under each number of threads and instruction set.

    python -m tests.quickstart.measured_seeds FILE --seeds 30 --threads 1 2 --instructions avx512 avx2 default
    python -m tests.quickstart.measured_seeds table FILE...

FILE is JSON, written anew after each run: the machine, the versions and the runs. A run has its threads' processors for
itself, and as many go on beside each other as there are processors. The table is that of docs/quickstart.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.cases.quickstart import accuracies, quickstart
from rlcore.bench.measurement.system import new_record

Run = dict[str, Any]


def one(seed: int) -> Run:
    """Run it on the CPU with this process' threads and instructions."""
    started = time.monotonic()
    done = quickstart("cpu:0", seed)
    before, after = accuracies(done.steps)
    return {
        "seed": seed,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "instructions": os.environ["ATEN_CPU_CAPABILITY"],
        "accuracy_before": before,
        "accuracy": after,
        "seconds": round(time.monotonic() - started, 1),
    }


def all_of(given: argparse.Namespace, file: Path) -> list[Run]:
    record = msgspec.to_builtins(new_record(rlcore.get_device("cpu:0")))
    where = {name: record[name] for name in ("started_at", "rlcore", "commit", "system", "dependencies")}
    runs: list[Run] = []
    ends_at = time.monotonic() + given.seconds

    def in_a_process(instructions: str, threads: int, seed: int) -> Run | None:
        if time.monotonic() > ends_at:
            return None
        own = {"OMP_NUM_THREADS": str(threads), "ATEN_CPU_CAPABILITY": instructions}
        command = [sys.executable, "-m", "tests.quickstart.measured_seeds", "one", str(seed)]
        run: Run = json.loads(subprocess.run(command, env=os.environ | own, check=True, capture_output=True).stdout)
        return run

    file.parent.mkdir(parents=True, exist_ok=True)
    at_once = max(1, len(os.sched_getaffinity(0)) // max(given.threads))
    with ThreadPoolExecutor(at_once) as pool:
        wanted = itertools.product(given.instructions, given.threads, range(given.first, given.first + given.seeds))
        for future in as_completed([pool.submit(in_a_process, *each) for each in wanted]):
            if run := future.result():
                runs.append(run)
                runs.sort(key=lambda run: (run["instructions"], run["threads"], run["seed"]))
                write_file(file, json.dumps(where | {"runs": runs}, indent=1).encode())
    return runs


def table(runs: Sequence[Run]) -> list[str]:
    lines = ["| threads | instruction set | seeds | worst | mean |", "| --- | --- | --- | --- | --- |"]
    for threads, instructions in sorted({(run["threads"], run["instructions"]) for run in runs}):
        row = [run for run in runs if (run["threads"], run["instructions"]) == (threads, instructions)]
        ends = [run["accuracy"] for run in row]
        mean = sum(ends) / len(ends)
        lines.append(f"| {threads} | {instructions} | {len(row)} | {min(ends):.1%} | {mean:.2%} |")
    return lines


def main(words: Sequence[str]) -> None:
    if words[0] == "one":
        print(json.dumps(one(int(words[1]))))
        return
    if words[0] == "table":
        print("\n".join(table([run for file in words[1:] for run in json.loads(Path(file).read_bytes())["runs"]])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--instructions", nargs="+", default=["avx512"], help="of ATEN_CPU_CAPABILITY")
    parser.add_argument("--seconds", type=float, default=1e9, help="in which runs begin")
    given = parser.parse_args(words)
    print("\n".join(table(all_of(given, given.file))))


if __name__ == "__main__":
    main(sys.argv[1:])
