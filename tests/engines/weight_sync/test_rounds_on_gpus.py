"""Weight syncs on GPUs, between processes that share one, on several, and from one to another.

On the CPU the same bodies are marked slow: what they show there is in test_rounds_between_processes.py too. On NPUs
they run over the simulated CANN, from tests/devices/ascend/test_simulated.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_engine import Checkpoint, Sizes, checkpoint, expected, registered, write

import rlcore
from rlcore.engines.weight_sync.transports.in_place import MOST_HANDLES as MOST_REOPENED
from rlcore.errors import UnsupportedError
from tests.engines.ask import ask

SIZES = Sizes(experts=3, is_tied=True, has_state=True)
LARGE = Sizes(vocab=4096, hidden=1024, inner=4096, heads=8, kv_heads=8, head_dim=128, layers=24)
"""1.6 GB in 266 tensors, most of which torch's allocator would keep in blocks of their own."""
MANY = Sizes(hidden=512, inner=256, experts=128, layers=8)
"""1.6 GB in 3136 tensors, none above 1 MiB: torch's allocator has some 800 blocks of 2 MiB for them."""
MOST_HANDLES = 7 + 2
"""Small tensors among them take less than a segment of 2 MiB, and others may have left space in one."""


class Place(NamedTuple):
    trainer: list[str]
    engine: list[str]


ONE = pytest.param(Place(["cuda:0"], ["cuda:0"]), marks=pytest.mark.gpu, id="one")
SAME_TWO = pytest.param(Place(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]), marks=pytest.mark.multigpu, id="same two")
APART = pytest.param(Place(["cuda:0"], ["cuda:1"]), marks=pytest.mark.multigpu, id="apart")
HOST = pytest.param(Place(["cpu:0"], ["cpu:1"]), marks=pytest.mark.slow, id="host")
HAS_TORCH_NPU = importlib.util.find_spec("torch_npu") is not None
NPU = [pytest.param(Place(["npu:0"], ["npu:0"]), marks=pytest.mark.npu_sim, id="npu")] * HAS_TORCH_NPU
NPU_APART = [pytest.param(Place(["npu:0"], ["npu:1"]), marks=pytest.mark.npu_sim, id="npu apart")] * HAS_TORCH_NPU


class Engines(NamedTuple):
    train: Any
    infer: Any
    sizes: Sizes
    shards: int

    def check(self) -> None:
        """Every worker holds what a fresh engine would of the trainer's weights."""
        devices = [rlcore.get_device(name).torch_device for name in self.infer.devices]
        fresh = expected(self.train.state_dict(), self.sizes, self.shards, torch.bfloat16, devices)
        for own, wanted in zip(ask(self.infer, "held"), fresh, strict=True):
            for name, tensor in wanted.items():
                assert torch.equal(own[name], tensor), name

    @property
    def is_on_host(self) -> bool:
        return bool(self.train.devices[0].startswith("cpu"))

    @property
    def wait_by(self) -> str:
        """Between processes."""
        is_apart = "export_event" not in rlcore.get_device(self.infer.devices[0]).streams.limits()
        return "event" if is_apart else "host"


Build = Callable[..., Engines]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    built: list[Any] = []

    def build(place: Place, sizes: Sizes = SIZES, executor: str = "small_apart") -> Engines:
        path: Path = write(checkpoint(sizes), tmp_path / "model.safetensors")
        train: Any = rlcore.TrainEngine(Checkpoint(checkpoint(sizes, seed=1)))
        infer: Any = rlcore.InferenceEngine(path, executor=executor)
        built.extend([train, infer])
        shards = len(place.engine)
        train.build(data_parallel_size=len(place.trainer), devices=place.trainer, launcher="process")
        options = {"sizes": tuple(sizes), "shards": shards, "dtype": "bfloat16", "launcher": "process"}
        infer.build(tensor_parallel_size=shards, devices=place.engine, **options)
        return Engines(train, infer, sizes, shards)

    with registered():
        yield build
        for engine in built:
            engine.close()


@pytest.mark.parametrize("route", ["direct", "packed"])
@pytest.mark.parametrize("place", [ONE, SAME_TWO, APART, HOST, *NPU])
def test_weights_of_another_process(build: Build, place: Place, route: str) -> None:
    engines = build(place)
    opened = []
    for number in range(4):
        engines.train.add(0.25)
        report = engines.train.sync_weights(engines.infer, route=route, staging_bytes=4096, checksums="always")
        assert (report.route, report.version) == (route, number + 1)
        assert report.moved_bytes <= 1.05 * report.needed_bytes
        assert report.staging_waits_by == ("" if route == "direct" else engines.wait_by)
        engines.check()
        opened.append(report.handles_opened)
        if number == 1 and (route == "packed" or not engines.is_on_host):
            engines.train.offload()
            engines.train.onload()
    assert opened[0] > 0
    assert opened[1] == opened[3] == 0, "they stay open"
    assert opened[2] == 0 or (route == "direct" and not engines.is_on_host), "only what had left is opened again"
    engines.train.add(0.25)
    engines.train.sync_weights(engines.infer, route=route, verify=True, version=100)
    engines.train.sync_weights(engines.infer)
    assert engines.infer.version == 101, "nothing had changed but the version"


@pytest.mark.parametrize("place", [ONE, SAME_TWO])
def test_few_handles_are_opened_after_an_offload(build: Build, place: Place) -> None:
    engines = build(place, LARGE)
    engines.train.sync_weights(engines.infer, route="direct")
    for _ in range(2):
        engines.train.offload()
        engines.train.onload()
        engines.train.add(0.25)
        report = engines.train.sync_weights(engines.infer, route="direct")
        assert 0 < report.handles_opened <= MOST_HANDLES * len(place.trainer) * len(place.engine)
    engines.check()


@pytest.mark.parametrize("place", [ONE, HOST])
def test_parameters_that_got_other_memory_are_sent_from_there(build: Build, place: Place) -> None:
    engines = build(place)
    for _ in range(2):
        engines.train.sync_weights(engines.infer, route="direct")
        engines.train.move()
        assert engines.train.sync_weights(engines.infer, route="direct").handles_opened > 0
        engines.check()
        engines.train.add(0.25)
        assert engines.train.sync_weights(engines.infer, route="direct").handles_opened == 0
        engines.check()


@pytest.mark.parametrize("place", [ONE])
def test_thousands_of_small_weights_are_not_opened_again_after_each_offload(build: Build, place: Place) -> None:
    engines = build(place, MANY)
    routes, opened = [], []
    for _ in range(4):
        engines.train.add(0.25)
        report = engines.train.sync_weights(engines.infer)
        engines.check()
        routes.append(report.route)
        opened.append(report.handles_opened)
        engines.train.offload()
        engines.train.onload()
    assert routes == ["direct", "packed", "packed", "packed"]
    assert opened[0] > MOST_REOPENED
    assert opened[1:] == [1, 0, 0], "the staging buffers, once"


@pytest.mark.parametrize("place", [APART, HOST, *NPU_APART])
def test_through_a_group(build: Build, place: Place) -> None:
    engines = build(place)
    for _ in range(2):
        engines.train.add(0.25)
        assert engines.train.sync_weights(engines.infer, route="collective", staging_bytes=4096).route == "collective"
        engines.check()


@pytest.mark.parametrize("place", [ONE])
def test_a_library_takes_a_device_once(build: Build, place: Place) -> None:
    engines = build(place)
    with pytest.raises(UnsupportedError, match="its library takes a device once, and 1 hold both a trainer rank and"):
        engines.train.sync_weights(engines.infer, route="collective")
    assert engines.train.sync_weights(engines.infer).route == "direct", "the first that works"


@pytest.mark.parametrize("place", [ONE])
def test_weights_of_the_same_process(build: Build, place: Place) -> None:
    engines = build(place, executor="small")
    for _ in range(2):
        engines.train.add(0.25)
        report = engines.train.sync_weights(engines.infer)
        assert (report.route, report.handles_opened) == ("local", 0)
        engines.check()
        engines.train.offload()
        engines.train.onload()
