"""The executor with real SGLang: beside transformers, under weight syncs, and when a process is killed.

The conformance suite holds its contract; what is here is SGLang's alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.conformance.ends import Belongings, descendants, wait_until
from rlcore.errors import InvalidInputError, RlcoreError, UnsupportedError, WorkerDiedError
from rlcore.process.status import start_time
from tests.accuracy import assert_as_accurate
from tests.model_rounding import logprob_rounding

from .conftest import DEVICE, DTYPE, SHAPE, WriteModel

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TURNS = 20
"""Offloads of weights and KV cache, each with its return."""
PROMPTS = [[9, 0, 2, 1], [3]]
FREE = {"max_tokens": 12, "ignore_eos": True, "seed": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 32, "tie_word_embeddings": True},
    "LlamaConfig": {},
    "GemmaConfig": {"head_dim": 32, "hidden_act": "gelu"},  # SGLang computes this one, whatever is asked for
    "Gemma2Config": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8},
    "Gemma3TextConfig": {"head_dim": 32, "sliding_window": 8},
    "Qwen3MoeConfig": {
        "head_dim": 64,  # SGLang's kernel of rotary embeddings has 64, 128, ..., and this model takes no other on a GPU
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,  # SGLang's model has a head of its own, which a tied checkpoint would not fill
    },
}
OPTIONS = {"Qwen3MoeConfig": {"enable_return_routed_experts": True}}
"""Of ``build()``. The two ranks have this model without."""
LOADED_NORMS = {"GemmaConfig": 5, "Gemma2Config": 9}
"""Norms of which SGLang's loader also makes a buffer of weights + 1. No plan copies it: the loader writes both."""


def schedulers(engine: rlcore.InferenceEngine) -> list[int]:
    return sorted(pid for pid, command in commands(engine).items() if b"sglang::scheduler" in command)


def commands(engine: rlcore.InferenceEngine) -> dict[int, bytes]:
    """Return the command line of each process that the worker started and that still runs."""
    found = {}
    for pid in descendants(engine.executors[0].workers[0].process_id):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def assert_as_transformers(engine: rlcore.InferenceEngine, folder: Path, **params: Any) -> None:
    """The engine's log-probs are those of transformers, up to what rounding does in ``DTYPE``."""
    outputs = engine.generate(PROMPTS, FREE | params)
    sequences = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    found = torch.tensor([logprob for output in outputs for logprob in output.outputs[0].logprobs])
    plain = model_of(folder)
    reference = plain_logprobs(plain, sequences, params.get("temperature", 1.0))
    if DTYPE == "float32":
        assert (found - reference).abs().max() < logprob_rounding(folder, num_tokens=16)
    else:
        exact = plain_logprobs(plain.double(), sequences, params.get("temperature", 1.0))
        assert_as_accurate(found, reference, exact, what="log-probs")


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE), experts_implementation="eager")
    return model.to(DEVICE)


@torch.no_grad()
def plain_logprobs(model: Any, sequences: list[tuple[list[int], list[int]]], temperature: float) -> torch.Tensor:
    """Return the log-probs of all completions' tokens, by prompt and completion."""
    found = []
    for prompt, completion in sequences:
        ids = torch.tensor([prompt + completion], device=DEVICE)
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu())
    return torch.cat(found)


@pytest.fixture(scope="module")
def replica(
    request: pytest.FixtureRequest, write_model: WriteModel, build_sglang: Callable[..., Any]
) -> Iterator[tuple[rlcore.InferenceEngine, Path]]:
    """An engine of a model of ``MODELS``, and its folder. All tests of a model have the same: each costs 20 s."""
    folder = write_model(request.param, **MODELS[request.param])
    with build_sglang(folder, **OPTIONS.get(request.param, {})) as engine:
        yield engine, folder


@pytest.mark.skipif(DTYPE != "float32", reason="in bfloat16 right routers differ where experts are nearly equal")
@pytest.mark.parametrize("replica", ["Qwen3MoeConfig"], indirect=True)
def test_completions_have_the_experts_that_transformers_chooses(replica: Any) -> None:
    """A second request with the same beginning has them too; its first tokens are in the prefix cache."""
    infer, folder = replica
    model = model_of(folder)
    for outputs in (infer.generate(PROMPTS, FREE | {"n": 2}), infer.generate(PROMPTS, FREE | {"max_tokens": 3})):
        for output in outputs:
            for completion in output.outputs:
                ids = torch.tensor([output.prompt_token_ids + completion.token_ids[:-1]], device=DEVICE)
                with torch.no_grad():
                    scores = model(ids, output_router_logits=True).router_logits
                chosen = torch.stack([layer.topk(2).indices for layer in scores], 1).cpu()
                found = completion.routed_experts
                assert found is not None and found.dtype == torch.int16
                assert found.sort(-1).values.tolist() == chosen.sort(-1).values.tolist()


@pytest.mark.parametrize("replica", ["Qwen2Config"], indirect=True)
def test_a_prompt_that_is_too_long_is_refused(replica: Any) -> None:
    """SGLang would cut it short without a word."""
    infer, folder = replica
    most = json.loads((folder / "config.json").read_text())["max_position_embeddings"] - 2
    told = rf"together {most + 1}; the model has {most} positions \(context_length, max_total_tokens\)"
    with pytest.raises(InvalidInputError, match=told):
        infer.generate([[5]], {"max_tokens": most})
    with pytest.raises(InvalidInputError, match=rf"has {most - 4} tokens; this engine takes .* at most {most - 5} "):
        infer.generate([[5] * (most - 4)], {"max_tokens": 1})
    assert infer.generate([[5] * (most - 5)], FREE | {"max_tokens": 5})[0].outputs[0].finish_reason == "length"
    assert len(infer.generate([[5]], FREE | {"max_tokens": most - 1})[0].outputs[0].token_ids) == most - 1


@pytest.mark.parametrize("replica", ["Qwen2Config"], indirect=True)
def test_schedulers_have_the_settings_of_nccl_that_trainers_have(replica: Any) -> None:
    """They are in one communicator, and a trainer's process has what the user sets, else NCCL's defaults."""
    infer, _ = replica
    (scheduler,) = schedulers(infer)

    def settings(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
        found = {name: value for name, value in environment if name.startswith("NCCL_") and "SOCKET" not in name}
        found.pop("NCCL_NVLS_ENABLE", None)  # ranks tell each other of it
        return found

    found = [entry.partition("=") for entry in Path(f"/proc/{scheduler}/environ").read_text().split("\0")]
    default = {"NCCL_CUMEM_ENABLE": "-2"}
    assert settings((name, value) for name, _, value in found) == default | settings(os.environ.items())


@pytest.mark.parametrize("replica", MODELS, indirect=True)
def test_a_model_samples_what_transformers_says_before_and_after_a_sync(
    replica: Any, request: pytest.FixtureRequest, write_model: WriteModel, build_train: Callable[..., Any]
) -> None:
    config = request.node.callspec.params["replica"]
    infer, first = replica
    second = write_model(config, seed=1, **MODELS[config])
    with build_train(second) as train:
        for temperature in (0.7, 1.0, 1.3):
            assert_as_transformers(infer, first, temperature=temperature)
        report = train.sync_weights(infer, verify=True)
        by_loader = getattr(torch, DTYPE).itemsize * SHAPE["hidden_size"] * LOADED_NORMS.get(config, 0)
        assert report.fallback_bytes == by_loader, "the rest is by plan"
        assert_as_transformers(infer, second)
        lose_nothing(infer)
        assert_as_transformers(infer, second)


@pytest.mark.parametrize("replica", ["Qwen2Config"], indirect=True)
def test_a_killed_worker_leaves_no_scheduler(replica: Any) -> None:
    """The worker and its schedulers are all the processes of a replica."""
    infer, _ = replica
    assert sum(b"sglang::" in command for command in commands(infer).values()) == len(schedulers(infer)) == 1
    belongings = Belongings(infer)
    os.kill(infer.executors[0].workers[0].process_id, signal.SIGKILL)
    belongings.wait_until_gone()


@pytest.mark.parametrize("replica", ["LlamaConfig"], indirect=True)
def test_a_worker_that_is_killed_with_its_guard_leaves_no_scheduler(replica: Any) -> None:
    """As by ``pkill -9 -f rlcore``: a scheduler is not found by that, as it writes a title over its command line."""
    infer, _ = replica
    (scheduler,) = schedulers(infer)
    began = start_time(scheduler)
    worker = infer.executors[0].workers[0].process_id
    own = Path(f"/proc/{worker}/cmdline").read_bytes()
    (guard,) = [pid for pid, command in commands(infer).items() if command == own]  # it is a fork of the worker
    for pid in (guard, worker):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: start_time(scheduler) != began, "the scheduler did not end")


def lose_nothing(engine: rlcore.InferenceEngine) -> None:
    """Have weights and KV cache leave and come back; whatever the model computes with must be as before.

    One request has no neighbours and finds nothing cached, so that each time the same kernels run on the same shapes.
    """

    def state() -> tuple[object, object, list[float]]:
        engine.meta("kv_cache")
        engine.onload("kv_cache")
        (completion,) = engine.generate([PROMPTS[0]], FREE | {"temperature": 0})[0].outputs
        (group,) = engine.executors
        (bits,) = group.call("sync_call", [(("sums", None), {})])
        return bits, completion.token_ids, completion.logprobs

    before = state()
    for _ in range(TURNS):
        engine.offload()
        engine.onload()
        assert state() == before


@pytest.mark.gpu
def test_large_tensors_and_captured_graphs_lose_nothing(
    write_model: WriteModel, build_sglang: Callable[..., Any]
) -> None:
    """The layers of a 7B, whose tensors leave in many blocks of host memory each."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    folder = write_model(**shape, vocab_size=152064, num_hidden_layers=4)
    with build_sglang(folder, max_total_tokens=1 << 20) as infer:
        lose_nothing(infer)
        free = torch.cuda.mem_get_info()[0]
        moved = sum(one.freed_device_bytes for reports in infer.offload().values() for one in reports)
        assert moved > 8 << 30
        assert torch.cuda.mem_get_info()[0] - free > moved - (1 << 28), "the driver has it again"


def write_two_ranks(write_model: WriteModel, seed: int = 0) -> Path:
    """Each rank has a half of each fused expert, and of all else that is cut."""
    return write_model("Qwen3MoeConfig", seed=seed, **MODELS["Qwen3MoeConfig"])


@pytest.fixture(scope="module")
def two_ranks_folder(write_model: WriteModel) -> Path:
    return write_two_ranks(write_model)


def two_devices() -> list[str]:
    if DEVICE != "cpu:0" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    return ["cpu:0", "cpu:1"] if DEVICE == "cpu:0" else ["cuda:0", "cuda:1"]


@pytest.fixture(scope="module")
def two_ranks(two_ranks_folder: Path, build_sglang: Callable[..., Any]) -> Iterator[rlcore.InferenceEngine]:
    with build_sglang(two_ranks_folder, devices=two_devices(), tensor_parallel_size=2) as engine:
        yield engine


def test_they_sample_what_transformers_says(two_ranks: Any, two_ranks_folder: Path) -> None:
    assert_as_transformers(two_ranks, two_ranks_folder)
    one, again = (two_ranks.generate(PROMPTS, FREE)[0].outputs[0].token_ids for _ in range(2))
    assert one == again


@pytest.mark.parametrize("route", ["direct", "packed", "collective"])
def test_each_gets_its_shards(
    two_ranks: Any, route: str, write_model: WriteModel, build_train: Callable[..., Any]
) -> None:
    if route != "collective" or DEVICE == "cpu:0":
        device = DEVICE
    elif torch.cuda.device_count() > 2:
        device = "cuda:2"
    else:
        pytest.skip("needs 3 CUDA devices: a collective joins ranks of devices of their own")
    other = write_two_ranks(write_model, seed=len(route))
    with build_train(other, devices=device) as train:
        report = train.sync_weights(two_ranks, route=route, verify=True)
    assert report.fallback_bytes == 0
    assert_as_transformers(two_ranks, other)


def test_nothing_listens_beyond_this_host(two_ranks: Any) -> None:
    told = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    listening = [line.split()[3] for line in told.splitlines() if "sglang::" in line]
    assert [address for address in listening if not address.startswith(("127.0.0.1:", "[::1]:"))] == []


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_scheduler_is_named_at_once_and_takes_nothing_with_it(two_ranks: Any, rank: int) -> None:
    if not rank:  # the one before is gone
        two_ranks.restart()
    belongings = Belongings(two_ranks)
    two_ranks.submit(PROMPTS, {"max_tokens": 200, "ignore_eos": True})
    pid = schedulers(two_ranks)[rank]
    os.kill(pid, signal.SIGKILL)
    told = rf"lost SGLang's scheduler \(process {pid}, tensor-parallel rank {rank}, .*killed by SIGKILL"
    with pytest.raises(WorkerDiedError, match=told):
        while True:
            two_ranks.collect(timeout_s=60)
    belongings.wait_until_gone()


def test_two_replicas_share_the_requests_and_both_take_new_weights(
    write_model: WriteModel, build_sglang: Callable[..., Any], build_train: Callable[..., Any]
) -> None:
    first, second = write_model(), write_model(seed=1)
    with build_sglang(first, devices=two_devices(), data_parallel_size=2) as infer, build_train(second) as train:
        assert len(infer.executors[0].workers) == 2
        assert_as_transformers(infer, first)
        train.sync_weights(infer, verify=True)
        assert_as_transformers(infer, second)


def test_a_value_that_sglang_refuses_is_told(write_model: WriteModel, build_sglang: Callable[..., Any]) -> None:
    with pytest.raises(RlcoreError, match="SGLang could not start: ValueError: 'no_such_format' is not a valid"):
        build_sglang(write_model(), load_format="no_such_format")


def test_a_model_that_sglang_fills_in_part_is_refused(
    write_model: WriteModel, build_sglang: Callable[..., Any]
) -> None:
    """It would answer nonsense without a word."""
    with pytest.raises(UnsupportedError, match=r"in SGLang is not supported: no weight reaches 'lm_head\.weight'"):
        build_sglang(write_model("Qwen3MoeConfig", **MODELS["Qwen3MoeConfig"] | {"tie_word_embeddings": True}))
