"""The cost and the gain of staleness, measured: ``examples/async_grpo.py`` for each seed and bound.

    python -m tests.rollout.measured_learning cpu FILE        a process for each run, with two cores of its own
    python -m tests.rollout.measured_learning shared FILE     all runs over one sampler (--executor, --sample-on)
    python -m tests.rollout.measured_learning imitate FOLDER  what "shared" begins with: a checkpoint for each seed
    python -m tests.rollout.measured_learning table FILE      the table of docs/rollout.md

FILE is JSON, written anew after each run: the machine, the versions and the runs. ``bench/results/rollout/`` has those
of docs/rollout.md. ``simulated_learning.py`` is the same question with a clock that is simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.measurement.system import new_record
from rlcore.examples import async_grpo
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.run import SMALL, sampler_dtype

BOUNDS, SEEDS = (0, 1, 2, 4, 8), (0, 1, 2, 3, 4)
EXAMPLE = Path(async_grpo.__file__)
Run = dict[str, Any]
_ON_PROCESSORS = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass
class Engines:
    """What runs where, over which all runs share one sampler."""

    train_on: str = "cpu:0"
    sample_on: str = "cpu:1"
    executor: str = "hf"


class Measured:
    """The runs of one machine, in a file."""

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._device = path, device
        self.runs: list[Run] = []
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, run: Run) -> None:
        with self._lock:
            self.runs.append(run)
            self.save({})
        print(_line(run), flush=True)

    def finish(self) -> None:
        """Say where it was. Not earlier: that takes memory of the device."""
        record = msgspec.to_builtins(new_record(rlcore.get_device(self._device)))
        names = "started_at", "rlcore", "commit", "system", "dependencies", "environment"
        self.save({name: record[name] for name in names})

    def save(self, where: dict[str, Any]) -> None:
        runs = sorted(self.runs, key=lambda run: (run["max_staleness"], run["seed"]))
        write_file(self._path, json.dumps(where | {"runs": runs}, indent=1).encode())


def measure_on_cores(measured: Measured, bounds: Sequence[int], seeds: Sequence[int], steps: int, until: float) -> None:
    """Run each pair in processes of its own on two cores that nobody else has; the longest runs first."""
    pairs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for pair in [(bound, seed) for bound in bounds for seed in seeds]:
        pairs.put(pair)
    cores = _cores()
    slots = [[*cores[first], *cores[first + 1]] for first in range(0, len(cores) - 1, 2)]
    print(f"{len(cores)} cores, so many runs at a time: {len(slots)}", flush=True)

    def work(slot: list[int]) -> None:
        while not pairs.empty() and time.monotonic() < until:
            try:
                bound, seed = pairs.get_nowait()
            except queue.Empty:
                return
            if (run := _run_alone(slot, bound, seed, steps)) is not None:
                measured.add(run | {"cores": len(slot)})

    threads = [threading.Thread(target=work, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _cores() -> list[list[int]]:
    """Return the processors of each physical core that this process may use."""
    found: dict[tuple[int, ...], list[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        text = path.read_text().strip() if path.exists() else str(processor)
        ends = [tuple(map(int, part.split("-"))) for part in text.split(",")]
        siblings = tuple(one for end in ends for one in range(end[0], end[-1] + 1))
        found.setdefault(siblings, []).append(processor)
    return list(found.values())


def _run_alone(processors: Sequence[int], bound: int, seed: int, steps: int) -> Run | None:
    with tempfile.TemporaryDirectory() as folder:
        record, timeline = Path(folder, "run.json"), Path(folder, "timeline.json")
        command = [sys.executable, "-c", _ON_PROCESSORS, json.dumps(processors), str(EXAMPLE)]
        command += [*map(str, (bound, steps, seed)), "--record", str(record), "--timeline", str(timeline)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RLCORE_DEVICE": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"FAILED bound {bound} seed {seed}: {done.stderr[-2000:]}", flush=True)
            return None
        run: Run = json.loads(record.read_text())
        return run | {"timeline": json.loads(timeline.read_text())}


def measure_shared(
    measured: Measured, bounds: Sequence[int], seeds: Sequence[int], steps: int, until: float, *, engines: Engines
) -> None:
    """Run each pair over one sampler, each seed from the same weights; bound by bound, as far as the time goes."""
    sampler = rlcore.InferenceEngine(quickstart_model(seed=seeds[0]), executor=engines.executor)
    with sampler as infer, tempfile.TemporaryDirectory() as folder:
        dtype = sampler_dtype(engines.executor, rlcore.get_device(engines.sample_on))
        infer.build(devices=engines.sample_on, launcher="process", dtype=dtype, **SMALL.get(engines.executor, {}))
        for seed in seeds:
            with async_grpo.trainer(seed) as train:
                train.build(devices=engines.train_on, launcher="process")
                async_grpo.imitate(train, seed)
                train.save(Path(folder, f"seed-{seed}"))
        with async_grpo.trainer(seeds[0]) as train:
            train.build(devices=engines.train_on, launcher="process")
            async_grpo.reinforce(train, infer, 0, num_steps=3, seed=seeds[0])  # kernels are compiled at their first use
            for bound, seed in [(bound, seed) for bound in bounds for seed in seeds]:
                if time.monotonic() > until:
                    break
                train.load(Path(folder, f"seed-{seed}"))
                timeline = Path(folder, "timeline.json")
                run = async_grpo.reinforce(train, infer, bound, num_steps=steps, seed=seed, timeline=timeline)
                measured.add(run | asdict(engines) | {"timeline": json.loads(timeline.read_text())})


def imitate(seed: int, train_on: str, folder: Path) -> None:
    with async_grpo.trainer(seed) as train:
        train.build(devices=train_on, launcher="process")
        async_grpo.imitate(train, seed)
        train.save(folder / f"seed-{seed}")


def table(runs: Iterable[Run]) -> list[str]:
    """Return the lines of a table in Markdown: a row for each bound."""
    runs = list(runs)
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        f"| `max_staleness` | held-out accuracy, seeds {seeds[0]} to {seeds[-1]} | mean | seconds | mean | "
        "trainer waits | generation hidden | mean staleness |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for bound in sorted({run["max_staleness"] for run in runs}):
        row = sorted((run for run in runs if run["max_staleness"] == bound), key=lambda run: run["seed"])
        accuracies, seconds = [run["accuracy"] for run in row], [run["seconds"] for run in row]
        lags = [sum(int(lag) * n for lag, n in run["stats"]["staleness"].items()) / _given(run) for run in row]
        cells = [
            str(bound),
            ", ".join(f"{one:.3f}" for one in accuracies),
            f"{_mean(accuracies):.3f}",
            ", ".join(f"{one:.1f}" for one in seconds),
            f"{_mean(seconds):.1f}",
            f"{_mean([run['stats']['trainer_idle'] for run in row]):.0%}",
            f"{_mean([run['stats']['hidden'] for run in row]):.0%}",
            f"{_mean(lags):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _given(run: Run) -> int:
    given: int = sum(run["stats"]["staleness"].values())
    return given


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _line(run: Run) -> str:
    stats = run["stats"]
    return (
        f"bound {run['max_staleness']} seed {run['seed']}: {run['accuracy_before']:.3f} -> {run['accuracy']:.3f} in "
        f"{run['seconds']:.1f} s; trainer waits {stats['trainer_idle']:.0%}, hidden {stats['hidden']:.0%}, staleness "
        f"{stats['staleness']}, discarded {stats['tokens_discarded']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cpu", "shared", "imitate", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--begin-within", type=float, default=1e9, help="seconds in which runs begin")
    for field in fields(Engines):
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default)
    given = parser.parse_args()
    if given.what == "table":
        print("\n".join(table(json.loads(given.file.read_text())["runs"])))
        return
    if given.what == "imitate":
        for seed in given.seeds:
            imitate(seed, given.train_on, given.file)
        return
    arguments = given.bounds, given.seeds, given.steps, time.monotonic() + given.begin_within
    if given.what == "cpu":
        measured = Measured(given.file, "cpu")
        measure_on_cores(measured, *arguments)
    else:
        measured = Measured(given.file, given.train_on)
        measure_shared(measured, *arguments, engines=Engines(given.train_on, given.sample_on, given.executor))
    measured.finish()
    print("\n".join(table(measured.runs)))


if __name__ == "__main__":
    main()
