"""Weights of a trainer in real vLLM: the same completions as a fresh engine of the exported checkpoint."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import StateError, SyncError, UnsupportedError
from tests.engines.ask import ask

from .conftest import ENGINE
from .policy import GREEDY, PROMPTS, assert_same, assert_same_logprobs, fresh

pytestmark = pytest.mark.vllm

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu:0"
BuildTrain = Callable[..., rlcore.TrainEngine]


def test_after_a_sync_it_is_a_fresh_engine_of_the_export(
    infer: rlcore.InferenceEngine, train: rlcore.TrainEngine, tmp_path: Path
) -> None:
    before = infer.generate(PROMPTS, GREEDY)
    for version in (1, 2):
        train.shake(version)
        report = train.sync_weights(infer)
        assert report.version == infer.version == version
        assert report.fallback_bytes == 0
        assert report.moved_bytes == report.needed_bytes > 0
        ours = infer.generate(PROMPTS, GREEDY)
        assert ours[0].outputs[0].version_spans[0].version == version
        assert [one.outputs[0].token_ids for one in ours] != [one.outputs[0].token_ids for one in before]
        assert_same(ours, fresh(train, tmp_path / str(version)))


def test_nothing_moves_when_nothing_changed(infer: rlcore.InferenceEngine, train: rlcore.TrainEngine) -> None:
    train.sync_weights(infer)
    report = train.sync_weights(infer)
    assert (report.moved_bytes, report.fallback_bytes) == (0, 0)
    assert infer.version == report.version


@pytest.mark.slow
def test_a_later_process_tests_no_plan_again(
    train: rlcore.TrainEngine, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM draws names for each process, in variables of its environment: they are no part of what an engine is."""
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))  # no plan is known here
    tested = []
    for _ in range(2):
        with rlcore.InferenceEngine(model_folder, executor="vllm").build(devices=DEVICE, **ENGINE) as infer:
            report = train.sync_weights(infer)
            tested.append("self_test" in report.calls_s)
            assert report.moved_bytes == report.needed_bytes > 0
    assert tested == [True, False]


def test_the_loop_with_released_weights(
    infer: rlcore.InferenceEngine, train: rlcore.TrainEngine, tmp_path: Path
) -> None:
    infer.meta()
    train.shake(7)
    infer.onload("weights")
    train.sync_weights(infer, verify=True)
    infer.onload("kv_cache")
    assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "export"))


def test_requests_under_way_go_on_with_the_new_weights(
    infer: rlcore.InferenceEngine, train: rlcore.TrainEngine
) -> None:
    old = infer.version
    (number,) = infer.submit([[1, 10, 1, 13]], GREEDY | {"max_tokens": 240})
    deadline = time.monotonic() + 60
    while ask(infer, "progress")[0].get(number, 0) < 10:
        assert time.monotonic() < deadline
    infer.pause("keep")
    train.shake(11)
    train.sync_weights(infer)
    infer.resume()
    completion = infer.collect(timeout_s=100)[number].outputs[0]
    first, second = completion.version_spans
    assert (first.version, second.version) == (old, infer.version)
    assert first.start == 0 < first.end == second.start < second.end == len(completion.token_ids) == 240
    # What follows the change is what the new weights say of everything before it.
    so_far = [1, 10, 1, 13, *completion.token_ids[: second.start]]
    (again,) = infer.generate([so_far], GREEDY | {"max_tokens": 256 - len(so_far)})
    rest = completion.token_ids[second.start :][: len(again.outputs[0].token_ids)]
    assert again.outputs[0].token_ids[: len(rest)] == rest
    assert_same_logprobs(completion.logprobs[second.start :][: len(rest)], again.outputs[0].logprobs[: len(rest)])


def test_a_poisoned_engine_refuses_until_a_whole_round(
    infer: rlcore.InferenceEngine, train: rlcore.TrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = infer.executors[0]
    call = type(group).call

    def failing(self: Any, method: str, calls: Any, *args: Any, **kwargs: Any) -> Any:
        if self is group and method == "sync_call" and calls[0][0][0] == "ready":
            raise SyncError("a worker said no")
        return call(self, method, calls, *args, **kwargs)

    train.shake(13)
    with monkeypatch.context() as patch:
        patch.setattr(type(group), "call", failing)
        with pytest.raises(SyncError, match="a worker said no"):
            train.sync_weights(infer, route="packed")  # where the vote is a call of its own
    assert infer.sync_state == "poisoned"
    with pytest.raises(StateError, match="the weights are a mixture"):
        infer.generate(PROMPTS, GREEDY)
    train.sync_weights(infer)
    assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "export"))


def test_another_model_is_refused_and_the_old_one_serves(
    infer: rlcore.InferenceEngine, build_train: BuildTrain, write_model: Callable[..., Path]
) -> None:
    before = infer.generate(PROMPTS, GREEDY)
    with build_train(write_model(intermediate_size=192)) as other, pytest.raises(SyncError, match="of other shapes"):
        other.sync_weights(infer)
    assert infer.sync_state == "serving"
    assert_same(infer.generate(PROMPTS, GREEDY), before)


def test_an_engine_of_weights_that_were_made_up_takes_the_trainers(
    build_vllm: Callable[..., rlcore.InferenceEngine], train: rlcore.TrainEngine, model_folder: Path, tmp_path: Path
) -> None:
    with build_vllm(model_folder, load_format="dummy") as infer:
        if DEVICE == "cpu:0":  # where a folder's weights, loaded twice, show whether vLLM packs them
            with pytest.raises(UnsupportedError, match="otherwise than it first loaded or made them up, such as"):
                train.sync_weights(infer)
            return
        assert train.sync_weights(infer, verify=True).fallback_bytes == 0
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "export"))


MOE = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ARCHITECTURES = {
    "untied": ("Qwen2Config", {"tie_word_embeddings": False}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gemma": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 64}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_that_no_code_names(
    name: str,
    write_model: Callable[..., Path],
    build_vllm: Callable[..., rlcore.InferenceEngine],
    build_train: BuildTrain,
    tmp_path: Path,
) -> None:
    config, changes = ARCHITECTURES[name]
    folder = write_model(config, **changes)
    with build_vllm(folder) as infer, build_train(folder) as train:
        train.shake(1)
        try:
            report = train.sync_weights(infer, verify=True)
        except UnsupportedError as refused:
            if DEVICE != "cpu:0" or name not in ("moe", "mixtral"):
                raise
            pytest.skip(f"needs a CUDA device: this vLLM's build for the CPU packs experts. {refused}")
        assert_same(infer.generate(PROMPTS, GREEDY), fresh(train, tmp_path / "export"))
        assert report.fallback_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_engine_has_what_its_own_loader_makes_of_the_trainers_export(
    dtype: str,
    model_folder: Path,
    build_vllm: Callable[..., rlcore.InferenceEngine],
    build_train: BuildTrain,
    tmp_path: Path,
) -> None:
    with build_vllm(model_folder, dtype="bfloat16") as infer, build_train(model_folder, dtype=dtype) as train:
        before = infer.generate(PROMPTS, GREEDY)
        train.shake(2)
        assert train.sync_weights(infer, verify=True).fallback_bytes == 0
        synced = [one.outputs[0] for one in infer.generate(PROMPTS, GREEDY)]
        assert [one.logprobs for one in synced] != [one.outputs[0].logprobs for one in before]
        train.export(tmp_path / "export")
    with build_vllm(tmp_path / "export", dtype="bfloat16") as infer:
        loaded = [one.outputs[0] for one in infer.generate(PROMPTS, GREEDY)]
    assert [(one.token_ids, one.logprobs) for one in synced] == [(one.token_ids, one.logprobs) for one in loaded]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu:0", reason="of vLLM's build for the CPU")
def test_a_model_that_vllm_reloads_otherwise_than_it_loaded_it_is_refused(
    write_model: Callable[..., Path], build_vllm: Callable[..., rlcore.InferenceEngine], build_train: BuildTrain
) -> None:
    folder = write_model("Qwen3MoeConfig", **MOE)
    with build_vllm(folder) as infer, build_train(folder) as train:
        expected = infer.generate(PROMPTS, GREEDY)
        try:
            train.sync_weights(infer)
        except UnsupportedError as refused:
            assert re.search(r"reloads \d+ tensors otherwise .*experts", str(refused))
        else:
            pytest.skip(
                "this vLLM reloads experts as it loads them, as 0.26 does; another test compares what comes out"
            )
        with pytest.raises(UnsupportedError, match="build the engine again from an exported folder"):
            infer.load()
        assert infer.sync_state == "serving"
        assert_same(infer.generate(PROMPTS, GREEDY), expected)
    with rlcore.InferenceEngine(folder) as hf:
        assert_same(expected, hf.build(devices="cpu:0", dtype="float32", launcher="inline").generate(PROMPTS, GREEDY))
