"""Random faults for engines over two hosts of a Ray cluster: root runs it by hand, for as long as there is time.

    python -m tests.engines.launchers.ray_faults --seed 0 --faults 50 --record faults.jsonl
    python -m tests.engines.launchers.ray_faults --table faults.jsonl

The hosts are Linux namespaces (tests/hosts.py). The program on the first (ray_faults_program.py) trains over both and
syncs to a sampler. At a random moment of a step a process is killed or stopped, or the link is cut or slow. After each
fault this must hold: the step has ended with an error of rlcore, or well; of what has failed no process is left on any
host; the engines, restarted, have whole weights, the same in trainer and samplers. Where the head of the cluster ends,
by a fault or because Ray aborts it, Ray ends the program a minute later: nothing may be left then.

To import torch is most of what a fault would cost: the program and the workers are forks of processes that have
imported it (tests/warm.py). A fault that breaks a promise is written down, and new hosts are made for the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.conformance.tiny_model import write_tiny_model
from rlcore.process.guard import FAMILY
from tests.engines.launchers.ray_faults_program import ADDRESS, Folder
from tests.engines.launchers.warm_ray import pythons_of
from tests.hosts import Host, hosts

FAULTS = (
    *("kill worker", "stop worker", "kill agent", "stop agent", "kill raylet", "kill head", "kill store actor"),
    *("cut link", "slow link", "kill program", "interrupt program"),
)
STEPS = ("train", "sync", "generate", "restart")
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "1" * 64,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_prestart_worker_first_driver": "0",  # processes that nobody uses here
}
LONGEST_S = 250.0
"""The longest that a step may go on after its fault; it makes a few calls."""
START_S = 100.0
"""How long Ray's own start may take."""
GONE_S = 40.0
"""How long what has failed may take to end: an agent that is cut off notices it after 13 s, its watchdog after 15 s."""


class HeadEndedError(Exception):
    """The head of the cluster, Ray's gcs_server, has ended."""


class Cluster:
    """The Ray cluster of both hosts.

    Args:
        pythons: the interpreter of each host, where it is not this one.
    """

    def __init__(self, here: Host, there: Host, pythons: Mapping[str, str] | None = None) -> None:
        self.hosts = {here.name: here, there.name: there}
        self.pythons = pythons or {}
        self._here, self._there = here, there
        self._start(here, "--head", "--include-dashboard=false")
        self._of_there = self._start(there, f"--address={ADDRESS}")

    def _start(self, host: Host, *options: str) -> subprocess.Popen[str]:
        python = self.pythons.get(host.name, sys.executable)
        ray = [python, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=4"]
        named = [f"--node-name={host.name}", f"--node-ip-address={host.address}"]
        for _ in range(5):  # Ray gives its own start 30 s, which a busy machine may not keep
            program = host.start([*ray, *named, *options], environment=ENVIRONMENT)
            assert program.stdout is not None
            limit = threading.Timer(START_S, program.kill)
            limit.start()
            for line in program.stdout:
                if "Ray runtime started" in line:
                    limit.cancel()
                    return program
            self._end(host)
            if host is self._there:
                self.look_for_head()
        raise AssertionError(f"Ray does not start on {host.name}: {program.communicate()[1]}")

    def _end(self, host: Host) -> None:
        for process in processes(
            host, "raylet", "gcs_server", "ray::", "ray.scripts", "/ray/dashboard", "/ray/_private"
        ):
            process.send(signal.SIGKILL)

    def look_for_head(self) -> None:
        if not processes(self._here, "/gcs_server "):
            raise HeadEndedError

    def start_again(self) -> None:
        """Start Ray on the second host again, after all of it has ended."""
        self._end(self._there)
        self.look_for_head()
        self._of_there.kill()
        self._of_there = self._start(self._there, f"--address={ADDRESS}")


@dataclass(frozen=True)
class Process:
    """A process of a host.

    Attributes:
        pid: as this machine counts.
        own_pid: as its host counts.
    """

    pid: int
    own_pid: int
    command: str

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def family(self) -> str:
        """Return the process id, as its host counts, of the agent whose worker has started it, or is it; or ""."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(f"{FAMILY}=".encode()):
                    return entry.partition(b"=")[2].partition(b"-")[0].decode()
        return ""


def processes(host: Host, *words: str) -> list[Process]:
    """Return the processes of a host that have one of the words in their command, or all; no program is run there."""
    return [one for one in _processes(host) if not words or any(word in one.command for word in words)]


def _processes(host: Host) -> Iterator[Process]:
    namespace = os.readlink(f"/proc/{host.pid}/ns/pid")
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, StopIteration):  # it has just ended
            if folder.name.isdecimal() and os.readlink(folder / "ns/pid") == namespace:
                pids = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("NSpid"))
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield Process(int(folder.name), int(pids.split()[-1]), command)


class Stalls:
    """The longest time that this program was not run for, though it asked to be: what a busy machine does to all."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            asked = time.monotonic()
            time.sleep(0.1)
            self._longest_s = max(self._longest_s, time.monotonic() - asked - 0.1)

    def take(self) -> float:
        """Return the longest since the last time."""
        found, self._longest_s = self._longest_s, 0.0
        return found


class Round:
    """One program and its incidents, until a fault ends it."""

    def __init__(self, cluster: Cluster, folder: Folder, model: Path, seed: int, first: int) -> None:
        self.cluster, self.folder, self.draw = cluster, folder, random.Random(seed)
        arguments = [str(folder.path), str(model), str(seed), str(first)]
        program = ["-m", "tests.engines.launchers.ray_faults_program", *arguments]
        self.program = cluster.hosts["host-a"].start([cluster.pythons["host-a"], *program], environment=ENVIRONMENT)
        self.pid = self.wait(f"ready-{first}", 300)["pid"]

    def wait(self, name: str, longest_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + longest_s
        while not self.folder.has(name):
            if self.program.poll() is not None:
                self.cluster.look_for_head()
                raise AssertionError(f"the program has ended before {name}: {self.program.communicate()[1][-3000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"hang: {name} did not come within {longest_s:g} s: {self.stacks()}")
            time.sleep(0.05)
        return self.folder.wait(name)

    def incident(self, number: int, fault: str) -> dict[str, Any]:
        """Let a fault happen, and check what must hold; return what came of it."""
        step = self.draw.choice(STEPS)
        self.folder.say(f"incident-{number}", step=step)
        before = self.wait(f"begin-{number}", 100)
        watched = self.watched(before)
        time.sleep(self.draw.random() * 1.5)
        struck = self.strike(fault, before)
        self.folder.say(f"struck-{number}")
        began, after = time.monotonic(), dict[str, Any](agents=[])
        result = dict[str, Any](error="")
        if fault in ("kill program", "interrupt program"):
            self.wait_for_end()
        else:
            try:
                result["error"] = "the program was ended by Ray"
                result = self.wait(f"result-{number}", LONGEST_S)
                self.heal(fault)
                self.folder.say(f"healed-{number}")
                after = self.wait(f"end-{number}", 300)
            except HeadEndedError:
                self.wait_for_end()
                result["has_head_ended"] = True
        result = {"seconds": time.monotonic() - began, **result}
        kept = [tuple(one) for kind in after.values() for one in kind]
        gone_s = self.check_gone({key: one for key, one in watched.items() if key not in kept}, after["agents"])
        return {"step": step, "struck": struck, **result, "gone_s": gone_s}

    def watched(self, at: dict[str, list[list[Any]]]) -> dict[tuple[str, int], int]:
        """Return a descriptor of each worker and agent, by its host and process id there."""
        found = {}
        for name, one in self.named([one for kind in at.values() for one in kind]):
            with contextlib.suppress(ProcessLookupError):  # a restart has just ended it
                found[name, one.own_pid] = os.pidfd_open(one.pid)
        return found

    def wait_for_end(self) -> None:
        try:
            self.program.wait(100)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program has not ended: {self.stacks()}") from None

    def stacks(self) -> str:
        """End the program, which prints its threads' stacks; return what it has printed."""
        for _, process in self.named([["host-a", self.pid]]):
            process.send(signal.SIGABRT)
        return self.program.communicate()[1][-8000:]

    def strike(self, fault: str, at: dict[str, list[list[Any]]]) -> str:
        """Let the fault happen; return to whom."""
        how = signal.SIGSTOP if fault.startswith("stop") else signal.SIGKILL
        here, there = self.cluster.hosts.values()
        match fault.partition(" ")[2]:
            case "worker" | "agent" as kind:
                living = self.named(at[f"{kind}s"])  # a restart may have ended some
                name, process = self.draw.choice(living)
                process.send(how)
                return name
            case "raylet":
                processes(there, "/core/src/ray/raylet/raylet ")[0].send(how)
            case "head":
                processes(here, "/gcs_server ")[0].send(how)
                return here.name
            case "store actor":
                processes(here, "ray::StoreActor")[0].send(how)
                return here.name
            case "link" if fault == "cut link":
                there.cut()
            case "link":
                there.limit(2)
            case "program":
                ((_, process),) = self.named([[here.name, self.pid]])
                process.send(signal.SIGINT if fault.startswith("interrupt") else signal.SIGKILL)
                return here.name
        return there.name

    def named(self, wanted: list[list[Any]]) -> list[tuple[str, Process]]:
        """Return those of these processes, named by their host and process id there, that are there."""
        running = [(name, one) for name, host in self.cluster.hosts.items() for one in processes(host)]
        return [(name, one) for name, one in running if [name, one.own_pid] in wanted]

    def heal(self, fault: str) -> None:
        there = self.cluster.hosts["host-b"]
        if fault == "slow link":
            there.run("tc qdisc del dev eth0 root")
        if fault in ("cut link", "kill raylet"):
            there.mend()
            self.cluster.start_again()
        self.cluster.look_for_head()

    def check_gone(self, watched: dict[tuple[str, int], int], agents: list[list[Any]]) -> float:
        """Wait until these have ended, and all that any other agent's workers have started; return the seconds."""
        began = time.monotonic()
        while left := [key for key, one in watched.items() if not select.select([one], [], [], 0)[0]] or [
            (name, process)
            for name, host in self.cluster.hosts.items()
            for process in processes(host)
            if (agent := process.family()) and [name, int(agent)] not in agents
        ]:
            if time.monotonic() > began + GONE_S:
                raise AssertionError(f"orphans: {left}")
            time.sleep(0.5)
        for one in watched.values():
            os.close(one)
        return time.monotonic() - began


class Cards:
    """The faults: all kinds, in a new order each time."""

    def __init__(self, seed: int, only: str | None) -> None:
        self._draw, self._kinds, self._left = random.Random(seed), [only] if only else list(FAULTS), list[str]()

    def take(self) -> str:
        self._left = self._left or self._draw.sample(self._kinds, len(self._kinds))
        return self._left.pop()


def faults(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Let faults happen, on new hosts after each that broke a promise; give what came of each."""
    cards, stalls, number = Cards(options.seed, options.only), Stalls(), 0
    deadline = time.monotonic() + 60 * options.minutes
    while number < options.faults and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as scratch, hosts(2, Path(scratch)) as (here, there):
            model, messages = write_tiny_model(Path(scratch, "model")), Path(scratch, "messages")
            messages.mkdir()
            cluster = Cluster(here, there, pythons_of([here, there], Path(scratch), ENVIRONMENT))
            round_: Round | None = None
            found: dict[str, Any] = {"is_kept": True}
            has_head = True
            while number < options.faults and time.monotonic() < deadline and found["is_kept"] and has_head:
                fault, began = cards.take(), time.monotonic()
                found = {"seed": options.seed, "number": number, "fault": fault, "is_kept": True}
                stalls.take()
                try:
                    round_ = round_ or Round(cluster, Folder(str(messages)), model, options.seed + number, number)
                    found |= round_.incident(number, fault)
                except (AssertionError, OSError, subprocess.SubprocessError) as error:
                    found |= {"is_kept": False, "broken": f"{type(error).__name__}: {error}"}
                yield found | {"all_s": time.monotonic() - began, "longest_stall_s": stalls.take()}
                round_ = None if fault.endswith("program") else round_
                has_head = not found.get("has_head_ended")
                number += 1


def table(records: list[dict[str, Any]]) -> str:
    """Return what came of the faults of each kind, as a table of Markdown."""
    rows = [
        "| fault | number | promises kept | error of the step, or none | s until the step ended: median, longest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        of_kind = [one for one in records if one["fault"] == fault]
        kept = [one for one in of_kind if one["is_kept"]]
        if of_kind:
            errors = [one["error"].partition(":")[0] for one in kept]
            told = ", ".join(f"{name or 'none'} {errors.count(name)}" for name in sorted(set(errors)))
            seconds = [one["seconds"] for one in kept]
            times = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
            rows.append(f"| {fault} | {len(of_kind)} | {len(kept)} | {told} | {times} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--only", choices=FAULTS)
    parser.add_argument("--record", type=Path, help="append what came of each fault to this file, a line of JSON each")
    parser.add_argument("--table", type=Path, help="start nothing; print such a file as a table")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its programs
    found = []
    for one in faults(options):
        found.append(one)
        print(json.dumps(one), flush=True)
        if options.record:
            with options.record.open("a") as file:
                file.write(json.dumps(one) + "\n")
    print(table(found))
    if not all(one["is_kept"] for one in found):
        sys.exit("a promise was broken")


if __name__ == "__main__":
    main()
