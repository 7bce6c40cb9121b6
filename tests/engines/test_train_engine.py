"""TrainEngine: methods of the user's module, train_batch, log-probs, checkpoints, residency."""

from __future__ import annotations

import itertools
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.offload.storages import distinct_storages
from rlcore.errors import (
    CheckpointError,
    InvalidInputError,
    StateError,
    UnsupportedError,
    WorkerDiedError,
    WorkerError,
)
from rlcore.nn import HuggingFaceTrainModule, OutputHead, TrainModule
from rlcore.ops import combine, kl, ppo_clip

from .train_batches import VOCAB, packed_batch, padded_batch

on_both_launchers = pytest.mark.parametrize("launcher", ["inline", "process"], indirect=True)


@pytest.fixture(scope="session")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

        def total(self, rows: Any, offset: int = 0) -> int:
            return sum(rows) + offset

        def accumulate(self, token: int) -> float:
            self(torch.full((1, 4), token, device=self.device)).logits.square().sum().backward()
            return float(self.model.norm.weight.grad.norm())

        def fail(self) -> None:
            raise KeyError("planted")

    return Policy


@pytest.fixture
def engine(policy: Any, qwen2_folder: Path, launcher: str) -> Iterator[rlcore.TrainEngine]:
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as built:
        built.build(devices="cpu", launcher=launcher)
        yield built


def module_of(engine: rlcore.TrainEngine) -> Any:
    return engine.executors[0].workers[0].worker.module


def weights_of(engine: rlcore.TrainEngine) -> dict[str, Tensor]:
    return engine.state_dict()


# ------------------------------------------------------------------------------------------ the user's methods


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
    with pytest.raises(WorkerError, match=r"module.fail\(\) failed on rank 0 \(cpu:0\): KeyError: 'planted'") as caught:
        engine.fail()
    if launcher == "inline":
        assert isinstance(caught.value.__cause__, KeyError)
    assert 'raise KeyError("planted")' in caught.value.traceback
    assert engine.total([1]) == [1], "the engine goes on"


def test_a_breakpoint_in_a_users_method_stops_there(qwen2_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "algorithm.py"
    script.write_text(
        textwrap.dedent(f"""
        import rlcore, rlcore.nn
        from transformers import Qwen2ForCausalLM

        class Policy(rlcore.nn.HuggingFaceTrainModule, Qwen2ForCausalLM):
            def train_step(self, secret):
                breakpoint()
                return secret

        with rlcore.meta_device():
            module = Policy.from_pretrained({str(qwen2_folder)!r})
        print(rlcore.TrainEngine(module).build(devices="cpu").train_step(41))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        input="p secret + 1\nc\n",
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"RLCORE_DEBUG": "pdb"},
        check=True,
    )
    assert "(Pdb) 42" in done.stdout
    assert done.stdout.rstrip().endswith("[41]")


# ------------------------------------------------------------------------------------------------- building


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
        module = module_of(engine)
        assert module.lm_head.weight is module.model.embed_tokens.weight
        reference = Qwen2ForCausalLM.from_pretrained(qwen2_folder)
        tokens = torch.arange(9)[None]
        torch.testing.assert_close(module.eval()(tokens).logits, reference(tokens).logits, rtol=0, atol=0)


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
    with pytest.raises(InvalidInputError, match="no train executor 'megatron'; registered: fsdp2"):
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
        ({"compute_dtype": ""}, "compute_dtype must be one of float32, bfloat16, got ''"),
        ({"compile": "inductor"}, "compile must be True or False, got 'inductor'"),
        ({"activation_checkpointing": 1}, "activation_checkpointing must be False, True or 'selective', got 1"),
        ({"reduce_each_micro_batch": 1}, "reduce_each_micro_batch must be True or False, got 1"),
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


class Regression(TrainModule):
    """A module that is not from transformers: an embedding and its tied head."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.weights = weights

    def materialization_source(self) -> dict[str, Tensor]:
        return self.weights

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def hidden_states(self, batch: Any) -> Tensor:
        hidden: Tensor = self.mix(self.embed(batch["input_ids"])) * self.scale
        return hidden

    def output_head(self) -> OutputHead:
        return OutputHead(self.head.weight)


def test_a_module_that_is_not_from_transformers_trains() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "embed.weight": torch.randn(VOCAB, 8, generator=generator) * 0.3,
        "mix.weight": torch.randn(8, 8, generator=generator),
        "mix.bias": torch.zeros(8),
    }
    with rlcore.meta_device():
        module = Regression(weights)
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu")
        losses = [engine.train_batch(padded_batch(), ppo_clip())["loss"] for _ in range(3)]
        assert all(map(math.isfinite, losses)) and len(set(losses)) == 3
        own = module_of(engine)
        assert own.head.weight is own.embed.weight
        assert own.scale == 2.0


def test_missing_and_unexpected_names_are_named() -> None:
    with rlcore.meta_device():
        module = Regression(
            {"embed.weight": torch.zeros(VOCAB, 8), "mix.weight": torch.zeros(8, 8), "mx.bias": torch.ones(1)}
        )
    with pytest.raises(CheckpointError, match=r"missing \['mix.bias'\], unexpected \['mx.bias'\]"):
        rlcore.TrainEngine(module).build(devices="cpu")


# ------------------------------------------------------------------------------------------------- training


@on_both_launchers
def test_log_probs_are_those_of_transformers(engine: rlcore.TrainEngine, qwen2_folder: Path) -> None:
    from transformers import Qwen2ForCausalLM

    batch = padded_batch()
    with torch.no_grad():
        logits = Qwen2ForCausalLM.from_pretrained(qwen2_folder)(batch["input_ids"]).logits / 0.7
    expected = torch.zeros(batch["input_ids"].shape)
    chosen = logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    expected[:, 1:] = torch.where(batch["loss_mask"][:, 1:], chosen, 0.0)
    got = engine.forward_logprobs(batch, temperature=0.7, max_tokens_per_micro_batch=13)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_packed_and_padded_batches_give_the_same(engine: rlcore.TrainEngine) -> None:
    padded = padded_batch()
    mask = padded["attention_mask"]
    packed = {name: padded[name][mask] for name in ("input_ids", "loss_mask")}
    packed["cu_seqlens"] = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    got = engine.forward_logprobs(packed)
    torch.testing.assert_close(got, engine.forward_logprobs(padded)[mask], rtol=0, atol=0)


def test_a_step_does_not_depend_on_how_the_batch_is_cut(policy: Any, qwen2_folder: Path) -> None:
    def trained(max_tokens: int) -> tuple[dict[str, float], dict[str, Tensor]]:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        with rlcore.TrainEngine(module) as engine:
            engine.build(devices="cpu")
            loss_fn = combine(ppo_clip(), kl(kind="k3", coef=0.1))
            batch = padded_batch() | {"ref_logprobs": padded_batch(seed=1)["old_logprobs"]}
            metrics = engine.train_batch(
                batch, loss_fn, token_weights="seq-mean-token-mean", max_tokens_per_micro_batch=max_tokens
            )
            return metrics, weights_of(engine)

    whole, whole_weights = trained(10**6)
    cut, cut_weights = trained(12)
    assert whole.keys() == cut.keys()
    for name in whole:
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    for name, tensor in whole_weights.items():
        # AdamW's first step is lr * sign(gradient) where the gradient is not near 0
        assert ((cut_weights[name] - tensor).abs() > 1e-4).float().mean() < 0.01, name


@on_both_launchers
def test_the_loss_is_the_weighted_sum_of_the_definition(engine: rlcore.TrainEngine) -> None:
    batch = padded_batch()
    mask = batch["loss_mask"]
    log_ratio = engine.forward_logprobs(batch)[mask] - batch["old_logprobs"][mask]
    advantage = batch["advantages"][:, None].expand(mask.shape)[mask]
    surrogate = torch.maximum(-log_ratio.exp() * advantage, -log_ratio.exp().clamp(0.8, 1.28) * advantage)
    metrics = engine.train_batch(batch, ppo_clip(), max_tokens_per_micro_batch=12)
    assert metrics["loss"] == pytest.approx(float(surrogate.mean()), rel=1e-5)
    assert metrics["num_tokens"] == int(mask.sum())
    assert metrics["lr/optimizer"] == pytest.approx(1e-2 / 3)


@on_both_launchers
def test_bad_batches_are_refused_and_nothing_changes(engine: rlcore.TrainEngine) -> None:
    before = weights_of(engine)
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
        (good | {"attention_mask": good["attention_mask"] * torch.arange(5)[:, None]}, "no token of sequence 0; leave"),
        (good | {"reference": None}, "batch entry 'reference' must be a tensor or numbers, got None"),
        (good | {"token_weight": torch.ones(5)}, "a batch cannot have an entry 'token_weight', which comes of"),
        (None, "takes a dict of tensors, as rlcore.collate.. makes, as batch, got None"),
    ]
    for batch, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            engine.train_batch(batch, ppo_clip())
    with pytest.raises(InvalidInputError, match="a sequence has 12 tokens; max_tokens_per_micro_batch is 11"):
        engine.train_batch(good, ppo_clip(), max_tokens_per_micro_batch=11)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


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

    before = weights_of(engine)
    with pytest.raises(rlcore.RlcoreError, match=r"the gradient norm of this batch is (nan|inf): no step was taken"):
        engine.train_batch(padded_batch(), explode)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
    assert math.isfinite(engine.train_batch(padded_batch(), ppo_clip())["loss"])
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())
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
    assert second == pytest.approx(first, rel=1e-6)
    with pytest.raises(rlcore.RlcoreError, match="no step was taken"):
        engine.train_batch(padded_batch(), lambda logprob, *_: (logprob * 1e38 * 1e38, {}))
    assert engine.train_batch(padded_batch(), ppo_clip())["grad_norm"] == pytest.approx(first, rel=1e-6)


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


# ------------------------------------------------------------------------------------------------- residency


def test_after_offload_every_storage_has_zero_bytes_and_training_goes_on_bit_equal(
    policy: Any, qwen2_folder: Path
) -> None:
    def losses(offloads: bool) -> list[float]:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        found = []
        with rlcore.TrainEngine(module) as engine:
            engine.build(devices="cpu", onload=not offloads)
            for _ in range(4):
                if offloads:
                    assert_away(engine)
                    engine.onload()
                found.append(engine.train_batch(padded_batch(), ppo_clip())["loss"])
                if offloads:
                    engine.offload()
        return found

    assert losses(offloads=True) == losses(offloads=False)


def assert_away(engine: rlcore.TrainEngine) -> None:
    module = module_of(engine)
    state = [value for values in module.optimizer.state.values() for value in values.values()]
    for storage in distinct_storages([*module.parameters(), *state]):
        assert storage.nbytes() == 0
    report = engine.memory_report()[0]["tags"]
    assert report["weights"]["device_bytes"] == report["optimizer"]["device_bytes"] == 0
    assert report["weights"]["host_bytes"] > 0


def test_reports_are_measured(engine: rlcore.TrainEngine) -> None:
    parameters = sum(storage.nbytes() for storage in distinct_storages(module_of(engine).parameters()))
    (first,) = engine.offload("weights")["weights"]
    assert first.moved_bytes == first.freed_device_bytes == parameters
    assert first.first_use and first.seconds > 0
    (back,) = engine.onload("weights")["weights"]
    assert back.moved_bytes == parameters and back.freed_device_bytes == -parameters
    assert not engine.offload("weights")["weights"][0].first_use
    assert engine.offload("weights") == {}, "a double move does nothing"


@pytest.mark.parametrize("move", ["offload", "meta"])
def test_touching_what_is_away_raises_with_the_call_that_fixes_it(engine: rlcore.TrainEngine, move: str) -> None:
    module = module_of(engine)
    state = "offloaded" if move == "offload" else "released"
    tokens = {"input_ids": torch.arange(4), "cu_seqlens": torch.tensor([0, 4])}
    getattr(engine, move)("weights")
    uses: list[Callable[[], Any]] = [
        lambda: module(torch.zeros(1, 2, dtype=torch.long)),
        lambda: module.hidden_states(tokens),
        module.state_dict,
        module.optimizer.step,
    ]
    for use in uses:
        with pytest.raises(StateError, match=rf"of this Policy are {state}; call the engine's onload\('weights'\)"):
            use()
    calls: list[Callable[[], Any]] = [
        lambda: engine.total([1]),
        lambda: engine.train_batch(padded_batch(), ppo_clip()),
        lambda: engine.forward_logprobs(padded_batch()),
        lambda: engine.save("unused"),
        lambda: engine.export("unused"),
        engine.state_dict,
    ]
    for call in calls:
        with pytest.raises(StateError, match=rf"needs the weights of the train engine, which are {state}; call onload"):
            call()


def test_an_optimizer_that_is_away_is_guarded(engine: rlcore.TrainEngine) -> None:
    engine.train_batch(padded_batch(), ppo_clip())
    engine.offload("optimizer")
    for use in (module_of(engine).optimizer.step, module_of(engine).optimizer.state_dict):
        with pytest.raises(StateError, match=r"optimizer of this Policy are offloaded; call the engine's onload"):
            use()
    with pytest.raises(StateError, match=r"train_batch\(\) needs the optimizer of the train engine"):
        engine.train_batch(padded_batch(), ppo_clip())
    engine.onload("optimizer")
    engine.train_batch(padded_batch(), ppo_clip())


STATES = {
    "loaded": [],
    "offloaded": ["offload"],
    "released": ["meta"],
    "empty": ["meta", "onload"],
}
WEIGHTS_AFTER = {
    ("loaded", "onload"): "loaded",
    ("loaded", "offload"): "offloaded",
    ("loaded", "meta"): "released",
    ("offloaded", "onload"): "loaded",
    ("offloaded", "offload"): "offloaded",
    ("offloaded", "meta"): "released",
    ("released", "onload"): "empty",
    ("released", "offload"): "there is nothing to offload",
    ("released", "meta"): "released",
    ("empty", "onload"): "empty",
    ("empty", "offload"): "have no values yet",
    ("empty", "meta"): "released",
}


@pytest.mark.parametrize("state, move", list(itertools.product(STATES, ["onload", "offload", "meta"])))
def test_every_move_from_every_state_of_the_weights(engine: rlcore.TrainEngine, state: str, move: str) -> None:
    for step in STATES[state]:
        getattr(engine, step)("weights")
    assert engine.state["weights"] == state
    expected = WEIGHTS_AFTER[state, move]
    if expected in STATES:
        getattr(engine, move)("weights")
        assert engine.state["weights"] == expected
    else:
        with pytest.raises(StateError, match=expected):
            getattr(engine, move)("weights")
        assert engine.state["weights"] == state


def test_a_released_optimizer_does_not_come_back_empty(engine: rlcore.TrainEngine) -> None:
    engine.meta("optimizer")
    for tags in (("optimizer",), ()):
        with pytest.raises(StateError, match=r"released its optimizer; call load\(path\), or restart\(\)"):
            engine.onload(*tags)
    assert engine.state["weights"] == "loaded", "a refused move moves nothing"


def test_an_unknown_tag_is_named(engine: rlcore.TrainEngine) -> None:
    with pytest.raises(InvalidInputError, match="has the tags weights, optimizer, grads; got 'kv_cache'"):
        engine.offload("kv_cache")


def test_rlites_names_move_the_same(engine: rlcore.TrainEngine) -> None:
    engine.cpu()
    assert set(engine.state.values()) == {"offloaded"}
    engine.cuda("weights")
    assert engine.state["weights"] == "loaded"
    engine.to("cuda")
    engine.to("cpu", "grads")
    assert engine.state == {"weights": "loaded", "optimizer": "loaded", "grads": "offloaded"}
    engine.to("meta")
    assert set(engine.state.values()) == {"released"}
    with pytest.raises(InvalidInputError, match="takes one of cpu, meta, cuda, npu, got 'disk'"):
        engine.to("disk")


def test_a_module_without_engine_can_be_offloaded() -> None:
    module = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with rlcore.offloaded(module, optimizer) as report:
        assert report.moved_bytes >= 3 * 64 * 65 * 4
        assert all(storage.nbytes() == 0 for storage in distinct_storages(module.parameters()))
        with pytest.raises(StateError, match="inside `with offloaded"):
            module(torch.ones(1, 64))
        with pytest.raises(StateError, match="inside `with offloaded"):
            optimizer.step()
    assert all(torch.equal(expected[name], tensor) for name, tensor in module.state_dict().items())
    optimizer.step()


def test_a_storage_that_cannot_be_freed_is_refused_with_the_remedy() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(torch.frombuffer(bytearray(16), dtype=torch.float32).view(2, 2))
    message = r"of shape \[2, 2\] made from a file or a numpy array.*tensor.clone"
    with pytest.raises(UnsupportedError, match=message), rlcore.offloaded(module):
        pass
    module(torch.ones(1, 2))


# ----------------------------------------------------------------------------------------------- checkpoints


def test_resume_is_exact(policy: Any, qwen2_folder: Path, tmp_path: Path) -> None:
    def fresh() -> rlcore.TrainEngine:
        with rlcore.meta_device():
            module = policy.from_pretrained(qwen2_folder)
        return rlcore.TrainEngine(module).build(devices="cpu")

    with fresh() as first:
        first.train_batch(padded_batch(), ppo_clip())
        first.save(tmp_path / "checkpoint", {"step": 1})
        noise = torch.rand(3)
        expected = [first.train_batch(padded_batch(seed=seed), ppo_clip()) for seed in range(3)]
    with fresh() as second:
        assert second.load(tmp_path / "checkpoint") == {"step": 1}
        assert torch.equal(torch.rand(3), noise)
        assert [second.train_batch(padded_batch(seed=seed), ppo_clip()) for seed in range(3)] == expected
        second.meta()
        second.onload("weights")
        second.load(tmp_path / "checkpoint")
        second.onload()
        assert second.train_batch(padded_batch(seed=0), ppo_clip()) == expected[0]


def test_a_checkpoint_of_another_model_is_refused(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.save(tmp_path)
    weights = {"embed.weight": torch.zeros(VOCAB, 8), "mix.weight": torch.zeros(8, 8), "mix.bias": torch.zeros(8)}
    with rlcore.meta_device():
        module = Regression(weights)
    with rlcore.TrainEngine(module) as other:
        other.build(devices="cpu")
        with pytest.raises(CheckpointError, match=r"of another model than Regression: missing: embed\.weight"):
            other.load(tmp_path)


def test_missing_and_damaged_checkpoints_are_refused(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no complete checkpoint in {tmp_path}"):
        engine.load(tmp_path)
    engine.save(tmp_path)
    weights = next(tmp_path.glob("*/weights-*"))
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"the checkpoint {tmp_path} is damaged"):
        engine.load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"the checkpoint {tmp_path} is damaged"):
        engine.load(tmp_path)


def test_what_json_cannot_hold_is_refused_before_writing(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"save\(\) cannot keep extra\['step'\] = <object object"):
        engine.save(tmp_path, {"step": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"blocking": None}, "takes True or False as blocking, got None"),
        ({"blocking": "no"}, "takes True or False as blocking, got 'no'"),
        ({"extra": "abc"}, "takes a dict, or None as extra, got 'abc'"),
        ({"extra": [1]}, r"takes a dict, or None as extra, got \[1\]"),
    ],
)
def test_save_refuses_options_of_a_wrong_kind(
    engine: rlcore.TrainEngine, tmp_path: Path, given: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"save\(\) {message}"):
        engine.save(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_previous_checkpoint(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.save(tmp_path, {"step": 1})
    files = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .* is intact"):
            engine.save(tmp_path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert engine.load(tmp_path) == {"step": 1}


def test_an_export_is_a_hugging_face_folder(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

    engine.train_batch(padded_batch(), ppo_clip())
    for _ in range(2):  # the second replaces the first
        engine.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is Qwen2ForCausalLM
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(loaded(tokens).logits, module_of(engine).eval()(tokens).logits, rtol=0, atol=0)
    assert (tmp_path / "model" / "tokenizer.json").exists()
    assert rlcore.InferenceEngine(tmp_path / "model").build(devices="cpu").generate(["1+1="], {"temperature": 0})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="is not empty, and no export of rlcore wrote it"):
        engine.export(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*notes.txt: .*Not a directory"):
        engine.export(tmp_path / "other" / "notes.txt")


@on_both_launchers
def test_state_dict_round_trip(engine: rlcore.TrainEngine) -> None:
    state = engine.state_dict()
    engine.train_batch(padded_batch(), ppo_clip())
    assert not torch.equal(engine.state_dict()["model.norm.weight"], state["model.norm.weight"])
    engine.load_state_dict(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in engine.state_dict().items())
    with pytest.raises(InvalidInputError, match=r"missing: model\.norm\.weight"):
        engine.load_state_dict({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    whole = {name: tensor.to(torch.int8) for name, tensor in state.items()}
    with pytest.raises(InvalidInputError, match=r"does not round .* from torch\.int8 to torch\.float32; convert it"):
        engine.load_state_dict(whole)
    assert all(torch.equal(state[name], tensor) for name, tensor in engine.state_dict().items())
    with pytest.raises(
        InvalidInputError, match=r"state_dict\(\) takes 'merged', 'base' or 'only' as adapters, got 'onyl'"
    ):
        engine.state_dict(adapters="onyl")  # type: ignore[arg-type]


@on_both_launchers
def test_restart_brings_the_last_checkpoint_back(engine: rlcore.TrainEngine, tmp_path: Path, launcher: str) -> None:
    engine.train_batch(padded_batch(), ppo_clip())
    engine.save(tmp_path / "checkpoint", {"step": 1})
    saved = engine.state_dict()
    following = engine.train_batch(padded_batch(seed=1), ppo_clip())
    if launcher == "process":
        os.kill(engine.executors[0].workers[0].process_id, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"the worker of rank 0 \(cpu:0\) was killed by SIGKILL"):
            engine.train_batch(padded_batch(), ppo_clip())
        with pytest.raises(StateError, match=r"train_step\(\) is refused: .* call restart\(\)"):
            engine.train_batch(padded_batch(), ppo_clip())
    engine.restart()
    assert engine.state == {"weights": "loaded", "optimizer": "loaded", "grads": "loaded"}
    assert all(torch.equal(saved[name], tensor) for name, tensor in engine.state_dict().items())
    assert engine.train_batch(padded_batch(seed=1), ppo_clip()) == following, "the optimizer's state too"


@on_both_launchers
def test_memory_is_reported_as_dataclasses(engine: rlcore.TrainEngine, launcher: str) -> None:
    (report,) = engine.memory_report()
    assert report["device"] == "cpu:0"
    assert report["tags"]["weights"]["device_bytes"] > 0
    assert report["stats"].reserved_bytes > 0 and report["info"].free_bytes > 0


def test_gradients_leave_and_come_back_and_nothing_touches_freed_memory(engine: rlcore.TrainEngine) -> None:
    alone = engine.call("accumulate", 3, gather="first")
    engine.offload("grads")
    assert all(parameter.grad is None for parameter in module_of(engine).parameters())
    assert engine.call("accumulate", 3, gather="first") == alone, "autograd starts a new gradient meanwhile"
    engine.onload("grads")
    assert engine.call("accumulate", 3, gather="first") == pytest.approx(3 * alone, rel=1e-5), "of both, and one more"
    engine.meta("grads")
    engine.onload("grads")
    assert engine.call("accumulate", 3, gather="first") == alone, "after a release gradients start from none"


def test_checkpoints_do_not_need_the_gradients(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.train_batch(padded_batch(), ppo_clip())
    engine.call("accumulate", 3)
    engine.offload("grads")
    engine.save(tmp_path)
    engine.load(tmp_path)
    with pytest.raises(
        StateError, match=r"the grads of this Policy are offloaded; call the engine's onload\('grads'\)"
    ):
        module_of(engine).optimizer.step()


def test_gradients_that_are_away_are_not_passed_over_by_zero_grad(engine: rlcore.TrainEngine) -> None:
    module = module_of(engine)
    engine.call("accumulate", 1)
    engine.offload("grads")
    for owner in (module, module.optimizer):
        with pytest.raises(StateError, match=r"in host memory, where zero_grad\(\) does not reach them; drop them by"):
            owner.zero_grad()
    engine.onload("grads")
    assert any(parameter.grad is not None for parameter in module.parameters())
    module.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())
    engine.offload("grads")
    module.zero_grad()  # there are none


def test_a_save_leaves_other_peoples_files(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    for _ in range(2):
        engine.save(tmp_path)
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert len(list(tmp_path.glob("data-*/weights-*"))) == 1


def test_a_refused_load_changes_nothing(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.save(tmp_path)
    engine.train_batch(padded_batch(), ppo_clip())
    before = weights_of(engine)
    module = module_of(engine)
    first, *rest = module.parameters()
    module.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    with pytest.raises(CheckpointError, match="optimizer of the checkpoint has groups of"):
        engine.load(tmp_path)
    del module.scheduler
    with pytest.raises(
        CheckpointError, match=r"the checkpoint has the schedulers \['scheduler'\]; the module has \[\]"
    ):
        engine.load(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(engine).items())


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
    assert metrics["loss"] == pytest.approx(float(trained.sum()) / 100 / int((trained > 0).sum()))


def test_calls_draw_no_random_number(engine: rlcore.TrainEngine) -> None:
    state = torch.get_rng_state()
    engine.memory_report()
    engine.total([1])
    assert torch.equal(torch.get_rng_state(), state)
