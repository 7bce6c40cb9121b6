"""Sender and receiver in one thread, as where a trainer and its engine take turns in one process; named tensors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rlcore
from rlcore.engines.weight_sync.target import ModuleTarget
from rlcore.errors import InvalidInputError, StateError, SyncError
from rlcore.registry import get_device
from tests.accuracy import assert_same_bits


class Unused:
    """A channel that nothing may go through."""

    def send(self, data: bytes) -> None:
        raise AssertionError

    def recv(self, timeout_s: float) -> bytes:
        raise AssertionError


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def test_one_call_in_one_thread_moves_the_weights() -> None:
    source, served = nn.Linear(30, 20), nn.Linear(30, 20)
    receiver = rlcore.WeightReceiver(served)
    assert (receiver.version, receiver.is_whole) == (None, True)
    sender = rlcore.WeightSender(source.named_parameters, receiver)
    report = sender.send(version=3)
    assert (report.version, report.route, report.handles_opened) == (3, "local", 0)
    assert report.moved_bytes == 4 * (20 * 30 + 20)
    assert (receiver.version, receiver.is_whole) == (3, True)
    assert equal(source, served)
    with torch.no_grad():
        source.weight.add_(1)
    assert sender.send(verify=True).version == 4
    assert equal(source, served)
    assert sender.send(version=0).version == 0
    assert receiver.version == 0
    for end in (sender, receiver):
        end.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_a_model_is_sent_as_its_checkpoint_has_it_with_adapters_merged(
    write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
    folder = write_checkpoint(transformers.Qwen3MoeConfig(**tiny_config | experts), seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    in_files = {name: torch.empty_like(tensor) for name, tensor in read_files(folder).items()}
    assert any(".experts.3.up_proj" in name for name in in_files), "transformers keeps them fused"
    sender = rlcore.WeightSender(adapted, rlcore.WeightReceiver(in_files))
    for number in (1, 2):
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.mul_(1.5)
        sender.send()
        merged = copy.deepcopy(adapted).merge_and_unload()
        merged.save_pretrained(tmp_path / str(number))
        expected = read_files(tmp_path / str(number))
        assert expected.keys() == in_files.keys()
        for name, tensor in expected.items():
            assert_same_bits(in_files[name], tensor, name)
    sender.revoke()
    sender.send()
    assert_same_bits(in_files["lm_head.weight"], expected["lm_head.weight"], "after revoke()")
    sender.close()


def read_files(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("route", ["local", "direct", "packed"])
def test_several_receivers_of_one_thread_commit_together(route: Any) -> None:
    source, served = nn.Linear(30, 20), [nn.Linear(30, 20) for _ in range(2)]
    receivers = [rlcore.WeightReceiver(module) for module in served]
    sender = rlcore.WeightSender(dict(source.named_parameters()), receivers)
    assert sender.send(route=route).route == route
    assert all(equal(source, module) for module in served)
    assert [receiver.version for receiver in receivers] == [1, 1]
    sender.close()


def test_a_loader_that_fails_leaves_a_mixture_and_says_so() -> None:
    class Loader(ModuleTarget):
        fails = True

        def reload(self, weights: Any) -> None:
            if self.fails:
                raise ArithmeticError("the loader says no")
            super().reload(weights)

    source, served = nn.Linear(30, 20), nn.Linear(30, 20)
    receiver = rlcore.WeightReceiver(Loader(served, get_device("cpu")))
    sender = rlcore.WeightSender(source.named_parameters, receiver)
    with pytest.raises(ArithmeticError, match="the loader says no") as caught:
        sender.send(verify=True)
    assert caught.value.__notes__[-1].startswith("The receiving model's weights are a mixture: do not use them before")
    assert not receiver.is_whole
    Loader.fails = False
    sender.send()
    assert receiver.is_whole
    assert equal(source, served)


def test_weights_of_another_model_are_refused_and_nothing_is_written() -> None:
    served = nn.Linear(30, 20)
    before = served.weight.detach().clone()
    sender = rlcore.WeightSender(nn.Linear(31, 20).named_parameters, rlcore.WeightReceiver(served))
    with pytest.raises(SyncError, match=r"of other shapes: weight \[20, 31\] for \[20, 30\]") as caught:
        sender.send()
    assert caught.value.__notes__[-1] == "The receiving model's weights are whole"
    assert torch.equal(served.weight, before)


class Lazy(Mapping[str, Tensor]):
    """A mapping that is no dict, with names that no module could have."""

    def __init__(self) -> None:
        self.held = {
            "a": torch.zeros(4, 3),
            "a.b": torch.zeros(5).double(),
            "type": torch.zeros(3, 4).T,
            "": torch.zeros(2),
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_named_tensors_are_written_in_place_whatever_their_names() -> None:
    served = Lazy()
    addresses = [tensor.data_ptr() for tensor in served.values()]
    given = {name: torch.randn(tensor.shape, dtype=tensor.dtype) for name, tensor in served.items()}
    receiver = rlcore.WeightReceiver(served)
    sender = rlcore.WeightSender(given, receiver)
    for verify in (False, True):
        for tensor in given.values():
            tensor.add_(1)
        sender.send(verify=verify)
        assert all(torch.equal(served[name], tensor) for name, tensor in given.items())
    assert [tensor.data_ptr() for tensor in served.values()] == addresses
    with pytest.raises(SyncError, match=r"missing: a\.b"):
        rlcore.WeightSender({"a": given["a"]}, rlcore.WeightReceiver({"a": served["a"], "a.b": served["a.b"]})).send()


def test_a_tensor_with_gaps_is_staged_and_what_lies_in_the_gaps_stays() -> None:
    whole = torch.full((6, 8), -1.0)
    given = {"a": torch.arange(18.0).view(6, 3)}
    sender = rlcore.WeightSender(given, rlcore.WeightReceiver({"a": whole[:, :3]}))
    sender.send()
    given["a"].add_(100)
    assert sender.send(staged=True).version == 2
    assert torch.equal(whole[:, :3], given["a"]) and bool((whole[:, 3:] == -1).all())


def test_receivers_that_are_none_are_refused() -> None:
    tensor = torch.zeros(2)
    receivers: dict[str, Any] = {
        "WeightReceiver takes at least one named tensor, got an empty mapping": {},
        "WeightReceiver takes a mapping of names to tensors; 'x' is int": {"x": 3},
        "WeightReceiver takes a mapping of names to tensors; 3 is Tensor": {3: tensor},
        "WeightReceiver takes tensors on one device, got some on each of cpu, meta; make": {
            "x": tensor, "y": tensor.to("meta")
        },
        "WeightReceiver takes a module with parameters; this ReLU has none": nn.ReLU(),
        "WeightReceiver takes a torch.nn.Module, a mapping of names to tensors, or a Target as model, got 3": 3,
    }  # fmt: skip
    for message, model in receivers.items():
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            rlcore.WeightReceiver(model)
    with pytest.raises(StateError, match=r"has no channel: its WeightSender's send\(\) does its part too"):
        rlcore.WeightReceiver({"x": tensor}).receive()
    here, there = rlcore.WeightReceiver({"x": tensor}), rlcore.WeightReceiver({"x": tensor}, Unused())
    with pytest.raises(InvalidInputError, match=r"takes channels or receivers of this process, got 1 and 1; make a"):
        rlcore.WeightSender({"x": tensor}, [here, Unused()])
    with pytest.raises(InvalidInputError, match="got a WeightReceiver that has a channel; give it the channel's other"):
        rlcore.WeightSender({"x": tensor}, there)


RANKS = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    import rlcore

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = {"a": torch.arange(35.0).view(7, 5), "b": torch.arange(3.0)}
    given = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    served = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    receiver = rlcore.WeightReceiver(served)
    sender = rlcore.WeightSender(given, receiver)
    found = []
    for step in (1, 2):
        for tensor in given.values():
            tensor.to_local().add_(1)
        report = sender.send()
        found.append([report.route, all(torch.equal(served[name], whole[name] + step) for name in whole)])
    sender.close()
    receiver.close()
    with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_of_a_sharded_trainer_has_a_receiver_in_its_own_thread(
    tmp_path: Path, torchrun: Callable[..., None]
) -> None:
    torchrun(RANKS, tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [["packed", True]] * 2
