"""Shards of a replica on the host, called as vLLM calls them: the executor checks what they answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.residency import Move
from rlcore.engines.sampling.vllm import shard as shard_module
from rlcore.engines.sampling.vllm import versions
from rlcore.engines.sampling.vllm.executor import VllmExecutor
from rlcore.engines.sampling.vllm.extension import RlcoreWorkerExtension, _shard_of
from rlcore.engines.sampling.vllm.replica import Replica
from rlcore.engines.sampling.vllm.shard import TensorParallelShard
from rlcore.engines.sampling.vllm.worker_processes import vllm_processes
from rlcore.errors import DeviceError, RlcoreError


class Model(nn.Module):
    """A model with a buffer, and tensors derived after loading that are neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.absorbed = torch.full((4, 8), 3.0)
        self.kv_cache: Any = None
        self.halves = [torch.full((2,), 5.0), torch.full((2,), 6.0)]


class PlainWorker(RlcoreWorkerExtension):
    """The members of ``vllm.v1.worker.gpu_worker.Worker`` that rlcore uses."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        model = Model()
        caches = [torch.zeros(2, 16), [torch.zeros(8), torch.zeros(4)]]
        model.kv_cache = caches[0]  # layers of attention have theirs
        self.model_runner = SimpleNamespace(get_model=lambda: model, kv_caches=caches)
        layers = {f"layers.{number}": SimpleNamespace(kv_cache=cache) for number, cache in enumerate(caches)}
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))

    @property
    def caches(self) -> list[Tensor]:
        first, others = self.model_runner.kv_caches
        return [first, *others]


class Engine:
    """Calls the workers as ``LLMEngine`` does."""

    def __init__(self, size: int) -> None:
        self.workers = [PlainWorker(rank) for rank in range(size)]

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True

    def reset_mm_cache(self) -> None:
        """It has none."""

    reset_encoder_cache = reset_mm_cache


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(versions, "forget_reloads", lambda model: None)  # of vLLM's own loads
    return Engine(2)


@pytest.fixture
def worker(engine: Any) -> Iterator[VllmExecutor]:
    context = WorkerContext("the inference engine", 0, 1, "cpu:0", 1, ("cpu:0", "cpu:1"))
    worker = VllmExecutor(context)
    reader: Any = None  # no prompt comes
    processes = vllm_processes(WorkerContext("it", 0, 1, "cpu:0", 1, ("cpu:0",)))  # vLLM started none
    worker._engine, worker._replica = engine, Replica(engine, processes, reader, lambda: None)
    yield worker
    worker._replica.close()


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
@pytest.mark.parametrize("move", [Move.OFFLOAD, Move.META])
def test_a_worker_that_does_not_do_as_told_is_seen(
    worker: VllmExecutor, engine: Engine, tag: str, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, real = _shard_of(engine.workers[1]), TensorParallelShard.move
    getattr(worker, move)(tag)
    assert [_shard_of(one)._offload_groups[tag].is_away for one in engine.workers] == [True, True]

    @functools.wraps(real)
    def stays_away(self: TensorParallelShard, wanted: str, of: str) -> Any:
        return (shard._offload_groups[of].meta(), True) if self is shard else real(self, wanted, of)

    with monkeypatch.context() as patch:
        patch.setattr(TensorParallelShard, "move", stays_away)
        with pytest.raises(RlcoreError, match=re.escape(f"onload('{tag}') left 1 of 2 vLLM workers without it")):
            worker.onload(tag)
    worker.onload(tag)
    assert [_shard_of(one)._offload_groups[tag].is_away for one in engine.workers] == [False, False]

    @functools.wraps(real)
    def stays_here(self: TensorParallelShard, wanted: str, of: str) -> Any:
        report, is_away = real(self, wanted, of)
        return report, is_away and self is not shard

    monkeypatch.setattr(TensorParallelShard, "move", stays_here)
    with pytest.raises(RlcoreError, match=re.escape(f"{move}('{tag}') left 1 of 2 vLLM workers")):
        getattr(worker, move)(tag)


def test_a_kv_cache_comes_back_as_zeros(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory holds that the device gives."""
    plain = engine.workers[0]
    shard = TensorParallelShard(plain)  # type: ignore[arg-type]
    group, after_kv = shard._offload_groups["kv_cache"], []
    plain.model_runner.post_kv_cache_wake_up = lambda: after_kv.append(plain.caches[0].sum().item())
    real = group.onload

    def onload() -> Any:
        report = real()
        for cache in plain.caches:
            cache.fill_(torch.nan)
        return report

    monkeypatch.setattr(group, "onload", onload)
    shard.move(Move.OFFLOAD, "kv_cache")
    assert all(cache.untyped_storage().nbytes() == 0 for cache in plain.caches)
    shard.move(Move.ONLOAD, "kv_cache")
    assert all(bool((cache == 0).all()) for cache in plain.caches)
    assert after_kv == [0.0], "the scales of an FP8 cache come after that"


def test_what_no_sync_brings_again_is_kept(engine: Engine) -> None:
    """Buffers, and what loading derived; neither the weights nor the KV cache."""
    shard = TensorParallelShard(engine.workers[0])  # type: ignore[arg-type]
    model: Any = shard.model
    kept = list(shard._kept())
    assert {id(one) for one in kept} == {id(one) for one in (model.table, model.absorbed, *model.halves)}
    assert len(kept) == 4


@pytest.mark.parametrize("move", [Move.OFFLOAD, Move.META])
def test_a_share_that_is_closed_leaves_all_memory_to_be_freed(engine: Engine, move: Move) -> None:
    plain = engine.workers[0]
    shard = TensorParallelShard(plain)  # type: ignore[arg-type]
    weight = shard.model.get_parameter("weight")
    shard.move(move, "weights")
    assert weight.untyped_storage().nbytes() == 0
    shard.close()
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert vars(shard) == {}, "it would keep the model"


def test_memory_that_finds_no_room_again_is_never_freed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_module, "_NEVER_FREED", kept := [])
    plain = engine.workers[0]
    shard = TensorParallelShard(plain)  # type: ignore[arg-type]
    model = shard.model
    shard.move(Move.META, "weights")

    def onload() -> None:
        raise DeviceError("cuda:0 has 1 MiB free")

    monkeypatch.setattr(shard._offload_groups["weights"], "onload", onload)
    shard.close()
    ((held, caches),) = kept
    assert held is model
    assert [id(cache) for cache in caches] == [id(cache) for cache in plain.caches]
    (told,) = caplog.messages
    assert "this process can make no other vLLM engine" in told
    assert told.endswith("Call cuda() before close(). cuda:0 has 1 MiB free")
