"""InferenceEngine, and a trainer and a sampler together: parity, weight sync, taking turns."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlcore
from rlcore.engines.engine import Engine
from rlcore.engines.executors.options import BUILD_OPTIONS
from rlcore.engines.offload.storages import distinct_storages
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.weight_sync.engines import poisoned
from rlcore.errors import (
    CheckpointError,
    DeviceError,
    InvalidInputError,
    StateError,
    SyncError,
    UnsupportedError,
    WorkerDiedError,
)
from rlcore.ops import ppo_clip

from .train_batches import packed
from .train_policy import adamw_policy, truth_of

GREEDY = {"temperature": 0, "max_tokens": 12}
PROMPTS = ["1+1=", "90210-777=", "3", "12*12+12="]


on_both_launchers = pytest.mark.parametrize("launcher", ["inline", "process"], indirect=True)
on_both_slowly = pytest.mark.parametrize(
    "launcher", ["inline", pytest.param("process", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def device(launcher: str, request: pytest.FixtureRequest) -> str:
    return "cpu" if launcher == "inline" else str(request.getfixturevalue("shared_devices")[0])


@pytest.fixture
def infer(qwen2_folder: Path, launcher: str, device: str) -> Iterator[rlcore.InferenceEngine]:
    with rlcore.InferenceEngine(qwen2_folder) as engine:
        yield engine.build(devices=device, launcher=launcher)


@pytest.fixture
def train(qwen2_folder: Path, launcher: str, device: str) -> Iterator[rlcore.TrainEngine]:
    with rlcore.meta_device():
        module = policy_of(qwen2_folder).from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as engine:
        yield engine.build(devices=device, launcher=launcher)


def test_parameters_are_parsed_once_and_submitted_texts_are_tokenised_once(
    qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Any] = []
    real_check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: (parsed.append(self), real_check(self)))
    with rlcore.InferenceEngine(qwen2_folder).build(devices="cpu", launcher="inline") as engine:
        reader = engine.executors[0].workers[0].worker._reader
        tokenized: list[str] = []
        real_tokenizer = reader.tokenizer

        class Counting:
            def __call__(self, texts: list[str]) -> Any:
                tokenized.extend(texts)
                return real_tokenizer(texts)

            def decode(self, *args: Any, **options: Any) -> Any:
                return real_tokenizer.decode(*args, **options)

        monkeypatch.setattr(reader, "tokenizer", Counting())
        outputs = engine.generate(PROMPTS, GREEDY)
        assert (len(parsed), tokenized) == (1, PROMPTS)
        engine.generate(PROMPTS[:2], [GREEDY, GREEDY])
        assert (len(parsed), tokenized) == (3, [*PROMPTS, *PROMPTS[:2]])
        tokenized.clear()
        numbers = engine.submit(PROMPTS, GREEDY, max_in_flight=2)
        found: dict[int, Any] = {}
        while len(found) < len(numbers):
            found |= engine.collect()
        assert (len(parsed), tokenized) == (4, PROMPTS)
        for output, same in zip([found[number] for number in numbers], outputs, strict=True):
            assert (output.prompt, output.prompt_token_ids) == (same.prompt, same.prompt_token_ids)
            assert output.outputs[0].text == same.outputs[0].text


def test_the_build_options_that_errors_name_are_those_of_build() -> None:
    parameters = inspect.signature(Engine.build).parameters.values()
    assert tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY) == BUILD_OPTIONS


def test_parameters_of_another_kind_are_refused(qwen2_folder: Path) -> None:
    with rlcore.InferenceEngine(qwen2_folder).build(devices="cpu", launcher="inline") as engine:
        for wrong in ("greedy", 5):
            for call in (engine.generate, engine.submit):
                with pytest.raises(
                    InvalidInputError, match="sampling parameters must be a mapping, None or rlcore's own"
                ):
                    call(PROMPTS, wrong)


def policy_of(folder: Path) -> Any:
    from transformers import AutoConfig, LlamaForCausalLM, Qwen2ForCausalLM

    base = {"qwen2": Qwen2ForCausalLM, "llama": LlamaForCausalLM}[AutoConfig.from_pretrained(folder).model_type]
    return adamw_policy(base, lr=0.05)


def model_of(engine: Any) -> Any:
    return engine.executors[0].workers[0].worker.module


def batch_from(infer: rlcore.InferenceEngine) -> dict[str, torch.Tensor]:
    outputs = infer.generate(PROMPTS, {"n": 3, "max_tokens": 8, "seed": 1})
    return rlcore.collate(outputs, advantages=torch.randn(len(PROMPTS), 3, generator=torch.Generator().manual_seed(0)))


# ---------------------------------------------------------------------------------------------------- parity


def assert_log_probs(outputs: Any, folder: Path, *, and_of: rlcore.TrainEngine | None = None, **sampling: Any) -> None:
    """Completions have those of plain PyTorch with the weights of ``folder``, and a trainer gives the same."""
    padded = rlcore.collate(outputs)
    batch, mask = packed(padded), padded["attention_mask"].bool()
    truth = truth_of(policy_of(folder), folder)
    truth.assert_logprobs(batch["old_logprobs"], batch, **sampling)
    if and_of is not None:
        truth.assert_logprobs(and_of.forward_logprobs(padded, **sampling)[mask], batch, **sampling)
    assert batch["old_logprobs"].min() < -0.5, "the comparison is not between zeros"


@pytest.mark.parametrize(
    ("folder", "sampling"),
    [
        pytest.param("qwen2_folder", {}, marks=pytest.mark.slow),
        pytest.param("qwen2_folder", {"temperature": 1.4, "top_p": 0.8}, marks=pytest.mark.slow),
        ("llama_folder", {"temperature": 0.9, "top_p": 0.7, "top_k": 6}),
    ],
    ids=str,
)
def test_the_samplers_log_probs_are_the_trainers(
    folder: str, sampling: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(folder)
    with rlcore.InferenceEngine(path) as infer:
        infer.build(devices="cpu")
        outputs = infer.generate(PROMPTS, {"n": 5, "max_tokens": 20, "seed": 3} | sampling)
    with rlcore.meta_device():
        module = policy_of(path).from_pretrained(path)
    with rlcore.TrainEngine(module).build(devices="cpu") as train:
        assert_log_probs(outputs, path, and_of=train, **sampling)


def test_collate_lays_out_prompt_and_completion(infer: rlcore.InferenceEngine) -> None:
    outputs = infer.generate([[1, 2, 3], [4]], {"n": 2, "max_tokens": 5, "seed": 0})
    batch = rlcore.collate(outputs, advantages=[[1.0, 2.0], [3.0, 4.0]])
    assert batch["advantages"].tolist() == [1, 2, 3, 4]
    completion = outputs[1].outputs[1]
    length = 1 + len(completion.token_ids)
    assert batch["input_ids"][3, :length].tolist() == [4, *completion.token_ids]
    assert batch["attention_mask"][3].sum() == length
    assert batch["loss_mask"][3].nonzero().flatten().tolist() == list(range(1, length))
    assert batch["old_logprobs"][3, 1:length].tolist() == completion.logprobs
    with pytest.raises(InvalidInputError, match=r"collate\(\) got 3 rewards for 4 completions; give one each"):
        rlcore.collate(outputs, rewards=[1, 2, 3])
    with pytest.raises(InvalidInputError, match="needs at least one completion"):
        rlcore.collate([])


# --------------------------------------------------------------------------------------------------- generate


@on_both_launchers
def test_texts_and_token_ids_give_the_same(infer: rlcore.InferenceEngine, characters: str) -> None:
    as_ids = [[characters.index(character) for character in prompt] for prompt in PROMPTS]
    from_text, from_ids = infer.generate(PROMPTS, GREEDY), infer.generate(as_ids, GREEDY)
    assert [o.outputs for o in from_text] == [o.outputs for o in from_ids]
    assert [o.prompt for o in from_text] == PROMPTS
    assert [o.prompt for o in from_ids] == [None] * len(PROMPTS)
    alone = infer.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert alone.token_ids == from_text[0].outputs[0].token_ids


def test_errors_of_generate_name_the_prompt_or_parameter(infer: rlcore.InferenceEngine) -> None:
    with pytest.raises(InvalidInputError, match=r"max_new_tokens.*max_tokens"):
        infer.generate(PROMPTS, {"max_new_tokens": 3})
    with pytest.raises(InvalidInputError, match="prompt 1 holds token id 21"):
        infer.generate([[1], [21]])
    with pytest.raises(InvalidInputError, match="prompt 1 holds token id 21"):
        infer.submit([[1], [21]])
    assert infer.collect() == {}
    assert infer.generate(PROMPTS, GREEDY), "the engine goes on"


@pytest.mark.parametrize("method", ["generate", "submit"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([1, 2, 3], "prompt 0 must be a text or a list of token ids, got 1"),
        (["1", [1.0]], r"prompt 1 must be a text or a list of token ids, got \[1\.0\]"),
        ([[True]], r"prompt 0 must be a text or a list of token ids, got \[True\]"),
        ([torch.tensor([1, 2])], r"prompt 0 must be a text or a list of token ids, got tensor\(\[1, 2\]\)"),
        (
            [{"prompt": "1"}],
            "prompt 0 is a dict, which needs the token ids of one prompt as prompt_token_ids or input_ids",
        ),
        ({"prompt": "1"}, "prompts must be a text or a list of texts or of lists of token ids, got {"),
        (3, "prompts must be a text or a list of texts or of lists of token ids, got 3"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_named(infer: rlcore.InferenceEngine, method: str, given: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{text}"):
        getattr(infer, method)(given)


# ------------------------------------------------------------------------------------------------------- sync


def test_only_a_sync_changes_what_is_generated(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine) -> None:
    before = infer.generate(PROMPTS, GREEDY)
    batch = batch_from(infer)
    for _ in range(5):
        train.train_batch(batch, ppo_clip())
    assert infer.generate(PROMPTS, GREEDY) == before
    ours = {storage.data_ptr() for storage in distinct_storages(model_of(train).parameters())}
    theirs = {storage.data_ptr() for storage in distinct_storages(model_of(infer).parameters())}
    assert not ours & theirs

    report = train.sync_weights(infer)
    assert report.version == infer.version == 1
    assert report.route == "local"
    assert (
        report.moved_bytes
        == report.needed_bytes
        == sum(storage.nbytes() for storage in distinct_storages(model_of(infer).parameters()))
    )
    after = infer.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in after] != [o.outputs[0].token_ids for o in before]
    assert {span.version for o in after for span in o.outputs[0].version_spans} == {1}
    for name, parameter in model_of(infer).named_parameters():
        assert torch.equal(parameter, model_of(train).get_parameter(name)), name
    assert train.p2p_weight_sync(infer, version=7).version == infer.version == 7


@on_both_slowly
def test_a_synced_engine_equals_a_fresh_one_of_the_export(
    train: rlcore.TrainEngine, infer: rlcore.InferenceEngine, tmp_path: Path
) -> None:
    train.train_batch(batch_from(infer), ppo_clip())
    train.sync_weights(infer)
    train.export(tmp_path / "model")
    with rlcore.InferenceEngine(tmp_path / "model") as fresh:
        expected = fresh.build(devices="cpu").generate(PROMPTS, GREEDY)
    got = infer.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
    assert_log_probs(infer.generate(PROMPTS, {"n": 3, "seed": 1}), tmp_path / "model")


@on_both_slowly
def test_taking_turns_on_one_device_as_a_colocated_system_does(
    train: rlcore.TrainEngine, infer: rlcore.InferenceEngine, launcher: str
) -> None:
    batch = batch_from(infer)
    infer.meta()
    if launcher == "inline":
        assert model_of(infer).get_parameter("model.norm.weight").untyped_storage().nbytes() == 0
    train.train_batch(batch, ppo_clip())
    train.offload("optimizer", "grads")
    infer.onload("weights")
    assert infer.state == {"weights": "empty", "kv_cache": "released"}
    with pytest.raises(StateError, match=r"the inference engine, which are empty; call sync_weights"):
        infer.generate(PROMPTS)
    train.sync_weights(infer)
    train.offload()
    with pytest.raises(StateError, match=r"needs the kv_cache of .* released; call onload\('kv_cache'\)"):
        infer.generate(PROMPTS)
    infer.onload("kv_cache")
    assert infer.generate(PROMPTS, GREEDY)


def test_a_sync_needs_both_sides_on_the_device(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine) -> None:
    infer.offload("weights")
    with pytest.raises(StateError, match=r"sync_weights\(\) needs the weights of the inference engine, .* offloaded"):
        train.sync_weights(infer)
    infer.onload()
    train.offload("weights")
    with pytest.raises(StateError, match=r"sync_weights\(\) needs the weights of the train engine, .* offloaded"):
        train.sync_weights(infer)
    train.onload()
    with pytest.raises(UnsupportedError, match=r"route='collective' .*it takes a process for each, and 1 hold both"):
        train.sync_weights(infer, route="collective")
    with pytest.raises(
        InvalidInputError, match="route must be one of local, direct, packed, collective, relayed, or None"
    ):
        train.sync_weights(infer, route="ipc")  # type: ignore[arg-type]
    several = "takes an inference engine or several different ones, got"
    others: list[Any] = ["x", None, train, [], [infer, infer], [infer, 3]]
    for other in others:
        with pytest.raises(InvalidInputError, match=rf"^sync_weights\(\) {several}"):
            train.sync_weights(other)
    assert infer.version == 0
    assert infer.sync_state == "serving"


@on_both_slowly
def test_a_sync_of_another_model_is_refused_before_the_first_byte(
    train: rlcore.TrainEngine, llama_folder: Path, launcher: str, device: str
) -> None:
    with rlcore.InferenceEngine(llama_folder) as other:
        other.build(devices=device, launcher=launcher)
        before = other.generate(PROMPTS, GREEDY)
        with pytest.raises(SyncError, match="serves its old weights: unexpected: model"):
            train.sync_weights(other)
        assert other.generate(PROMPTS, GREEDY) == before


def test_an_engine_that_lost_its_workers_in_a_sync_asks_for_a_restart(llama_folder: Path) -> None:
    """A sync into it, or load(), would be refused too."""
    with rlcore.InferenceEngine(llama_folder) as other:
        other.build(devices="cpu:0", launcher="process")
        told = r"refuses to generate; restart\(\) the engine that lost its workers; then sync again"
        with pytest.raises(SyncError, match=told), poisoned([other], 3):
            os.kill(other.executors[0].workers[0].process_id, signal.SIGKILL)
            other.memory_report()
        with pytest.raises(StateError, match=r"generate\(\) is refused: the workers were ended .*; call restart\(\)$"):
            other.generate(PROMPTS)
        other.restart()
        assert len(other.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_a_sync_that_stops_midway_poisons_the_engine_until_a_complete_one(
    train: rlcore.TrainEngine, infer: rlcore.InferenceEngine
) -> None:
    receiver = infer.executors[0].workers[0].worker._receiver

    def torn(round_id: int) -> int:
        raise RuntimeError("the cable was pulled")

    receiver.ready = torn
    with pytest.raises(SyncError, match=r"stopped midway.*the cable was pulled.*holds a mixture and refuses"):
        train.sync_weights(infer)
    del receiver.ready
    assert infer.sync_state == "poisoned"
    with pytest.raises(StateError, match=r"generate\(\) is refused: a weight sync stopped midway"):
        infer.generate(PROMPTS)
    infer.offload()
    with pytest.raises(StateError, match="taking the KV cache back is refused"):
        infer.onload()
    infer.onload("weights")
    train.sync_weights(infer)
    infer.onload("kv_cache")
    assert infer.sync_state == "serving"
    assert infer.generate(PROMPTS, GREEDY)


def test_load_brings_the_folders_weights_back(
    train: rlcore.TrainEngine, infer: rlcore.InferenceEngine, llama_folder: Path
) -> None:
    before = infer.generate(PROMPTS, GREEDY)
    train.train_batch(batch_from(infer), ppo_clip())
    train.sync_weights(infer)
    infer.meta()
    infer.onload()
    infer.load()
    assert infer.version == 0
    assert infer.generate(PROMPTS, GREEDY) == before
    with pytest.raises(CheckpointError):
        infer.load("/nonexistent")
    assert infer.generate(PROMPTS, GREEDY) == before, "a folder that cannot be read changes nothing"
    with pytest.raises(SyncError):
        infer.load(llama_folder)


# -------------------------------------------------------------------------------------------------- placement


def test_placement_says_who_holds_the_device(train: rlcore.TrainEngine, qwen2_folder: Path) -> None:
    engine = rlcore.InferenceEngine(qwen2_folder)
    with pytest.raises(rlcore.RlcoreError, match=r"can be used: cpu:0 is held by the train engine"):
        engine.build(not_colocate_with=train, devices="cpu")
    with pytest.raises(InvalidInputError, match="devices or colocate_with, not both"):
        engine.build(colocate_with=train, devices="cpu")
    with pytest.raises(StateError, match="colocate_with names the inference engine, which is not built"):
        engine.build(colocate_with=rlcore.InferenceEngine(qwen2_folder))
    assert engine.build(colocate_with=train).device == "cpu:0"
    engine.close()


def test_an_option_that_the_executor_does_not_know_is_named_with_the_nearest(qwen2_folder: Path) -> None:
    with pytest.raises(
        InvalidInputError,
        match=r"build\(\) of the inference engine has no option 'max_num_seq'; did you mean 'max_num_seqs'\? .* and by "
        "the executor 'hf': dtype, attn_implementation, max_num_seqs, max_num_tokens, "
        "enable_return_routed_experts$",
    ):
        rlcore.InferenceEngine(qwen2_folder).build(devices="cpu", max_num_seq=4)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), None, "5"])
def test_a_deadline_that_is_none_is_refused_before_anything_starts(qwen2_folder: Path, timeout_s: Any) -> None:
    with pytest.raises(InvalidInputError, match="timeout_s must be a positive number of seconds, got"):
        rlcore.InferenceEngine(qwen2_folder).build(devices="cpu", timeout_s=timeout_s)


def test_a_sync_between_launchers_goes_through_staging_buffers(
    train: rlcore.TrainEngine, qwen2_folder: Path, shared_devices: tuple[str, ...]
) -> None:
    with rlcore.InferenceEngine(qwen2_folder) as other:
        other.build(devices=shared_devices[0], launcher="process")
        with pytest.raises(
            UnsupportedError, match=rf"local: {shared_devices[0]} of the receivers is not in one process"
        ):
            train.sync_weights(other, route="local")
        train.train_batch(batch_from(other), ppo_clip())
        assert train.sync_weights(other).route == "packed"
        assert train.sync_weights(other).moved_bytes == 0, "nothing has changed but the version"
        assert other.version == 2


def test_a_delta_sync_after_the_weights_were_released_brings_all(
    train: rlcore.TrainEngine, infer: rlcore.InferenceEngine
) -> None:
    options: Any = {"route": "packed", "delta": True}
    train.sync_weights(infer, **options)
    train.train_batch(batch_from(infer), ppo_clip())
    assert train.sync_weights(infer, **options).is_delta
    infer.meta("weights")
    infer.onload("weights")
    report = train.sync_weights(infer, **options)
    assert not report.is_delta
    assert "does not hold version 2 as this trainer sent it" in report.why_dense


def test_restart_brings_the_folders_weights_back(train: rlcore.TrainEngine, infer: rlcore.InferenceEngine) -> None:
    before = infer.generate(PROMPTS, GREEDY)
    train.train_batch(batch_from(infer), ppo_clip())
    train.sync_weights(infer)
    infer.restart()
    assert infer.version == 0
    assert infer.generate(PROMPTS, GREEDY) == before
    assert train.sync_weights(infer).version == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["process"], indirect=True)
def test_engines_whose_process_was_killed_restart_in_another(qwen2_folder: Path, launcher: str) -> None:
    with rlcore.meta_device():
        module = policy_of(qwen2_folder).from_pretrained(qwen2_folder)
    options = {"devices": "cpu:7", "launcher": launcher}
    with rlcore.TrainEngine(module) as train, rlcore.InferenceEngine(qwen2_folder) as infer:
        train.build(**options)
        before = infer.build(**options).generate(PROMPTS, GREEDY)
        os.kill(infer.executors[0].workers[0].process_id, signal.SIGKILL)
        for engine in (infer, train):  # they shared it
            with pytest.raises(WorkerDiedError):
                engine.memory_report()
        train.restart()
        infer.restart()
        assert infer.generate(PROMPTS, GREEDY) == before
        assert train.sync_weights(infer).version == 1


def test_acceptable_node_ips_must_name_this_host(qwen2_folder: Path) -> None:
    engine = rlcore.InferenceEngine(qwen2_folder)
    with pytest.raises(DeviceError, match=r"acceptable_node_ips \['192.0.2.7'\] names no address of this host \(.+\)"):
        engine.build(devices="cpu", acceptable_node_ips=["192.0.2.7"])
    with pytest.raises(InvalidInputError, match="must hold IP addresses, got 'node7'"):
        engine.build(devices="cpu", acceptable_node_ips=["node7"])
    with pytest.raises(InvalidInputError, match=r"must be a list of addresses, got '127.0.0.1'"):
        engine.build(devices="cpu", acceptable_node_ips="127.0.0.1")
    with engine:
        assert engine.build(devices="cpu", acceptable_node_ips=["192.0.2.7", "127.0.0.1"]).is_built


def test_the_engine_shows_what_a_program_calls_and_no_step_of_a_weight_sync() -> None:
    found = {name for name in dir(rlcore.InferenceEngine) if not name.startswith("_")}
    assert found == {
        *("build", "close", "restart", "is_built", "device", "devices", "executors", "label", "kind", "tags"),
        *("takes_all_devices", "onload", "offload", "meta", "cpu", "cuda", "npu", "to", "state", "memory_report"),
        *("generate", "generate_turns", "submit", "collect", "abort", "pause", "resume"),
        *("load", "path", "version", "sync_state", "activations", "can_swap"),
    }
