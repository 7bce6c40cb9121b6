"""A program that measures launcher="ray" beside "process"; it is run by hand, and docs/clusters.md has its numbers.

    python -m tests.engines.launchers.ray_costs hosts    # root: a call, tensors and a start, over two namespaces
    python -m tests.engines.launchers.ray_costs scale    # the program's time for a call of 64 to 512 workers

In "scale" agents and Ray are real, and the workers are stand-ins in them that answer at once: what is measured is the
program that calls them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rlcore
from rlcore.engines.launchers.group import WorkerGroup
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.ray.agent import Agent
from rlcore.engines.launchers.ray.wire import Opened, Opening, Posted, Said
from tests.engines.launchers.ray_faults import ENVIRONMENT, Cluster
from tests.engines.launchers.ray_faults_program import ADDRESS
from tests.hosts import hosts

_TENSOR_BYTES = 256 << 20


class Echo:
    """A worker that answers at once."""

    def __init__(self, context: Any) -> None:
        self.tensor = torch.zeros(_TENSOR_BYTES, dtype=torch.uint8)

    def echo(self, value: int) -> int:
        return value

    def take(self, tensor: torch.Tensor) -> int:
        return len(tensor)

    def give(self) -> torch.Tensor:
        return self.tensor

    def close(self) -> None:
        pass


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


def seconds_of(call: Callable[[], Any], number: int) -> dict[str, float]:
    for _ in range(3):
        call()
    found = []
    for _ in range(number):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return {"median": statistics.median(found), "fastest": min(found)}


def costs(names: list[str], launcher: str) -> dict[str, Any]:
    """Return seconds of a call, of 256 MiB each way, and of the start of as many workers as there are names."""
    began = time.perf_counter()
    group = start_workers(Echo, "the measurement", names, launcher=launcher, timeout_s=600)
    started_s = time.perf_counter() - began
    group.stop()
    group = start_workers(Echo, "the measurement", names[:1], launcher=launcher, timeout_s=600)
    tensor = torch.zeros(_TENSOR_BYTES, dtype=torch.uint8)
    ask: Callable[..., Any] = lambda method, *arguments: group.call(method, [(arguments, {})])  # noqa: E731
    found = {
        f"start {len(names)}": started_s,
        "call": seconds_of(lambda: ask("echo", 7), 500),
        "send 256 MiB": seconds_of(lambda: ask("take", tensor), 8),
        "receive 256 MiB": seconds_of(lambda: ask("give"), 8),
    }
    group.stop()
    return found


def program(out: str) -> None:
    rlcore.init(address=ADDRESS)
    found = {"process": costs([f"cpu:{index}" for index in range(4)], "process")}
    for host in ("host-a", "host-b"):
        costs([f"{host}/cpu:0"], "ray")  # its agent starts
        found[host] = costs([f"{host}/cpu:{index}" for index in range(4)], "ray")
    Path(out).write_text(json.dumps(found))


def over_two_hosts() -> None:
    with tempfile.TemporaryDirectory() as scratch, hosts(2, Path(scratch)) as (here, there):
        Cluster(here, there)
        out = Path(scratch, "found.json")
        running = here.python("-m", "tests.engines.launchers.ray_costs", "program", str(out), environment=ENVIRONMENT)
        _, errors = running.communicate(timeout=1800)
        assert out.exists(), errors[-3000:]
        for launcher, found in json.loads(out.read_text()).items():
            print(launcher, json.dumps(found))


def scale(num_agents: int) -> None:
    """Measure a call of 64 to 512 workers of some agents: the program's processor time, and the seconds that pass."""
    from rlcore.engines.launchers.ray import cluster

    real = cluster.hosts_of

    def many(nodes: Any) -> Any:  # as many hosts, all on this one
        ((host, node),) = real(nodes)
        return [(rlcore_host(host, f"host-{index}"), node) for index in range(num_agents)]

    cluster.Agent, cluster.hosts_of = AgentOfStandIns, many  # type: ignore[misc]
    rlcore.init(launcher="ray")
    began = time.perf_counter()
    cluster.connect().links([f"host-{index}" for index in range(num_agents)])
    print(f"{num_agents} agents started in {time.perf_counter() - began:.1f} s", flush=True)
    idle = time.process_time()
    time.sleep(20)
    print(f"heartbeats of {num_agents} agents: {(time.process_time() - idle) / 20 * 1000:.1f} ms a second", flush=True)
    tokens = torch.zeros(16 * 1024)
    batch = {name: tokens.clone() for name in ("input_ids", "old_logprobs", "advantages", "ref_logprobs")}
    for number in (8, 64, 512):
        names = [f"host-{index}/cpu:{one}" for index in range(num_agents) for one in range(number // num_agents)]
        began = time.perf_counter()
        group = start_workers(Echo, "the measurement", names, launcher="ray", timeout_s=600)
        print(f"{len(names)} workers opened and started in {time.perf_counter() - began:.2f} s", flush=True)
        own = [(({name: tensor.clone() for name, tensor in batch.items()},), {}) for _ in names]
        for what, calls in (
            ("no arguments", [((), {})] * number),
            ("256 KiB each", own),
            ("the same 256 KiB", [((batch,), {})] * number),
        ):
            report(group, f"{len(names)} workers, {what}", calls)
        group.stop()
    os._exit(0)


def rlcore_host(host: Any, name: str) -> Any:
    return type(host)(name=name, address=host.address, counts={"cpu": 512}, labels={})


def report(group: WorkerGroup, what: str, calls: list[Any]) -> None:
    call = lambda: group.call("echo", calls)  # noqa: E731
    call()
    walls, processor, number = [], time.process_time(), 10
    for _ in range(number):
        began = time.perf_counter()
        call()
        walls.append(time.perf_counter() - began)
    processor = (time.process_time() - processor) / number
    print(
        f"{what}: {processor * 1000:.0f} ms of the processor, {statistics.median(walls) * 1000:.0f} ms pass "
        f"(fastest {min(walls) * 1000:.0f}), {threading.active_count()} threads",
        flush=True,
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hosts"]:
            over_two_hosts()
        case ["program", out]:
            program(out)
        case ["scale", *number]:
            scale(int(number[0]) if number else 2)
        case _:
            sys.exit(__doc__)
