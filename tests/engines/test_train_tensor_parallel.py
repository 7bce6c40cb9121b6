"""Workers that share matrices and experts train as plain PyTorch does: ten steps, checkpoints, adapters, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.engines.need_parallel import split_arguments
from rlcore.engines.rank_batch import rank_batches
from rlcore.errors import InvalidInputError, UnsupportedError, WorkerError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip
from rlcore.parallel_plans import Sizes, why_not_split
from tests.accuracy import assert_same_bits

from .plain_training import Truth
from .train_batches import assert_same_weights, packed_batch
from .train_policy import Build, Place, Regression, engines_of, loss_on, places, regression_weights, two_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

slow, multigpu = pytest.mark.slow, pytest.mark.multigpu
on_two = places(("cpu", 2, ()), ("cuda", 2, multigpu))
KINDS = {"Qwen2": "Qwen2ForCausalLM", "Qwen3Moe": "Qwen3MoeForCausalLM", "Gemma3": "Gemma3ForCausalLM"}


def policy_of(kind: str) -> Any:
    import transformers

    class Policy(HuggingFaceTrainModule, getattr(transformers, KINDS[kind])):
        def on_weights_materialized(self) -> None:
            self.forget_steps()

        def forget_steps(self, **options: Any) -> None:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, **options)

        def squares(self, rows: Any) -> list[int]:
            return [row * row for row in rows]

    return Policy


def config_of(kind: str, common: dict[str, Any]) -> Any:
    import transformers

    if kind == "Qwen2":  # of 21 tokens, the vocabulary does not divide
        return transformers.Qwen2Config(**common)
    if kind == "Qwen3Moe":  # norms of heads, a head of its own
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        return transformers.Qwen3MoeConfig(**common | experts | {"tie_word_embeddings": False})
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    scales = {"head_dim": 8, "query_pre_attn_scalar": 8, "initializer_range": 0.1}
    return transformers.Gemma3TextConfig(**common | windows | scales)


def why_no_experts(module: Any) -> str | None:
    """Return what is lacking: machines with GPUs may have an older transformers."""
    reason = why_not_split(module, Sizes(experts=2))
    return reason if reason and reason.startswith("transformers") else None


class Model:
    """A tiny random model of one kind, its policy, and engines on it."""

    def __init__(self, kind: str, folder: Path, build: Build, policy: Any) -> None:
        self.kind, self.folder, self.policy = kind, folder, policy
        self._build = build

    def build(self, workers: int, device: str = "cpu", **options: Any) -> rlcore.TrainEngine:
        if "expert_parallel_size" in options and device != "cpu" and (reason := why_no_experts(self.module())):
            pytest.skip(reason)
        return self._build(workers, device, **options)

    def truth(self, device: str = "cpu") -> Truth:
        return Truth(lambda: self.policy.from_pretrained(self.folder), device=device)

    def module(self) -> Any:
        with rlcore.meta_device():
            return self.policy.from_pretrained(self.folder)


@pytest.fixture(scope="module")
def models(
    write_checkpoint: Callable[..., Path],
    tiny_config: dict[str, Any],
    shared_devices: tuple[str, ...],
    short_runtime_folder: Path,
) -> Iterator[Callable[[str], Model]]:
    made: dict[str, Model] = {}
    with ExitStack() as stack:

        def model(kind: str) -> Model:
            if kind not in made:
                folder, policy = write_checkpoint(config_of(kind, tiny_config)), policy_of(kind)
                build = stack.enter_context(engines_of(policy, folder, shared_devices, short_runtime_folder))
                made[kind] = Model(kind, folder, build, policy)
            return made[kind]

        yield model


# ------------------------------------------------------------------------------------------------------- training

TENSOR_2 = {"tensor_parallel_size": 2}
EXPERTS_2 = {"expert_parallel_size": 2}
SEQUENCES_2 = {"sequence_parallel_size": 2}
KEPT = {"reshard_after_forward": False}
SELECTIVE = {"activation_checkpointing": "selective"}


def on_cpus(kind: str, workers: int, options: dict[str, Any], num_steps: int, name: str, *marks: Any) -> Any:
    return pytest.param(kind, Place("cpu", workers), options, num_steps, id=name, marks=marks)


def on_gpus(kind: str, workers: int, options: dict[str, Any]) -> Any:
    """Two steps: of more, rounding to TF32 might send a token to another expert."""
    sizes = ", ".join(f"{name.removesuffix('_parallel_size')} {size}" for name, size in options.items())
    return pytest.param(kind, Place("cuda", workers), options, 2, id=f"{kind}, {workers} cuda, {sizes}", marks=multigpu)


@pytest.mark.parametrize(
    ("kind", "place", "options", "num_steps"),
    [
        on_cpus("Qwen3Moe", 2, TENSOR_2 | EXPERTS_2, 2, "Qwen3Moe, TP 2, EP 2"),
        on_cpus("Qwen2", 4, TENSOR_2, 10, "Qwen2, FSDP 2, TP 2", slow),
        on_cpus("Gemma3", 4, TENSOR_2 | SELECTIVE, 10, "Gemma3, recomputed", slow),
        on_cpus("Qwen2", 4, TENSOR_2 | SEQUENCES_2, 10, "Qwen2, SP 2, TP 2", slow),
        on_cpus("Qwen2", 2, SEQUENCES_2 | {"compile": True}, 2, "Qwen2, SP 2, compiled", slow),
        on_cpus("Qwen3Moe", 2, SEQUENCES_2, 2, "Qwen3Moe, SP 2", slow),
        on_cpus("Qwen3Moe", 2, SEQUENCES_2 | EXPERTS_2, 2, "Qwen3Moe, SP 2, EP 2", slow),
        on_cpus("Qwen3Moe", 4, SEQUENCES_2 | EXPERTS_2 | {"replicas": 2}, 2, "Qwen3Moe, HSDP 2, SP 2, EP 2", slow),
        on_cpus("Gemma3", 2, SEQUENCES_2, 2, "Gemma3, SP 2", slow),
        on_cpus("Qwen3Moe", 4, TENSOR_2 | {"expert_parallel_size": 4}, 10, "Qwen3Moe, TP 2, EP 4", slow),
        on_cpus("Qwen3Moe", 4, EXPERTS_2, 10, "Qwen3Moe, FSDP 4, EP 2", slow),
        on_cpus("Qwen3Moe", 4, EXPERTS_2 | KEPT, 2, "Qwen3Moe, FSDP 4, EP 2, blocks kept", slow),
        on_cpus("Gemma3", 8, TENSOR_2 | {"replicas": 2}, 10, "Gemma3, HSDP 2 x 2, TP 2", slow),
        on_cpus("Qwen3Moe", 8, TENSOR_2 | EXPERTS_2 | {"replicas": 2}, 10, "Qwen3Moe, HSDP 2 x 2, TP 2, EP 2", slow),
        on_gpus("Qwen2", 2, TENSOR_2),
        on_gpus("Gemma3", 2, TENSOR_2 | SELECTIVE),
        on_gpus("Qwen3Moe", 2, EXPERTS_2),
        on_gpus("Qwen3Moe", 2, TENSOR_2 | EXPERTS_2),
        on_gpus("Qwen2", 4, TENSOR_2),
        on_gpus("Qwen2", 4, TENSOR_2 | SEQUENCES_2),
        on_gpus("Qwen3Moe", 4, TENSOR_2 | {"expert_parallel_size": 4}),
    ],
)
def test_steps_are_those_of_plain_pytorch(
    models: Callable[[str], Model], kind: str, place: Place, options: dict[str, Any], num_steps: int
) -> None:
    """Gradients of micro-batches are added up, and their norm is one of parameters on several meshes."""
    model, loss = models(kind), loss_on(place.device)
    engine, truth = model.build(place.workers, place.device, **options), model.truth(place.device)
    for number in range(num_steps):
        batch, limit = packed_batch(seed=number), {"max_tokens_per_micro_batch": 15 if number % 2 else 16384}
        truth.assert_step(engine.train_batch(batch, loss, **limit), batch, loss)
    truth.assert_weights(engine.state_dict())
    scored = packed_batch()
    truth.assert_logprobs(engine.forward_logprobs(scored, temperature=0.7), scored, temperature=0.7)
    most = {"top_k": 18}
    truth.assert_logprobs(engine.forward_logprobs(scored, **most), scored, **most)


@slow
@places(("cpu", 4, ()), ("cuda", 2, multigpu))
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_optimizers_that_take_all_tensors_at_once(
    models: Callable[[str], Model], options: dict[str, bool], place: Place
) -> None:
    """Tensors of norms and of matrices are on different meshes."""
    model, batch, loss = models("Qwen3Moe"), packed_batch(), loss_on(place.device)
    engine = model.build(place.workers, place.device, **TENSOR_2, expert_parallel_size=place.workers)
    truth = model.truth(place.device)
    engine.forget_steps(**options)
    truth.assert_step(engine.train_batch(batch, loss), batch, loss)
    truth.assert_weights(engine.state_dict())


@slow
@places(("cpu", 4, ()), ("cuda", 2, multigpu))
def test_memory_leaves_and_comes_back_between_steps(models: Callable[[str], Model], place: Place) -> None:
    """It does after a batch that failed on all ranks, too."""
    model, batch, loss = models("Qwen3Moe"), packed_batch(), loss_on(place.device)
    engine = model.build(place.workers, place.device, **TENSOR_2, expert_parallel_size=place.workers)
    truth = model.truth(place.device)

    def fails(logprob: torch.Tensor, entropy: torch.Tensor, per_token: Any) -> Any:
        raise ValueError("planted")

    for _ in range(2):
        truth.assert_step(engine.train_batch(batch, loss), batch, loss)
        engine.offload()
        engine.onload()
        with pytest.raises(WorkerError, match="ValueError: planted"):
            engine.train_batch(batch, fails)
    truth.assert_weights(engine.state_dict())


@slow
@pytest.mark.parametrize(
    ("kind", "place", "options", "targets"),
    [
        ("Qwen2", Place("cpu", 2), TENSOR_2, ["q_proj", "v_proj", "down_proj"]),
        ("Gemma3", Place("cpu", 2), TENSOR_2, ["q_proj", "o_proj", "up_proj"]),
        ("Qwen3Moe", Place("cpu", 2), TENSOR_2 | EXPERTS_2, ["q_proj", "v_proj"]),
        ("Qwen3Moe", Place("cpu", 2), SEQUENCES_2 | EXPERTS_2, ["q_proj", "v_proj"]),
        pytest.param("Qwen2", Place("cuda", 2), TENSOR_2, ["q_proj", "v_proj", "down_proj"], marks=multigpu),
    ],
    ids=str,
)
def test_adapters_are_cut_with_their_layers(
    models: Callable[[str], Model],
    shared_devices: tuple[str, ...],
    kind: str,
    place: Place,
    options: dict[str, int],
    *,
    targets: list[str],
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    from .test_train_lora import lora_module, plain_with

    model, loss = models(kind), loss_on(place.device)
    model.build(2, place.device, **options)  # its processes and groups are there already
    with rlcore.TrainEngine(lora_module(model.policy, model.folder, target_modules=targets)) as engine:
        engine.build(devices=two_of(place.device, shared_devices), **options)
        fresh = engine.state_dict(adapters="only")
        adapted = partial(plain_with, fresh, model.policy, model.folder, target_modules=targets)
        truth = Truth(adapted, device=place.device)
        for number in range(3):
            batch = packed_batch(seed=number)
            truth.assert_step(engine.train_batch(batch, loss), batch, loss)
        truth.assert_weights(engine.state_dict(adapters="only"), adapters="only")
        truth.assert_weights(engine.state_dict())


# ------------------------------------------------------------------------------------------------- across layouts


@slow
@pytest.mark.parametrize(
    ("kind", "place", "options"),
    [
        ("Qwen2", Place("cpu", 4), TENSOR_2),
        ("Qwen3Moe", Place("cpu", 4), TENSOR_2 | {"expert_parallel_size": 4}),
        pytest.param("Qwen3Moe", Place("cuda", 2), TENSOR_2 | EXPERTS_2, marks=multigpu),
    ],
    ids=str,
)
def test_checkpoints_and_exports_are_of_no_layout(
    models: Callable[[str], Model], kind: str, place: Place, options: dict[str, Any], tmp_path: Path
) -> None:
    """One is saved by several workers and read by one, and the other way round: the next step is the same."""
    model, batches, loss = models(kind), [packed_batch(seed=seed) for seed in range(3)], loss_on(place.device)
    several, one = model.build(place.workers, place.device, **options), model.build(1, place.device)
    truth = model.truth(place.device)
    truth.assert_step(several.train_batch(batches[0], loss), batches[0], loss)
    several.save(tmp_path / "several")
    one.load(tmp_path / "several")
    assert_same_weights(one.state_dict(), several.state_dict())
    truth.assert_step(one.train_batch(batches[1], loss), batches[1], loss)
    one.save(tmp_path / "one")
    several.load(tmp_path / "one")
    truth.assert_step(several.train_batch(batches[2], loss), batches[2], loss)
    truth.assert_weights(several.state_dict())
    several.export(tmp_path / "exported")
    loaded = dict(model.policy.from_pretrained(tmp_path / "exported").named_weights())
    for name, tensor in several.state_dict().items():
        assert_same_bits(loaded[name].detach(), tensor, name)


@slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("Gemma3", TENSOR_2), ("Qwen3Moe", TENSOR_2 | {"expert_parallel_size": 4}), ("Qwen3Moe", EXPERTS_2)],
    ids=str,
)
def test_weights_reach_samplers_box_by_box(
    models: Callable[[str], Model], shared_devices: tuple[str, ...], kind: str, options: dict[str, Any]
) -> None:
    """Four workers send to two samplers, which compare every byte with what their own loader makes of it."""
    model, batch = models(kind), packed_batch()
    engine, truth = model.build(4, **options), model.truth()
    truth.assert_step(engine.train_batch(batch, ppo_clip()), batch, ppo_clip())
    with ExitStack() as stack:
        samplers = [stack.enter_context(rlcore.InferenceEngine(model.folder)) for _ in range(2)]
        for sampler, device in zip(samplers, shared_devices, strict=False):
            sampler.build(devices=device, launcher="process")
        report = engine.sync_weights(samplers, verify=True)
    assert report.fallback_bytes == 0
    assert report.moved_bytes == report.needed_bytes, "each byte is read once"


# ------------------------------------------------------------------------------------------ who gets which arguments


def test_workers_that_compute_the_same_have_the_same_arguments() -> None:
    rows, tokens = rlcore.NeedParallel([1, 2]), rlcore.NeedParallel(torch.arange(4), type="seq")
    calls = split_arguments([rows, tokens], {}, 8, sequence_parallel_size=2, tensor_parallel_size=2)
    assert [(given[0], given[1].tolist()) for given, _ in calls] == [
        (row, part) for row in ([1], [2]) for part in ([0, 1], [2, 3]) for _ in range(2)
    ]
    tokens_of_two = {"input_ids": torch.arange(8), "cu_seqlens": torch.tensor([0, 4, 8])}
    batches = rank_batches(tokens_of_two, 8, 16, sequence_parallel_size=2, tensor_parallel_size=2)
    assert [(len(one.positions_T), one.part) for one in batches] == [(4, part) for part in (0, 0, 1, 1)] * 2


@slow
def test_results_of_rows_are_joined_once(models: Callable[[str], Model]) -> None:
    engine = models("Qwen2").build(4, **TENSOR_2)
    rows = rlcore.NeedParallel([1, 2, 3, 4, 5], balance_by=[1, 1, 9, 1, 1])
    assert engine.call("squares", rows, gather="cat") == [1, 4, 9, 16, 25]


# ------------------------------------------------------------------------------------ refusals, before any worker


def refusal(module: Any, *, executor: str = "fsdp2", **options: Any) -> str:
    with (
        rlcore.TrainEngine(module, executor=executor) as engine,
        pytest.raises((InvalidInputError, UnsupportedError)) as raised,
    ):
        engine.build(devices=[f"cpu:{number}" for number in range(4)], **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Qwen2", {"tensor_parallel_size": 4}, "its 2 key and value heads do not divide by 4"),
        ("Qwen3Moe", TENSOR_2 | {"data_parallel_size": 2}, "give experts to ranks whole: expert_parallel_size=2"),
        ("Qwen2", EXPERTS_2 | {"data_parallel_size": 4}, "transformers has no expert-parallel plan for Policy"),
        ("Qwen3Moe", {"expert_parallel_size": 3, "data_parallel_size": 4}, "divide the 4 workers of a replica"),
        ("Qwen3Moe", {"tensor_parallel_size": 2, "expert_parallel_size": 1.0}, "expert_parallel_size must be a whole"),
        ("Qwen2", TENSOR_2 | {"data_parallel_size": 2, "compile": True}, "compile=True does not go with tensor"),
        ("Qwen3Moe", EXPERTS_2 | {"data_parallel_size": 4, "compile": True}, "compile=True does not go with tensor"),
        ("Qwen2", {"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number of at least 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused_before_a_worker_starts(
    models: Callable[[str], Model], kind: str, options: dict[str, Any], said: str
) -> None:
    assert said in refusal(models(kind).module(), **options)


def test_experts_that_do_not_divide_are_refused(
    write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]
) -> None:
    policy, config = policy_of("Qwen3Moe"), config_of("Qwen3Moe", tiny_config)
    config.num_experts = 5
    folder = write_checkpoint(config)
    with rlcore.meta_device():
        module = policy.from_pretrained(folder)
    found = refusal(module, expert_parallel_size=2, data_parallel_size=4)
    assert "expert_parallel_size=2 of Policy" in found and "5 experts do not divide by 2" in found


def test_dropout_is_refused(models: Callable[[str], Model]) -> None:
    module = models("Qwen2").module()
    module.config.attention_dropout = 0.1
    assert "each rank would drop others; set attention_dropout to 0" in refusal(
        module, data_parallel_size=2, tensor_parallel_size=2
    )


def test_modules_and_executors_that_cannot_are_refused(models: Callable[[str], Model]) -> None:
    with rlcore.meta_device():
        own = Regression(regression_weights())
    found = refusal(own, tensor_parallel_size=4)
    assert "tensor_parallel_size=4 and expert_parallel_size=1 of Regression" in found
    assert "does not define check_split() and split()" in found
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found = refusal(models("Qwen2").module(), executor="deepspeed", data_parallel_size=2, tensor_parallel_size=2)
    assert "executor='fsdp2' can" in found


@pytest.mark.parametrize(
    ("targets", "path"),
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, "layers.0.mlp.experts"),
    ],
    ids=["embedding", "experts"],
)
@pytest.mark.filterwarnings("ignore:The PEFT config's")
def test_an_adapter_that_is_not_cut_is_refused(
    models: Callable[[str], Model], targets: dict[str, list[str]], path: str
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    from .test_train_lora import lora_module

    model = models("Qwen3Moe")  # its head is not tied to the embedding
    module = lora_module(model.policy, model.folder, **targets)
    found = refusal(module, data_parallel_size=2, **TENSOR_2, expert_parallel_size=2)
    assert f"an adapter on model.{path} is not cut with its layer" in found
