"""A shard on the host, over objects with the members of SGLang's scheduler that it uses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlcore.engines.launchers.worker import WorkerContext
from rlcore.engines.residency import Move
from rlcore.engines.sampling.replica.shard import ReplicaShard
from rlcore.engines.sampling.sglang import shard as module
from rlcore.engines.sampling.sglang.executor import SglangExecutor
from rlcore.engines.sampling.sglang.shard import SglangShard
from rlcore.errors import UnsupportedError


class Model(nn.Module):
    """A model with a buffer, and tensors that are neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.absorbed = torch.full((4, 8), 3.0)
        self.order = [torch.arange(3)]


@pytest.fixture
def scheduler() -> Any:
    config = SimpleNamespace(hf_eos_token_id={1}, model_path="nowhere")
    pool = SimpleNamespace(k_buffer=[torch.ones(4, 2), torch.ones(4, 2)], v_buffer=[torch.ones(4, 2)], size=4)
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=Model(), model_config=config)),
        model_config=config,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.full((3, 16), 1 << 30, dtype=torch.int32)),
    )


def test_the_places_of_requests_are_in_the_memory_of_the_kv_cache(scheduler: Any) -> None:
    """Captured graphs read them, and the bits that the memory comes back with are no places."""
    shard, places = SglangShard(scheduler), scheduler.req_to_token_pool.req_to_token
    report, is_away = shard.move(Move.OFFLOAD, "kv_cache")
    assert (report.freed_device_bytes, is_away) == (3 * 4 * 2 * 4 + 3 * 16 * 4, True)
    assert places.untyped_storage().nbytes() == 0
    shard.move(Move.ONLOAD, "kv_cache")
    assert not places.any()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("context", [90, 1 << 20])
def test_no_completion_that_is_taken_would_be_cut_short(scheduler: Any, page_size: int, context: int) -> None:
    """By the rule of SGLang's own scheduler, which is the same in all supported versions."""
    cache = 160
    scheduler.max_total_num_tokens, scheduler.page_size = cache, page_size
    scheduler.max_req_len = min(context, cache) - 1
    scheduler.max_req_input_len = scheduler.max_req_len - 5
    together, prompt = SglangShard(scheduler).limits()
    assert prompt == scheduler.max_req_input_len - 1, "SGLang takes shorter ones than this"
    left = []
    for length in range(1, prompt + 1):
        pages = -(-length // page_size) * page_size
        left.append(min(scheduler.max_req_len - length - 1, cache - pages - page_size - 1) - (together - length))
    assert min(left) == 0, "what is taken is served, and no less is taken than could be"


@pytest.mark.parametrize(
    ("attribute", "told"),
    [("swa_kv_pool", r"moved; try build\(disable_hybrid_swa_memory=True\)$"), ("index_pool", "cannot be moved$")],
)
def test_a_cache_that_is_not_found_is_refused_at_once(scheduler: Any, attribute: str, told: str) -> None:
    """The way out is that of sliding windows, and of no other pool."""
    inner = scheduler.token_to_kv_pool_allocator.get_kvcache()
    scheduler.token_to_kv_pool_allocator.get_kvcache = lambda: SimpleNamespace(full=inner, **{attribute: inner})
    with pytest.raises(UnsupportedError, match=told):
        SglangShard(scheduler)


def test_tensors_beside_the_parameters_are_kept_and_no_sync_is_taken_where_they_are_of_weights(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLA multiplies by what SGLang derives of its weights as it loads them, and a plan writes the weights alone."""
    shard, model = SglangShard(scheduler), scheduler.tp_worker.model_runner.model
    kept = [model.table, model.absorbed, *model.order]
    assert [tensor.data_ptr() for tensor in shard._kept()] == [tensor.data_ptr() for tensor in kept]
    monkeypatch.setattr(module, "checkpoint_trace", lambda *_: SimpleNamespace(refusal=""))
    monkeypatch.setattr(ReplicaShard, "differing_after_reload", lambda *_: ["weight"])
    assert shard.differing_after_reload("nowhere") == ["weight"]
    assert shard.derived() == ["absorbed"], "the order holds no numbers of weights"


def test_an_engine_is_known_again_by_its_arguments_and_its_model(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = SglangShard(scheduler)
    assert shard._target.identity() is None, "nobody has said what it was made with"
    shard.made_with(["dtype='bfloat16'"])
    before = shard._target.identity()
    scheduler.tp_worker.model_runner.model.weight.data.fill_(3)
    assert before is not None and shard._target.identity() == before
    monkeypatch.setenv("SGLANG_RUN_ID", "sglang-run-1")  # SGLang draws one for each process
    assert shard._target.identity() == before
    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_USE_OTHER_KERNELS", "1")
        assert shard._target.identity() != before
    scheduler.tp_worker.model_runner.model.backend = "cutlass"
    assert shard._target.identity() != before
    del scheduler.tp_worker.model_runner.model.backend
    assert shard._target.identity() == before
    shard.made_with(["dtype='float32'"])
    assert shard._target.identity() != before


@pytest.mark.parametrize(
    ("differing", "derived", "told"),
    [
        (["weight"], [], "reloads 1 tensors otherwise than it first loaded or made them up, such as 'weight'"),
        ([], ["absorbed"], "keeps 1 tensors beside the parameters, such as 'absorbed': they may be derived from"),
        ([], [], None),
    ],
)
def test_the_reason_for_which_no_weights_are_taken_is_the_right_one(
    differing: list[str], derived: list[str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = SglangExecutor(WorkerContext("the inference engine", 0, 1, "cpu:0", 1, ("cpu:0", "cpu:1")))
    found = {"differing_after_reload": differing, "derived": derived}
    monkeypatch.setattr(executor, "_call_each", lambda method, calls: [found[method] for _ in calls])
    monkeypatch.setattr(executor, "_folder", SimpleNamespace(path=Path("model")), raising=False)
    executor._prove_reload("model")
    if told is None:
        executor._require_reload("load()")
    else:
        with pytest.raises(UnsupportedError, match=told):
            executor._require_reload("load()")
