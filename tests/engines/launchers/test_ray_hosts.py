"""Engines over two hosts of a Ray cluster: two raylets on this machine, each with an agent and workers of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.ray._ray_private import plain_bytes
from rlcore.errors import DeviceError, InvalidInputError, StateError, WorkerDiedError
from rlcore.process.status import start_time
from tests.conftest import RunPython
from tests.engines.ask import ask_all
from tests.engines.train_batches import assert_same_weights, packed_batch

pytestmark = [pytest.mark.ray, pytest.mark.slow]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file


class Worker:
    def __init__(self, context: Any) -> None:
        self.context = context

    def where(self) -> list[str]:
        store = self.context.store.partition(":")[0]
        return [self.context.host, self.context.device.name, store, os.environ["GLOO_SOCKET_IFNAME"]]

    def reduce(self) -> float:
        group = self.context.process_group(60.0)
        value = torch.tensor([1.0 + self.context.rank])
        torch.distributed.all_reduce(value, group=group)
        return float(value)

    def nap(self) -> None:
        time.sleep(300)

    def close(self) -> None:
        pass


def loss(logprob: torch.Tensor, entropy: Any, per_token: Any) -> Any:
    return -logprob * per_token["advantages"], {"logprob_mean": logprob}


def steps(engine: rlcore.TrainEngine) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return [engine.train_batch(packed_batch(seed=seed), loss) for seed in (5, 6, 7)], engine.state_dict()


@pytest.fixture
def new_trainer(policy: Any, qwen2_folder: Path) -> Callable[[], rlcore.TrainEngine]:
    def new() -> rlcore.TrainEngine:
        with rlcore.meta_device():
            return rlcore.TrainEngine(policy.from_pretrained(qwen2_folder))

    return new


def test_workers_of_two_hosts_form_a_world_through_the_store_actor(two_raylets: str) -> None:
    group = start_workers(Worker, "e", ["host-a/cpu:0", "host-b/cpu:0"], launcher="ray", timeout_s=100)
    try:
        found = ask_all(group, "where")
        assert [one[:3] for one in found] == [["host-a", "cpu:0", "ray-store"], ["host-b", "cpu:0", "ray-store"]]
        assert all(one[3] != "lo" for one in found), "the interface at which the other host can be reached"
        assert ask_all(group, "reduce") == [3.0, 3.0]
        assert ask_all(group, "reduce") == [3.0, 3.0]
    finally:
        group.stop()


def test_two_hosts_train_as_one_does(two_raylets: str, new_trainer: Any) -> None:
    with new_trainer() as engine:
        expected = steps(engine.build(data_parallel_size=2, devices=["cpu:0", "cpu:1"], launcher="process"))
    with new_trainer() as engine:
        engine.build(data_parallel_size=2, num_hosts=2, launcher="ray")
        assert engine.devices == ["host-a/cpu:0", "host-b/cpu:0"]
        metrics, weights = steps(engine)
        assert metrics == expected[0]
        assert_same_weights(weights, expected[1])


def test_weights_go_from_host_to_host(two_raylets: str, new_trainer: Any, qwen2_folder: Path) -> None:
    prompts, greedy = [[1, 2, 3], [4, 5]], {"max_tokens": 8, "temperature": 0.0}
    with new_trainer() as train, rlcore.InferenceEngine(qwen2_folder) as infer:
        train.build(data_parallel_size=2, launcher="ray")
        infer.build(devices="host-b/cpu:0", launcher="ray")
        assert train.devices == ["host-a/cpu:0", "host-a/cpu:1"], "one host is filled first"
        before = infer.generate(prompts, greedy)
        steps(train)
        for _ in range(2):  # the process group is formed, and used again
            report = train.sync_weights(infer, route="collective", verify=True)
            train.train_batch(packed_batch(seed=8), loss)
        assert report.route == "collective" and report.moved_bytes > 0
        after = infer.generate(prompts, greedy)
        assert [one.outputs[0].logprobs for one in before] != [one.outputs[0].logprobs for one in after]


def test_hosts_are_chosen_by_name_and_by_number(two_raylets: str, new_trainer: Any) -> None:
    with new_trainer() as engine, pytest.raises(InvalidInputError, match=r"the cluster has 2 hosts: say which"):
        engine.build(devices="cpu:0", launcher="ray")
    with new_trainer() as engine, pytest.raises(DeviceError, match=r"3 hosts with 1 free devices each .* 2 have so"):
        engine.build(data_parallel_size=3, num_hosts=3, launcher="ray")
    with new_trainer() as engine, pytest.raises(DeviceError, match=r"names no host of this cluster, which has host-a"):
        engine.build(acceptable_node_ips=["192.0.2.77"], launcher="ray")


def test_a_host_that_is_lost_is_named_and_the_other_is_left(two_raylets: str, wait_until: Callable[..., None]) -> None:
    from rlcore.engines.launchers.ray.cluster import connect

    group = start_workers(Worker, "e", ["host-a/cpu:0", "host-b/cpu:0"], launcher="ray", timeout_s=100)
    pids, agent = [worker.process_id for worker in group.workers], connect().link("host-b").facts.pid
    threading.Timer(0.5, os.kill, (agent, signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError, match=r"rank 1 \(host-b/cpu:0\) was lost with its host host-b"):
        ask_all(group, "nap")
    wait_until(lambda: not any(map(start_time, [agent, *pids])))
    group.stop()
    other = start_workers(Worker, "e", ["host-a/cpu:0"], launcher="ray", timeout_s=100)
    assert ask_all(other, "where")[0][0] == "host-a"
    other.stop()


def test_ps_lists_the_workers_of_all_hosts(two_raylets: str, run_python: RunPython, runtime_folder: Path) -> None:
    group = start_workers(Worker, "e", ["host-a/cpu:0", "host-b/cpu:0"], launcher="ray", timeout_s=100)
    try:
        environment = {"RLCORE_RUNTIME": str(runtime_folder)}  # Ray's token is in this process's
        listed = run_python(["-m", "rlcore", "ps", "--address", two_raylets, "--json"], env=environment)
        assert listed.returncode == 0, listed.stderr
        found = {one["host"]: [process["pid"] for process in one["processes"]] for one in json.loads(listed.stdout)}
        for worker in group.workers:
            assert worker.process_id in found[worker.context.host]
    finally:
        group.stop()


class Planted:
    """Makes a file wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def plant(path: str) -> Any:
    return Planted(Path(path))


def test_what_a_host_has_pickled_is_not_unpickled(two_raylets: str, tmp_path: Path) -> None:
    import ray

    path = tmp_path / "unpickled"
    answer = ray.remote(plant).options(num_cpus=0).remote(str(path))
    with pytest.raises(StateError, match="instead of plain bytes"):
        plain_bytes(answer, 100)
    assert not path.exists()
    ray.get(answer)
    assert path.exists(), "it would have been"
