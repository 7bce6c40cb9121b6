"""Random faults for engines over two hosts of a Ray cluster: root runs it by hand, for as long as there is time.

    python -m tests.engines.launchers.ray_faults --seed 0 --faults 50

The hosts are Linux namespaces (tests/hosts.py). The program on the first (ray_faults_program.py) trains over both and
syncs to a sampler. At a random moment of a step a process is killed or stopped, or the link is cut or slow. After each
fault this must hold: the step has ended with an error of rlcore, or well; of what has failed no process is left on any
host; the engines, restarted, have whole weights, the same in trainer and samplers.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rlcore.conformance.tiny_model import write_tiny_model
from tests.engines.launchers.ray_faults_program import ADDRESS, Folder
from tests.hosts import Host, hosts

FAULTS = (
    *("kill worker", "stop worker", "kill agent", "stop agent", "kill raylet", "kill store actor"),
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
}
LONGEST_S = 250.0
"""The longest that a step may go on after its fault; calls have 100 s."""
GONE_S = 40.0
"""How long what has failed may take to end: an agent that is cut off notices it after 10 s, its watchdog after 12 s."""


class Cluster:
    """The Ray cluster of both hosts."""

    def __init__(self, here: Host, there: Host) -> None:
        self.hosts = {here.name: here, there.name: there}
        self._there = there
        self._start(here, "--head", "--include-dashboard=false")
        self._of_there = self._start(there, f"--address={ADDRESS}")

    def _start(self, host: Host, *options: str) -> subprocess.Popen[str]:
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=4"]
        named = [f"--node-name={host.name}", f"--node-ip-address={host.address}"]
        for _ in range(5):  # Ray gives its own start 30 s, which a busy machine may not keep
            program = host.start([*ray, *named, *options], environment=ENVIRONMENT)
            assert program.stdout is not None
            for line in program.stdout:
                if "Ray runtime started" in line:
                    return program
            self._end(host)
        raise AssertionError(program.communicate()[1])

    def _end(self, host: Host) -> None:
        for pid in processes(host, "raylet", "gcs_server", "ray::", "ray start", "dashboard", "runtime_env/agent"):
            send(host, pid, signal.SIGKILL)

    def start_again(self) -> None:
        """Start Ray on the second host again, after all of it has ended."""
        self._end(self._there)
        self._of_there.kill()
        self._of_there = self._start(self._there, f"--address={ADDRESS}")


def processes(host: Host, *words: str) -> list[int]:
    """Return the processes of a host that have one of the words in their command."""
    listed = host.run("for d in /proc/[0-9]*; do echo \"${d#/proc/} $(tr '\\0' ' ' < $d/cmdline 2>/dev/null)\"; done")
    rows = [line.partition(" ") for line in listed.splitlines()]
    return [
        int(pid) for pid, _, command in rows if "for d in" not in command and any(word in command for word in words)
    ]


def send(host: Host, pid: int, number: signal.Signals) -> None:
    host.run(f"kill -{number.value} {pid} 2>/dev/null || true")


def is_there(host: Host, pid: int) -> bool:
    return (
        host.run(f"test -d /proc/{pid} && ! grep -q '^State:.Z' /proc/{pid}/status && echo yes || echo no") == "yes\n"
    )


class Round:
    """One program and its incidents, until a fault ends it."""

    def __init__(self, cluster: Cluster, folder: Folder, model: Path, seed: int, first: int) -> None:
        self.cluster, self.folder, self.draw = cluster, folder, random.Random(seed)
        arguments = [str(folder.path), str(model), str(seed), str(first)]
        program = ["-X", "faulthandler", str(Path(__file__).with_name("ray_faults_program.py"))]
        self.program = cluster.hosts["host-a"].python(*program, *arguments, environment=ENVIRONMENT)
        self.pid = self.wait(f"ready-{first}", 300)["pid"]

    def wait(self, name: str, longest_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + longest_s
        while not self.folder.has(name):
            if self.program.poll() is not None:
                raise AssertionError(f"the program has ended before {name}: {self.program.communicate()[1][-3000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"hang: {name} did not come within {longest_s:g} s")
            time.sleep(0.05)
        return self.folder.wait(name)

    def incident(self, number: int, fault: str) -> str:
        """Let a fault happen, and check what must hold; return what came of it."""
        step = self.draw.choice(STEPS)
        self.folder.say(f"incident-{number}", step=step)
        before = self.wait(f"begin-{number}", 100)
        time.sleep(self.draw.random() * 1.5)
        self.strike(fault, before)
        self.folder.say(f"struck-{number}")
        if fault in ("kill program", "interrupt program"):
            self.wait_for_end()
            self.check_gone(before["workers"] + before["agents"])
            return f"{step}: the program has ended, and all of its processes"
        result = self.wait(f"result-{number}", LONGEST_S)
        self.heal(fault)
        self.folder.say(f"healed-{number}")
        after = self.wait(f"end-{number}", 300)
        kept = [one for kind in after.values() for one in kind]
        self.check_gone([one for kind in before.values() for one in kind if one not in kept])
        return f"{step}: {result['error'][:110] or 'no error'} ({result['seconds']:.1f} s)"

    def wait_for_end(self) -> None:
        try:
            self.program.wait(100)
        except subprocess.TimeoutExpired:
            send(self.cluster.hosts["host-a"], self.pid, signal.SIGABRT)  # it prints its threads' stacks
            raise AssertionError(f"the program has not ended: {self.program.communicate()[1][-8000:]}") from None

    def strike(self, fault: str, at: dict[str, list[list[Any]]]) -> None:
        there = self.cluster.hosts["host-b"]
        how = signal.SIGSTOP if fault.startswith("stop") else signal.SIGKILL
        match fault.partition(" ")[2]:
            case "worker" | "agent" as kind:
                host, pid = self.draw.choice(at[f"{kind}s"])
                send(self.cluster.hosts[host], pid, how)
            case "raylet":
                send(there, processes(there, "raylet/raylet")[0], how)
            case "store actor":
                here = self.cluster.hosts["host-a"]
                send(here, processes(here, "ray::StoreActor")[0], how)
            case "link" if fault == "cut link":
                there.cut()
            case "link":
                there.limit(2)
            case "program":
                number = signal.SIGINT if fault.startswith("interrupt") else signal.SIGKILL
                send(self.cluster.hosts["host-a"], self.pid, number)

    def heal(self, fault: str) -> None:
        there = self.cluster.hosts["host-b"]
        if fault == "slow link":
            there.run("tc qdisc del dev eth0 root")
        if fault in ("cut link", "kill raylet"):
            there.mend()
            self.cluster.start_again()

    def check_gone(self, processes_of_before: list[list[Any]]) -> None:
        deadline = time.monotonic() + GONE_S
        while left := [one for one in processes_of_before if is_there(self.cluster.hosts[one[0]], one[1])]:
            if time.monotonic() > deadline:
                raise AssertionError(f"orphans: {left}")
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--only", choices=FAULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its programs
    draw, deadline = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    met: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch, hosts(2, Path(scratch)) as (here, there):
        model = write_tiny_model(Path(scratch, "model"))
        cluster, messages = Cluster(here, there), Path(scratch, "messages")
        messages.mkdir()
        round_: Round | None = None
        cards: list[str] = []
        for number in range(options.faults):
            if time.monotonic() > deadline:
                break
            if not cards:
                cards = [options.only] if options.only else draw.sample(FAULTS, len(FAULTS))
            fault, began = cards.pop(), time.monotonic()
            with contextlib.suppress(StopIteration):
                round_ = round_ or Round(cluster, Folder(str(messages)), model, options.seed + number, number)
                told = round_.incident(number, fault)
            if fault.endswith("program"):
                round_ = None
            met[fault] += 1
            print(f"{number} {fault}: {told} [{time.monotonic() - began:.0f} s]", flush=True)
    print(f"{met.total()} faults, every promise kept: {dict(met)}")


if __name__ == "__main__":
    main()
