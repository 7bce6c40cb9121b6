"""Weight syncs between real processes: any number of trainer ranks to any grid of receivers, by every route.

Engines are shared by the tests of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_engine import Checkpoint, Sizes, checkpoint, expected, registered, write
from torch import Tensor

import rlcore
from rlcore.errors import StateError, SyncError, UnsupportedError
from tests.engines.ask import ask

# 37 rows over 2 ranks are 19 and 18; over 3 they are 13, 13 and 11, and the 4 of A_log are 2, 2 and none.
SIZES = Sizes(experts=3, is_tied=True, has_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, short_runtime_folder: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, registered():
        patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield tmp_path_factory.mktemp("sync")


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Iterator[rlcore.TrainEngine]:
    """A trainer in this process."""
    with rlcore.TrainEngine(Checkpoint(checkpoint(SIZES, seed=1))) as engine:
        yield engine.build(devices="cpu:0")


@pytest.fixture(scope="module")
def sharded(folder: Path, pair: rlcore.InferenceEngine) -> Iterator[rlcore.TrainEngine]:
    """Two shards; one shares a process with a shard of ``pair``."""
    with rlcore.TrainEngine(Checkpoint(checkpoint(SIZES, seed=1))) as engine:
        yield engine.build(data_parallel_size=2, devices=["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[rlcore.InferenceEngine]:
    """Two shards in bfloat16."""
    path = write(checkpoint(SIZES), folder / "pair.safetensors")
    with rlcore.InferenceEngine(path, executor="small") as engine:
        options = {"sizes": tuple(SIZES), "shards": 2, "dtype": "bfloat16"}
        yield engine.build(tensor_parallel_size=2, devices=["cpu:1", "cpu:2"], **options)


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[rlcore.InferenceEngine]:
    """One worker, on a device of its own."""
    path = write(checkpoint(SIZES), folder / "apart.safetensors")
    with rlcore.InferenceEngine(path, executor="small") as engine:
        yield engine.build(devices="cpu:3", launcher="process", sizes=tuple(SIZES))


def held(engine: rlcore.InferenceEngine) -> list[dict[str, Tensor]]:
    return ask(engine, "held")


def check(trainer: Any, engine: rlcore.InferenceEngine, shards: int, dtype: torch.dtype) -> None:
    """Every worker holds what a fresh engine would of the trainer's weights."""
    fresh = expected(trainer.state_dict(), SIZES, shards, dtype)
    for rank, own in enumerate(held(engine)):
        for name, tensor in fresh[rank % shards].items():
            assert torch.equal(own[name], tensor), (rank, name)


def test_shards_to_shards_through_staging_buffers(trainer: Any, pair: rlcore.InferenceEngine) -> None:
    report = trainer.sync_weights(pair, staging_bytes=4096, checksums="always")
    assert report.route == "packed"
    assert report.handles_opened == 2, "the staging buffers, by each receiver"
    assert report.fallback_bytes > 0, "A_log is changed by the loader"
    check(trainer, pair, 2, torch.bfloat16)
    trainer.add(0.25)
    report = trainer.sync_weights(pair, staging_bytes=4096)
    assert report.handles_opened == 0, "they stay open"
    assert report.moved_bytes <= 1.05 * report.needed_bytes
    check(trainer, pair, 2, torch.bfloat16)
    for versions in ask(pair, "committed_versions"):
        assert versions[-2:] == [report.version - 1, report.version]


def test_an_engine_takes_the_former_name_of_staging_bytes(trainer: Any, pair: rlcore.InferenceEngine) -> None:
    with pytest.warns(DeprecationWarning, match="slab_bytes is called staging_bytes now") as caught:
        trainer.sync_weights(pair, slab_bytes=8192)
    assert caught[0].filename == __file__


def test_nothing_is_sent_when_nothing_has_changed(trainer: Any, pair: rlcore.InferenceEngine) -> None:
    trainer.add(1.0)
    assert trainer.sync_weights(pair).moved_bytes > 0
    report = trainer.sync_weights(pair)
    assert (report.moved_bytes, report.version) == (0, pair.version)
    check(trainer, pair, 2, torch.bfloat16)
    pair.meta()
    pair.onload("weights")
    assert trainer.sync_weights(pair).moved_bytes > 0, "what the receivers held is gone"
    pair.onload()
    check(trainer, pair, 2, torch.bfloat16)


def test_staging_buffers_stay_open_when_the_trainer_is_offloaded(trainer: Any, pair: rlcore.InferenceEngine) -> None:
    trainer.add(0.5)
    trainer.sync_weights(pair)
    trainer.offload()
    with pytest.raises(StateError, match=r"needs the weights of the train engine, .* offloaded"):
        trainer.sync_weights(pair)
    trainer.onload()
    trainer.add(0.5)
    assert trainer.sync_weights(pair).handles_opened == 0
    check(trainer, pair, 2, torch.bfloat16)


def test_verify_compares_with_the_engines_own_loader(trainer: Any, pair: rlcore.InferenceEngine) -> None:
    trainer.add(-0.5)
    trainer.sync_weights(pair, verify=True)
    check(trainer, pair, 2, torch.bfloat16)


@pytest.mark.slow
def test_through_a_group_of_all(sharded: Any, apart: rlcore.InferenceEngine, pair: rlcore.InferenceEngine) -> None:
    for _ in range(2):
        sharded.add(0.125)
        report = sharded.sync_weights(apart, route="collective", staging_bytes=4096, timeout_s=100)
        assert (report.route, report.handles_opened) == ("collective", 0)
        check(sharded, apart, 1, torch.float32)
    with pytest.raises(UnsupportedError, match="it takes a process for each, and 1 hold both a trainer rank and"):
        sharded.sync_weights(pair, route="collective")
    assert pair.sync_state == "serving", "nothing was written"


@pytest.mark.slow
def test_several_engines_commit_together(
    sharded: Any, apart: rlcore.InferenceEngine, pair: rlcore.InferenceEngine
) -> None:
    sharded.add(0.5)
    sharded.sync_weights([apart, pair], version=100)
    assert apart.version == pair.version == 100
    check(sharded, apart, 1, torch.float32)
    check(sharded, pair, 2, torch.bfloat16)


def test_weights_that_are_loaded_by_the_engine_cannot_be_staged(trainer: Any, pair: rlcore.InferenceEngine) -> None:
    trainer.add(0.5)
    with pytest.raises(UnsupportedError, match=r"staged=True is not supported: .* go through the engine's own loader"):
        trainer.sync_weights(pair, staged=True)
    assert pair.sync_state == "serving"


@pytest.mark.slow
def test_offloading_the_trainer_takes_its_exports_back(sharded: Any, apart: rlcore.InferenceEngine) -> None:
    sharded.add(0.5)
    first = sharded.sync_weights(apart, route="direct", timeout_s=100)
    assert first.route == "direct"
    assert first.handles_opened > 0
    check(sharded, apart, 1, torch.float32)
    sharded.add(0.5)
    assert sharded.sync_weights(apart, route="direct").handles_opened == 0, "they stay open"
    check(sharded, apart, 1, torch.float32)
    with pytest.raises(UnsupportedError, match="in shared memory of the host, as after export_ipc"):
        sharded.offload("weights")
    sharded.add(0.5)
    again = sharded.sync_weights(apart, route="direct")
    assert again.handles_opened == first.handles_opened, "offload had taken them back"
    check(sharded, apart, 1, torch.float32)
    sharded.restart()  # the host's weights cannot be offloaded once they are shared


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (SIZES._replace(hidden=12), "its loader raised RuntimeError: The size of tensor"),
        (SIZES._replace(layers=3), "its loader raised AttributeError: .* for the weight 'layers.2."),
        (SIZES._replace(layers=1), r"no weight reaches 'layer1.\w+' and \d more parameters"),
    ],
    ids=["width", "more", "fewer"],
)
def test_another_model_is_refused_before_anything_is_written(
    trainer: Any, pair: rlcore.InferenceEngine, other: Sizes, reason: str
) -> None:
    before = held(pair)
    with rlcore.TrainEngine(Checkpoint(checkpoint(other))) as engine:
        engine.build(devices="cpu:4")
        with pytest.raises(SyncError, match=f"is not the engine's, which still serves its old weights: {reason}"):
            engine.sync_weights(pair)
    assert pair.sync_state == "serving"
    for name, tensor in held(pair)[0].items():
        assert torch.equal(tensor, before[0][name])


def test_a_loader_that_fails_poisons_the_engine_until_a_complete_round(
    folder: Path, trainer: Any, pair: rlcore.InferenceEngine
) -> None:
    """It objects to values alone, which are not known before."""
    weights = checkpoint(SIZES)
    weights["layers.1.A_log"][0] = torch.nan
    with rlcore.TrainEngine(Checkpoint(weights)) as engine:
        engine.build(devices="cpu:4")
        with pytest.raises(SyncError, match=r"stopped midway: .* holds a mixture and refuses to generate"):
            engine.sync_weights(pair)
    assert pair.sync_state == "poisoned"
    with pytest.raises(StateError, match=r"generate\(\) is refused: a weight sync stopped midway"):
        pair.generate([[1]])
    trainer.sync_weights(pair)
    assert pair.sync_state == "serving"
    check(trainer, pair, 2, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "shards"), [(1, 3), (2, 2)], ids=["a rank with no rows", "HSDP"])
@pytest.mark.usefixtures("sharded", "pair", "apart")  # whose processes serve here too
def test_a_grid_takes_from_any_shards(folder: Path, replicas: int, shards: int) -> None:
    """Two copies of an engine, of two shards each, take weights in bfloat16."""
    path = write(checkpoint(SIZES), folder / "grid.safetensors")
    with (
        rlcore.TrainEngine(Checkpoint(checkpoint(SIZES, seed=3))) as engine,
        rlcore.InferenceEngine(path, executor="small") as grid,
    ):
        devices = [f"cpu:{index}" for index in range(4)]
        options = {"sizes": tuple(SIZES), "shards": 2, "dtype": "bfloat16"}
        grid.build(tensor_parallel_size=2, data_parallel_size=2, devices=devices, **options)
        engine.build(replicas=replicas, data_parallel_size=shards, devices=devices[: replicas * shards])
        for _ in range(2):
            engine.call("add", 0.5)
            report = engine.sync_weights(grid, staging_bytes=4096)
            assert report.route == "packed"
            check(engine, grid, 2, torch.bfloat16)
