"""Programs that measure launcher="ray"; they are run by hand, and docs/clusters.md has their numbers.

    python -m tests.engines.launchers.ray_costs hosts RECORD.json    # root: `rlcore bench run workers` on two hosts
    python -m tests.engines.launchers.ray_costs hosts-table RECORD.json
    python -m tests.engines.launchers.ray_costs scale 2 8            # the program's time for calls of 8 to 512 workers
    python -m tests.engines.launchers.ray_costs scale-table FILE...  # the tables again, of what such runs have printed
    python -m tests.engines.launchers.ray_costs sync vllm            # syncs on one device, by "process" and by "ray"

"hosts" makes the two of namespaces (tests/hosts.py), with a Ray cluster over both; the bench runs on the first, with
what follows the record's name, such as `workers --within 4 --continue`. In "scale" agents, here 2 and then 8, and Ray
are real, and the workers are stand-ins in them that answer at once: what is measured is the program that calls them;
its last table is what follows for more hosts, on paper. "sync" has a trainer of Qwen2.5-1.5B's shapes (small ones where
the device is a host) and a sampler of the executor that is named.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import rlcore
from rlcore.bench.cases.models import QWEN_1_5B
from rlcore.bench.cases.peers.vllm_pair import EnginePair
from rlcore.bench.record import Record, read
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.ray import cluster
from rlcore.engines.launchers.ray.agent import Agent
from rlcore.engines.launchers.ray.cluster import connect
from rlcore.engines.launchers.ray.wire import Opened, Opening, Posted, Said
from rlcore.registry import get_device
from tests.engines.launchers.ray_faults import ENVIRONMENT, Cluster
from tests.engines.launchers.ray_faults_program import ADDRESS
from tests.hosts import hosts

WORKERS = (8, 64, 512)
CALLS = {"without arguments": 10, "a batch of 256 KiB for each worker": 2, "one batch of 256 KiB for all": 0}
"""The calls that are measured, and how many of each a step on paper has."""
DEVICES_OF_A_HOST = 8
BATCH_BYTES = 256 << 10
STARTED_AT_ONCE = 8
"""Agents that this one machine starts at a time; each imports torch, and has two minutes for it."""
MEASURED = {
    "a call and its answer, ms": ("call", 1000),
    "256 MiB as an argument, s": ("send", 1),
    "256 MiB as an answer, s": ("receive", 1),
    "start of four workers, its agent running, s": ("start_4", 1),
}
_IDLE_S = 20.0


class StandIn:
    """In the place of a worker's process."""

    is_stopped = False

    def kill(self, because: str) -> None:
        pass


class AgentOfStandIns(Agent):
    """An agent whose workers are no processes, and answer each call with 7."""

    def _open(self, opening: Opening) -> Opened:
        number = len(self._processes)
        self._processes[number] = StandIn()  # type: ignore[assignment]
        return Opened(process=number, worker=0, pid=os.getpid(), name=f"stand-in {number}", local_name="cpu:0")

    def _take(self, posted: Posted, buffers: list[Any]) -> None:
        if posted.kind in ("start", "call", "close"):
            answer = b"\x07" if posted.kind == "call" else b"\xc0"  # 7 and None in msgpack
            self._said.put((Said("result", posted.process, posted.call, answer), []))


class Worker:
    """The class of the stand-ins."""

    def take(self, *batch: Any) -> int:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Cost(NamedTuple):
    """Seconds of the program, for a call of all workers."""

    agents: int
    workers: int
    call: str
    processor: float
    passed: float


def over_two_hosts(record: Path, asked: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch, hosts(2, Path(scratch), also=[record.parent]) as (here, there):
        Cluster(here, there)
        bench = ["-m", "rlcore", "bench", "run", *(asked or ["workers"]), "-o", str(record)]
        program = here.python(*bench, environment=ENVIRONMENT | {"RAY_ADDRESS": ADDRESS})
        printed = "".join(program.communicate())
        sys.exit(printed if program.returncode else None)


def hosts_table(record: Record) -> str:
    """Return the medians of what a record of "hosts" has, and the fastest in brackets."""
    rows = ["| | process | ray, own host | ray, other host |", "| --- " * 4 + "|"]
    for label, (name, scale) in MEASURED.items():
        found = [samples_of(record, f"workers/{place}{name}") for place in ("", "ray_", "ray_other_host_")]
        cells = [f"{statistics.median(one) * scale:.2g} ({min(one) * scale:.2g})" if one else "" for one in found]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(rows)


def samples_of(record: Record, case: str) -> list[float]:
    """Return the seconds of a case; none where it did not pass."""
    return [sample for one in record.passed() if one.name == case for sample in one.samples("time")]


def scale(numbers_of_agents: list[int]) -> None:
    measured = []
    for number in numbers_of_agents:
        measured.append(found_by("agents", str(number)))
        print(json.dumps(measured[-1]), flush=True)
    print_scale(measured)


def print_scale(measured: list[dict[str, Any]]) -> None:
    costs = [Cost(*one) for found in measured for one in found["costs"]]
    idle = [(Cost(*found["costs"][0]).agents, found["idle"]) for found in measured]
    print(measured_table(costs))
    print("\n".join(f"each of {number} agents, no call: {share * 1000:.2f} ms a second" for number, share in idle))
    print(paper_table(costs, statistics.median(share for _, share in idle)))


def found_by(*arguments: str) -> Any:
    """Return what this program, called with the arguments, has printed: a program has one cluster."""
    command = [sys.executable, "-m", "tests.engines.launchers.ray_costs", *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])


def measured_table(costs: list[Cost]) -> str:
    rows = [f"| processor time of the program, ms | {' | '.join(f'{one} workers' for one in WORKERS)} |"]
    rows.append("| --- " * (1 + len(WORKERS)) + "|")
    for agents in dict.fromkeys(one.agents for one in costs):
        for call in CALLS:
            found = {one.workers: one.processor for one in costs if (one.agents, one.call) == (agents, call)}
            cells = [f"{found[one] * 1000:.0f}" if one in found else "" for one in WORKERS]
            rows.append(f"| {agents} agents: {call} | {' | '.join(cells)} |")
    return "\n".join(rows)


def paper_table(costs: list[Cost], beat_s: float) -> str:
    """Return a table of a step over many hosts; each host costs the same, and each worker."""
    rows = ["| hosts | workers | messages to agents | bytes of batches | processor time | heartbeats |"]
    rows.append("| --- " * 6 + "|")
    seconds = {call: each_costs([one for one in costs if one.call == call]) for call in CALLS}
    for call, (of_host, of_worker) in seconds.items():
        print(f"{call}: {of_host * 1000:.2f} ms for each host, {of_worker * 1000:.3f} for each worker")
    for hosts_ in WORKERS:
        workers = hosts_ * DEVICES_OF_A_HOST
        spent = sum(CALLS[call] * (hosts_ * one[0] + workers * one[1]) for call, one in seconds.items())
        sent = CALLS["a batch of 256 KiB for each worker"] * workers * BATCH_BYTES / 2**20
        cells = [hosts_, workers, hosts_ * sum(CALLS.values()), f"{sent:.0f} MiB", f"{spent:.1f} s"]
        rows.append(f"| {' | '.join(map(str, cells))} | {hosts_ * beat_s:.3f} of a core |")
    return "\n".join(rows)


def each_costs(costs: list[Cost]) -> tuple[float, float]:
    """Return the seconds of each host and of each worker that fit the measured ones best, in their ratios."""
    both = np.array([[one.agents, one.workers] for one in costs]) / np.array([[one.processor] for one in costs])
    of_host, of_worker = np.linalg.lstsq(both, np.ones(len(costs)))[0]
    return max(0.0, float(of_host)), max(0.0, float(of_worker))


def agents(number: int) -> None:
    """Measure with so many agents, and print what was found."""
    names = [f"host-{index}" for index in range(number)]
    cluster_of(names)
    without = idle_share()
    for first in range(0, number, STARTED_AT_ONCE):
        connect().links(names[first : first + STARTED_AT_ONCE])
    found: dict[str, Any] = {"idle": (idle_share() - without) / number, "costs": []}
    for workers in WORKERS:
        if workers >= number:
            found["costs"] += of_calls(names, workers // number)
    print(json.dumps(found), flush=True)
    os._exit(0)


def idle_share() -> float:
    """Return the processor's seconds of this program in a second, while it does nothing."""
    began = time.process_time()
    time.sleep(_IDLE_S)
    return (time.process_time() - began) / _IDLE_S


def cluster_of(names: list[str]) -> None:
    """Start a cluster in which this host has all of these names."""
    real = cluster.hosts_of

    def many(nodes: Any) -> Any:
        ((host, node),) = real(nodes)
        return [(type(host)(name=name, address=host.address, counts={"cpu": 512}, labels={}), node) for name in names]

    cluster.Agent, cluster.hosts_of = AgentOfStandIns, many  # type: ignore[misc]
    rlcore.init(launcher="ray")
    connect()


def of_calls(names: list[str], on_each: int) -> list[Cost]:
    """Measure calls of so many workers on each host."""
    devices = [f"{name}/cpu:{index}" for name in names for index in range(on_each)]
    group = start_workers(Worker, "the measurement", devices, launcher="ray", timeout_s=600)
    batch = [torch.zeros(BATCH_BYTES // 4 // 4) for _ in range(4)]
    arguments = {
        "without arguments": [() for _ in devices],
        "a batch of 256 KiB for each worker": [tuple(tensor.clone() for tensor in batch) for _ in devices],
        "one batch of 256 KiB for all": [tuple(batch) for _ in devices],
    }
    found = []
    for call, of_workers in arguments.items():
        processor, passed = seconds_of(lambda of=of_workers: group.call("take", [(one, {}) for one in of]))  # type: ignore[misc]
        found.append(Cost(len(names), len(devices), call, processor, passed))
    group.stop()
    return found


def seconds_of(call: Callable[[], Any], number: int = 10) -> tuple[float, float]:
    """Return the processor's seconds of one call, and the median of those that pass."""
    assert set(call()) == {7}
    passed, processor = [], time.process_time()
    for _ in range(number):
        began = time.perf_counter()
        call()
        passed.append(time.perf_counter() - began)
    return (time.process_time() - processor) / number, statistics.median(passed)


def sync(executor: str) -> None:
    """Print the seconds of syncs by each launcher."""
    for launcher in ("process", "ray"):
        print(launcher, json.dumps(found_by("sync-by", launcher, executor)), flush=True)


def sync_by(launcher: str, executor: str) -> None:
    rlcore.init(launcher=launcher)
    pair = EnginePair(QWEN_1_5B, get_device(), executor)
    of_vllm = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
    pair.train.build(dtype="bfloat16", timeout_s=300)
    options = of_vllm if executor == "vllm" else {}
    pair.infer.build(colocate_with=pair.train, dtype="bfloat16", timeout_s=300, **options)
    pair.sync_first()
    found = []
    for _ in range(20):
        pair.step()
        found.append(pair.train.sync_weights(pair.infer))
    seconds = [report.seconds for report in found]
    pair.close()
    told = {
        "route": found[-1].route,
        "nbytes": pair.nbytes,
        "first_s": pair.first["first_sync"],
        "device": get_device().name,
    }
    print(json.dumps(told | {"median_s": statistics.median(seconds), "fastest_s": min(seconds)}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hosts", record, *asked]:
            over_two_hosts(Path(record).resolve(), asked)
        case ["hosts-table", record]:
            print(hosts_table(read(Path(record))))
        case ["scale", *numbers] if numbers:
            scale([int(number) for number in numbers])
        case ["scale-table", *files] if files:
            lines = [line for file in files for line in Path(file).read_text().splitlines()]
            print_scale([json.loads(line) for line in lines if line.startswith("{")])
        case ["sync", executor]:
            sync(executor)
        case ["sync-by", launcher, executor]:
            sync_by(launcher, executor)
        case ["agents", number]:
            agents(int(number))
        case _:
            sys.exit(__doc__)
