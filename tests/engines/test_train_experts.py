"""Experts that transformers fuses and checkpoints hold singly; the same bodies for any conversion of transformers."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rlcore
from rlcore.engines.executors.pieces import own_pieces
from rlcore.engines.fsdp2.sharding import reshard
from rlcore.nn import HuggingFaceTrainModule

from .plain_training import Truth
from .train_batches import assert_same_weights

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file


def config_of(kind: str, common: dict[str, Any]) -> Any:
    import transformers

    if kind == "Qwen3Moe":
        return transformers.Qwen3MoeConfig(
            **common, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        )
    if kind == "Mixtral":  # its checkpoints have other names too: block_sparse_moe, w1, w2, w3
        return transformers.MixtralConfig(**common, num_local_experts=3)
    if not hasattr(transformers, CLASSES[kind]):
        pytest.skip(f"transformers {transformers.__version__} has no {CLASSES[kind]}")
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

    def engine(self, *devices: str) -> rlcore.TrainEngine:
        with rlcore.meta_device():
            module = self.module_class.from_pretrained(self.folder)
        engine = rlcore.TrainEngine(module)
        return engine.build(devices=devices, data_parallel_size=len(devices), launcher="process", timeout_s=250)


@pytest.fixture(
    scope="module",
    params=["Qwen3Moe", "Mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("HrmText", "Qwen3VLMoe"))],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_config: Any) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param), tiny_config)


def test_a_derived_class_computes_experts_as_its_model_does(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where the model's own class has not been used before, and so has not said how."""
    import transformers

    known = "_can_set_experts_implementation_cached_value"
    monkeypatch.delattr(transformers.Qwen3MoeForCausalLM, known, raising=False)

    class Derived(HuggingFaceTrainModule, transformers.Qwen3MoeForCausalLM):
        pass

    with rlcore.meta_device():
        made = Derived._from_config(config_of("Qwen3Moe", tiny_config))
    assert made.config._experts_implementation == "grouped_mm"


@pytest.fixture(autouse=True)
def _same_runtime(short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param((0,), id="1 cpu"),
        pytest.param((0, 1), id="2 cpu"),
        pytest.param(("cuda:0", "cuda:1"), id="2 cuda", marks=pytest.mark.multigpu),
    ],
)
def test_weights_are_those_of_the_file(
    model: Model,
    devices: tuple[Any, ...],
    shared_devices: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = [shared_devices[device] if isinstance(device, int) else device for device in devices]
    with caplog.at_level(logging.WARNING, "rlcore"), model.engine(*names) as engine:
        found = engine.state_dict()
        assert not caplog.messages, "read by slices"
        assert_same_weights(found, model.file)
        assert_same_weights(joined(engine.pieces()), {name: model.file[name] for name in engine.pieces()[0]})
        changed = {name: tensor + 1 for name, tensor in found.items()}
        engine.load_state_dict(changed)
        assert_same_weights(engine.state_dict(), changed)
        engine.export(tmp_path / "export")
    loaded, report = model.transformers_class.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    assert_same_weights(loaded.state_dict(), {name: one + 1 for name, one in model.model.state_dict().items()})


@pytest.mark.slow
def test_a_sampler_that_fuses_experts_gets_them(
    shared_devices: tuple[str, ...], tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    model = Model("Mixtral", tmp_path / "model", tiny_config)
    with model.engine(*shared_devices) as train, rlcore.InferenceEngine(model.folder, executor="hf") as infer:
        infer.build(devices=shared_devices[:1], launcher="process")
        train.load_state_dict({name: tensor * 1.1 for name, tensor in model.file.items()})
        assert train.sync_weights(infer).fallback_bytes == 0, "copied into the fused parameters, part by part"
        output = infer.generate([[1, 2, 3]], {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True})[0].outputs[0]
        ids = torch.tensor([1, 2, 3, *output.token_ids])
        batch = {"input_ids": ids, "cu_seqlens": torch.tensor([0, len(ids)]), "loss_mask": torch.arange(len(ids)) >= 3}
        scored = train.forward_logprobs(batch)
        train.export(tmp_path / "changed")
    truth = Truth(lambda: model.module_class.from_pretrained(tmp_path / "changed"))
    for found in (scored, torch.cat([torch.zeros(3), torch.tensor(output.logprobs)])):
        truth.assert_logprobs(found, batch)


def joined(ranks: list[dict[str, list[tuple[list[tuple[int, int]], Tensor]]]]) -> dict[str, Tensor]:
    """Return each weight, joined from the parts of the ranks; one rank has each element."""
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
