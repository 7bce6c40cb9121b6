"""The executor ``vllm`` on real vLLM: the same completions as ``hf``, requests beside the program, moves, errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.errors import CheckpointError, InvalidInputError, StateError, SyncError, WorkerDiedError
from rlcore.ops import token_logprob
from tests.engines.ask import ask

from .policy import assert_same_logprobs

pytestmark = pytest.mark.vllm

GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPTS = ["1+1=", "90210-777=", "3", "12*12+12="]


def tokens(outputs: Any) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def assert_same(ours: list[rlcore.RequestOutput], theirs: list[rlcore.RequestOutput]) -> None:
    assert tokens(ours) == tokens(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.prompt, one.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
        for mine, yours in zip(one.outputs, other.outputs, strict=True):
            assert (mine.text, mine.finish_reason, mine.version_spans) == (
                yours.text,
                yours.finish_reason,
                yours.version_spans,
            )
            assert_same_logprobs(mine.logprobs, yours.logprobs)


@pytest.fixture(autouse=True)
def _ready(infer: rlcore.InferenceEngine) -> Iterator[None]:
    """Each test leaves the engine as it found it, or the next one says so."""
    yield
    infer.resume()
    infer.abort()
    assert set(infer.state.values()) == {"loaded"}


# ---------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize(
    "params",
    [GREEDY, GREEDY | {"ignore_eos": True, "max_tokens": 30}, GREEDY | {"stop_token_ids": [3, 17]}],
    ids=["greedy", "ignore_eos", "stop"],
)
def test_greedy_completions_are_those_of_hf(
    infer: rlcore.InferenceEngine, hf: rlcore.InferenceEngine, params: dict[str, Any]
) -> None:
    assert_same(infer.generate(PROMPTS, params), hf.generate(PROMPTS, params))
    ids = [[9, 0, 2, 1], [3]]
    assert_same(infer.generate(ids, params), hf.generate(ids, params))


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"temperature": 1.4, "top_p": 0.8}, {"top_k": 4}, {"top_k": 6, "top_p": 0.7}],
    ids=lambda sampling: "-".join(sampling) or "plain",
)
def test_log_probs_are_of_the_distribution_sampled_from(
    infer: rlcore.InferenceEngine, hf: rlcore.InferenceEngine, sampling: dict[str, Any]
) -> None:
    outputs = infer.generate(PROMPTS, sampling | {"n": 4, "max_tokens": 8, "seed": 5})
    module = hf.executors[0].workers[0].worker.module
    for output in outputs:
        for completion in output.outputs:
            ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
            with torch.inference_mode():
                logits = module(ids.to(module.device)).logits[0, len(output.prompt_token_ids) - 1 : -1].float().cpu()
            expected = token_logprob(
                logits,
                torch.tensor(completion.token_ids),
                temperature=sampling.get("temperature", 1.0),
                keep_mask=keep(logits, **sampling),
            ).logprob
            assert_same_logprobs(completion.logprobs, expected)


def keep(logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> torch.Tensor | None:
    """vLLM's rule, written out: the k likeliest, of these the fewest that reach top_p."""
    if top_p == 1 and top_k < 1:
        return None
    values, order = (logits / temperature).sort(-1, descending=True)
    ranks = torch.arange(values.shape[-1])
    values = values.masked_fill(ranks >= (top_k if top_k > 0 else len(ranks)), -torch.inf)
    probability = values.softmax(-1)
    kept = (probability.cumsum(-1) - probability < top_p) & values.isfinite()
    return torch.zeros_like(kept).scatter(-1, order, kept)


def test_a_seed_gives_the_same_samples_whatever_is_beside_it(infer: rlcore.InferenceEngine) -> None:
    params = {"n": 8, "seed": 11, "max_tokens": 10}
    alone = tokens(infer.generate(PROMPTS[:1], params))
    assert tokens(infer.generate(PROMPTS, params))[:8] == alone
    assert tokens(infer.generate(PROMPTS[:1], params | {"seed": 12})) != alone
    assert len({tuple(one) for one in alone}) > 3
    free = {"n": 8, "max_tokens": 10}
    assert tokens(infer.generate(PROMPTS[:1], free)) != tokens(infer.generate(PROMPTS[:1], free))


def test_prompts_with_seeds_may_need_several_steps(infer: rlcore.InferenceEngine) -> None:
    """vLLM's build for the CPU fails where it computes such a prompt in parts."""
    prompts = [[(number + place) % 20 for place in range(200)] for number in range(20)]  # 4,000 tokens, 2,048 a step
    params = {"max_tokens": 2, "seed": 1, "ignore_eos": True}
    assert tokens(infer.generate(prompts, params))[-1:] == tokens(infer.generate(prompts[-1:], params))


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], [21]], {}, "prompt 1 holds token id 21; the model's token ids are 0 to 20"),
        (["1+1="], {"max_tokens": 300}, r"together 304; the model has 256 positions \(max_model_len\)"),
        (["1+1="], {"max_token": 3}, "did you mean 'max_tokens'"),
        (["1"], {"stop_token_ids": [99]}, "stop_token_ids of prompt 0 holds 99"),
    ],
)
def test_a_bad_request_is_refused_as_by_hf(
    infer: rlcore.InferenceEngine, hf: rlcore.InferenceEngine, prompts: Any, params: Any, match: str
) -> None:
    for engine in (infer, hf):
        expected = match.replace("max_model_len", "max_position_embeddings") if engine is hf else match
        with pytest.raises(InvalidInputError, match=expected):
            engine.generate(prompts, params)
    assert infer.generate("1+1=", GREEDY)


# ----------------------------------------------------------------------------------- beside the program


def test_submitted_requests_end_beside_the_program_and_are_collected_once(infer: rlcore.InferenceEngine) -> None:
    expected = infer.generate(PROMPTS, GREEDY)
    numbers = infer.submit(PROMPTS, GREEDY)
    found: dict[int, rlcore.RequestOutput] = {}
    while len(found) < len(numbers):
        new = infer.collect(timeout_s=60)
        assert new and not found.keys() & new.keys()
        found |= new
    assert_same([found[number] for number in numbers], expected)
    assert infer.collect() == {}


def test_more_than_max_in_flight_wait_for_room(infer: rlcore.InferenceEngine) -> None:
    numbers = infer.submit(PROMPTS * 6, GREEDY, max_in_flight=5)
    assert len(infer._router.placed) <= 5
    found: dict[int, rlcore.RequestOutput] = {}
    while len(found) < 24:
        found |= infer.collect(timeout_s=60)
    assert_same([found[number] for number in numbers], infer.generate(PROMPTS * 6, GREEDY))


def test_paused_requests_stay_and_go_on(infer: rlcore.InferenceEngine) -> None:
    params = GREEDY | {"max_tokens": 200, "ignore_eos": True}
    expected = infer.generate(PROMPTS, params)
    infer.pause("keep")
    numbers = infer.submit(PROMPTS, params)
    assert infer.collect(timeout_s=0.3) == {}
    with pytest.raises(StateError, match=r"wait for ever while the engine is paused; call resume\(\)"):
        infer.collect()
    with pytest.raises(StateError, match=r"generate\(\) is refused while the engine is paused"):
        infer.generate("1", GREEDY)
    with pytest.raises(StateError, match=r"submit\(\) needs room"):
        infer.submit(PROMPTS, GREEDY, max_in_flight=4)
    infer.resume()
    found: dict[int, rlcore.RequestOutput] = {}
    while len(found) < 4:
        found |= infer.collect(timeout_s=60)
    assert_same([found[number] for number in numbers], expected)


def test_pause_can_finish_or_give_up_what_is_under_way(infer: rlcore.InferenceEngine) -> None:
    params = GREEDY | {"max_tokens": 100, "ignore_eos": True}
    infer.submit(PROMPTS, params)
    infer.pause("wait")
    assert len(infer.collect(timeout_s=0)) == 4
    infer.resume()
    infer.submit(PROMPTS, params)
    infer.pause("abort")
    assert infer.collect(timeout_s=0) == {}
    infer.resume()
    first, *rest = infer.submit(PROMPTS, params)
    infer.pause("keep")
    assert infer.abort([first]) in (0, 1)
    infer.resume()
    found: dict[int, rlcore.RequestOutput] = {}
    while len(found) < 3:
        found |= infer.collect(timeout_s=60)
    assert sorted(found) == rest
    with pytest.raises(InvalidInputError, match=r"pause\(\) takes one of abort, wait, keep, got 'now'"):
        infer.pause("now")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ moves


def test_what_left_comes_back(infer: rlcore.InferenceEngine) -> None:
    expected = tokens(infer.generate(PROMPTS, GREEDY))
    before = infer.memory_report()[0]["tags"]
    assert before["weights"]["device_bytes"] > 0 and before["kv_cache"]["device_bytes"] > 0
    reports = infer.offload()
    assert (
        reports["weights"][0].moved_bytes
        == reports["weights"][0].freed_device_bytes
        == before["weights"]["device_bytes"]
    )
    assert reports["kv_cache"][0].moved_bytes == 0
    assert reports["kv_cache"][0].freed_device_bytes == before["kv_cache"]["device_bytes"]
    away = infer.memory_report()[0]["tags"]
    assert away["weights"] == {"device_bytes": 0, "host_bytes": before["weights"]["device_bytes"]}
    assert away["kv_cache"] == {"device_bytes": 0, "host_bytes": 0}
    with pytest.raises(StateError, match=r"generate\(\) needs the weights of the inference engine"):
        infer.generate("1", GREEDY)
    infer.onload("weights")
    assert infer.onload("weights") == {}
    infer.onload("kv_cache")
    assert infer.memory_report()[0]["tags"] == before
    assert tokens(infer.generate(PROMPTS, GREEDY)) == expected


def test_requests_under_way_outlive_the_kv_cache(infer: rlcore.InferenceEngine) -> None:
    params = GREEDY | {"max_tokens": 200, "ignore_eos": True}
    expected = infer.generate(PROMPTS, params)
    numbers = infer.submit(PROMPTS, params)
    time.sleep(0.05)
    infer.offload()
    assert infer.collect(timeout_s=0.2).keys() <= set(numbers)
    infer.onload()
    found: dict[int, rlcore.RequestOutput] = {}
    while len(found) < 4 and (new := infer.collect(timeout_s=60)):
        found |= new
    assert_same(
        [found[number] for number in numbers if number in found],
        [output for number, output in zip(numbers, expected, strict=True) if number in found],
    )


def test_released_weights_are_read_again(infer: rlcore.InferenceEngine, write_model: Callable[..., Path]) -> None:
    expected = infer.generate(PROMPTS, GREEDY)
    infer.meta()
    infer.onload("weights")
    assert infer.state["weights"] == "empty"
    with pytest.raises(StateError, match="which are empty"):
        infer.generate("1", GREEDY)
    infer.load()
    infer.onload("kv_cache")
    assert_same(infer.generate(PROMPTS, GREEDY), expected)
    infer.load(write_model(seed=1))
    assert tokens(infer.generate(PROMPTS, GREEDY)) != tokens(expected)
    infer.load()
    assert_same(infer.generate(PROMPTS, GREEDY), expected)


def test_nothing_that_was_cached_outlives_a_load(
    infer: rlcore.InferenceEngine, write_model: Callable[..., Path]
) -> None:
    blocks = [[1 + number % 10 for number in range(200)]]  # longer than the blocks that are cached whole
    expected = infer.generate(blocks, GREEDY)
    infer.load(write_model(seed=1))
    assert tokens(infer.generate(blocks, GREEDY)) != tokens(expected)
    infer.load()
    assert_same(infer.generate(blocks, GREEDY), expected)


def test_spans_tell_what_came_before_a_load(infer: rlcore.InferenceEngine, write_model: Callable[..., Path]) -> None:
    (number,) = infer.submit(PROMPTS[0], GREEDY | {"max_tokens": 200, "ignore_eos": True})
    while ask(infer, "progress")[0].get(number, 0) < 10:
        time.sleep(0.001)
    infer.pause("keep")
    infer.load(write_model(seed=1))
    infer.resume()
    (output,) = infer.collect().values()
    first, second = output.outputs[0].version_spans
    assert (first.version, second.version) == (0, 1)
    assert (first.start, first.end, second.end) == (0, second.start, 200)
    infer.load()
    assert infer.generate(PROMPTS[0], GREEDY)[0].outputs[0].version_spans[0].version == 0


def test_another_models_folder_changes_nothing(
    infer: rlcore.InferenceEngine, write_model: Callable[..., Path], tmp_path: Path
) -> None:
    expected = tokens(infer.generate(PROMPTS, GREEDY))
    with pytest.raises(SyncError, match="holds another model than the inference engine's"):
        infer.load(write_model(intermediate_size=192))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        infer.load(tmp_path)
    assert tokens(infer.generate(PROMPTS, GREEDY)) == expected


# ------------------------------------------------------------------------------------------------- life, errors


def test_the_users_process_has_no_vllm_and_a_killed_replica_comes_back(
    model_folder: Path, build_vllm: Callable[..., rlcore.InferenceEngine], infer: rlcore.InferenceEngine
) -> None:
    expected = tokens(infer.generate(PROMPTS, GREEDY))
    with build_vllm(model_folder) as engine:
        pid = engine.executors[0].workers[0].process_id
        assert pid != os.getpid()
        engine.submit(PROMPTS, GREEDY | {"max_tokens": 200})
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            engine.generate(PROMPTS, GREEDY)
        assert tokens(engine.restart().generate(PROMPTS, GREEDY)) == expected
        assert engine.collect(timeout_s=0) == {}


def test_ctrl_c_leaves_no_request_in_the_way(infer: rlcore.InferenceEngine) -> None:
    expected = tokens(infer.generate(PROMPTS, GREEDY))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    long = {"n": 4, "max_tokens": 250, "ignore_eos": True}
    with pytest.raises(KeyboardInterrupt):
        infer.generate(["1"] * 2048, long)  # minutes
    started = time.monotonic()
    assert infer.executors[0].call("progress", [((), {})]) == [{}]
    assert tokens(infer.generate(PROMPTS, GREEDY)) == expected
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_num_seq": 4}, "vLLM has no engine argument 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"logprobs_mode": "raw_logits"}, "takes no 'logprobs_mode' .* distribution that was sampled from"),
        ({"worker_cls": "mine.Worker"}, "takes no 'worker_cls' .* the workers are rlcore's"),
        ({"max_model_len": 100_000}, "vLLM refuses these arguments of build"),
        ({"max_model_len": -5}, r"of build\(\): max_model_len: Input should be greater than or equal to -1$"),
        (
            {"kv_cache_memory_bytes": 1 << 10},
            "vLLM cannot start with these arguments of build.* 1024 bytes a device: `kv_cache_memory_bytes` is what to",
        ),
    ],
)
def test_engine_arguments_are_checked(
    model_folder: Path, build_vllm: Callable[..., rlcore.InferenceEngine], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInputError, match=match):
        build_vllm(model_folder, **options)
