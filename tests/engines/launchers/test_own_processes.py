"""Workers with a process each, apart from other engines', and workers that drive several devices."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import pytest

import rlcore
from rlcore.engines.executors.worker import Worker
from rlcore.engines.launchers.launch import choose_launcher
from rlcore.engines.launchers.worker import WorkerContext
from rlcore.errors import InvalidInputError, UnsupportedError, WorkerDiedError
from rlcore.launch import LaunchFacts
from tests.engines.ask import ask


class Replica(Worker):
    """Stands for an executor that owns another library's engine on several devices."""

    runs_on_many_devices: ClassVar[bool] = True
    owns_process: ClassVar[bool] = True
    drives_replica: ClassVar[bool] = True

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.context = context

    def build(self, path: Any) -> None:
        pass

    def where(self) -> dict[str, Any]:
        return {
            "rank": self.context.rank,
            "devices": list(self.context.devices),
            "device": self.device.name,
            "process": os.getpid(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }


class Neighbour(Replica):
    """Lives with whatever else is on its device."""

    owns_process: ClassVar[bool] = False
    drives_replica: ClassVar[bool] = False


@pytest.fixture(autouse=True)
def _executors(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"replica": Replica, "neighbour": Neighbour}
    monkeypatch.setattr("rlcore.engines.engine.executor_class", lambda kind, name: classes[name])


def build(executor: str, **options: Any) -> rlcore.InferenceEngine:
    return rlcore.InferenceEngine("nowhere", executor=executor).build(launcher="process", timeout_s=100, **options)


@pytest.mark.slow
def test_one_worker_drives_each_replica_in_a_process_that_it_shares_with_nobody() -> None:
    devices = [f"cpu:{index}" for index in range(4)]
    with (
        build("replica", tensor_parallel_size=2, data_parallel_size=2, devices=devices) as engine,
        build("neighbour", data_parallel_size=1, colocate_with=engine) as other,
        build("neighbour", devices="cpu:0") as third,
    ):
        found, neighbours = ask(engine, "where"), [*ask(other, "where"), *ask(third, "where")]
        assert [one["devices"] for one in found] == [devices[:2], devices[2:]]
        assert [one["rank"] for one in found] == [0, 1]
        assert engine.devices == devices
        assert neighbours[0]["process"] == neighbours[1]["process"]
        assert len({os.getpid(), *(one["process"] for one in [*found, *neighbours])}) == 4
        with pytest.raises(rlcore.errors.DeviceError, match="cpu:1 is held by the inference engine"):
            build("neighbour", devices="cpu:1", not_colocate_with=engine)
        os.kill(found[0]["process"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rank 0 \(cpu:0\)"):
            ask(engine, "where")
        assert [*ask(other, "where"), *ask(third, "where")] == neighbours
        assert [one["devices"] for one in ask(engine.restart(), "where")] == [devices[:2], devices[2:]]


@pytest.mark.slow
def test_its_devices_are_its_processs_first_and_the_others_stay_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What the launcher computes for a vendor with a variable, on a host whose devices are really cpu.
    def order(self: LaunchFacts, indices: list[int]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(["4", "6", "7", "9"][index] for index in indices)}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7,9")
    monkeypatch.setattr(LaunchFacts, "worker_environment", order)
    monkeypatch.setattr("rlcore.devices.cpu.device.CpuDevice.count", lambda self: 4)
    with build("replica", tensor_parallel_size=2, devices=["cpu:2", "cpu:0"]) as engine:
        (found,) = ask(engine, "where")
        assert found["visible"] == "7,4,6,9"
        assert found["device"] == "cpu:0"  # the process's own number of what the user calls cpu:2
        assert found["devices"] == engine.devices == ["cpu:2", "cpu:0"]


@pytest.mark.parametrize("launcher", ["inline", "torchrun"])
def test_another_launcher_is_refused(launcher: str) -> None:
    with pytest.raises(UnsupportedError, match=f"launcher '{launcher}'.*processes of their own.*use 'process'"):
        rlcore.InferenceEngine("nowhere", executor="replica").build(launcher=launcher)
    with pytest.raises(InvalidInputError, match="launcher must be one of"):
        choose_launcher("slurm", 1, owns_process=True)


def test_it_is_the_process_launcher_without_a_word_and_under_pdb(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_launcher(None, 1, owns_process=True) == "process"
    monkeypatch.setenv("RLCORE_DEBUG", "pdb")
    assert choose_launcher(None, 2, owns_process=True) == "process"
    assert choose_launcher(None, 2) == "inline"
