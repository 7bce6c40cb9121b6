"""TrainEngine: methods of the user's module, what is refused, train_batch and log-probabilities."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.errors import CheckpointError, InvalidInputError, StateError, WorkerError
from rlcore.ops import combine, kl, ppo_clip
from tests.accuracy import assert_as_accurate, assert_same_bits, assert_within_rounding

from .plain_training import Truth, keep_float64
from .train_batches import VOCAB, assert_same_weights, packed, packed_batch, padded_batch
from .train_policy import Regression, regression_weights, truth_of, truth_of_own

on_both_launchers = pytest.mark.parametrize("launcher", ["inline", "process"], indirect=True)


@pytest.fixture
def engine(
    policy: Any, qwen2_folder: Path, launcher: str, request: pytest.FixtureRequest
) -> Iterator[rlcore.TrainEngine]:
    devices = "cpu" if launcher == "inline" else request.getfixturevalue("shared_devices")[0]
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as built:
        yield built.build(devices=devices, launcher=launcher)


@pytest.fixture
def truth(policy: Any, qwen2_folder: Path) -> Truth:
    return truth_of(policy, qwen2_folder)


def module_of(engine: rlcore.TrainEngine) -> Any:
    return engine.executors[0].workers[0].worker.module


# --------------------------------------------------------------------------------------------------- the user's methods


@on_both_launchers
def test_a_method_of_the_module_is_called_on_the_engine(engine: rlcore.TrainEngine) -> None:
    assert engine.total([1, 2], offset=3) == [6]
    assert engine.total(rlcore.NeedParallel([1, 2])) == [3]
    assert engine.call("total", [1, 2], gather="first") == 3
    assert engine.call("total", [1, 2], gather="mean") == 3.0


def test_an_unknown_method_is_named(engine: rlcore.TrainEngine) -> None:
    with pytest.raises(AttributeError, match="neither the train engine nor Policy has a method 'totl'"):
        engine.totl([1])


@on_both_launchers
def test_an_exception_of_the_users_code_arrives_with_rank_device_method_and_traceback(
    engine: rlcore.TrainEngine, launcher: str
) -> None:
    with pytest.raises(
        WorkerError, match=r"module.fail\(\) failed on rank 0 \(cpu:\d\): KeyError: 'planted'"
    ) as caught:
        engine.fail()
    if launcher == "inline":
        assert isinstance(caught.value.__cause__, KeyError)
    assert 'raise KeyError("planted")' in caught.value.traceback
    assert engine.total([1]) == [1], "the engine goes on"


def test_a_breakpoint_in_a_users_method_stops_in_the_users_program(
    policy: Any, qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(policy):  # type: ignore[misc]
        def train_step(self, secret: int) -> int:
            breakpoint()
            return secret

    stops: list[tuple[int, threading.Thread]] = []
    monkeypatch.setenv("RLCORE_DEBUG", "pdb")
    monkeypatch.setattr(  # in pdb's place
        sys, "breakpointhook", lambda: stops.append((sys._getframe(1).f_locals["secret"], threading.current_thread()))
    )
    with rlcore.meta_device():
        module = Stopping.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module).build(devices="cpu", launcher="process") as engine:
        assert engine.train_step(41) == [41]
    assert stops == [(41, threading.main_thread())], "where the terminal is"


# ------------------------------------------------------------------------------------------------------------- building


def test_from_pretrained_under_meta_reads_only_the_config(policy: Any, copy_of: Any, qwen2_folder: Path) -> None:
    folder = copy_of(qwen2_folder)
    (folder / "model.safetensors").write_bytes(b"\x00")
    with rlcore.meta_device():
        module = policy.from_pretrained(folder)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.lm_head.weight is module.model.embed_tokens.weight
    with pytest.raises(CheckpointError, match=f"cannot read the model at {folder}"):
        rlcore.TrainEngine(module).build(devices="cpu")


@pytest.mark.parametrize("context", ["rlcore", "accelerate", "torch"])
def test_build_inside_the_meta_context_makes_real_tied_weights(context: str, policy: Any, qwen2_folder: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import Qwen2ForCausalLM

    contexts: dict[str, Callable[[], Any]] = {
        "rlcore": rlcore.meta_device,
        "accelerate": init_empty_weights,
        "torch": lambda: torch.device("meta"),
    }
    with contexts[context]():
        engine = rlcore.TrainEngine(policy.from_pretrained(qwen2_folder)).build(devices="cpu")
    with engine:
        module, reference = module_of(engine), Qwen2ForCausalLM.from_pretrained(qwen2_folder)
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert_same_weights(dict(module.named_parameters()), dict(reference.named_parameters()))
        assert_same_weights(dict(module.named_buffers()), dict(reference.named_buffers()))


def test_a_module_with_real_parameters_is_refused(policy: Any, qwen2_folder: Path) -> None:
    module = policy.from_pretrained(qwen2_folder)
    with pytest.raises(InvalidInputError, match=r"must be on the meta device.*inside `with rlcore.meta_device"):
        rlcore.TrainEngine(module)


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"takes a rlcore.nn.TrainModule, got Linear"):
        rlcore.TrainEngine(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_building_twice_and_using_a_closed_engine_are_refused(engine: rlcore.TrainEngine) -> None:
    with pytest.raises(StateError, match="the train engine is already built; make a new engine"):
        engine.build()
    engine.close()
    with pytest.raises(StateError, match="the train engine is closed"):
        engine.total([1])


def test_unknown_options_and_sizes_are_refused(policy: Any, qwen2_folder: Path) -> None:
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with pytest.raises(InvalidInputError, match="launcher must be one of inline"):
        rlcore.TrainEngine(module).build(launcher="threads")
    with pytest.raises(InvalidInputError, match="tensor_parallel_size must be a whole number of at least 1, got 0"):
        rlcore.TrainEngine(module).build(tensor_parallel_size=0)
    with pytest.raises(InvalidInputError, match="no train executor 'megatron'; registered: deepspeed, fsdp2"):
        rlcore.TrainEngine(module, executor="megatron")
    with pytest.raises(
        InvalidInputError,
        match=r"build\(\) of the train engine has no option 'compute_dtpe'; did you mean 'compute_dtype'\? It takes "
        r"devices, launcher, .*, timeout_s; and by the executor 'fsdp2': dtype, compute_dtype, replicas, ",
    ):
        rlcore.TrainEngine(module).build(devices="cpu", compute_dtpe="float32")
    with pytest.raises(InvalidInputError, match="no option 'data_parallel_sise'; did you mean 'data_parallel_size'"):
        rlcore.TrainEngine(module).build(devices="cpu", data_parallel_sise=2)
    with pytest.raises(InvalidInputError, match=r"no option 'misspelt'\. It takes devices, "):
        rlcore.TrainEngine(module).build(devices="cpu", misspelt=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": "2"}, "data_parallel_size must be a whole number of at least 1, got '2'"),
        ({"data_parallel_size": True}, "data_parallel_size must be a whole number of at least 1, got True"),
        ({"data_parallel_size": -1}, "data_parallel_size must be a whole number of at least 1, got -1"),
        ({"replicas": 0}, "replicas must be a whole number of at least 1, got 0"),
        ({"replicas": 1.0}, "replicas must be a whole number of at least 1, got 1.0"),
        ({"dtype": torch.float32}, "dtype must be one of float32, bfloat16, got torch.float32"),
        ({"dtype": ["float32"]}, r"dtype must be one of float32, bfloat16, got \['float32'\]"),
        ({"compute_dtype": ""}, "compute_dtype must be one of float32, bfloat16, float8, got ''"),
        ({"compile": "inductor"}, "compile must be True or False, got 'inductor'"),
        ({"activation_checkpointing": 1}, "activation_checkpointing must be False, True or 'selective', got 1"),
        ({"deterministic": "yes"}, "deterministic must be True or False, got 'yes'"),
        ({"reduce_each_micro_batch": 1}, "reduce_each_micro_batch must be True or False, got 1"),
        ({"reshard_after_forward": 2}, "reshard_after_forward must be True or False, got 2"),
        ({"gather_bytes": -1}, "gather_bytes must be a whole number of at least 0, got -1"),
        ({"onload": "yes"}, r"build\(\) takes True or False as onload, got 'yes'"),
        (
            {"reserve_host_bytes": "1GB"},
            r"takes a whole number of at least 1, or None as reserve_host_bytes, got '1GB'",
        ),
        ({"reserve_host_bytes": -5}, r"takes a whole number of at least 1, or None as reserve_host_bytes, got -5"),
        ({"host_memory_bytes": 0}, r"takes a whole number of at least 1, or None as host_memory_bytes, got 0"),
    ],
)
def test_an_option_of_a_wrong_kind_is_refused_before_a_worker_starts(
    policy: Any, qwen2_folder: Path, monkeypatch: pytest.MonkeyPatch, given: Any, message: str
) -> None:
    monkeypatch.setattr("rlcore.engines.engine.start_workers", lambda *_, **__: pytest.fail("a worker was started"))
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with pytest.raises(InvalidInputError, match=message):
        rlcore.TrainEngine(module).build(devices="cpu", **given)


def test_missing_and_unexpected_names_are_named() -> None:
    with rlcore.meta_device():
        module = Regression(
            {"embed.weight": torch.zeros(VOCAB, 8), "mix.weight": torch.zeros(8, 8), "mx.bias": torch.ones(1)}
        )
    with pytest.raises(CheckpointError, match=r"missing \['mix.bias'\], unexpected \['mx.bias'\]"):
        rlcore.TrainEngine(module).build(devices="cpu")


# ------------------------------------------------------------------------------------------------------------- training


def test_log_probs_are_those_of_transformers(engine: rlcore.TrainEngine, qwen2_folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    batch = padded_batch()
    mask = batch["loss_mask"]

    def scored(dtype: torch.dtype) -> Tensor:
        model = keep_float64(Qwen2ForCausalLM.from_pretrained(qwen2_folder).to(dtype))
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits / 0.7
        chosen = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
        return chosen[mask[:, 1:]]

    got = engine.forward_logprobs(batch, temperature=0.7, max_tokens_per_micro_batch=13)
    assert_as_accurate(got[mask], scored(torch.float32), scored(torch.float64))
    assert (got[~mask] == 0).all()


def test_packed_and_padded_batches_give_the_same(engine: rlcore.TrainEngine) -> None:
    """A padded batch is packed, and then one of those."""
    padded = padded_batch()
    got = engine.forward_logprobs(packed(padded))
    assert_same_bits(got, engine.forward_logprobs(padded)[padded["attention_mask"]])


@pytest.mark.parametrize("max_tokens", [10**6, 14], ids=["whole", "cut"])
def test_a_step_is_that_of_plain_pytorch_however_the_batch_is_cut(
    engine: rlcore.TrainEngine, truth: Truth, max_tokens: int
) -> None:
    loss_fn = combine(ppo_clip(), kl(kind="k3", coef=0.1))
    batch = padded_batch((12, 3, 7, 2, 9, 14)) | {
        "ref_logprobs": padded_batch((12, 3, 7, 2, 9, 14), seed=1)["old_logprobs"]
    }
    found = engine.train_batch(
        batch, loss_fn, token_weights="seq-mean-token-mean", max_tokens_per_micro_batch=max_tokens
    )
    trained_NL = batch["loss_mask"]
    counts_N = trained_NL.sum(1)
    weight_NL = trained_NL / (counts_N.clamp(min=1) * (counts_N > 0).sum())[:, None]
    truth.assert_step(found, packed(batch), loss_fn, weight_T=weight_NL[batch["attention_mask"]])
    truth.assert_weights(engine.state_dict())


def test_the_loss_is_the_mean_of_the_definition(engine: rlcore.TrainEngine, truth: Truth) -> None:
    def definition(logprob: Tensor, entropy: Tensor, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantage = (logprob - per_token["old_logprobs"]).exp(), per_token["advantages"]
        surrogate = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        return surrogate, ppo_clip()(logprob, entropy, per_token)[1]

    batch = padded_batch()
    found = engine.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=12)
    truth.assert_step(found, packed(batch), definition)
    truth.assert_weights(engine.state_dict())
    assert found["num_tokens"] == int(batch["loss_mask"].sum())
    assert found["lr/optimizer"] == pytest.approx(1e-2 / 3)


def test_a_module_that_is_not_from_transformers_trains() -> None:
    weights = regression_weights()
    with rlcore.meta_device():
        module = Regression(weights)
    truth = truth_of_own(lambda: Regression(weights), weights)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu")
        for _ in range(3):
            found = engine.train_batch(padded_batch(), ppo_clip())
            truth.assert_step(found, packed(padded_batch()), ppo_clip())
        own = module_of(engine)
        assert own.head.weight is own.embed.weight
        assert own.scale == 2.0


def test_bad_batches_are_refused_and_nothing_changes(engine: rlcore.TrainEngine) -> None:
    before = engine.state_dict()
    good = padded_batch()
    bad_token, bad_advantage, bad_shape = dict(good), dict(good), dict(good)
    bad_token["input_ids"] = good["input_ids"].clone()
    bad_token["input_ids"][2, 3] = VOCAB
    bad_advantage["advantages"] = good["advantages"].clone()
    bad_advantage["advantages"][4] = math.nan
    bad_shape["advantages"] = torch.zeros(3)
    cases = [
        (bad_token, r"input_ids of sequence 2 holds 21; the model's vocabulary is 0 to 20"),
        (bad_advantage, r"advantages of sequence 4 is nan on a token that is trained on"),
        (
            bad_shape,
            r"advantages must be one entry for each token, \[5, 12\] .* one value for each sequence, \[5\], or",
        ),
        (
            packed_batch() | {"advantages": torch.ones(3)},
            r"batch entry 'advantages' has shape \[3\]; accepted: one value a token, one a sequence \[7\], or a scalar",
        ),
        ({"tokens": good["input_ids"]}, r"a batch needs input_ids; it has \['tokens'\]"),
        ({"input_ids": torch.zeros(4)}, r"input_ids must be \[N, L\] with attention_mask, or \[T\] with cu_seqlens"),
        ({"input_ids": torch.zeros(2, 4)}, r"input_ids must be whole numbers, got torch.float32"),
        (packed_batch() | {"input_ids": torch.zeros(1, 52)}, r"or \[T\] with cu_seqlens; got \[1, 52\] with"),
        (packed_batch() | {"cu_seqlens": torch.tensor([1, 53])}, r"must rise from 0 to the 52 tokens .* got \[1, 53\]"),
        (packed_batch() | {"cu_seqlens": torch.tensor([[0, 52]])}, r"from 0 to the 52 tokens .* got \[\[0, 52\]\]"),
        (
            {"input_ids": torch.zeros(0).long(), "cu_seqlens": torch.tensor([0])},
            "a batch needs at least one sequence, got none",
        ),
        (
            good | {"attention_mask": good["attention_mask"] * (torch.arange(5)[:, None] > 0)},
            "no token of sequence 0; leave",
        ),
        (good | {"reference": None}, "batch entry 'reference' must be a tensor or numbers, got None"),
        (good | {"token_weight": torch.ones(5)}, "a batch cannot have an entry 'token_weight', which comes of"),
        (None, "takes a dict of tensors, as rlcore.collate.. makes, as batch, got None"),
    ]
    for batch, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            engine.train_batch(batch, ppo_clip())
    with pytest.raises(InvalidInputError, match="a sequence has 12 tokens; max_tokens_per_micro_batch is 11"):
        engine.train_batch(good, ppo_clip(), max_tokens_per_micro_batch=11)
    assert_same_weights(engine.state_dict(), before)


def test_nan_on_masked_tokens_does_not_matter(engine: rlcore.TrainEngine) -> None:
    batch = padded_batch()
    batch["old_logprobs"] = torch.where(batch["loss_mask"], batch["old_logprobs"], math.nan)
    assert math.isfinite(engine.train_batch(batch, ppo_clip())["loss"])


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_infinite_gradient_is_refused_and_takes_no_step(engine: rlcore.TrainEngine, is_fused: bool) -> None:
    module = module_of(engine)
    module.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=is_fused)
    module.scheduler = torch.optim.lr_scheduler.LinearLR(module.optimizer, total_iters=10)

    def explode(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return logprob * 1e38 * 1e38, {}

    before = engine.state_dict()
    with pytest.raises(rlcore.RlcoreError, match=r"the gradient norm of this batch is (nan|inf): no step was taken"):
        engine.train_batch(padded_batch(), explode)
    assert_same_weights(engine.state_dict(), before)
    assert math.isfinite(engine.train_batch(padded_batch(), ppo_clip())["loss"])
    assert not all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
    assert all(float(state["step"]) == 1 for state in module.optimizer.state.values())


def test_momentum_is_not_made_by_a_step_that_is_refused(engine: rlcore.TrainEngine) -> None:
    """torch would make it of memory as it finds it, and read that at the next step."""
    module = module_of(engine)
    module.optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9, fused=True)
    module.scheduler = torch.optim.lr_scheduler.LinearLR(module.optimizer, total_iters=10)
    with pytest.raises(rlcore.RlcoreError, match="no step was taken"):
        engine.train_batch(padded_batch(), lambda logprob, *_: (logprob * 1e38 * 1e38, {}))
    assert not module.optimizer.state
    assert math.isfinite(engine.train_batch(padded_batch(), ppo_clip())["grad_norm"])
    assert module.optimizer.state


def test_gradients_of_parameters_in_no_optimizer_do_not_add_up(engine: rlcore.TrainEngine) -> None:
    module = module_of(engine)
    module.optimizer = torch.optim.SGD(list(module.parameters())[1:], lr=0.0)
    module.scheduler = torch.optim.lr_scheduler.LinearLR(module.optimizer, total_iters=10)
    first, second = (engine.train_batch(padded_batch(), ppo_clip())["grad_norm"] for _ in range(2))
    assert second == first, "the same operations"
    with pytest.raises(rlcore.RlcoreError, match="no step was taken"):
        engine.train_batch(padded_batch(), lambda logprob, *_: (logprob * 1e38 * 1e38, {}))
    assert engine.train_batch(padded_batch(), ppo_clip())["grad_norm"] == first


def test_a_module_without_optimizer_cannot_train_but_scores(policy: Any, qwen2_folder: Path) -> None:
    class Reference(policy):  # type: ignore[misc]
        def on_weights_materialized(self) -> None:
            pass

    with rlcore.meta_device():
        module = Reference.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu")
        assert engine.forward_logprobs(padded_batch()).shape == (5, 12)
        with pytest.raises(StateError, match="train_batch needs an optimizer, and Reference has none"):
            engine.train_batch(padded_batch(), ppo_clip())
        engine.meta()
        engine.onload()
        assert engine.state == {"weights": "empty", "optimizer": "loaded", "grads": "loaded"}


def test_options_out_of_range_are_refused(engine: rlcore.TrainEngine) -> None:
    for option, value, message in (
        (
            "loss_fn",
            None,
            r"takes a function \(logprob, entropy, per_token\) -> .* as loss_fn, got None",
        ),
        ("max_tokens_per_micro_batch", True, "takes a whole number as max_tokens_per_micro_batch, got True"),
        ("max_grad_norm", "1", "takes a number, or None as max_grad_norm, got '1'"),
        ("temperature", "hot", "takes a number as temperature, got 'hot'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            engine.train_batch(padded_batch(), **({"loss_fn": ppo_clip()} | {option: value}))
    with pytest.raises(InvalidInputError, match=r"gather='mean' does not fit what extra_repr\(\) gave, ''"):
        engine.call("extra_repr", gather="mean")
    with pytest.raises(InvalidInputError, match=r"max_grad_norm must be above 0, or None for no limit, got -1\.0"):
        engine.train_batch(padded_batch(), ppo_clip(), max_grad_norm=-1.0)
    with pytest.raises(
        InvalidInputError, match="max_tokens_per_micro_batch must be a whole number of at least 1, got 0"
    ):
        engine.forward_logprobs(padded_batch(), max_tokens_per_micro_batch=0)


def test_dr_grpo_divides_by_the_longest_possible_response(engine: rlcore.TrainEngine) -> None:
    def value(logprob: Tensor, entropy: Tensor | None, per_token: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return logprob * 0 + 1, {}

    batch = padded_batch()
    metrics = engine.train_batch(batch, value, token_weights="seq-mean-token-sum-norm", max_length=100)
    trained = batch["loss_mask"].sum(1)
    expected = float(trained.sum()) / 100 / int((trained > 0).sum())
    assert_within_rounding(metrics["loss"], expected, terms=2 * int(trained.sum()), dtype=torch.float32)


def test_calls_draw_no_random_number(engine: rlcore.TrainEngine) -> None:
    state = torch.get_rng_state()
    engine.memory_report()
    engine.total([1])
    assert torch.equal(torch.get_rng_state(), state)


@on_both_launchers
def test_memory_is_reported_as_dataclasses(engine: rlcore.TrainEngine, launcher: str) -> None:
    (report,) = engine.memory_report()
    assert report["device"] == ("cpu:0" if launcher == "inline" else "cpu:4")
    assert report["tags"]["weights"]["device_bytes"] > 0
    assert report["stats"].reserved_bytes > 0 and report["info"].free_bytes > 0
