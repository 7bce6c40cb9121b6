"""``rlcore.swap`` between engines: what moves, what is refused, what stands after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.offload import host_arena as arena_module
from rlcore.engines.offload.host_arena import arena_of
from rlcore.engines.residency import State
from rlcore.errors import DeviceError, InvalidInputError, StateError, UnsupportedError
from rlcore.ops import ppo_clip
from tests.engines.train_policy import adamw_policy

Build = Callable[..., Any]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "BLOCK_BYTES", 4096)


@pytest.fixture(scope="session")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    return adamw_policy(Qwen2ForCausalLM, lr=1e-2)


@pytest.fixture
def build_train(policy: Any, qwen2_folder: Path) -> Iterator[Build]:
    built: list[rlcore.TrainEngine] = []

    def build(**options: Any) -> rlcore.TrainEngine:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        built.append(rlcore.TrainEngine(module))
        return built[-1].build(**options)

    yield build
    for engine in reversed(built):
        engine.close()


@pytest.fixture
def build_infer(qwen2_folder: Path) -> Iterator[Build]:
    built: list[rlcore.InferenceEngine] = []

    def build(**options: Any) -> rlcore.InferenceEngine:
        built.append(rlcore.InferenceEngine(qwen2_folder))
        return built[-1].build(**options)

    yield build
    for engine in reversed(built):
        engine.close()


def batch(device: Any = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(21, (4, 12), generator=generator),
        "attention_mask": torch.ones(4, 12, dtype=torch.bool),
        "old_logprobs": torch.full((4, 12), -3.0),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]),
    }


def train_once(engine: rlcore.TrainEngine) -> float:
    return engine.train_batch(batch(), ppo_clip())["loss"]


def greedy(engine: rlcore.InferenceEngine) -> list[int]:
    output = engine.generate("1+2=", {"temperature": 0, "max_tokens": 8})
    return list(output[0].outputs[0].token_ids)


@pytest.mark.parametrize("launcher", ["inline", pytest.param("process", marks=pytest.mark.slow)], indirect=True)
def test_trainer_and_sampler_change_places(build_train: Build, build_infer: Build, launcher: str, device: Any) -> None:
    train = build_train(devices=device.name, launcher=launcher)
    infer = build_infer(devices=device.name, launcher=launcher)
    expected = greedy(infer)
    losses = []
    infer.offload()
    for _ in range(3):
        losses.append(train_once(train))
        reports = rlcore.swap(out=[(train, ())], in_=[(infer, ("weights",)), (infer, "kv_cache")])
        assert set(train.state.values()) == {"offloaded"}
        assert set(infer.state.values()) == {"loaded"}
        assert greedy(infer) == expected
        (out,), (weights, cache) = reports.out, reports.in_
        assert set(out) == {"weights", "optimizer", "grads"} and set(weights) == {"weights"} and len(cache) == 1
        assert out["optimizer"][0].moved_bytes > out["weights"][0].moved_bytes > 0
        assert weights["weights"][0].moved_bytes == -weights["weights"][0].freed_device_bytes > 0
        rlcore.swap(out=[(infer, ())], in_=[(train, ())])
    alone = build_train(devices=device.name, launcher=launcher)
    assert losses == [train_once(alone) for _ in range(3)]
    tags = train.memory_report()[0]["tags"]
    assert tags["optimizer"]["device_bytes"] > 0 == tags["optimizer"]["host_bytes"]


def test_what_is_there_already_is_left_alone(build_train: Build) -> None:
    train = build_train(devices="cpu")
    train.offload("grads")
    reports = rlcore.swap(out=[(train, "grads")], in_=[(train, "weights")])
    assert reports == ([{}], [{}])


def test_one_engine_changes_its_own_tags(build_train: Build) -> None:
    train = build_train(devices="cpu")
    train.offload("optimizer")
    rlcore.swap(out=[(train, "weights")], in_=[(train, "optimizer")])
    assert train.state == {"weights": "offloaded", "optimizer": "loaded", "grads": "loaded"}


def test_released_weights_come_back_empty(build_train: Build, build_infer: Build) -> None:
    train, infer = build_train(devices="cpu"), build_infer(devices="cpu")
    infer.meta()
    rlcore.swap(out=[(train, ("optimizer", "grads"))], in_=[(infer, "weights")])
    assert infer.state["weights"] == "empty"
    train.sync_weights(infer)
    greedy_needs_cache = pytest.raises(StateError, match="needs the kv_cache")
    with greedy_needs_cache:
        greedy(infer)


def test_wrong_orders_move_nothing(build_train: Build, build_infer: Build) -> None:
    train, infer = build_train(devices="cpu"), build_infer(devices="cpu")
    train.meta("optimizer")
    with pytest.raises(StateError, match="released its optimizer"):
        rlcore.swap(out=[(infer, ())], in_=[(train, ())])
    with pytest.raises(InvalidInputError, match="'weights' of the inference engine is named twice"):
        rlcore.swap(out=[(infer, "weights"), (infer, ())], in_=[])
    with pytest.raises(InvalidInputError, match="'weights' of the inference engine is named twice"):
        rlcore.swap(out=[(infer, ())], in_=[(infer, "weights")])
    with pytest.raises(InvalidInputError, match=r"swap\(\) takes pairs of an engine and its tags, .* got <rlcore"):
        rlcore.swap(out=[infer], in_=[])
    with pytest.raises(InvalidInputError, match="has the tags weights, kv_cache; got 'grads'"):
        rlcore.swap(out=[(infer, "grads")], in_=[])
    assert set(infer.state.values()) == {"loaded"}
    with pytest.raises(StateError, match=r"is not built; call build\(\) first"):
        rlcore.swap(out=[(rlcore.InferenceEngine("unused"), ())], in_=[])


def test_a_failure_halfway_leaves_both_engines_where_they_were(
    build_train: Build, build_infer: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, infer = build_train(devices="cpu"), build_infer(devices="cpu")
    expected = greedy(infer)
    train_once(train)
    train.offload()
    resize, room_bytes = torch.UntypedStorage.resize_, [50_000]

    def limited(storage: torch.UntypedStorage, nbytes: int) -> Any:
        grown = nbytes - storage.nbytes()
        if grown > room_bytes[0]:
            raise torch.OutOfMemoryError("planted")
        room_bytes[0] -= grown
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", limited)
    with pytest.raises(DeviceError, match=r"planted; offload something else first. Nothing has moved"):
        rlcore.swap(out=[(infer, ())], in_=[(train, ())])
    monkeypatch.undo()
    assert set(infer.state.values()) == {"loaded"} and set(train.state.values()) == {"offloaded"}
    assert greedy(infer) == expected
    train.onload()
    train_once(train)


def test_host_memory_is_limited_and_reserved_at_build(build_train: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_arenas", {})
    arena = arena_of(rlcore.get_device("cpu"))
    train = build_train(devices="cpu", reserve_host_bytes=1 << 20, host_memory_bytes=1 << 20)
    arena.wait()
    assert arena.total_bytes == 1 << 20
    assert not train.offload("weights")["weights"][0].first_use
    train.close()
    assert arena.limit_bytes == 1 << 20, "for the engines that are built later in this process"
    assert arena.total_bytes == 0, "a closed engine gives its host memory back"
    with pytest.raises(DeviceError, match="needs 1048640 bytes of host memory more, and host_memory_bytes is 1048576"):
        build_train(devices="cpu", reserve_host_bytes=(1 << 20) + 1)


def test_a_limit_of_an_earlier_build_is_named_as_such(build_train: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_arenas", {})
    build_train(devices="cpu", host_memory_bytes=4096).close()
    message = (
        r"host_memory_bytes is 4096 bytes, .* \(set by the last build\(\) in this process that gave one; pass host_m"
    )
    with pytest.raises(DeviceError, match=message):
        build_train(devices="cpu").offload()


@pytest.mark.parametrize("options", [{"onload": False}, {"reserve_host_bytes": 8192}], ids=str)
def test_a_build_that_fails_leaves_the_limit_of_host_memory(
    build_train: Build, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(arena_module, "_arenas", {})
    arena = arena_of(rlcore.get_device("cpu"))
    for earlier in (None, 1 << 30):
        arena.set_limit(earlier)
        with pytest.raises(DeviceError, match="host_memory_bytes is 4096 bytes"):
            build_train(devices="cpu", host_memory_bytes=4096, **options)
        assert arena.limit_bytes == earlier
        build_train(devices="cpu", **options).close()


def test_an_engine_that_keeps_its_memory_by_itself_is_refused_before_anything_moves(
    build_train: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_train(devices="cpu")
    monkeypatch.setattr(type(engine), "can_swap", property(lambda self: False))
    with pytest.raises(UnsupportedError, match=r"swap\(\) of the train engine with this executor .*call offload"):
        rlcore.swap(out=[(engine, ())], in_=[])
    assert State.OFFLOADED not in engine.state.values()
