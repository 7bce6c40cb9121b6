"""Makes the evidence that needs GPUs: every measurement of ``jobs.toml``, beside each other on one machine.

    python -m tests.evidence FOLDER                         all of it, on the GPUs that there are
    python -m tests.evidence FOLDER --minutes 5 race train  some of it
    python -m tests.evidence FOLDER --minutes 25 --python vllm=/vllm/bin/python --python sglang=/sglang/bin/python

A job begins as soon as GPUs and processors for it are free, in the order of the file, and is ended after its seconds.
One that would not fit into the minutes is not begun. FOLDER gets a folder for each job, with ``log`` and what it wrote,
and ``outcomes.json``. Jobs beside each other share the host: records say so by their mark "shared". A job that has to
be alone begins when all before it have ended, and holds back those after it.
Ctrl-C and SIGTERM end the jobs, too. SIGKILL does not: each job has a session of its own, and goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

JOBS = Path(__file__).with_name("jobs.toml")
TO_END_S = 10.0
"""What a job gets between SIGTERM, after which the bench keeps what it has, and SIGKILL."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One command, and what it needs."""

    name: str
    command: str
    """Shell words; ``{python}`` is the interpreter of the job's environment, ``{out}`` the job's folder."""
    seconds: int
    """After which it is ended."""
    gpus: int = 1
    cores: int = 10
    memory_gb: int = 0
    """The memory in GB that it takes of each of its GPUs, where that is more than 80."""
    alone: bool = False
    """Nothing runs beside it: it measures the host."""
    environment: str = ""
    """The name of the one of ``--python`` that it needs; that of this program unless given."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    name: str
    outcome: str
    seconds: float = 0.0


@dataclass
class Free:
    """What jobs may take: the GPUs and processors that none has, and the interpreter of each environment."""

    gpus: list[str]
    cores: list[int]
    pythons: dict[str, str] = field(default_factory=dict)
    memory_gb: float = math.inf
    """The least memory of any GPU, in GB."""

    def suffices(self, job: Job) -> bool:
        return len(self.gpus) >= job.gpus and len(self.cores) >= job.cores


class Running:
    """A job under way, with what it took."""

    def __init__(self, job: Job, free: Free, folder: Path) -> None:
        self.job, self._free, self._began = job, free, time.monotonic()
        self._gpus, self._cores = free.gpus[: job.gpus], free.cores[: job.cores]
        del free.gpus[: job.gpus], free.cores[: job.cores]
        out = folder / job.name
        out.mkdir(parents=True)
        command = job.command.format(python=shlex.quote(free.pythons[job.environment]), out=shlex.quote(str(out)))
        cores = ",".join(map(str, self._cores))
        with (out / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["taskset", "-c", cores, "bash", "-euo", "pipefail", "-c", command],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def outcome(self) -> Outcome | None:
        """Return what became of it; None while it runs and may."""
        code = self._process.poll()
        if code is None and self.seconds < self.job.seconds:
            return None
        said = f"ended after {self.job.seconds} s" if code is None else "done" if code == 0 else f"failed ({code})"
        self.end()
        return Outcome(self.job.name, said, round(self.seconds, 1))

    def end(self) -> None:
        """End all processes of its group; what it took is free again. Workers' guards end what has another session."""
        latest = time.monotonic() + TO_END_S
        is_left = self.tell(signal.SIGTERM)
        while is_left and time.monotonic() < latest:
            time.sleep(0.05)
            self._process.poll()  # else the shell stays in the group when it has ended
            is_left = self.tell(0)
        self.tell(signal.SIGKILL)
        self._process.wait()
        self._free.gpus += self._gpus
        self._free.cores += self._cores

    def tell(self, number: int) -> bool:
        """Send a signal to its group; return whether there is one."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def run(jobs: Sequence[Job], free: Free, folder: Path, minutes: float) -> list[Outcome]:
    """Run the jobs; return what became of each, in the order in which they ended."""
    ends_at = time.monotonic() + 60 * minutes
    waiting: list[Job] = []
    running: list[Running] = []
    outcomes: list[Outcome] = []

    def say(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"{outcome.name:24} {outcome.seconds:7.1f} s  {outcome.outcome}", flush=True)

    for one in jobs:
        if reason := why_never(one, free):
            say(Outcome(one.name, f"not begun: {reason}"))
        else:
            waiting.append(one)
    try:
        while waiting or running:
            for job in list(waiting):
                if time.monotonic() + job.seconds > ends_at:
                    waiting.remove(job)
                    say(Outcome(job.name, f"not begun: {job.seconds} s do not fit into what is left"))
            while job := next_to_begin(waiting, running, free):
                waiting.remove(job)
                running.append(Running(job, free, folder))
            for one in list(running):
                if outcome := one.outcome():
                    running.remove(one)
                    say(outcome)
            time.sleep(0.1)
    finally:
        for one in running:  # after Ctrl-C
            one.tell(signal.SIGTERM)
        for one in running:
            one.end()
    return outcomes


def next_to_begin(waiting: Sequence[Job], running: Sequence[Running], free: Free) -> Job | None:
    for job in waiting:
        if running and (job.alone or running[-1].job.alone):
            return None
        if free.suffices(job):
            return job
    return None


def why_never(job: Job, free: Free) -> str:
    """Return what this machine lacks for the job while no other runs; nothing if it can run."""
    if job.environment not in free.pythons:
        return f"it needs --python {job.environment}=INTERPRETER"
    if job.gpus and job.memory_gb > free.memory_gb:
        return f"it takes {job.memory_gb} GB of a GPU; there are {free.memory_gb:.0f}"
    if not free.suffices(job):
        return f"it needs {job.gpus} GPUs and {job.cores} processors; there are {len(free.gpus)} and {len(free.cores)}"
    return ""


def read_jobs(path: Path, names: Sequence[str]) -> list[Job]:
    """Return the jobs of a file that have these names, all without any."""
    jobs = msgspec.convert(tomllib.loads(path.read_text())["job"], list[Job])
    known = [job.name for job in jobs]
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no job {name!r}; these are: {', '.join(known)}")
    return [job for job in jobs if not names or job.name in names]


def visible_gpus() -> tuple[list[str], float]:
    """Return what ``CUDA_VISIBLE_DEVICES`` names, all GPUs unless it is set, and the least memory of any GPU in GB,
    infinite where it is not told.

    CUDA is not loaded here.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(len(listed))] if named is None else [one for one in named.split(",") if one]
    mebibytes = [int(one) for one in listed if one.strip().isdecimal()]
    return gpus, min(mebibytes, default=math.inf) * 2**20 / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--python", action="append", default=[], metavar="ENVIRONMENT=INTERPRETER")
    parser.add_argument("--file", type=Path, default=JOBS, help="other jobs")
    options = parser.parse_intermixed_args(argv)  # else options after FOLDER leave no job for it
    pythons = {"": sys.executable} | dict(one.split("=", 1) for one in options.python)
    gpus, memory_gb = visible_gpus()
    free = Free(gpus, sorted(os.sched_getaffinity(0)), pythons, memory_gb)
    jobs = read_jobs(options.file, options.jobs)
    try:
        options.folder.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{options.folder} is there; give a new folder")
    outcomes = run(jobs, free, options.folder.resolve(), options.minutes)
    (options.folder / "outcomes.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    return sum(one.outcome != "done" for one in outcomes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the jobs, as Ctrl-C does
    sys.exit(main())
