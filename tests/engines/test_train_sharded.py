"""The train engine on several workers: what plain PyTorch computes, however the weights and tokens are cut.

Engines are shared by the tests of this file, which bring them back to the weights of their folder.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import rlcore
from rlcore.errors import InvalidInputError, RlcoreError, StateError, UnsupportedError, WorkerDiedError, WorkerError
from rlcore.nn import OutputHead, TrainModule
from rlcore.ops import ppo_clip
from tests.accuracy import assert_as_accurate

from .plain_training import Truth
from .train_batches import VOCAB, assert_same_weights, packed_batch, repeated
from .train_policy import Build, Place, places, policy_gradient, truth_of, truth_of_own

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

slow, multigpu = pytest.mark.slow, pytest.mark.multigpu
on_each_place = places(("cpu", 1, ()), ("cpu", 2, ()), ("cpu", 3, slow), ("cuda", 2, multigpu), ("cuda", 4, multigpu))
on_two = places(("cpu", 2, ()), ("cuda", 2, multigpu))


@pytest.fixture(scope="module")
def untied_folder(write_checkpoint: Callable[..., Path], tiny_config: dict[str, Any]) -> Path:
    from transformers import Qwen2Config

    return write_checkpoint(Qwen2Config(**tiny_config | {"tie_word_embeddings": False}))


@pytest.fixture(
    params=["qwen2_folder", pytest.param("untied_folder", marks=slow)], ids=["tied head", "head of its own"]
)
def folder(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------------------------------------------- values


@on_each_place
def test_steps_and_log_probs_are_those_of_plain_pytorch(build: Build, policy: Any, place: Place, folder: Path) -> None:
    engine, truth = build(place.workers, place.device, folder), truth_of(policy, folder, place.device)
    for lengths, max_tokens in (
        ((12, 3, 7, 2, 9, 5, 14), 16384),
        ((12, 3, 7, 2, 9, 5, 14), 15),
        ((4, 24, 9, 13), 24),
        ((40,), 16384),
    ):
        batch = packed_batch(lengths)
        options: dict[str, Any] = {"max_tokens_per_micro_batch": max_tokens}
        truth.assert_step(
            engine.train_batch(batch, ppo_clip(), max_grad_norm=0.1, **options), batch, ppo_clip(), max_grad_norm=0.1
        )
        truth.assert_logprobs(engine.forward_logprobs(batch, temperature=0.7, **options), batch, temperature=0.7)
    truth.assert_weights(engine.state_dict())
    batch, sampling = packed_batch((12, 3, 40, 7, 2, 24, 9)), {"temperature": 1.4, "top_p": 0.95, "top_k": 12}
    truth.assert_logprobs(engine.forward_logprobs(batch, max_tokens_per_micro_batch=40, **sampling), batch, **sampling)


def test_a_failed_loss_leaves_nothing_behind(build: Build, truth: Truth) -> None:
    sharded, batch = build(2), packed_batch()
    seen: list[int] = []

    def fails_at_the_second(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        seen.append(len(logprob))
        if len(seen) == 2:
            raise ValueError("planted")
        return -logprob, {}

    with pytest.raises(WorkerError, match="ValueError: planted"):
        sharded.train_batch(batch, fails_at_the_second, max_tokens_per_micro_batch=15)
    truth.assert_step(sharded.train_batch(batch, ppo_clip()), batch, ppo_clip())
    truth.assert_weights(sharded.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": "bfloat16"},
        pytest.param({"compute_dtype": "bfloat16", "dtype": "bfloat16"}, marks=slow),
        pytest.param({"compute_dtype": "bfloat16", "reduce_each_micro_batch": True}, marks=slow),
        pytest.param({"reduce_each_micro_batch": True}, marks=slow),
        pytest.param({"reshard_after_forward": False}, marks=slow),
    ],
)
def test_a_failed_loss_leaves_no_gradients_for_the_next_step(build: Build, options: dict[str, Any]) -> None:
    """FSDP keeps sums apart from ``grad`` where they have another dtype than what is computed."""
    batch, seen = packed_batch(), [0]

    def fails_at_the_second(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        seen[0] += 1
        if seen[0] == 2:
            raise ValueError("planted")
        return -100 * logprob, {}

    norms = []
    for fails in (False, True):
        sharded = build(2, **options)
        if fails:
            with pytest.raises(WorkerError, match="ValueError: planted"):
                sharded.train_batch(batch, fails_at_the_second, max_tokens_per_micro_batch=15)
        norms.append(sharded.train_batch(batch, policy_gradient, max_tokens_per_micro_batch=15)["grad_norm"])
    assert norms[0] == norms[1]


@on_two
def test_a_failed_block_leaves_nothing_behind(build: Build, place: Place, policy: Any, qwen2_folder: Path) -> None:
    sharded, truth = build(place.workers, place.device), truth_of(policy, qwen2_folder, place.device)
    with pytest.raises(WorkerError, match="ValueError: planted"):
        sharded.fail_in_a_block()
    truth.assert_step(sharded.train_batch(packed_batch(), ppo_clip()), packed_batch(), ppo_clip())


def test_an_infinite_gradient_is_refused_on_all_workers(build: Build) -> None:
    sharded = build(2)
    before = sharded.state_dict()

    def explodes(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        return logprob * torch.where(per_token["advantages"] == per_token["advantages"].max(), float("inf"), 1.0), {}

    with pytest.raises(RlcoreError, match="no step was taken"):
        sharded.train_batch(packed_batch(), explodes)
    assert_same_weights(sharded.state_dict(), before)


# ------------------------------------------------------------------------------------------------------ layouts


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "recomputed": {"activation_checkpointing": True},
    "reduced each time": {"reduce_each_micro_batch": True},
    "gathered one by one": {"gather_bytes": 0},
    "kept after forward": {"gather_bytes": 0, "reshard_after_forward": False},
    "sequences shared": {"sequence_parallel_size": 2},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when it compiles
def test_wrappers_do_not_reach_names(build: Build) -> None:
    names = build(1).state_dict().keys()
    assert build(1, activation_checkpointing=True, compile=True).state_dict().keys() == names


def test_fused_optimizers_clip_as_others_do(build: Build, truth: Truth) -> None:
    sharded, batch = build(2), packed_batch()
    sharded.forget_steps(fused=True)
    for norm in (None, 0.01, 1e6):
        found = sharded.train_batch(batch, ppo_clip(), max_grad_norm=norm)
        truth.assert_step(found, batch, ppo_clip(), max_grad_norm=norm)
        truth.assert_weights(sharded.state_dict())


@pytest.mark.parametrize(
    "layout",
    [
        "replicas",
        "sequences shared",
        "kept after forward",
        pytest.param("reduced each time", marks=slow),
        pytest.param("recomputed", marks=slow),  # a user's own blocks are, in another test
        pytest.param("gathered one by one", marks=slow),
    ],
)
def test_each_layout_trains_alike(build: Build, layout: str, truth: Truth) -> None:
    sharded = build(2, **LAYOUTS[layout])
    for max_tokens in (16384, 15):
        found = sharded.train_batch(packed_batch(), ppo_clip(), max_tokens_per_micro_batch=max_tokens)
        truth.assert_step(found, packed_batch(), ppo_clip())
    truth.assert_weights(sharded.state_dict())


def test_blocks_that_are_kept_after_their_forward_are_gathered_once(build: Build) -> None:
    kept, freed = (build(2, **LAYOUTS[layout]) for layout in ("kept after forward", "gathered one by one"))
    parts = kept.local_sizes()
    padded = {name: 2 * 4 * max(part[name] for part in parts) for name in parts[0]}
    in_blocks = sum(size for name, size in padded.items() if ".layers." in name)
    once = sum(padded.values())
    assert kept.gathered_bytes() == [once] * 2
    assert freed.gathered_bytes() == [once + in_blocks] * 2
    assert kept.local_sizes() == parts, "nothing stays gathered"


@pytest.mark.slow
def test_two_replicas_of_two_shards(build: Build, truth: Truth) -> None:
    sharded = build(4, replicas=2)
    for lengths in ((12, 3, 7, 2, 9, 5, 14), (40, 3)):
        batch = packed_batch(lengths)
        truth.assert_step(sharded.train_batch(batch, ppo_clip()), batch, ppo_clip())
    truth.assert_weights(sharded.state_dict())


@slow
@pytest.mark.parametrize("workers", [1, 2])
def test_bfloat16_costs_no_more_than_plain_bfloat16_does(
    build: Build, workers: int, policy: Any, qwen2_folder: Path
) -> None:
    engine, truth = build(workers, compute_dtype="bfloat16"), truth_of(policy, qwen2_folder, dtype=torch.bfloat16)
    found = engine.train_batch(packed_batch(), policy_gradient)
    truth.assert_step(found, packed_batch(), policy_gradient)
    assert found["loss"] != build(workers).train_batch(packed_batch(), policy_gradient)["loss"], "another precision"
    assert all(tensor.dtype == torch.float32 for tensor in engine.state_dict().values())


def test_every_worker_holds_its_part(build: Build) -> None:
    sizes = build(2).local_sizes()
    whole = {name: tensor.numel() for name, tensor in build(1).state_dict().items()}
    assert {name: sum(part[name] for part in sizes) for name in whole} == whole
    assert [part["model.embed_tokens.weight"] // 32 for part in sizes] == [11, 10], "rows"
    assert [part["model.norm.weight"] for part in sizes] == [16, 16]


class Tagger(TrainModule):
    """Not from transformers: weights from memory, a buffer, a tied head, a part that starts fresh, no blocks."""

    new_parameters = ("fresh",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 7)
        self.fresh = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def materialization_source(self) -> dict[str, Tensor]:
        return {"embed.weight": torch.linspace(-1, 1, VOCAB * 7).view(VOCAB, 7), "scale": torch.tensor(3.0)}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def hidden_states(self, batch: Any) -> Tensor:
        hidden: Tensor = self.fresh(self.embed(batch["input_ids"])) * self.scale
        return hidden.view(-1, 7)

    def output_head(self) -> OutputHead:
        return OutputHead(self.head.weight)

    def fresh_weights(self) -> tuple[Tensor, float]:
        return self.fresh.weight.to_local().detach().clone(), float(self.scale)


class Early(TrainModule):
    """Looks at what the second of three blocks returns, after all of them have run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def materialization_source(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(x.shape, generator=generator) for name, x in self.named_parameters()}

    def wrap_classes(self) -> list[str]:
        return ["Linear"]

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=self.is_fused)

    is_fused = False

    def hidden_states(self, batch: Any) -> Tensor:
        outputs = [self.embed(batch["input_ids"].view(-1))]
        for block in self.blocks:
            outputs.append(outputs[-1] + block(outputs[-1]).tanh())
        return outputs[-2]

    def output_head(self) -> OutputHead:
        return OutputHead(self.embed.weight)

    def num_gathers(self) -> int:
        """FSDP's groups."""
        return len({id(part._get_fsdp_state()) for part in self.modules() if isinstance(part, FSDPModule)})


class EarlyFused(Early):
    is_fused = True


@pytest.mark.parametrize(
    ("recomputes", "options", "num_gathers"),
    [(False, {}, 2), (True, {"gather_bytes": 0}, 4)],
    ids=["gathered together", "alone, and recomputed"],
)
def test_a_block_whose_result_nobody_uses(
    build: Build, shared_devices: tuple[str, ...], options: dict[str, Any], num_gathers: int, recomputes: bool
) -> None:
    build(2)
    with rlcore.meta_device():
        module = Early()
    with rlcore.TrainEngine(module) as sharded:
        sharded.build(devices=shared_devices, data_parallel_size=2, activation_checkpointing=recomputes, **options)
        assert sharded.num_gathers() == [num_gathers] * 2
        truth = truth_of_own(Early, Early().materialization_source())
        for _ in range(2):
            truth.assert_step(sharded.train_batch(packed_batch(), ppo_clip()), packed_batch(), ppo_clip())
        truth.assert_weights(sharded.state_dict())


def test_a_fused_sgd_is_refused_where_torch_has_none(build: Build, shared_devices: tuple[str, ...]) -> None:
    build(2)
    with rlcore.meta_device():
        module = EarlyFused()
    with (
        rlcore.TrainEngine(module) as sharded,
        pytest.raises(rlcore.RlcoreError, match=r"SGD with fused=True, on several workers.*leave fused out"),
    ):
        sharded.build(devices=shared_devices, data_parallel_size=2)


def test_an_optimizer_that_a_method_made_and_torch_cannot_shard_is_refused_before_a_step(build: Build) -> None:
    sharded = build(2)
    before = sharded.state_dict()
    sharded.take("Rprop")
    with pytest.raises(UnsupportedError, match=r"torch's Rprop, on several workers is not supported"):
        sharded.train_batch(packed_batch(), ppo_clip())
    assert_same_weights(sharded.state_dict(), before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_that_is_a_tensor(build: Build, truth: Truth, fused: bool) -> None:
    sharded = build(2)
    sharded.forget_steps(fused, torch.tensor(1e-2))
    for _ in range(2):
        truth.assert_step(sharded.train_batch(packed_batch(), ppo_clip()), packed_batch(), ppo_clip())
    truth.assert_weights(sharded.state_dict())


def test_gradients_in_bfloat16_that_are_exchanged_for_each_micro_batch_sum_in_float32(build: Build) -> None:
    """16 alike sum to the gradient of one, to the bit: their weights are a 16th, and float32 has room for the sum."""
    sharded = build(2, dtype="bfloat16", reduce_each_micro_batch=True)
    sharded.take("SGD", lr=1.0)
    found = []
    for times in (1, 16):
        sharded.load_state_dict(sharded.initial)
        batch = repeated(packed_batch((9,)), 2 * times)
        sharded.train_batch(batch, policy_gradient, max_tokens_per_micro_batch=9, max_grad_norm=None)
        found.append(sharded.state_dict())
    assert_same_weights(*found)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_module_that_is_not_from_transformers(build: Build, shared_devices: tuple[str, ...], replicas: int) -> None:
    build(2)
    with rlcore.meta_device():
        module = Tagger()
    with rlcore.TrainEngine(module) as sharded:
        sharded.build(devices=shared_devices, data_parallel_size=2 // replicas, replicas=replicas)
        (first, scale), (second, _) = sharded.fresh_weights()
        assert scale == 3.0
        assert torch.equal(first, second) == (replicas == 2), "of one draw"
        truth = truth_of_own(Tagger, sharded.state_dict())
        for lengths in ((12, 3, 7, 2), (40,)):
            batch = packed_batch(lengths)
            truth.assert_step(sharded.train_batch(batch, ppo_clip()), batch, ppo_clip())
        truth.assert_weights(sharded.state_dict())


# ------------------------------------------------------------------------------------------- the user's methods


def test_methods_see_fsdps_own_mean_of_gradients(build: Build, policy: Any, folder: Path) -> None:
    truth = truth_of(policy, folder, dtype=torch.bfloat16)
    reference, exact = (plain.module.mean_gradient(3) for plain in (truth.reference, truth.exact))
    for found in build(2, folder=folder, compute_dtype="bfloat16").mean_gradient(3):
        assert_as_accurate(found, reference, exact)


def test_arguments_are_split_and_results_gathered(build: Build) -> None:
    engine = build(2)
    assert engine.total(rlcore.NeedParallel([1, 2, 3, 4, 5])) in ([3, 12], [6, 9])
    assert sorted(engine.total(rlcore.NeedParallel([7]))) == [0, 7]
    assert engine.call("total", [1, 2], gather="mean") == 3.0
    rows = rlcore.NeedParallel([1, 2, 3, 4, 5], balance_by=[1, 1, 9, 1, 1])
    assert engine.call("squares", rows, gather="cat") == [1, 4, 9, 16, 25], "in their own order"
    assert sorted(map(len, engine.squares(rows))) == [1, 4], "by cost"
    with pytest.raises(InvalidInputError, match="needs one result a row: 2 results for 5 rows"):
        engine.call("totals", rows, gather="cat")


def test_refusals(build: Build) -> None:
    engine = build(2)
    batch = packed_batch()
    batch["input_ids"][13] = VOCAB
    with pytest.raises(InvalidInputError, match="input_ids of sequence 1 holds 21; the model's vocabulary is 0 to 20"):
        engine.train_batch(batch, ppo_clip())
    with pytest.raises(InvalidInputError, match="a sequence has 14 tokens; max_tokens_per_micro_batch is 13: raise it"):
        engine.forward_logprobs(packed_batch(), max_tokens_per_micro_batch=13)


# -------------------------------------------------------------------------------------------------- what leaves


@on_two
def test_offloads_between_steps_change_no_bit(build: Build, place: Place) -> None:
    """The second curve is the first one's operations, in the same processes."""
    engine = build(place.workers, place.device)
    lengths = [(12, 3, 7), (9, 4), (5, 14, 2, 6)]
    curves = []
    for moves in (False, True):
        engine.load_state_dict(engine.initial)  # type: ignore[attr-defined]
        engine.forget_steps()
        losses = []
        for seed, some in enumerate(lengths):
            losses.append(engine.train_batch(packed_batch(some, seed), ppo_clip()))
            engine.forward_logprobs(packed_batch(some, seed))  # leaves the root gathered, if nobody looks after it
            if moves:
                reports = engine.offload()
                assert len(reports["weights"]) == place.workers
                assert all(report.freed_device_bytes > 0 for report in reports["weights"])
                assert all(one["tags"]["weights"]["device_bytes"] == 0 for one in engine.memory_report())
                with pytest.raises(StateError, match=r"call onload\('weights'\)"):
                    engine.state_dict()
                engine.onload()
        curves.append((losses, engine.state_dict()))
    assert curves[0][0] == curves[1][0]
    assert_same_weights(curves[1][1], curves[0][1])


@on_two
def test_what_a_method_leaves_gathered_does_not_leave_the_device(build: Build, place: Place) -> None:
    engine = build(place.workers, place.device)
    engine.train_batch(packed_batch(), ppo_clip())  # from then on FSDP holds uneven shards padded
    shards = [one["tags"]["weights"]["device_bytes"] for one in engine.memory_report()]
    engine.score_alone()
    assert [report.freed_device_bytes for report in engine.offload("weights")["weights"]] == shards
    engine.onload("weights")


def test_a_gathered_module_whose_weights_are_away_refuses_before_it_gathers(build: Build) -> None:
    engine = build(1, compute_dtype="bfloat16")
    module = engine.executors[0].workers[0].worker.module
    engine.offload("weights")
    with pytest.raises(
        StateError, match=r"weights of this Policy are offloaded; call the engine's onload\('weights'\)"
    ):
        module(torch.zeros(1, 3, dtype=torch.int64))
    engine.onload("weights")
    engine.train_batch(packed_batch(), ppo_clip())


def test_one_gathered_worker_gives_its_weights_to_inference(build: Build, qwen2_folder: Path) -> None:
    engine = build(1, compute_dtype="bfloat16")
    engine.train_batch(packed_batch(), ppo_clip())
    state = engine.state_dict()
    with rlcore.InferenceEngine(qwen2_folder, executor="hf").build(devices="cpu") as infer:
        report = engine.sync_weights(infer)
        assert report.moved_bytes == sum(tensor.nbytes for tensor in state.values())
        served = dict(infer.executors[0].workers[0].worker.module.named_parameters())
    assert all(torch.equal(served[name], tensor) for name, tensor in state.items())


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.slow
def test_a_worker_killed_in_a_step_ends_all_and_restart_continues(
    tmp_path: Path, short_runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def dies(logprob: Tensor, entropy: Tensor, per_token: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return -logprob, {}

    with rlcore.meta_device():
        module = Tagger()
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices=["cpu:6", "cpu:7"], data_parallel_size=2, timeout_s=250)  # processes of its own
        engine.train_batch(packed_batch(), ppo_clip())
        engine.save(tmp_path / "checkpoint")
        state = engine.state_dict()
        with pytest.raises(WorkerDiedError):
            engine.train_batch(packed_batch(), dies)
        with pytest.raises(StateError, match=r"call restart\(\)"):
            engine.state_dict()
        engine.restart()
        assert_same_weights(engine.state_dict(), state)
        engine.train_batch(packed_batch(), ppo_clip())
