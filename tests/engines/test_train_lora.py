"""Adapters of peft on a sharded module: only they train, and what leaves the module is merged as peft merges it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import rlcore
from rlcore.engines.weight_sync.module_source import ModuleSourceTensors
from rlcore.errors import InvalidInputError, UnsupportedError
from rlcore.nn import TrainModule
from rlcore.ops import ppo_clip
from tests.accuracy import assert_parts_as_accurate, assert_same_bits
from tests.engines.train_policy import adamw_policy

from .plain_training import Truth
from .train_batches import assert_same_weights, packed_batch

peft = pytest.importorskip("peft", reason="peft is not installed")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

TARGETS = ["q_proj", "v_proj", "down_proj"]
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
WRAPPERS = ("base_model.", "base_layer", "_orig_mod", "_checkpoint_wrapped_module", ".default")


def policy_of(transformers_class: Any) -> Any:
    class Policy(adamw_policy(transformers_class, lr=1e-2, eps=1e-3)):  # eps: else signs of 0 to rounding
        def what_trains(self) -> dict[str, list[str]]:
            names = {parameter: name for name, parameter in self.named_parameters()}
            return {
                "states": [names[parameter] for parameter in self.optimizer.state],
                "dtypes": sorted({str(parameter.dtype) for parameter in self.parameters() if parameter.requires_grad}),
                "frozen dtypes": sorted({str(held.dtype) for held in self.parameters() if not held.requires_grad}),
            }

        def add_to_a_weight_of_the_last_rank(self, value: float) -> None:
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                self.model.norm.weight.to_local().data.add_(value)

    return Policy


@pytest.fixture(scope="module")
def dense() -> Any:
    from transformers import Qwen2ForCausalLM

    return policy_of(Qwen2ForCausalLM)


@pytest.fixture(scope="module")
def moe_folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return write_checkpoint(Qwen3MoeConfig(**tiny_config, **experts))


def lora_module(module_class: Any, folder: Path, **config: Any) -> Any:
    with rlcore.meta_device():
        module = module_class.from_pretrained(folder)
        module.add_adapter(peft.LoraConfig(r=4, **config))
    return module


Build = Callable[..., rlcore.TrainEngine]


@pytest.fixture(scope="module")
def build(shared_devices: tuple[str, ...], short_runtime_folder: Path) -> Iterator[Build]:
    """``build(module, workers, device="cpu", **options)``: engines, until the end of the file."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def get(module: Any, workers: int, device: str = "cpu", **options: Any) -> rlcore.TrainEngine:
            patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))  # the settings of tests are taken back after each
            engine = stack.enter_context(rlcore.TrainEngine(module))
            devices = shared_devices[:workers] if device == "cpu" else [f"{device}:{index}" for index in range(workers)]
            return engine.build(devices=devices, data_parallel_size=workers, launcher="process", **options)

        yield get


@pytest.fixture(scope="module")
def engine(dense: Any, qwen2_folder: Path, build: Build) -> rlcore.TrainEngine:
    """On two workers, for tests that do not care which adapters they begin with."""
    return build(lora_module(dense, qwen2_folder, target_modules=TARGETS), 2)


def merged_by_peft(
    folder: Path, adapters: dict[str, Tensor], scratch: Path, dtype: torch.dtype, **config: Any
) -> dict[str, Tensor]:
    """Checkpoint names and weights that peft and transformers write for the same adapters."""
    from transformers import AutoModelForCausalLM

    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=4, **config))
    report = peft.set_peft_model_state_dict(model, {f"base_model.model.{name}": w for name, w in adapters.items()})
    assert not report.unexpected_keys, "state_dict(adapters='only') has peft's names"
    model.to(dtype).merge_and_unload().save_pretrained(scratch / str(dtype))
    return load_file(scratch / str(dtype) / "model.safetensors")


def plain_with(adapters: dict[str, Tensor], module_class: Any, folder: Path, **config: Any) -> Any:
    module = module_class.from_pretrained(folder)
    module.add_adapter(peft.LoraConfig(r=4, **config))
    for name, tensor in module.named_weights("only"):
        tensor.copy_(adapters[name])
    return module


KINDS = [
    ("dense", "cpu", ()),
    ("experts", "cpu", pytest.mark.slow),
    ("dense", "cuda", pytest.mark.multigpu),
    ("experts", "cuda", [pytest.mark.slow, pytest.mark.multigpu]),
]


@pytest.fixture(params=[pytest.param(kind, id=f"{kind[0]} {kind[1]}", marks=kind[2]) for kind in KINDS])
def adapted(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The device, the class of the module, its folder, and what peft is told."""
    from transformers import Qwen3MoeForCausalLM

    kind, device, _ = request.param
    if kind == "dense":
        given = request.getfixturevalue("dense"), request.getfixturevalue("qwen2_folder")
        return SimpleNamespace(device=device, given=given, config={"target_modules": TARGETS})
    given = policy_of(Qwen3MoeForCausalLM), request.getfixturevalue("moe_folder")
    return SimpleNamespace(device=device, given=given, config=EXPERTS)


@pytest.mark.filterwarnings("ignore:The PEFT config's", "ignore:`is_gradient_checkpointing` is deprecated")
def test_only_adapters_train_and_merge_as_in_peft(adapted: SimpleNamespace, build: Build, tmp_path: Path) -> None:
    (module_class, folder), config = adapted.given, adapted.config
    alone, sharded = (build(lora_module(*adapted.given, **config), workers, adapted.device) for workers in (1, 2))
    base, fresh = alone.state_dict(adapters="base"), alone.state_dict(adapters="only")
    assert_same_weights(alone.state_dict(), base)
    assert_same_weights(sharded.state_dict(adapters="only"), fresh)
    assert all((tensor == 0).all() == ("lora_B" in name) for name, tensor in fresh.items())
    for engine in (alone, sharded):
        truth = Truth(lambda: plain_with(fresh, *adapted.given, **config), device=adapted.device)
        for _ in range(2):
            truth.assert_step(engine.train_batch(packed_batch(), ppo_clip()), packed_batch(), ppo_clip())
        truth.assert_weights(engine.state_dict(adapters="only"), adapters="only")
    for what in sharded.what_trains():
        assert len(what["states"]) == len(fresh) and all("lora_" in name for name in what["states"])

    adapters, merged = sharded.state_dict(adapters="only"), sharded.state_dict()
    assert not any(wrapper in name for name in merged for wrapper in WRAPPERS)
    assert_same_weights(sharded.state_dict(adapters="base"), base)
    assert any(not torch.equal(merged[name], base[name]) for name in base)
    by_peft = (merged_by_peft(folder, adapters, tmp_path, dtype, **config) for dtype in (torch.float32, torch.float64))
    assert_parts_as_accurate(merged, *by_peft)

    sharded.export(tmp_path / "export")
    exported = Truth(lambda: module_class.from_pretrained(tmp_path / "export"), device=adapted.device)
    exported.assert_logprobs(sharded.forward_logprobs(packed_batch()), packed_batch())


def test_a_checkpoint_holds_the_adapters_and_the_base_is_read_again(
    engine: rlcore.TrainEngine, dense: Any, qwen2_folder: Path, build: Build, tmp_path: Path
) -> None:
    engine.train_batch(packed_batch(), ppo_clip())
    engine.save(tmp_path / "checkpoint")
    merged, trained = engine.state_dict(), engine.state_dict(adapters="only")
    expected = engine.train_batch(packed_batch(seed=1), ppo_clip())

    files = [safe_open(file, framework="pt") for file in (tmp_path / "checkpoint").rglob("*.safetensors")]
    names = {name for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
    saved = {name for name in names if name.startswith("model.")}
    assert len(saved) == len(engine.state_dict(adapters="only")) and all("lora_" in name for name in saved)
    engine.meta("weights")
    engine.onload("weights")
    engine.load(tmp_path / "checkpoint")
    assert_same_weights(engine.state_dict(), merged)
    assert engine.train_batch(packed_batch(seed=1), ppo_clip()) == expected, "the same operations"

    other = build(lora_module(dense, qwen2_folder, target_modules=TARGETS), 1)
    other.load(tmp_path / "checkpoint")
    assert_same_weights(other.state_dict(adapters="only"), trained)


def test_all_ranks_save_what_one_of_them_has_changed_of_the_base(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.add_to_a_weight_of_the_last_rank(1.0)
    base = engine.state_dict(adapters="base")
    engine.save(tmp_path)
    engine.add_to_a_weight_of_the_last_rank(1.0)
    engine.load(tmp_path)
    assert_same_weights(engine.state_dict(adapters="base"), base)
    engine.add_to_a_weight_of_the_last_rank(-1.0)
    engine.save(tmp_path)
    left_out = json.loads((tmp_path / "manifest.json").read_text())["state"]["left_out"]
    assert "model.norm.weight" in left_out, "1 + 1 - 1 are the bits of its source"


@pytest.mark.slow
def test_a_restart_goes_on_from_the_checkpoint(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.train_batch(packed_batch(), ppo_clip())
    engine.save(tmp_path / "checkpoint")
    merged = engine.state_dict()
    expected = engine.train_batch(packed_batch(seed=1), ppo_clip())
    engine.restart()
    assert_same_weights(engine.state_dict(), merged)
    assert engine.train_batch(packed_batch(seed=1), ppo_clip()) == expected, "the same operations"


def test_the_base_is_its_own_reference(engine: rlcore.TrainEngine) -> None:
    engine.disable_adapters()
    base = engine.forward_logprobs(packed_batch())
    engine.enable_adapters()
    for _ in range(2):
        assert engine.train_batch(packed_batch(), ppo_clip())["grad_norm"] > 0
    assert not torch.equal(engine.forward_logprobs(packed_batch()), base)
    engine.disable_adapters()
    again = engine.forward_logprobs(packed_batch())
    engine.enable_adapters()
    assert_same_bits(again, base, "the same operations")


def test_load_state_dict_takes_adapters(engine: rlcore.TrainEngine) -> None:
    adapters = {name: torch.randn(tensor.shape) for name, tensor in engine.state_dict(adapters="only").items()}
    engine.load_state_dict(adapters)
    assert_same_weights(engine.state_dict(adapters="only"), adapters)
    with pytest.raises(InvalidInputError, match=r"needs exactly what state_dict\(adapters='only'\) gives: missing"):
        engine.load_state_dict(engine.state_dict())


def test_the_seed_of_the_program_is_that_of_the_adapters(dense: Any, qwen2_folder: Path, build: Build) -> None:
    def fresh(seed: int) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build(lora_module(dense, qwen2_folder, target_modules=["q_proj"]), 1).state_dict(adapters="only")

    first, again, other = fresh(3), fresh(3), fresh(4)
    assert_same_weights(first, again)
    random = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in random)
    assert not torch.equal(first[random[0]], first[random[1]]), "each layer has its own"


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_frozen_is_kept_in_the_compute_dtype(
    dense: Any, qwen2_folder: Path, build: Build, workers: int
) -> None:
    module = lora_module(dense, qwen2_folder, target_modules=TARGETS)
    engine = build(module, workers, compute_dtype="bfloat16")
    assert engine.train_batch(packed_batch(), ppo_clip())["grad_norm"] > 0
    for what in engine.what_trains():
        assert (what["dtypes"], what["frozen dtypes"]) == (["torch.float32"], ["torch.bfloat16"])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"use_dora": True},
            r"DoRA at model.layers.0.self_attn.q_proj is not supported: it starts from the base weights",
        ),
        ({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper at lm_head is not supported: it holds a second copy"),
        ({"target_modules": ["embed_tokens"]}, "an adapter on model.embed_tokens is not supported: its weight is tied"),
    ],
)
def test_what_peft_has_and_this_has_not_is_refused(
    config: dict[str, Any], message: str, dense: Any, qwen2_folder: Path
) -> None:
    module = lora_module(dense, qwen2_folder, **{"target_modules": ["q_proj"], **config})
    with pytest.raises(UnsupportedError, match=message):
        rlcore.TrainEngine(module)


def test_adapters_that_start_from_base_weights_are_refused(dense: Any, qwen2_folder: Path) -> None:
    module = lora_module(dense, qwen2_folder, target_modules=["q_proj"])
    module.peft_config["default"].init_lora_weights = "olora"
    with pytest.raises(UnsupportedError, match="init_lora_weights='olora' of adapter 'default' is not supported"):
        rlcore.TrainEngine(module)


def test_other_kinds_of_adapters_are_refused(dense: Any, qwen2_folder: Path) -> None:
    with rlcore.meta_device():
        module = dense.from_pretrained(qwen2_folder)
        module = peft.inject_adapter_in_model(peft.LoHaConfig(r=4, target_modules=["q_proj"]), module)
    with pytest.raises(UnsupportedError, match="the adapters supported are LoRA's"):
        rlcore.TrainEngine(module)


def test_what_is_written_past_version_counters_between_two_passes_is_merged() -> None:
    module = TrainModule()
    module.layer = nn.Linear(3, 2)
    module.config = {}
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["layer"], r=1, lora_alpha=1), module)
    weights = [weight.name for weight in module.weight_views()]
    assert weights == ["layer.weight", "layer.bias"]
    holding = ModuleSourceTensors(module, 1)
    holding.compute([0])
    layer: Any = module.layer
    layer.base_layer.bias.data.fill_(5.0)
    layer.lora_A.default.weight.data.fill_(2.0)
    layer.lora_B.default.weight.data.fill_(3.0)
    (bias,) = holding.compute([1])
    assert torch.equal(bias, torch.full((2,), 5.0)), "what the first pass kept was not used"
    weight, bias = holding.compute([0, 1])
    assert_same_bits(weight, layer.base_layer.weight.detach() + 6.0, "2 times 3 is exact, and the sum rounds once")
