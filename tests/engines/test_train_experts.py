"""Experts that transformers fuses and checkpoints hold singly; the same bodies for any conversion of transformers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rlcore
from rlcore.engines.pieces import own_pieces
from rlcore.engines.sharding import reshard
from rlcore.nn import HuggingFaceTrainModule

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file


def config_of(kind: str, common: dict[str, Any]) -> Any:
    import transformers

    if kind == "Qwen3Moe":
        return transformers.Qwen3MoeConfig(
            **common, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        )
    if kind == "Mixtral":  # its checkpoints have other names too: block_sparse_moe, w1, w2, w3
        return transformers.MixtralConfig(**common, num_local_experts=3)
    if kind == "HrmText":  # its checkpoints hold in one what it has apart
        return transformers.HrmTextConfig(
            **common | {"num_key_value_heads": None, "num_hidden_layers": 1}, num_layers_per_stack=1, head_dim=8
        )
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    rope = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    return transformers.Qwen3VLMoeConfig(  # its checkpoints hold experts fused, and turned
        text_config=common | experts | rope, vision_config=vision | {"patch_size": 4, "deepstack_visual_indexes": [0]}
    )


CLASSES = {
    "Qwen3Moe": "Qwen3MoeForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "HrmText": "HrmTextForCausalLM",
    "Qwen3VLMoe": "Qwen3VLMoeForConditionalGeneration",
}


def in_weight(part: tuple[slice, ...], box: tuple[slice, ...]) -> list[tuple[int, int]]:
    return [(at.start + side.start, at.start + side.stop) for at, side in zip(part, box, strict=True)]


class Model:
    """A tiny random model and what is in its files."""

    def __init__(self, kind: str, folder: Path, common: dict[str, Any]) -> None:
        import transformers

        self.folder = folder
        self.transformers_class: Any = getattr(transformers, CLASSES[kind])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = self.transformers_class(config_of(kind, common))
        self.model.save_pretrained(folder)
        self.file = load_file(folder / "model.safetensors")

        class Policy(HuggingFaceTrainModule, self.transformers_class):
            def pieces(self) -> dict[str, list[tuple[list[tuple[int, int]], Tensor]]]:
                reshard(self)
                return {
                    weight.name: [
                        (in_weight(part.box, box), tensor.cpu().clone())
                        for part in weight.parts
                        for box, tensor in own_pieces(part.view, part.parameter)
                    ]
                    for weight in self.weight_views()
                }

        self.module_class: Any = Policy

    def engine(self, workers: int, device: str = "cpu") -> rlcore.TrainEngine:
        with rlcore.meta_device():
            module = self.module_class.from_pretrained(self.folder)
        engine = rlcore.TrainEngine(module)
        devices = [f"{device}:{index}" for index in range(workers)]
        return engine.build(devices=devices, data_parallel_size=workers, launcher="process", timeout_s=250)


@pytest.fixture(
    scope="module",
    params=["Qwen3Moe", "Mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("HrmText", "Qwen3VLMoe"))],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_config: Any) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param), tiny_config)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, qwen2_folder: Path) -> Iterator[None]:
    """Worker processes that engines of this file share: they end with the last engine on their device."""
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RLCORE_RUNTIME", str(tmp_path_factory.mktemp("runtime")))
        with rlcore.meta_device():
            module = Policy.from_pretrained(qwen2_folder)
        with rlcore.TrainEngine(module) as engine:
            yield engine.build(devices=["cpu:0", "cpu:1", "cpu:2"], data_parallel_size=3, launcher="process")


@pytest.mark.parametrize(
    "place",
    [("cpu", 1), ("cpu", 2), ("cpu", 3), pytest.param(("cuda", 2), marks=pytest.mark.multigpu)],
    ids=lambda place: f"{place[1]} {place[0]}",
)
def test_weights_are_those_of_the_file(
    model: Model, place: tuple[str, int], processes: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device, workers = place
    with caplog.at_level(logging.WARNING, "rlcore"), model.engine(workers, device) as engine:
        found = engine.state_dict()
        assert not caplog.messages, "read by slices"
        assert found.keys() == model.file.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.file.items())
        assert all(torch.equal(whole, model.file[name]) for name, whole in joined(engine.pieces()).items())
        changed = {name: tensor + 1 for name, tensor in found.items()}
        engine.load_state_dict(changed)
        again = engine.state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in changed.items())
        engine.export(tmp_path / "export")
    loaded, report = model.transformers_class.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor + 1), name


def test_a_sampler_that_fuses_experts_gets_them(processes: None, tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    model = Model("Mixtral", tmp_path / "model", tiny_config)
    with model.engine(2) as train, rlcore.InferenceEngine(model.folder, executor="hf") as infer:
        infer.build(devices=["cpu:0"], launcher="process")
        changed = {name: tensor * 1.1 for name, tensor in model.file.items()}
        train.load_state_dict(changed)
        assert train.sync_weights(infer).fallback_bytes == 0, "copied into the fused parameters, part by part"
        output = infer.generate([[1, 2, 3]], {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True})[0].outputs[0]
        ids = torch.tensor([1, 2, 3, *output.token_ids])
        scored = train.forward_logprobs({"input_ids": ids, "cu_seqlens": torch.tensor([0, len(ids)])})
    torch.testing.assert_close(scored[3:], torch.tensor(output.logprobs), rtol=1e-4, atol=1e-4)


def joined(ranks: list[dict[str, list[tuple[list[tuple[int, int]], Tensor]]]]) -> dict[str, Tensor]:
    """What the ranks hold of each weight, put together; each element is held by one of them."""
    names = ranks[0].keys()
    return {name: _joined([piece for rank in ranks for piece in rank[name]]) for name in names}


def _joined(pieces: list[tuple[list[tuple[int, int]], Tensor]]) -> Tensor:
    shape = [max(side) for side in zip(*[[stop for _, stop in box] for box, _ in pieces], strict=True)]
    whole = torch.full(shape, torch.nan)
    for box, tensor in pieces:
        part = whole[tuple(slice(*side) for side in box)]
        assert part.isnan().all(), "held twice"
        part.copy_(tensor)
    return whole
