"""Exports shard by shard: the files are transformers' own, and the host holds a weight at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.checkpoints import export as export_module
from rlcore.engines.checkpoints.export import export
from rlcore.errors import CheckpointError, InvalidInputError
from rlcore.nn import HuggingFaceTrainModule, TrainModule


@pytest.fixture(scope="module")
def engine(qwen2_folder: Path) -> Iterator[rlcore.TrainEngine]:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    with rlcore.meta_device():
        module = Policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as built:
        yield built.build(devices="cpu")


def test_shards_and_their_index_are_those_of_transformers(
    engine: rlcore.TrainEngine, qwen2_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    engine.export(tmp_path / "ours", max_shard_bytes=20_000)
    original = AutoModelForCausalLM.from_pretrained(qwen2_folder)
    original.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    names = [sorted(path.name for path in (tmp_path / who).glob("model*")) for who in ("ours", "theirs")]
    assert names[0] == names[1] and len(names[0]) > 4
    ours, theirs = (
        json.loads((tmp_path / who / "model.safetensors.index.json").read_text()) for who in ("ours", "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    state = engine.state_dict()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[name]), name
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert (tmp_path / "ours" / "tokenizer.json").exists() and (tmp_path / "ours" / "generation_config.json").exists()
    engine.export(tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").glob("model*")] == ["model.safetensors"], "the folder is replaced"


def test_a_folder_with_frozen_weights_in_bfloat16_is_read_as_it_was_trained(qwen2_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    with rlcore.meta_device():
        module = Policy.from_pretrained(qwen2_folder)
        module.model.embed_tokens.weight.requires_grad_(False)  # the first of all parameters
    with rlcore.TrainEngine(module).build(devices="cpu", dtype="float32", compute_dtype="bfloat16") as engine:
        state = engine.state_dict()
        engine.export(tmp_path / "ours")
    assert {value.dtype for value in state.values()} == {torch.float32, torch.bfloat16}
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "ours").named_parameters():
        assert torch.equal(parameter, state[name].float()), name


def test_a_wrong_shard_size_is_refused(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="max_shard_bytes must be a whole number of at least 1, got 0"):
        engine.export(tmp_path / "model", max_shard_bytes=0)


class Large(TrainModule):
    """64 weights of 4 MiB, which are made as they are asked for, as a device's are gathered."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(64):
            self.register_parameter(f"w{number:02}", torch.nn.Parameter(torch.empty(1 << 20, device="meta")))

    def materialization_source(self) -> dict[str, Tensor]:
        return {}

    def named_weights(self, *_: Any) -> Iterator[tuple[str, Tensor]]:
        for number in range(64):
            yield f"w{number:02}", torch.full((1 << 20,), float(number))


def peak_growth(work: Callable[[], None]) -> int:
    """Bytes by which anonymous memory grew at most."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10

    peak, stop, before = [0], threading.Event(), anonymous()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        stop.set()
        watcher.join()
    return peak[0] - before


def test_the_host_holds_less_than_a_shard(tmp_path: Path) -> None:
    shard = 64 << 20
    growth = peak_growth(lambda: export(Large(), tmp_path / "model", max_shard_bytes=shard, writes=True))
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert [file.stat().st_size // shard for file in files] == [1] * 4
    assert growth < shard, f"{growth >> 20} MiB"


def test_weights_of_several_widths_are_aligned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    class Mixed(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.uint8), ("d", torch.float64)):
                value = torch.arange(3).to(dtype)
                self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

        def materialization_source(self) -> dict[str, Tensor]:
            return {}

    export(Mixed(), tmp_path / "model", max_shard_bytes=1 << 20, writes=True)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: parameter.dtype for name, parameter in Mixed().named_parameters()
    }
    assert all(tensor.tolist() == [0, 1, 2] for tensor in found.values())


def test_those_who_do_not_write_gather_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    gathered = export_module._gathered

    def count(*args: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in gathered(*args):
            taken.append(name)
            yield name, tensor

    monkeypatch.setattr(export_module, "_gathered", count)
    export(Large(), tmp_path / "model", max_shard_bytes=1 << 30, writes=False)
    assert len(taken) == 64 and not (tmp_path / "model").exists()
    taken.clear()
    monkeypatch.setattr(export_module, "host_pieces", lambda tensor: (_ for _ in ()).throw(OSError("planted")))
    with pytest.raises(CheckpointError, match="planted"):
        export(Large(), tmp_path / "model", max_shard_bytes=1 << 30, writes=True)
    assert len(taken) == 64
    assert list(tmp_path.iterdir()) == []
