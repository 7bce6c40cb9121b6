"""The cases with real vLLM: what they need of it, and, where it is installed, a whole one on the host."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from rlcore.bench.case import Case, Work, load_cases
from rlcore.bench.cases.models import QWEN_7B, QWEN_30B_A3B, ModelShape
from rlcore.bench.cases.peers import vllm as weight_sync_vllm
from rlcore.bench.cases.peers import vllm_pair, vllm_worker
from rlcore.bench.cases.peers.vllm_pair import Layout
from rlcore.engines.sampling.model_folder import check_model_folder
from rlcore.errors import MissingDependencyError, UnsupportedError
from rlcore.registry import get_device
from rlcore.types import SyncReport
from rlcore.weights.source import in_files

CASES = ["7b", "7b_2_to_tp2", "7b_4_to_tp2_dp2", "30b_a3b", "30b_a3b_2_to_tp2", "30b_a3b_4_to_tp2_dp2"]


@pytest.fixture
def case() -> Case:
    return load_cases()["weight_sync/vllm/7b"]


def test_what_is_missing_is_said_before_anything_starts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name in load_cases() if name.startswith("weight_sync/vllm/")} == {
        f"weight_sync/vllm/{name}" for name in CASES
    }
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match="vllm"):
        case.prepare(get_device("cpu"))
    cpu = get_device("cpu")
    monkeypatch.setattr(type(cpu), "count", lambda self: 1)
    with pytest.raises(UnsupportedError, match="it takes 4 devices"):
        load_cases()["weight_sync/vllm/7b_4_to_tp2_dp2"].prepare(cpu)


@pytest.mark.parametrize(
    ("model", "names", "gigabytes"),
    [
        pytest.param(QWEN_7B, 339, 15.2, id="7b"),
        pytest.param(QWEN_30B_A3B, 18_867, 61.1, marks=pytest.mark.slow, id="30b"),
    ],
)
def test_a_folder_of_real_shapes_takes_no_space(
    model: ModelShape, names: int, gigabytes: float, tmp_path: Path
) -> None:
    vllm_pair.write_folder(vllm_pair.policy(model, "cpu"), tmp_path)
    files = check_model_folder(tmp_path).weight_files
    assert len(files) > 1
    found = in_files(files)
    assert len(found) == names
    sizes = [file.stat() for file in files]
    assert sum(size.st_size for size in sizes) / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert sum(size.st_blocks for size in sizes) * 512 < 8 << 20, "but for the headers they are holes"
    assert not found["model.norm.weight"].read(()).any()


def test_vllms_own_sender_is_driven_as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions stand in for vLLM 0.26's, which need a GPU."""
    nothing: Any = lambda *_: iter(())  # noqa: E731
    with pytest.raises(UnsupportedError, match="vLLM's own ipc engine is not supported: it takes CUDA devices"):
        vllm_worker.VllmIpcSender(get_device("cpu"), nothing, nothing, is_packed=False)
    gpu: Any = types.SimpleNamespace(spec=types.SimpleNamespace(is_host=False))

    module: Any = types.ModuleType("vllm.distributed.weight_transfer.ipc_engine")
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.distributed.weight_transfer"], "ipc_engine", module, raising=False)

    class Later:
        pass

    module.IPCWeightTransferEngine = Later
    with pytest.raises(UnsupportedError, match=r"the case drives that of 0\.26 only"):
        vllm_worker.VllmIpcSender(gpu, nothing, nothing, is_packed=False)

    @dataclasses.dataclass
    class Update:
        names: list[str]

    class Engine:
        @staticmethod
        def trainer_send_weights(iterator: Iterator[Any], arguments: Any) -> None:
            for name, _ in iterator:
                arguments.send_mode(Update([name, str(arguments.packed)]))

    module.IPCWeightTransferEngine, module.IPCTrainerSendWeightsArgs = Engine, types.SimpleNamespace
    asked: list[Any] = []
    named = lambda: iter([("a", torch.ones(1)), ("b", torch.ones(1))])  # noqa: E731
    sender = vllm_worker.VllmIpcSender(gpu, named, lambda *call: asked.append(call), is_packed=True)
    sender.send()
    updates = [("update", {"names": [name, "True"]}) for name in "ab"]
    assert asked == [("start",), *updates, ("finish",)]


@pytest.mark.parametrize("has_ray", [True, False])
def test_vllms_own_sender_needs_no_ray(has_ray: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's module imports it for another way to reach workers."""
    package = tmp_path / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "ipc_engine.py").write_text("import ray\n")
    if has_ray:
        (tmp_path / "ray.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_ray else None)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "ray")]:
            del sys.modules[name]
        found = vllm_worker._vllms_ipc()
        assert hasattr(found.ray, "value") == has_ray
        assert ("ray" in sys.modules) == has_ray, "others would take the stand-in for Ray"


# ------------------------------------------------------------------------------------------------- with real vLLM


@pytest.fixture(scope="module")
def whole(settings_of_vllm: pytest.MonkeyPatch) -> Iterator[Work]:
    work = weight_sync_vllm._prepare(QWEN_7B, Layout(), get_device("cpu"))
    yield work
    assert work.close is not None
    work.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's build for the CPU; on a GPU the case itself is run")
@pytest.mark.timeout(600)
def test_every_way_leaves_the_same_bytes_in_vllm(whole: Work) -> None:
    ways = {contender.implementation: contender for contender in whole.contenders}
    assert list(ways) == ["turn", "again", "packed", "nothing_new", "vllm_ipc", "vllm_ipc_packed", "per_tensor"]
    assert whole.params["names"] == 27
    states = []
    for name, way in ways.items():
        if name.startswith("vllm_ipc"):
            with pytest.raises(UnsupportedError, match="it takes CUDA devices"):
                way.run()
            continue
        done = way.run()
        way.check(done)
        states.append(done.state)
        assert way.seconds is not None and way.seconds(done) > 0
        wrong = [{key: value + 1 for key, value in done.sums[0].items()}]
        with pytest.raises(AssertionError, match="are not those that another way"):
            way.check(done._replace(sums=wrong))
    assert set(states) == {0, 1}
    turn = ways["turn"]
    assert turn.quantities is not None
    found = turn.quantities(turn.run())
    phases = {"wake_weights", "sync", "trainer_offload", "wake_kv_cache"}
    moves = {f"{kind}_{way}" for kind in ("cold", "reserved", "later") for way in ("to_host", "to_device")}
    assert found.keys() >= phases | {f"{phase}_of_limit" for phase in phases} | moves
    assert found.keys() >= {"turn", "first_sync", "first_prepare", "first_self_test", "verified_sync"}
    assert found["reserved_of_moved"].value >= 1, "or the first move would have to allocate"
    for tag in ("weights", "kv_cache"):
        wake = f"wake_{tag}"
        assert found[f"{wake}_moving"].value < found[wake].value
        assert found[f"{wake}_of_limit"].value == found[wake].value / found[f"{wake}_limit"].value
    assert found["pieces_of_weights"].value > 10 > found["pieces_of_kv_cache"].value > 0
    assert found.keys() >= {"call_begin", "call_commit", f"route_{turn.run().report.route}"}
    assert found["read_amplification"].value == 1
    assert all(quantity.value > 0 for quantity in found.values())
    assert msgspec.json.encode(whole.params)


def test_steps_of_a_sync_keep_their_names_in_records() -> None:
    calls_s = {"begin": 1.0, "open_staging_buffers": 2.0, "open_events": 3.0, "import_events": 4.0}
    report = SyncReport(
        version=1, route="packed", moved_bytes=1, needed_bytes=1, fallback_bytes=0, handles_opened=0, seconds=1.0,
        calls_s=calls_s,
    )  # fmt: skip
    found = {name: one.value for name, one in weight_sync_vllm._parts(report).items() if name.startswith("call_")}
    assert found == {"call_begin": 1.0, "call_open_slabs": 2.0, "call_open_marks": 3.0, "call_know_marks": 4.0}
