"""Weights on their way from files into a module: by slices, by transformers' own loader, or from nothing."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.core_model_loading import PermuteForRope

import rlcore
from rlcore.errors import CheckpointError
from rlcore.nn import HuggingFaceTrainModule, OutputHead, TrainModule

READ_AS_RANK_2_OF_4 = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from rlcore.weights import source as weight_source
from rlcore.engines.executors.materialize import materialize
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.meta import meta_device
from rlcore.nn import TrainModule

class Stack(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 4098, bias=False) for _ in range(8))
    def wrap_classes(self):
        return ["Linear"]
    def materialization_source(self):
        return Path(sys.argv[1])

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

with meta_device():
    module = Stack()
cpu = torch.device("cpu")
join = lambda: dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
shard(module, Sharding(), cpu, join, 4)
torch.ones(1 << 20).to(torch.bfloat16).float()  # memory that the first conversion takes
source = weight_source.open_weights(module, torch.float32)
before, peak, read = anonymous(), 0, weight_source.TensorSlices.read
def watched(self, box):
    global peak
    peak = max(peak, anonymous())
    return read(self, box)
weight_source.TensorSlices.read = watched
materialize(module, source, cpu, seed=0)
held = sum(parameter.to_local().nbytes for parameter in module.parameters())
print(held, max(peak, anonymous()) - before, module.layers[7].weight.to_local()[0, 0].item())
"""


@pytest.mark.slow
def test_a_rank_reads_its_own_slices_and_holds_nothing_else(run_python: Any, tmp_path: Path) -> None:
    rows = torch.arange(4098.0)[:, None].expand(4098, 2048).bfloat16().contiguous()
    save_file({f"layers.{index}.weight": rows.clone() for index in range(8)}, tmp_path / "model.safetensors")
    script = tmp_path / "read.py"
    script.write_text(READ_AS_RANK_2_OF_4)
    done = run_python([str(script), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    held, grown, first = map(float, done.stdout.split())
    assert held == 8 * 1025 * 2048 * 4, "1025 of 4098 rows, in float32"
    assert grown < held + 1025 * 2048 * 4 + 4e6, f"{grown / 1e6:.0f} MB for {held / 1e6:.0f} MB of shards"
    assert first == float(torch.tensor(2050.0).bfloat16())


READ_JOINED_AS_EACH_RANK = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, PermuteForRope, WeightConverter
import rlcore
from rlcore.weights import source as weight_source
from rlcore.engines.executors.materialize import materialize
from rlcore.engines.fsdp2.sharding import Sharding, shard
from rlcore.weights.shards import own_box
from rlcore.nn import HuggingFaceTrainModule

class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
    pass

read, count = weight_source.TensorSlices.read, 0
def counted(self, box):
    global count
    found = read(self, box)
    count += found.nbytes
    return found
weight_source.TensorSlices.read = counted

cpu, attention = torch.device("cpu"), [f"self_attn.{part}_proj" for part in "qkv"]
config = Qwen2Config(vocab_size=30, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
for turned in [], [PermuteForRope(permute_layer_names=attention[:2])]:
    register_checkpoint_conversion_mapping("qwen2", [
        WeightConverter(["self_attn.wqkv"], attention, [Chunk(0), *turned]),
        WeightConverter(["mlp.gate_up.weight"], ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(0)]),
    ], overwrite=True)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(sys.argv[1])
    for rank in range(3):
        with rlcore.meta_device():
            policy = Policy.from_pretrained(sys.argv[1])
        source = weight_source.open_weights(policy, torch.float32)
        assert "model.layers.1.self_attn.wqkv.weight" in source and not source.is_whole
        join = lambda: dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        shard(policy, Sharding(), cpu, join, 3)
        count, held = 0, 0
        materialize(policy, source, cpu, seed=0)
        for name, parameter in policy.named_parameters():
            assert torch.equal(parameter.to_local(), model.get_parameter(name)[own_box(parameter)]), name
            held += parameter.to_local().nbytes
        print(count / held)
        dist.destroy_process_group()
"""


@pytest.mark.slow
def test_of_matrices_that_the_file_has_in_one_a_rank_reads_its_own_rows(run_python: Any, tmp_path: Path) -> None:
    if "permute_layer_names" not in inspect.signature(PermuteForRope).parameters:
        pytest.skip(f"transformers {transformers.__version__} turns no tensors by the names of their layers")
    script = tmp_path / "read.py"
    script.write_text(READ_JOINED_AS_EACH_RANK)
    done = run_python([str(script), str(tmp_path / "model")])
    assert done.returncode == 0, done.stderr
    read = list(map(float, done.stdout.split()))
    assert read[:3] == [1.0] * 3, "joined"
    # Rows of a head that are turned lie two by two in the file: both halves of those of each head are read twice.
    assert len(read) == 6 and all(1.0 < share < 1.5 for share in read[3:]), "and turned"


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Dense(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    return Dense


def weights_in(module_class: Any, folder: Path) -> dict[str, Tensor]:
    with rlcore.meta_device():
        module = module_class.from_pretrained(folder)
    with rlcore.TrainEngine(module) as engine:
        return engine.build(devices="cpu").state_dict()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_folder_with_an_index_is_read_by_it(policy: Any, qwen2_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen2_folder, tmp_path, dirs_exist_ok=True)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(whole)}
    for file in set(weight_map.values()):
        save_file({name: whole[name] for name in whole if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"another.format": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert_equal(weights_in(policy, tmp_path), whole)


@pytest.mark.parametrize("held", ["the bare model", "a causal model"])
@pytest.mark.parametrize("wanted", ["Qwen2Model", "Qwen2ForCausalLM", "Qwen2ForTokenClassification"])
def test_a_bare_model_and_one_with_another_head_are_read_by_slices(
    wanted: str, held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    is_tied = (held, wanted) == ("the bare model", "Qwen2ForCausalLM")  # its head has to be somewhere
    config = transformers.Qwen2Config(
        vocab_size=21, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    (model.model if held == "the bare model" else model).save_pretrained(tmp_path)

    class Wanted(HuggingFaceTrainModule, getattr(transformers, wanted)):  # type: ignore[misc]
        new_parameters = ("score",)

    with caplog.at_level(logging.WARNING, "rlcore"):
        found = weights_in(Wanted, tmp_path)
    inner = {name.removeprefix("model."): tensor for name, tensor in found.items() if not name.startswith("score")}
    expected = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    assert inner.keys() >= model.model.state_dict().keys()
    assert_equal(inner, expected)
    is_head_left = held == "a causal model" and wanted != "Qwen2ForCausalLM"
    assert caplog.messages == [f"Wanted has no use for ['lm_head.weight'] in {tmp_path}"] * is_head_left


def test_a_bare_model_without_the_head_is_refused(policy: Any, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=21, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing \['lm_head.weight'\], unexpected \[\]"):
        weights_in(policy, tmp_path)


def test_unknown_names_go_through_transformers_and_the_log_says_so(
    policy: Any, qwen2_folder: Path, copy_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(qwen2_folder)
    whole = load_file(folder / "model.safetensors")
    odd = {name.replace("q_proj", "query"): tensor for name, tensor in whole.items()}
    save_file(odd, folder / "model.safetensors", metadata={"format": "pt"})
    with (
        caplog.at_level(logging.WARNING, "rlcore"),
        pytest.raises(CheckpointError, match=r"does not fit Dense: missing \['model.layers.0.self_attn.q_proj"),
    ):
        weights_in(policy, folder)
    assert f"the tensors of {folder} are not this module's name by name" in caplog.text


def test_absent_tensors_of_a_model_folder_are_named(policy: Any, copy_of: Any, qwen2_folder: Path) -> None:
    folder = copy_of(qwen2_folder)
    whole = load_file(folder / "model.safetensors")
    del whole["model.norm.weight"]
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"do not fit Dense: missing \['model.norm.weight'\], unexpected \[\]"):
        weights_in(policy, folder)
    save_file(whole | {"model.norm.weight": torch.ones(31)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[32\]; the checkpoint has \[31\]"):
        weights_in(policy, folder)


class Critic(TrainModule):
    """Half of it is not in the checkpoint."""

    new_parameters = ("value",)

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, 8)
        self.value = nn.Linear(8, 5)
        self.weights = weights

    def materialization_source(self) -> dict[str, Tensor]:
        return self.weights

    def output_head(self) -> OutputHead:
        return OutputHead(self.value.weight, self.value.bias)


def test_parameters_that_start_fresh_are_initialized() -> None:
    with rlcore.meta_device():
        module = Critic({"embed.weight": torch.full((21, 8), 3.0)})
    with rlcore.TrainEngine(module) as engine:
        state = engine.build(devices="cpu").state_dict()
    assert torch.equal(state["embed.weight"], torch.full((21, 8), 3.0))
    bound = 8**-0.5
    assert state["value.weight"].abs().max() <= bound and state["value.weight"].std() > 0.1 * bound
    assert state["value.bias"].unique().numel() == 5
