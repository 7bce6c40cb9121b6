"""Offload without an engine, by tag: ``rlcore.Offloader`` and ``rlcore.offloaded``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rlcore
from rlcore.engines.offload.group import optimizer_tensors
from rlcore.engines.offload.storages import distinct_storages
from rlcore.errors import InvalidInputError, StateError, UnsupportedError


def trained() -> tuple[nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    module = nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(3, 64)).square().sum().backward()
        optimizer.step()
    return module, optimizer


def bytes_on_device(tensors: Any) -> int:
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def moments(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (tensor for tensor in optimizer_tensors([optimizer]) if tensor.numel() > 1)


def test_each_tag_leaves_and_comes_back_by_itself() -> None:
    module, optimizer = trained()
    before = copy.deepcopy([*module.state_dict().values(), *moments(optimizer), *(p.grad for p in module.parameters())])
    away = rlcore.Offloader(module, optimizer)
    assert away.state == {"weights": "loaded", "optimizer": "loaded", "grads": "loaded"}

    reports = away.offload("optimizer", "grads")
    nbytes = 4 * (64 * 48 + 48)
    assert reports["optimizer"].freed_device_bytes >= 2 * nbytes
    assert reports["grads"].freed_device_bytes == nbytes
    assert list(reports) == ["optimizer", "grads"]
    assert away.state == {"weights": "loaded", "optimizer": "offloaded", "grads": "offloaded"}
    assert bytes_on_device(moments(optimizer)) == 0
    assert all(parameter.grad is None for parameter in module.parameters())
    module(torch.ones(1, 64))
    with pytest.raises(StateError, match=r"^the optimizer of this Linear is offloaded; call onload\('optimizer'\) of"):
        optimizer.state_dict()
    with pytest.raises(StateError, match=r"^the grads of this Linear are offloaded; call onload\('grads'\) of"):
        module.zero_grad()

    assert list(away.offload()) == ["weights"], "what is away already is left alone"
    assert bytes_on_device(module.parameters()) == 0
    with pytest.raises(StateError, match=r"^the weights of this Linear are offloaded; call onload\('weights'\) of"):
        module(torch.ones(1, 64))

    assert list(away.onload("weights")) == ["weights"]
    module(torch.ones(1, 64))
    assert list(away.onload()) == ["optimizer", "grads"]
    assert away.onload() == {}
    after = [*module.state_dict().values(), *moments(optimizer), *(p.grad for p in module.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    optimizer.step()


def test_an_optimizer_alone_leaves_and_its_weights_stay() -> None:
    module, optimizer = trained()
    expected = [tensor.clone() for tensor in moments(optimizer)]
    away = rlcore.Offloader(optimizer)
    assert away.state == {"optimizer": "loaded"}
    with pytest.raises(InvalidInputError, match=r"^this Offloader has the tags optimizer; got 'weights'$"):
        away.offload("optimizer", "weights")
    assert away.state == {"optimizer": "loaded"}, "all tags or none"
    with rlcore.offloaded(optimizer) as report:
        assert report.moved_bytes >= 2 * 4 * (64 * 48 + 48)
        assert bytes_on_device(moments(optimizer)) == 0
        module(torch.ones(1, 64)).sum().backward()
        with pytest.raises(StateError, match=r"^the optimizer of this AdamW is offloaded; .* or leave the `with"):
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(expected, moments(optimizer), strict=True))
    optimizer.step()


def test_accelerates_optimizer_is_the_one_that_it_wraps() -> None:
    accelerate = pytest.importorskip("accelerate")
    module, optimizer = trained()
    module, wrapped = accelerate.Accelerator(cpu=True).prepare(module, optimizer)
    with rlcore.offloaded(module, wrapped):
        assert bytes_on_device([*module.parameters(), *moments(optimizer)]) == 0
        for use in (wrapped.step, wrapped.state_dict, lambda: copy.deepcopy(wrapped)):
            with pytest.raises(StateError, match="offloaded"):
                use()
    wrapped.step()


@pytest.mark.parametrize("first", ["weights", "optimizer"])
def test_a_method_that_two_tags_refuse_is_refused_until_both_are_back(first: str) -> None:
    module, optimizer = trained()
    away = rlcore.Offloader(module, optimizer)
    away.offload("weights")
    away.offload("optimizer")
    away.onload(first)
    with pytest.raises(StateError, match="offloaded"):
        copy.deepcopy(optimizer)
    away.onload()
    copy.deepcopy(optimizer)


def test_several_modules_leave_together() -> None:
    (policy, optimizer), (reference, _) = trained(), trained()
    with rlcore.offloaded(policy, reference, optimizer):
        for module in (policy, reference):
            assert bytes_on_device(module.parameters()) == 0
            with pytest.raises(StateError, match="offloaded"):
                module(torch.ones(1, 64))
    assert torch.equal(policy(torch.ones(1, 64)), reference(torch.ones(1, 64)))


def test_what_is_away_is_kept_though_nobody_refers_to_it() -> None:
    module, _ = trained()
    rlcore.Offloader(module).offload()
    gc.collect()
    with pytest.raises(StateError, match="the weights of this Linear are offloaded"):
        module(torch.ones(1, 64))
    (left,) = (one for one in gc.get_objects() if type(one) is rlcore.Offloader and "offloaded" in one.state.values())
    left.onload()
    module(torch.ones(1, 64))


def test_weights_in_a_file_are_read_into_memory_first(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True)
    module.load_state_dict(state, assign=True)
    module[1].weight = nn.Parameter(module[0].weight.data.T)  # another object that looks at the same memory
    assert not module[0].weight.untyped_storage().resizable(), "the weights lie in the file"
    parameters = list(module.parameters())
    expected = [parameter.detach().clone() for parameter in parameters]
    with rlcore.offloaded(module) as report:
        assert bytes_on_device(parameters) == 0
        assert report.freed_device_bytes == 4 * (64 * 64 + 2 * 64), "memory that is shared leaves once"
    assert all(torch.equal(one, other) for one, other in zip(expected, parameters, strict=True))
    assert [id(one) for one in module.parameters()] == [id(one) for one in parameters]
    with torch.no_grad():
        module[0].weight.fill_(3)
    assert (module[1].weight == 3).all()


def test_a_model_from_a_folder_of_weights_leaves_and_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    with rlcore.offloaded(model):
        assert bytes_on_device(model.parameters()) == 0
    assert torch.equal(model(tokens).logits, expected)


def test_memory_that_others_may_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").write_bytes(bytes(64))
    shared = torch.from_file(str(tmp_path / "shared"), shared=True, size=16)
    module = nn.Linear(16, 1, bias=False)
    module.weight = nn.Parameter(shared[None])
    with pytest.raises(UnsupportedError, match=r"tensor\.clone"), rlcore.offloaded(module):
        pass
    assert module.weight.data_ptr() == shared.data_ptr()
