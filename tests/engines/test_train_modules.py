"""Modules that engines train beside language models of transformers: a user's own, one that sees, and critics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import rlcore
from rlcore import NeedParallel
from rlcore.errors import StateError
from rlcore.nn import HuggingFaceTrainModule, OutputHead, TrainModule
from rlcore.ops import gae, ppo_clip, token_weights, value_loss
from rlcore.weights.view import Adapters, WeightView, whole
from tests.accuracy import assert_as_accurate

from .plain_training import Truth, assert_metrics
from .train_batches import VOCAB, assert_same_weights, packed_batch
from .train_policy import adamw_policy, truth_of_own

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

HIDDEN = 8
Build = Callable[..., rlcore.TrainEngine]


@pytest.fixture(scope="module")
def build(shared_devices: tuple[str, ...], short_runtime_folder: Path) -> Iterator[Build]:
    """``build(module, workers, **options)``: engines, until the end of the file."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def get(module: Any, workers: int, **options: Any) -> rlcore.TrainEngine:
            patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))  # the settings of tests are taken back after each
            engine = stack.enter_context(rlcore.TrainEngine(module))
            return engine.build(devices=shared_devices[:workers], data_parallel_size=workers, **options)

        yield get


# ------------------------------------------------------------------------------------------------- a user's own


class Mixer(nn.Module):
    """A gated sum of what came before; its two matrices are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * HIDDEN + 1, HIDDEN))

    def forward(self, hidden_TH: Tensor, cu_seqlens: Tensor) -> Tensor:
        past_TH = torch.cat([part.cumsum(0) / len(part) for part in hidden_TH.tensor_split(cu_seqlens[1:-1].long())])
        gate_TH, up_TH = past_TH @ self.gate_up[:HIDDEN].T, past_TH @ self.gate_up[HIDDEN:-1].T
        return hidden_TH + torch.sigmoid(gate_TH) * up_TH + self.gate_up[-1]


class Own(TrainModule):
    """A language model of somebody's own, whose files have other names than it, and each matrix by itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("scale", torch.ones(1))

    def materialization_source(self) -> Path:
        return self.folder

    def weight_views(self, adapters: Adapters = "merged") -> Iterator[WeightView]:
        for name, parameter, view, *_ in super().weight_views(adapters):
            if not name.endswith("gate_up"):
                yield WeightView(f"policy.{name}", parameter, view)
                continue
            gate, up, bias = view.split([HIDDEN, HIDDEN, 1])
            for leaf, part in (("gate", gate), ("up", up.T), ("bias", bias[0])):
                yield WeightView(f"policy.{name.removesuffix('gate_up')}{leaf}", parameter, part)

    def wrap_classes(self) -> list[str]:
        return ["Mixer"]

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    def hidden_states(self, batch: Any) -> Tensor:
        hidden_TH = self.embed(batch["input_ids"]) * self.scale
        for mixer in self.mixers:
            hidden_TH = mixer(hidden_TH, batch["cu_seqlens"])
        return hidden_TH

    def output_head(self) -> OutputHead:
        return OutputHead(self.head.weight, self.head.bias)

    def what_is_sharded(self) -> list[str]:
        return [name for name, part in self.named_modules() if isinstance(part, FSDPModule)]

    def state_beside_weights(self) -> list[Any]:
        return [bool(self.training), len(self.optimizer.state), [p.grad is None for p in self.parameters()]]


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN), "head.bias": (VOCAB,), "scale": (1,)}
    for index in range(2):
        shapes |= {f"mixers.{index}.{leaf}": (HIDDEN, HIDDEN) for leaf in ("gate", "up")}
        shapes |= {f"mixers.{index}.bias": (HIDDEN,)}
    weights = {f"policy.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def own_module(folder: Path) -> Own:
    with rlcore.meta_device():
        return Own(folder)


def plain_own(folder: Path) -> Own:
    """Return the module with its own weights."""
    file = load_file(folder / "model.safetensors")
    module = Own(folder)
    for index, mixer in enumerate(module.mixers):
        gate, up, bias = (file.pop(f"policy.mixers.{index}.{leaf}") for leaf in ("gate", "up", "bias"))
        mixer.gate_up.data = torch.cat([gate, up.T, bias[None]])
    module.load_state_dict({name.removeprefix("policy."): tensor for name, tensor in file.items()}, strict=False)
    return module


@pytest.mark.parametrize("workers", [1, 2])
def test_a_module_of_ones_own_reads_and_gives_weights_as_its_views_say(
    own_folder: Path, build: Build, tmp_path: Path, workers: int
) -> None:
    file, truth = load_file(own_folder / "model.safetensors"), Truth(lambda: plain_own(own_folder))
    engine = build(own_module(own_folder), workers)
    wrapped = ["", "mixers.0", "mixers.1"] if workers > 1 else []
    assert engine.what_is_sharded() == [wrapped] * workers, "as wrap_classes says"
    assert_same_weights(engine.state_dict(), file)
    for step in range(3):
        batch = packed_batch(seed=step)
        truth.assert_step(engine.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=15), batch, ppo_clip())
    trained = engine.state_dict()
    truth.assert_weights(trained)
    assert not torch.equal(trained["policy.mixers.0.up"], file["policy.mixers.0.up"])
    engine.export(tmp_path / "export")
    assert_same_weights(load_file(tmp_path / "export" / "model.safetensors"), trained)
    engine.load_state_dict(file)
    assert_same_weights(engine.state_dict(), file)


class Changed(Own):
    """Its source is a mapping of tensors, changed on their way in; one that goes out is computed."""

    def materialization_source(self) -> dict[str, Tensor]:  # type: ignore[override]
        file = load_file(self.folder / "model.safetensors")
        return {name: 2 * tensor if name == "policy.head.bias" else tensor for name, tensor in file.items()}

    def weight_views(self, adapters: Adapters = "merged") -> Iterator[WeightView]:
        for weight in super().weight_views(adapters):
            yield weight
            if weight.name == "policy.head.bias":
                yield WeightView("policy.half_bias", None, weight.view, lambda: whole(self.head.bias.detach()) / 2)


def test_weights_can_be_changed_on_their_way_in_and_out(own_folder: Path, build: Build) -> None:
    with rlcore.meta_device():
        module = Changed(own_folder)
    state = build(module, 2).state_dict()
    file = load_file(own_folder / "model.safetensors")
    assert torch.equal(state["policy.head.bias"], 2 * file["policy.head.bias"])
    assert torch.equal(state["policy.half_bias"], file["policy.head.bias"])


# -------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("workers", "lengths"),
    [(1, (12, 3, 7, 2, 9)), (2, (12, 3, 7, 2, 9)), (2, (15,))],
    ids=["one", "several", "one sequence for several"],
)
def test_eval_batch_is_the_loss_of_train_batch_and_changes_nothing(
    own_folder: Path, build: Build, workers: int, lengths: tuple[int, ...]
) -> None:
    engine, truth = build(own_module(own_folder), workers), Truth(lambda: plain_own(own_folder))
    batch, options = packed_batch(lengths), {"max_tokens_per_micro_batch": 15, "temperature": 0.7}
    before, beside = engine.state_dict(), engine.state_beside_weights()
    engine.offload("optimizer", "grads")
    evaluated = engine.eval_batch(batch, ppo_clip(), **options)
    assert engine.eval_batch(batch, ppo_clip(), **options) == evaluated
    engine.onload()
    assert engine.state_beside_weights() == beside
    assert_same_weights(engine.state_dict(), before)
    trained = engine.train_batch(batch, ppo_clip(), **options)
    assert evaluated.keys() == trained.keys() - {"grad_norm", "lr/optimizer"}
    step = truth.step(batch, ppo_clip(), temperature=0.7)
    for found in (trained, evaluated):
        assert_metrics(found, *step)


def test_eval_batch_needs_the_weights(own_folder: Path, build: Build) -> None:
    engine = build(own_module(own_folder), 1)
    engine.offload("weights")
    with pytest.raises(StateError, match=r"eval_batch\(\)"):
        engine.eval_batch(packed_batch(), ppo_clip())


# ------------------------------------------------------------------------------------------------- one that sees


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = tiny_config | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    ids = {"image_token_id": 18, "vision_start_token_id": 19, "vision_end_token_id": 20}
    folder = tmp_path_factory.mktemp("vision")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids)).save_pretrained(
            folder
        )
    return folder


def seeing(folder: Path, is_plain: bool) -> Any:
    from transformers import Qwen2VLForConditionalGeneration

    class Seeing(adamw_policy(Qwen2VLForConditionalGeneration, lr=1e-2, eps=1e-3)):  # type: ignore[misc]
        def look(self, ids_NL: Tensor, pixels: Tensor, grid_N3: Tensor) -> float:
            """One step on captions: the mean over rows, of which each worker has as many."""
            images = (ids_NL == self.config.image_token_id).int()
            logits = self(
                input_ids=ids_NL, pixel_values=pixels, image_grid_thw=grid_N3, mm_token_type_ids=images
            ).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids_NL[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return float(loss.detach())

    with nullcontext() if is_plain else rlcore.meta_device():
        return Seeing.from_pretrained(folder)


def assert_trains_as_plainly(
    build: Build, module: Callable[[bool], Any], file: dict[str, Tensor], *rows: Tensor
) -> None:
    """Two steps of ``module(is_plain).look(*rows)`` on one worker and on two."""
    truth = Truth(lambda: module(True))
    assert_same_weights(truth.reference.weights(), file)
    for _ in range(2):
        truth.both(lambda plain: plain.module.look(*rows))
    for workers in (1, 2):
        engine = build(module(False), workers)
        assert_same_weights(engine.state_dict(), file)
        for _ in range(2):
            engine.look(*map(NeedParallel, rows))
        trained = engine.state_dict()
        truth.assert_weights(trained)
        moved = {name for name, tensor in trained.items() if not torch.equal(tensor, file[name])}
        assert any("vis" in name for name in moved), "gradients reach the vision tower"


@pytest.mark.slow
def test_a_module_that_sees_trains_by_a_method_of_its_own(vision_folder: Path, build: Build) -> None:
    generator = torch.Generator().manual_seed(0)
    grid_N3 = torch.tensor([[1, 4, 4]]).repeat(2, 1)  # patches of each image; four of them are one token
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
    text = torch.randint(18, (2, 6), generator=generator)
    ids_NL = torch.cat([torch.tensor([[19, 18, 18, 18, 18, 20]] * 2), text], 1)
    file = load_file(vision_folder / "model.safetensors")
    assert_trains_as_plainly(build, partial(seeing, vision_folder), file, ids_NL, pixels, grid_N3)


@pytest.fixture(scope="module")
def llava_folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]) -> Path:
    """Its names in a file are not its module's, and its language model does not look at the last layer of its eyes."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    eyes = CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**tiny_config | {"tie_word_embeddings": False})
    config = LlavaConfig(
        vision_config=eyes.to_dict(), text_config=text.to_dict(), image_token_id=18, image_seq_length=4
    )
    folder = tmp_path_factory.mktemp("llava")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def looking(folder: Path, is_plain: bool) -> Any:
    from transformers import LlavaForConditionalGeneration

    class Looking(HuggingFaceTrainModule, LlavaForConditionalGeneration):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)

        def look(self, ids_NL: Tensor, pixels: Tensor) -> float:
            loss = self(input_ids=ids_NL, pixel_values=pixels, labels=ids_NL).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return float(loss.detach())

    with nullcontext() if is_plain else rlcore.meta_device():
        return Looking.from_pretrained(folder)


def test_a_module_with_weights_reads_a_file_of_other_names(llava_folder: Path) -> None:
    """transformers alone knows no names for a class of a user, and would begin with random weights."""
    file = load_file(llava_folder / "model.safetensors")
    assert_same_weights(dict(looking(llava_folder, True).named_weights()), file)


@pytest.mark.slow
def test_names_of_a_file_are_tried_before_those_of_the_module(llava_folder: Path, build: Build) -> None:
    generator = torch.Generator().manual_seed(0)
    ids_NL = torch.cat([torch.full((2, 4), 18), torch.randint(18, (2, 6), generator=generator)], 1)
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    file = load_file(llava_folder / "model.safetensors")
    assert_trains_as_plainly(build, partial(looking, llava_folder), file, ids_NL, pixels)


# ------------------------------------------------------------------------------------------------------- critics


def critic_class() -> Any:
    from transformers import Qwen2ForTokenClassification

    class Critic(adamw_policy(Qwen2ForTokenClassification, lr=1e-2, eps=1e-3)):  # type: ignore[misc]
        new_parameters = ("score",)

        def values(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
            """[N, L] on the host, 0 on padding."""
            with torch.no_grad():
                return self._values(ids_NL, mask_NL).cpu()

        def value_step(self, ids_NL: Tensor, mask_NL: Tensor, returns_NL: Tensor, weight_NL: Tensor) -> float:
            """Its part of the loss of the batch, of which ``weight_NL`` are the shares."""
            values_NL = self._values(ids_NL, mask_NL)
            loss, _ = value_loss(values_NL, returns_NL.to(values_NL), weight_NL.to(values_NL))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return float(loss.detach())

        def _values(self, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
            cu_seqlens = nn.functional.pad(mask_NL.sum(1).cumsum(0), (1, 0)).int()
            ids_T = ids_NL[mask_NL].to(self.device)
            hidden_TH = self.hidden_states({"input_ids": ids_T, "cu_seqlens": cu_seqlens})
            value_T = self.score(hidden_TH).squeeze(-1)
            return value_T.new_zeros(mask_NL.shape).masked_scatter(mask_NL.to(value_T.device), value_T)

    return Critic


def trained_values(critic: Any, *arguments: Tensor, workers: int = 0) -> tuple[Tensor, Tensor]:
    """Values before and after four steps; of a module, or of an engine of so many workers."""

    def call(method: str, gather: str, *rows: Tensor) -> Any:
        return (
            critic.call(method, *map(NeedParallel, rows), gather=gather) if workers else getattr(critic, method)(*rows)
        )

    ids_NL, mask_NL, rewards_NL = arguments
    before_NL = call("values", "cat", ids_NL, mask_NL)
    _, returns_NL = gae(rewards_NL.to(before_NL), before_NL, mask_NL)
    # FSDP takes the mean of gradients over workers, and the loss is the sum of their parts
    weight_NL = token_weights("token-mean", mask_NL) * max(workers, 1)
    losses = [call("value_step", "mean", ids_NL, mask_NL, returns_NL, weight_NL) for _ in range(4)]
    assert losses[-1] < losses[0]
    return before_NL, call("values", "cat", ids_NL, mask_NL)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_critic_is_one_more_train_engine(workers: int, qwen2_folder: Path, build: Build) -> None:
    from transformers import Qwen2Config

    generator = torch.Generator().manual_seed(0)
    mask_NL = torch.arange(12) < torch.tensor([12, 3, 7, 9, 5])[:, None]
    ids_NL = torch.randint(VOCAB, mask_NL.shape, generator=generator)
    rows = ids_NL, mask_NL, torch.randn(mask_NL.shape, generator=generator)
    config, critic = Qwen2Config.from_pretrained(qwen2_folder, num_labels=1), critic_class()
    with rlcore.meta_device():
        module = critic.from_pretrained(qwen2_folder, config=config)
    engine = build(module, workers)
    state = engine.state_dict()
    assert {"score.weight", "score.bias"} < state.keys()
    found = trained_values(engine, *rows, workers=workers)
    truth = truth_of_own(lambda: critic(deepcopy(config)), state)
    for got, reference, exact in zip(
        found, *truth.both(lambda plain: trained_values(plain.module, *rows)), strict=True
    ):
        assert (got[~mask_NL] == 0).all() and got.std() > 0
        assert_as_accurate(got[mask_NL], reference[mask_NL], exact[mask_NL])
    truth.assert_weights(engine.state_dict())


def test_a_head_is_measured_before_its_weights_are_placed(own_folder: Path) -> None:
    class Measuring(Own):
        measured_on: str | None = None

        def measure_head(self) -> None:
            self.measured_on = self.head.weight.device.type

        def where_measured(self) -> str | None:
            return self.measured_on

    with rlcore.meta_device():
        module = Measuring(own_folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", launcher="inline")
        assert engine.call("where_measured") == ["meta"]


# --------------------------------------------------------------------------------------------------------- traces


def test_a_model_made_of_its_configuration_computes_in_another_dtype_than_it_stores(qwen2_folder: Path) -> None:
    """Its head is measured in the build, while its weights are whole: later, reading a parameter gives a cast."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Policy(adamw_policy(Qwen2ForCausalLM)):  # type: ignore[misc]
        def materialization_source(self) -> Path:
            return qwen2_folder

    with rlcore.meta_device():
        module = Policy._from_config(Qwen2Config.from_pretrained(qwen2_folder))
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu", launcher="inline", compute_dtype="bfloat16")
        assert engine.train_batch(packed_batch(), ppo_clip())["grad_norm"] > 0


def test_phases_are_named_in_traces(own_folder: Path, tmp_path: Path) -> None:
    device = rlcore.get_device("cpu")
    batch = packed_batch()
    with rlcore.TrainEngine(own_module(own_folder)) as engine:
        engine.build(devices="cpu")
        device.profiler.start(tmp_path / "trace.json")
        engine.train_batch(batch, ppo_clip())
        engine.forward_logprobs(batch)
        engine.eval_batch(batch, ppo_clip())
        engine.offload()
        engine.onload()
        device.profiler.stop()
    phases = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    calls = ("train_step", "score", "evaluate", "offload", "onload")
    steps = ("forward and loss", "backward", "clip", "optimizer", "metrics")
    assert {f"{method} of the train engine" for method in calls} <= phases
    assert {f"train_batch: {step}" for step in steps} <= phases
    assert {"forward_logprobs: forward", "eval_batch: forward and loss"} <= phases
