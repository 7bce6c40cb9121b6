"""RLite's tutorial runs, and its names mean here what they mean there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.compat import rlite
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.nn import HuggingFaceTrainModule, TrainModule
from tests.warm import run_warm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a token for each of some characters, none of which ends a text: all are as long."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder = tmp_path_factory.mktemp("qwen2")
    characters = "Helo, wrd!?你好世界"
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(characters), "bos_token_id": None, "eos_token_id": None, "dtype": "float32"}
    config = Qwen2Config(**shape, **tokens, num_key_value_heads=2, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {character: token for token, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor", ["hf", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang"))]
)
def test_the_tutorial_runs_whole(executor: str, folder: Path, tmp_path: Path, short_runtime_folder: Path) -> None:
    program = (ROOT / "examples" / "rlite_tutorial.py").read_text()
    # What the tutorial leaves to the reader: the sampler has the trainer's weights.
    program += """
    again = vllm_engine.generate(prompts[:1], {"temperature": 0, "max_tokens": 8})[0].outputs[0]
    print(vllm_engine.version, again.version_spans[0].version, vllm_engine.state, fsdp2_engine.state)
    fsdp2_engine.close(), vllm_engine.close()
"""
    (tmp_path / "tutorial.py").write_text(program)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {
        "RLCORE_DEVICE": device,
        "RLCORE_RUNTIME": str(short_runtime_folder),
        "TORCH_COMPILE_DISABLE": "1",
    }
    result = run_warm([str(tmp_path / "tutorial.py"), str(folder), executor], env=settings)
    assert result.returncode == 0, result.stderr
    *_, last = result.stdout.splitlines()
    assert last.startswith("1 1 {'weights': <State.LOADED")
    assert re.search(r"\{'weights': <State.OFFLOADED[^}]*'optimizer': <State.OFFLOADED", last)


@pytest.fixture
def infer(folder: Path) -> Iterator[rlite.RliteInferenceEngine]:
    with rlite.RliteInferenceEngine(folder, executor="hf") as engine:
        yield engine.build(devices="cpu", tensor_parallel_size=1)


def test_a_hook_makes_conversations(infer: rlite.RliteInferenceEngine) -> None:
    calls = []

    def hook(generation: rlite.IndexedGenerationHistory, input_queue: Any, output_queue: Any) -> None:
        calls.append(generation.index)
        if len(generation.outputs) < 2 + generation.index:
            text = generation.inputs[-1] + generation.outputs[-1].outputs[0].text
            inputs = [*generation.inputs, text]
            input_queue.put(rlite.IndexedGenerationHistory(generation.index, inputs, generation.outputs))
        else:
            output_queue.put(generation)

    params = {"temperature": 0, "max_tokens": 4}
    found = infer.generate(["Hello", "world"], params, post_generation_hook=hook)
    assert [len(turns) for turns in found] == [2, 3]
    assert sorted(calls) == [0, 0, 1, 1, 1]
    for turns, first in zip(found, ["Hello", "world"], strict=True):
        texts = [turn.outputs[0].text for turn in turns]
        assert [turn.prompt for turn in turns] == [first + "".join(texts[:at]) for at in range(len(turns))]
    with pytest.raises(InvalidInputError, match="history 0 on 0 input and 0 output queues; put it on one"):
        infer.generate(["Hello"], params, post_generation_hook=lambda generation, again, done: None)
    nothing = rlite.IndexedGenerationHistory(0)
    for put in (3, nothing):
        with pytest.raises(InvalidInputError, match="must put a history with inputs on a queue, got"):
            infer.generate(["Hello"], params, post_generation_hook=lambda history, again, done, put=put: again.put(put))
    for prompts in ("Hello", 3, None, {}):
        with pytest.raises(
            InvalidInputError, match=r"generate\(\) takes a list of texts, or NeedParallel of one, as prom"
        ):
            infer.generate(prompts, params)
    with pytest.raises(
        InvalidInputError, match=r"generate\(\) takes a function, or None as post_generation_hook, got 3"
    ):
        infer.generate(["Hello"], params, post_generation_hook=3)
    for texts in (["Hello"], iter(["Hello"])):
        assert infer.generate(texts, params)[0].outputs[0].token_ids == found[0][0].outputs[0].token_ids


class Counting(rlite.nn.BaseTrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def materialization_source(self) -> Any:
        return {"weight": torch.ones(3)}

    def where(self, rows: list[int]) -> tuple[str, list[int]]:
        made = [torch.zeros(2, device="cuda"), torch.zeros(2).cuda(), torch.ones(1).to("cuda:0")]
        made += [
            torch.zeros(1, device=torch.device("cuda", 0)),
            torch.zeros(1, device=torch.device(type="cuda", index=0)),
        ]
        return str({one.device.type for one in made}), rows

    def num_own(self) -> int:
        return getattr(self.weight, "_local_tensor", self.weight).numel()


@pytest.fixture
def train() -> Iterator[rlite.RliteTrainEngine]:
    with rlite.device("meta"):
        module = Counting()
    with rlite.RliteTrainEngine(module) as engine:
        yield engine


def test_methods_return_by_replica_and_shard_and_cuda_is_their_own_device(train: rlite.RliteTrainEngine) -> None:
    train.build(tensor_parallel_size=1, devices="cpu")
    assert train.where(rlite.NeedParallel([5, 6, 7])) == [[("{'cpu'}", [5, 6, 7])]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "elements"),
    [({"tensor_parallel_size": 2}, [[2, 1]]), ({"data_parallel_size": 2}, [[3], [3]])],
    ids=["shards", "replicas"],
)
def test_tensor_parallel_devices_have_a_shard_each_and_data_parallel_ones_the_whole(
    sizes: dict[str, Any], elements: list[list[int]], train: rlite.RliteTrainEngine, short_runtime_folder: Path
) -> None:
    train.build(devices=["cpu:0", "cpu:1"], **sizes)
    assert train.num_own() == elements


def test_a_list_of_tags_moves_each_of_them(infer: rlite.RliteInferenceEngine) -> None:
    assert set(infer.cpu(["weights", "kv_cache"])) == {"weights", "kv_cache"}
    assert {str(state) for state in infer.state.values()} == {"offloaded", "released"}
    assert set(infer.to("cuda", ["weights"], "kv_cache")) == {"weights", "kv_cache"}
    assert {str(state) for state in infer.state.values()} == {"loaded"}
    assert set(infer.meta(("weights",))) == {"weights"}
    with pytest.raises(InvalidInputError, match="has the tags weights, kv_cache; got 'optimizer'"):
        infer.cuda(["weights", "optimizer"])
    not_a_list: Any = {"weights"}
    with pytest.raises(InvalidInputError, match=r"has the tags weights, kv_cache; got \{'weights'\}$"):
        infer.cuda(not_a_list)


def test_arguments_of_build_are_taken_at_their_defaults(train: rlite.RliteTrainEngine) -> None:
    infer = rlite.RliteInferenceEngine("unused", executor="hf")
    for engine in (train, infer):
        with pytest.raises(
            UnsupportedError, match=r"pipeline_parallel_size=2\) .* only 1 is accepted; use tensor_parallel_size$"
        ):
            engine.build(pipeline_parallel_size=2, devices="cpu")
        with pytest.raises(UnsupportedError, match=r"allow_colocate=False\) .* only True .* with not_colocate_with$"):
            engine.build(allow_colocate=False, devices="cpu")
    for name, accepted in (("tensor_parallel_size", "1"), ("data_parallel_size", "1, or -1")):
        with pytest.raises(InvalidInputError, match=rf"^{name} must be a whole number of at least {accepted}, got 0$"):
            train.build(**{name: 0}, devices="cpu")
    train.build(pipeline_parallel_size=1, allow_colocate=True, devices="cpu")
    assert train.num_own() == [[3]]


@pytest.mark.parametrize("tag", ["gpu", None, ["meta"]])
def test_a_device_that_torch_has_not(tag: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"device\(\) takes a device of torch, such as 'cuda' or 'meta', got"):
        rlite.device(tag)


@pytest.mark.parametrize("options", [{"debug_mode": "debugpy"}, {"debug_post_mortem": True}])
def test_a_debugger_that_is_not_there(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="use debug_mode='pdb'"):
        rlite.init(**options)


def test_what_a_cluster_needs_is_taken_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("rlcore.init", lambda **options: asked.append(options))
    rlite.init(network_interface="eth3", dedup_logs=True, debug_mode="pdb")
    assert asked == [{"debug": "pdb"}]


def test_the_modules_have_all_the_names_that_rlite_has_for_them() -> None:
    nn = rlite.nn
    assert nn.Fsdp2TrainModule is nn.BaseTrainModule and issubclass(nn.BaseTrainModule, TrainModule)
    own = nn.HuggingFaceFsdp2TrainModule
    assert nn.BaseHuggingFaceTrainModule is nn.HuggingFaceFsdpTrainModule is own
    assert issubclass(own, HuggingFaceTrainModule)
