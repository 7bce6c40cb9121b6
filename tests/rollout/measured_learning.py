"""The cost and the gain of staleness, measured: ``examples/async_grpo.py`` for each seed and bound.

    python -m tests.rollout.measured_learning cpu FILE        each seed with two cores of its own
    python -m tests.rollout.measured_learning shared FILE     all runs over one sampler (--executor, --sample-on)
    python -m tests.rollout.measured_learning imitate FOLDER  what "shared" begins with: a checkpoint for each seed
    python -m tests.rollout.measured_learning table FILE...   the tables of docs/rollout.md

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
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import stdev
from typing import Any

import msgspec

import rlcore
from rlcore.atomic import write_file
from rlcore.bench.measurement.system import new_record
from rlcore.examples import async_grpo
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.run import SMALL, sampler_dtype

BOUNDS, SEEDS = (0, 1, 2, 4, 8), (0, 1, 2, 3, 4)
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
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.save({})
        print(_line(run), flush=True)

    def finish(self) -> None:
        """Say where it was. Not earlier: that takes memory of the device."""
        record = msgspec.to_builtins(new_record(rlcore.get_device(self._device)))
        names = "started_at", "rlcore", "commit", "system", "dependencies", "environment"
        self.save({name: record[name] for name in names})

    def save(self, where: dict[str, Any]) -> None:
        runs = sorted(self.runs, key=lambda run: (run["max_staleness"], run["seed"], run["steps"]))
        write_file(self._path, json.dumps(where | {"runs": runs}, indent=1).encode())


def measure_on_cores(given: argparse.Namespace) -> list[Run]:
    """Run each seed in processes of its own on two cores that nobody else has."""
    cores, command = _cores(), [sys.executable, "-c", _ON_PROCESSORS]
    slots: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for first in range(0, len(cores) - 1, 2):
        slots.put([*cores[first], *cores[first + 1]])
    print(f"{len(cores)} cores, so many seeds at a time: {slots.qsize()}", flush=True)
    shared = ["-m", "tests.rollout.measured_learning", "shared"]
    options = [*_words("--bounds", given.bounds), *_words("--steps", [given.steps])]
    options += _words("--begin-within", [given.begin_within]) + _words("--stop-at", [given.stop_at])
    options += [f"--as-long-as={given.as_long_as}"] if given.as_long_as else []

    def run(seed: int) -> list[Run]:
        slot = slots.get()
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "runs.json")
                words = [*command, json.dumps(slot), *shared, str(file), *_words("--seeds", [seed]), *options]
                subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1", "RLCORE_DEVICE": "cpu"}, check=True)
                runs: list[Run] = json.loads(file.read_bytes())["runs"]
        finally:
            slots.put(slot)
        return [one | {"cores": len(slot)} for one in runs]

    with ThreadPoolExecutor(len(given.seeds)) as pool:
        return [one for runs in pool.map(run, given.seeds) for one in runs]


def _words(name: str, values: Iterable[object]) -> list[str]:
    return [name, *map(str, values)]


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


def measure_shared(measured: Measured, given: argparse.Namespace, engines: Engines) -> None:
    """Run each pair over one sampler, each seed from the same weights; seed by seed, as far as the time goes."""
    began = time.monotonic()
    sampler = rlcore.InferenceEngine(quickstart_model(seed=given.seeds[0]), executor=engines.executor)
    with sampler as infer, tempfile.TemporaryDirectory() as folder, async_grpo.trainer(given.seeds[0]) as train:
        command = [sys.executable, "-m", "tests.rollout.measured_learning", "imitate", folder]
        command += ["--train-on", engines.train_on, "--seeds"]
        imitations = [subprocess.Popen([*command, str(seed)]) for seed in given.seeds]
        dtype = sampler_dtype(engines.executor, rlcore.get_device(engines.sample_on))
        infer.build(devices=engines.sample_on, launcher="process", dtype=dtype, **SMALL.get(engines.executor, {}))
        print(f"{time.monotonic() - began:.0f} s: the sampler is built", flush=True)
        train.build(devices=engines.train_on, launcher="process")
        print(f"{time.monotonic() - began:.0f} s: the trainer is built", flush=True)
        if any(process.wait() for process in imitations):
            raise RuntimeError("an imitation has failed")
        print(f"{time.monotonic() - began:.0f} s: all have imitated", flush=True)
        train.load(Path(folder, f"seed-{given.seeds[0]}"))
        async_grpo.reinforce(train, infer, 0, num_steps=3, seed=given.seeds[0])  # kernels are compiled at first use
        for bound, seed, limits in _planned(given):
            if time.monotonic() - began > given.begin_within:
                break
            train.load(Path(folder, f"seed-{seed}"))
            timeline = Path(folder, "timeline.json")
            run = async_grpo.reinforce(train, infer, bound, seed=seed, timeline=timeline, **limits)
            measured.add(run | asdict(engines) | {"timeline": json.loads(timeline.read_text())})


def _planned(given: argparse.Namespace) -> list[tuple[int, int, dict[str, Any]]]:
    """Return bound, seed and limits of each run: the same steps; and a bound of 1 for the synchronous runs' seconds."""
    limits = {"num_steps": given.steps, "stop_at": given.stop_at}
    equal_steps = [(bound, seed, limits) for seed in given.seeds for bound in given.bounds]
    synchronous = json.loads(given.as_long_as.read_bytes())["runs"] if given.as_long_as else []
    return equal_steps + [
        (1, run["seed"], {"num_steps": 10**6, "seconds": run["seconds"]})
        for run in synchronous
        if run["max_staleness"] == 0 and run["seed"] in given.seeds
    ]


def imitate(seed: int, train_on: str, folder: Path) -> None:
    with async_grpo.trainer(seed) as train:
        train.build(devices=train_on, launcher="process")
        async_grpo.imitate(train, seed)
        train.save(folder / f"seed-{seed}")


def table(runs: Sequence[Run], steps: int) -> list[str]:
    """Return the lines of a table in Markdown: a row for each bound, and one for runs of other lengths."""
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        f"| `max_staleness` | held-out accuracy, seeds {seeds[0]} to {seeds[-1]} | mean | seconds | mean | "
        "trainer waits | generation hidden | mean staleness |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for bound, is_other in sorted({(run["max_staleness"], run["steps"] != steps) for run in runs}):
        own = [run for run in runs if (run["max_staleness"], run["steps"] != steps) == (bound, is_other)]
        row = sorted(own, key=lambda run: run["seed"])
        most = max(run["steps"] for run in row)
        accuracies, seconds = [run["accuracy"] for run in row], [run["seconds"] for run in row]
        lags = [sum(int(lag) * n for lag, n in run["stats"]["staleness"].items()) / _given(run) for run in row]
        cells = [
            f"{bound}, up to {most} steps" if is_other else str(bound),
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


def paired(runs: Sequence[Run], steps: int) -> list[str]:
    """Return the lines of a table of what each bound differs from bound 0; none without two seeds that have both."""
    found = {(run["max_staleness"], run["seed"]): run for run in runs if run["steps"] == steps}
    lines = []
    for bound in sorted({bound for bound, _ in found} - {0}):
        seeds = [seed for other, seed in sorted(found) if other == bound and (0, seed) in found]
        if len(seeds) < 2:
            continue
        pairs = [(found[0, seed], found[bound, seed]) for seed in seeds]
        differences = [one["accuracy"] - synchronous["accuracy"] for synchronous, one in pairs]
        faster = [synchronous["seconds"] / one["seconds"] for synchronous, one in pairs]
        cells = [
            str(bound),
            ", ".join(f"{one:+.3f}" for one in differences),
            f"{_mean(differences):+.3f}",
            f"{stdev(differences) / len(differences) ** 0.5:.3f}",
            ", ".join(f"{one:.2f}" for one in faster),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    head = "| `max_staleness` | accuracy less that of bound 0 | mean | standard error | times as fast as bound 0 |"
    return [head, "| --- | --- | --- | --- | --- |", *lines] if lines else []


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
    parser.add_argument("more", type=Path, nargs="*", help="of a table")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--as-long-as", type=Path, help="a FILE with synchronous runs: as many seconds, too")
    parser.add_argument("--begin-within", type=float, default=1e9, help="seconds in which runs begin")
    parser.add_argument("--stop-at", type=float, default=1.0, help="share of rejected groups at which a run ends")
    for field in fields(Engines):
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default)
    given = parser.parse_args()
    if given.what == "table":
        runs = [run for file in (given.file, *given.more) for run in json.loads(file.read_bytes())["runs"]]
        print("\n".join([*table(runs, given.steps), "", *paired(runs, given.steps)]))
        return
    if given.what == "imitate":
        for seed in given.seeds:
            imitate(seed, given.train_on, given.file)
        return
    measured = Measured(given.file, given.train_on)
    if given.what == "cpu":
        measured.runs = measure_on_cores(given)
    else:
        measure_shared(measured, given, Engines(given.train_on, given.sample_on, given.executor))
    measured.finish()
    print("\n".join(table(measured.runs, given.steps)))


if __name__ == "__main__":
    main()
