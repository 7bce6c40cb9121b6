"""The executor ``deepspeed``: what plain PyTorch computes, at each stage of ZeRO, and what else a train executor does.

Its modules are none of transformers', which every worker would have to import.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import rlcore
from rlcore.conformance.ends import check_killed_worker_is_named
from rlcore.errors import RlcoreError, StateError, WorkerError
from rlcore.nn import OutputHead, TrainModule
from rlcore.ops import ppo_clip

from .plain_training import Truth, assert_metrics
from .train_batches import assert_same_weights, packed_batch
from .train_policy import Regression, regression_weights, truth_of_own

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

pytestmark = pytest.mark.slow
INSTALLED = Path(sys.prefix) / "deepspeed"
"""Where `make test-slow` installs it, apart from what the other tests import."""
Build = Callable[..., rlcore.TrainEngine]


class Place(NamedTuple):
    """A stage of ZeRO, the workers, and their kind of device."""

    stage: int
    workers: int
    device: str = "cpu"


def places(*on_hosts: Place) -> Any:
    """A parameter ``place`` of these on hosts, and of each stage on one GPU and on two."""
    on_gpus = [
        pytest.param(Place(stage, workers, "cuda"), marks=mark)
        for workers, mark in ((1, pytest.mark.gpu), (2, pytest.mark.multigpu))
        for stage in (1, 2, 3)
    ]
    return pytest.mark.parametrize(
        "place", [*on_hosts, *on_gpus], ids=lambda place: f"ZeRO {place.stage}, {place.workers} {place.device}"
    )


each_place = places(Place(1, 2), Place(2, 1), Place(3, 3))


class Leaf(nn.Module):
    """One weight of a model, and one factor of what goes through it."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + sum((one.square().mean() for one in self.parameters()), torch.zeros(())))


class Mirror(TrainModule):
    """Has the weights of a model folder by their names, the embedding also as the head, and uses each of them."""

    def __init__(
        self, weights: dict[str, Tensor], frozen: tuple[str, ...] = (), kind: type[Any] = torch.optim.AdamW
    ) -> None:
        super().__init__()
        self.kind = kind
        shapes: dict[str, dict[str, torch.Size]] = {}
        for name, tensor in weights.items():
            path, _, leaf = name.rpartition(".")
            shapes.setdefault(path, {})[leaf] = tensor.shape
        self.embedding = next(path for path in shapes if path.endswith("embed_tokens"))
        self.leaves = [path for path in shapes if path != self.embedding]
        for path, found in shapes.items():
            owner: nn.Module = self
            *parents, last = path.split(".")
            for parent in parents:
                if parent not in dict(owner.named_children()):
                    owner.add_module(parent, nn.Module())
                owner = owner.get_submodule(parent)
            owner.add_module(last, nn.Embedding(*found["weight"]) if path == self.embedding else Leaf(found))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        self.weights = weights

    def materialization_source(self) -> dict[str, Tensor]:
        return self.weights

    def on_weights_materialized(self) -> None:
        self.forget_steps()

    def forget_steps(self) -> None:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = self.kind(groups, lr=1e-2, eps=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

    def hidden_states(self, batch: Any) -> Tensor:
        hidden = self.get_submodule(self.embedding)(batch["input_ids"])
        for path in self.leaves:
            hidden = self.get_submodule(path)(hidden)
        return torch.tanh(hidden)

    def output_head(self) -> OutputHead:
        return OutputHead(self.get_submodule(self.embedding).weight)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def step_of_its_own(self, token: int) -> float:
        loss = self.hidden_states({"input_ids": torch.full((4,), token, device=self.device)}).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())


@pytest.fixture(scope="module", autouse=True)
def deepspeed_on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if INSTALLED.is_dir():
            patch.syspath_prepend(str(INSTALLED))
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("needs DeepSpeed: DS_ACCELERATOR=cpu pip install --no-build-isolation 'deepspeed>=0.19.8'")
        yield


@pytest.fixture(scope="module")
def weights(qwen2_folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(qwen2_folder / "model.safetensors"))


@pytest.fixture(scope="module")
def start(weights: dict[str, Tensor], short_runtime_folder: Path) -> Iterator[Build]:
    """``start(workers, device="cpu", executor="deepspeed", make=None, **options)``: a new engine of ``make()``."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")

        def get(
            workers: int,
            device: str = "cpu",
            executor: str = "deepspeed",
            frozen: tuple[str, ...] = (),
            kind: type[Any] = torch.optim.AdamW,
            *,
            make: Callable[[], TrainModule] | None = None,
            **options: Any,
        ) -> Any:
            if device == "cuda" and torch.cuda.device_count() < workers:
                pytest.skip(f"needs {workers} GPUs, found {torch.cuda.device_count()}")
            patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
            with rlcore.meta_device():
                module = Mirror(weights, frozen, kind) if make is None else make()
            engine = stack.enter_context(rlcore.TrainEngine(module, executor=executor))
            devices = [f"{device}:{index}" for index in range(workers)]
            return engine.build(
                devices=devices, data_parallel_size=workers, launcher="process", timeout_s=250, **options
            )

        yield get


@pytest.fixture(scope="module")
def build(start: Build) -> Build:
    """``build(place)``: the engine of this place, which all tests share, at the weights that it has."""
    engines: dict[Place, rlcore.TrainEngine] = {}

    def get(place: Place) -> rlcore.TrainEngine:
        if place not in engines:
            # a bucket that the largest parameter does not fit into, and several for the others
            engines[place] = start(place.workers, place.device, stage=place.stage, bucket_elements=256)
        return engines[place]

    return get


def truth_of_weights(weights: dict[str, Tensor], device: str = "cpu") -> Truth:
    return truth_of_own(lambda: Mirror(weights), weights, device)


@each_place
def test_twenty_steps_are_those_of_plain_pytorch(build: Build, weights: dict[str, Tensor], place: Place) -> None:
    engine, truth = build(place), truth_of_weights(weights, place.device)
    for number in range(20):
        lengths, max_tokens = [((12, 3, 7, 2, 9, 5, 14), 15), ((4, 24, 9, 13), 24), ((40,), 16384)][number % 3]
        limit = (0.01, None, 1.0)[number % 3]
        batch = packed_batch(lengths)
        found = engine.train_batch(batch, ppo_clip(), max_grad_norm=limit, max_tokens_per_micro_batch=max_tokens)
        truth.assert_step(found, batch, ppo_clip(), max_grad_norm=limit)
    assert found["lr/optimizer"] == rate_of(truth), "the module's scheduler has gone on"
    batch = packed_batch()
    truth.assert_logprobs(engine.forward_logprobs(batch, max_tokens_per_micro_batch=15), batch)
    truth.assert_weights(engine.state_dict())
    evaluated = engine.eval_batch(batch, ppo_clip(), max_tokens_per_micro_batch=15)
    assert_metrics(evaluated, *truth.step(batch, ppo_clip()))


@each_place
def test_what_leaves_the_device_comes_back_in_place(build: Build, place: Place) -> None:
    engine = build(place)
    engine.train_batch(packed_batch(), ppo_clip())  # so that the optimizer has states
    before, resident = engine.state_dict(), tags_of(engine)
    for tag in ("optimizer", "grads", "weights"):
        report = engine.offload(tag)
        assert [one[tag]["device_bytes"] for one in tags_of(engine)] == [0] * place.workers, f"{tag}: {report}"
    with pytest.raises(StateError, match=r"onload\('weights'\)"):
        engine.step_of_its_own(3)
    engine.onload("weights")
    with pytest.raises(StateError, match=r"onload\('grads'\)"):
        engine.step_of_its_own(3)
    with pytest.raises(StateError, match=r"float32 weights, too; call the engine's onload\('optimizer'\)"):
        engine.load_state_dict(before)
    engine.onload("optimizer")
    engine.meta("grads")
    engine.onload("grads")
    assert tags_of(engine) == resident
    assert_same_weights(engine.state_dict(), before)
    first = [engine.train_batch(packed_batch(), ppo_clip())["loss"] for _ in range(2)]
    assert len({*first}) == 2, "it trains"


@each_place
def test_steps_that_fail_and_steps_of_the_users_own(
    start: Build, weights: dict[str, Tensor], build: Build, place: Place
) -> None:
    engine, truth = build(place), truth_of_weights(weights, place.device)
    engine.load_state_dict(truth.reference.weights())
    seen: list[int] = []

    def fails_at_the_second(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        seen.append(len(logprob))
        if len(seen) == 2:
            raise ValueError("planted")
        return -logprob, {}

    def explodes(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        return logprob * float("inf"), {}

    with pytest.raises(WorkerError, match="ValueError: planted"):
        engine.train_batch(packed_batch(), fails_at_the_second, max_tokens_per_micro_batch=15)
    with pytest.raises(RlcoreError, match="no step was taken"):
        engine.train_batch(packed_batch(), explodes)
    assert_same_weights(engine.state_dict(), truth.reference.weights())
    batch = packed_batch()
    metrics = engine.eval_batch(batch, ppo_clip(), max_tokens_per_micro_batch=15)
    assert_metrics(metrics, *truth.step(batch, ppo_clip()))
    losses = {engine.step_of_its_own(token)[0] for token in (3, 3)}
    assert len(losses) == 2, "the method's own backward and step have changed the weights"


@places(Place(3, 3))
def test_the_sampler_gets_partitions_of_elements(build: Build, qwen2_folder: Path, place: Place) -> None:
    """No parameter is gathered: 21 rows of 32 are cut into three chunks of 224 elements."""
    engine = build(place)
    with rlcore.InferenceEngine(qwen2_folder).build(launcher="inline", devices=f"{place.device}:0") as infer:
        for _ in range(2):
            engine.train_batch(packed_batch(), ppo_clip())
            report = engine.sync_weights(infer, verify=True)
            assert report.fallback_bytes == 0
            assert report.moved_bytes == sum(tensor.nbytes for tensor in engine.state_dict().values())


@pytest.mark.parametrize("saved_by", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (Place(1, 2), Place(3, 3)),
        pytest.param(Place(1, 1, "cuda"), Place(3, 1, "cuda"), marks=pytest.mark.gpu),
        pytest.param(Place(1, 2, "cuda"), Place(3, 1, "cuda"), marks=pytest.mark.multigpu),
    ],
)
def test_some_workers_save_and_others_of_the_other_executor_go_on(
    start: Build, build: Build, *, weights: Any, tmp_path: Path, saves: Place, loads: Place, saved_by: str
) -> None:
    """Moments, steps and the scheduler included: else the second step would be another. A rank is killed before."""
    truth, batch, folder = truth_of_weights(weights, saves.device), packed_batch(), tmp_path / "checkpoint"
    first = start(saves.workers, saves.device, "fsdp2") if saved_by == "fsdp2" else build(saves)
    if saved_by == "deepspeed":
        check_killed_worker_is_named(first, "train_step", lambda: first.train_batch(batch, ppo_clip()))
        first.restart()
    second = build(loads) if saved_by == "fsdp2" else start(loads.workers, loads.device, "fsdp2")
    for _ in range(2):
        truth.assert_step(first.train_batch(batch, ppo_clip()), batch, ppo_clip())
    first.save(folder, extra={"step": 2}, blocking=False).result()
    second.meta("optimizer")
    assert second.load(folder) == {"step": 2}
    second.onload()
    for lengths in ((4, 24, 9, 13), (12, 3, 7, 2, 9, 5, 14)):
        rate = rate_of(truth)
        found = second.train_batch(packed_batch(lengths), ppo_clip(), max_tokens_per_micro_batch=24)
        truth.assert_step(found, packed_batch(lengths), ppo_clip())
        assert found["lr/optimizer"] == rate
    truth.assert_weights(second.state_dict())
    second.export(tmp_path / "model")
    from safetensors.torch import load_file

    truth.assert_weights(load_file(tmp_path / "model" / "model.safetensors"))


def test_frozen_parameters_stay(start: Build) -> None:
    engine = start(1, frozen=("model.layers.0",), stage=3, persist_below=100)
    before = engine.state_dict()
    engine.train_batch(packed_batch(), ppo_clip())
    trained = engine.state_dict()
    changed = {name for name in trained if not torch.equal(trained[name], before[name])}
    matrices = {name for name, tensor in trained.items() if tensor.dim() > 1}  # a bias of 0 has no gradient
    assert matrices & changed == {name for name in matrices if not name.startswith("model.layers.0")}
    assert not [name for name in changed if name.startswith("model.layers.0")]
    with pytest.raises(StateError, match=r"has other groups of parameters .* call restart\(\)"):
        engine.forget_steps()  # parameters have no dimensions outside of a forward
        engine.train_batch(packed_batch(), ppo_clip())


def adapted() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    class Adapted(Regression):
        new_parameters = ("score",)

        def __init__(self) -> None:
            super().__init__(regression_weights())
            self.score = nn.Linear(8, 1).requires_grad_(False)
            self.config: Any = {}
            peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["mix"], r=1), self)
            self.score.requires_grad_(False)

        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad])

        def write(self, value: float) -> None:
            for parameter in (self.score.weight, self.embed.weight):
                held: Any = parameter
                getattr(held, "ds_tensor", held).data.fill_(value)

    return Adapted()


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_that_the_source_does_not_have_so_come_back(start: Build, tmp_path: Path, stage: int) -> None:
    engine = start(2, make=adapted, stage=stage)
    engine.write(5.0)
    before = engine.state_dict(adapters="base")
    engine.save(tmp_path)
    left_out = json.loads((tmp_path / "manifest.json").read_text())["state"]["left_out"]
    assert left_out == ["mix.base_layer.bias", "mix.base_layer.weight"]
    engine.write(6.0)
    engine.load(tmp_path)
    assert_same_weights(engine.state_dict(adapters="base"), before)
    assert engine.train_batch(packed_batch(), ppo_clip())["grad_norm"] > 0


def test_a_resume_in_bfloat16_has_the_float32_weights(start: Build, tmp_path: Path) -> None:
    # NAdam has a second state, besides the step, that is one number for a whole group
    engine = start(1, kind=torch.optim.NAdam, stage=2, compute_dtype="bfloat16")
    losses = [engine.train_batch(packed_batch(), ppo_clip())["loss"] for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    engine.save(tmp_path)
    expected = [engine.train_batch(packed_batch(), ppo_clip()) for _ in range(2)]
    engine.load(tmp_path)
    assert [engine.train_batch(packed_batch(), ppo_clip()) for _ in range(2)] == expected
    engine.forget_steps()  # another optimizer of the same groups
    assert engine.train_batch(packed_batch(), ppo_clip())["lr/optimizer"] < expected[0]["lr/optimizer"]
    assert engine.train_batch(packed_batch(), ppo_clip())["loss"] < losses[2]


def test_no_step_is_taken_by_gradients_in_bfloat16_that_are_not_finite(start: Build) -> None:
    """Their norm says so, without DeepSpeed's search of each gradient."""
    engine = start(1, stage=2, compute_dtype="bfloat16")
    before = engine.state_dict()

    def explodes(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        from deepspeed.runtime.zero import stage_1_and_2

        stage_1_and_2.has_inf_or_nan = None  # a search fails
        return logprob * float("inf"), {}

    with pytest.raises(RlcoreError, match="no step was taken"):
        engine.train_batch(packed_batch(), explodes)
    assert_same_weights(engine.state_dict(), before)
    engine.train_batch(packed_batch(), ppo_clip())
    with pytest.raises(AssertionError):
        assert_same_weights(engine.state_dict(), before)


def rate_of(truth: Truth) -> float:
    return float(truth.exact.module.optimizer.param_groups[0]["lr"])


def tags_of(engine: rlcore.TrainEngine) -> list[dict[str, Any]]:
    return [{tag: dict(found) for tag, found in one["tags"].items()} for one in engine.memory_report()]
