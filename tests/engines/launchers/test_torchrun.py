"""launcher="torchrun": each rank of a world that torchrun started is one worker, in its own process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.engines.launchers.launch import start_workers
from rlcore.engines.launchers.slurm import use_slurm_variables
from rlcore.engines.launchers.torchrun import num_hosts
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.placement import place_workers
from rlcore.errors import DeviceError, InvalidInputError

PROGRAM = """
    import json, os, sys
    from pathlib import Path
    import torch
    from rlcore.engines.launchers.launch import start_workers

    class Worker:
        def __init__(self, context):
            self.context = context
        def add_up(self, value):
            group = self.context.process_group(100.0)
            total = torch.tensor(value)
            torch.distributed.all_reduce(total, group=group)
            return float(total), self.context.rank, self.context.world_size, self.context.device_name, os.getpid()
        def close(self):
            pass

    rank = int(os.environ["RANK"])
    found = {}
    for name, devices in [("world", ["cpu:4", "cpu:5"]), ("alone", ["cpu:0"])]:
        group = start_workers(Worker, "the engine", devices, launcher="torchrun", timeout_s=100)
        found[name] = [group.call("add_up", [((float(rank + 1),), {})])[0] for _ in range(2)]
        group.stop()
    torch.distributed.init_process_group("gloo")
    group = start_workers(Worker, "the engine", ["cpu:0", "cpu:1"], launcher="torchrun", timeout_s=100)
    found["user's own"] = group.call("add_up", [((float(rank + 1),), {})])
    group.stop()
    found["left as it is"] = torch.distributed.is_initialized()
    torch.distributed.destroy_process_group()
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found | {"pid": os.getpid()}))
"""


@pytest.mark.slow
def test_each_rank_joins_as_one_worker(tmp_path: Path, torchrun: Callable[..., None]) -> None:
    torchrun(PROGRAM, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        pid = found["pid"]
        assert found["world"] == [[3.0, rank, 2, f"cpu:{rank + 4}", pid]] * 2, "no children"
        assert found["alone"] == [[rank + 1.0, 0, 1, f"cpu:{rank}", pid]] * 2
        assert found["user's own"] == [[3.0, rank, 2, f"cpu:{rank}", pid]]
        assert found["left as it is"]


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def where(self) -> list[Any]:
        return [self.context.rank, self.context.world_size, self.context.device_name, os.getpid()]

    def close(self) -> None:
        pass


def test_a_rank_is_the_worker_of_its_number_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    found = {}
    for devices in (["cpu:4", "cpu:5", "cpu:4", "cpu:5"], ["cpu:0"]):
        group = start_workers(Worker, "the engine", devices, launcher="torchrun", timeout_s=1)
        (found[len(devices)],) = group.call("where", [((), {})])
        group.stop()
    assert found == {4: [3, 4, "cpu:5", os.getpid()], 1: [0, 1, "cpu:1", os.getpid()]}
    with pytest.raises(
        InvalidInputError,
        match="launcher 'torchrun' runs one worker a rank: the engine has 3 workers, this world has 4 ranks",
    ):
        start_workers(Worker, "the engine", ["cpu:0", "cpu:1", "cpu:2"], launcher="torchrun", timeout_s=1)


def test_without_torchrun_the_absent_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    absent = "needs the variables that torchrun sets, or srun for several tasks; absent: RANK, WORLD_SIZE"
    with pytest.raises(InvalidInputError, match=absent):
        start_workers(Worker, "the engine", ["cpu:0"], launcher="torchrun", timeout_s=1)
    with pytest.raises(InvalidInputError, match="'inline' runs one worker, and the engine has 2; use 'process'"):
        start_workers(Worker, "the engine", ["cpu:0", "cpu:1"], launcher="inline", timeout_s=1)


def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank_5 = {
        "SLURM_JOB_ID": "31", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_NODEID": "2",
        "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "rack[2-3]n[07,9],n8",
    }  # fmt: skip
    found = dict(of_rank_5)
    use_slurm_variables(found)
    assert found == of_rank_5 | {
        "MASTER_ADDR": "rack2n07", "MASTER_PORT": "20233", "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    for left_alone in ({"RANK": "0"}, {"SLURM_NTASKS": "1"}):  # torchrun is started by srun; an interactive shell
        found = of_rank_5 | left_alone
        use_slurm_variables(found)
        assert found == of_rank_5 | left_alone
    with pytest.raises(InvalidInputError, match=r"SLURM_STEP_TASKS_PER_NODE='1' .* does not tell of node 2"):
        use_slurm_variables(of_rank_5 | {"SLURM_STEP_TASKS_PER_NODE": "1"})
    for name, value in of_rank_5.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set here goes with the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("RLCORE_DEVICE", "cpu")
    assert place_workers("torchrun", 6) == ["cpu:0", "cpu:1"] * 3, "not a share for each task"
    monkeypatch.setattr("rlcore.engines.placement._all_like", lambda device: ["cpu:0"])
    with pytest.raises(DeviceError, match=r"must see all devices of their host: use --gpus-per-node in place of"):
        place_workers("torchrun", 6)


def test_workers_of_the_whole_world_are_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert num_hosts(6) == 1, "the world does not say that it has others"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (num_hosts(6), num_hosts(1), num_hosts(None)) == (3, 1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert num_hosts(1) == 1
    with pytest.raises(
        InvalidInputError, match="takes as many ranks on each host; this world has 6, and 4 of them are"
    ):
        num_hosts(6)
