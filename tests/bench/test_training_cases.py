"""The cases of the train engine pass on a host at its sizes, and refuse what is wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import pytest
import torch
from once import run_once
from torch.distributed.fsdp import FSDPModule

from rlcore.bench.case import load_cases
from rlcore.bench.cases import models
from rlcore.bench.cases.agreement import expect_same, tolerance
from rlcore.bench.cases.models import TINY, packed_batch
from rlcore.registry import get_device

if TYPE_CHECKING:
    from rlcore.bench.cases.agreement import StepNumbers
    from rlcore.bench.cases.train_steps import Batch, Setup

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

pytest.importorskip("transformers")

trainer_offload = pytest.importorskip("rlcore.bench.cases.trainer_offload")
train_steps = pytest.importorskip("rlcore.bench.cases.train_steps")
experts = pytest.importorskip("rlcore.bench.cases.experts")
training = pytest.importorskip("rlcore.bench.cases.training")

DEEPSPEED = Path(sys.prefix) / "deepspeed"
"""Where `make test-slow` installs it, apart from what the other tests import."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_WARM_UP", 1)
    monkeypatch.setattr(training, "_STEPS", 1)
    monkeypatch.setattr(experts, "_STEPS", 1)
    monkeypatch.setattr(trainer_offload, "_TRAINING_CYCLES", 2)
    monkeypatch.setattr(trainer_offload, "_CYCLES", 1)


CONTENDERS = {
    "train/dense_1.5b": [("torch FSDP2", "equal"), ("engine", "equal"), ("engine", "uneven")],
    "train/long_sequence_32k": [
        ("engine, Ulysses", None),
        ("engine, tensor parallel", None),
        ("engine on one device", None),
    ],
    "train/sizes_of_one": [("engine", None), ("engine, sizes of 1", None)],
    "train/experts": [("engine", None), ("engine", None)],
    "train/materialize": [("engine", None)],
    "offload/trainer": [("engine", None)],
    "offload/training": [("no offload", None), ("offload after each step", None)],
}


SLOW = ("train/experts", "offload/trainer", "offload/training", "train/long_sequence_32k", "train/materialize")


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CONTENDERS])
def test_case_passes_on_a_host(name: str) -> None:
    results = run_once(name)
    assert [(one.implementation, one.params.get("lengths"), one.status, one.reason) for one in results] == [
        (contender, lengths, "pass", "") for contender, lengths in CONTENDERS[name]
    ]


def test_sizes_of_one_that_compute_something_else_are_refused() -> None:
    work = load_cases()["train/sizes_of_one"].prepare(get_device("cpu"))
    assert work.close is not None
    try:
        with_ones = work.contenders[1]
        metrics = with_ones.run()
        with_ones.check(metrics)
        with_ones.check.args[0].logprob_T += 1e-6  # type: ignore[attr-defined]
        with pytest.raises(AssertionError, match="log-probs are not those of the engine without sizes"):
            with_ones.check(metrics)
    finally:
        work.close()


def test_one_long_sequence_is_also_that_of_one_device() -> None:
    """Memory that falls with the number of devices is seen beside that of one."""
    contenders = load_cases()["train/long_sequence_128k"].prepare(get_device("cpu")).contenders
    assert [(one.implementation, one.params["devices"]) for one in contenders] == [
        ("engine, Ulysses", 2),
        ("engine on one device", 1),
    ]


def test_a_device_of_which_the_profiler_tells_nothing_is_not_idle() -> None:
    assert train_steps._work_seen(get_device("cpu"), [lambda: torch.ones(2)]) is None


def test_gaps_between_queued_kernels_are_told_from_those_in_which_the_host_is_late() -> None:
    overlapping, queued, late = [(10.0, 20.0), (12.0, 15.0)], (22.0, 30.0), (130.0, 131.0)
    work = train_steps.work_of([late, *overlapping, queued])
    assert work == pytest.approx((19e-6, 4, 2e-6))
    assert train_steps.work_of([]) == (0.0, 0, 0.0)


@pytest.mark.slow
def test_a_trainer_that_learns_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    work = load_cases()["train/dense_1.5b"].prepare(get_device("cpu"))
    plain, engine, *_ = work.contenders
    plain.check(plain.run())
    clip = train_steps.ppo_clip
    monkeypatch.setattr(train_steps, "ppo_clip", lambda **options: _other_loss(clip(**options)))
    with pytest.raises(AssertionError, match="the norm of gradients is"):
        engine.check(engine.run())


def _other_loss(loss_fn: Any) -> Any:
    def other(*args: Any) -> Any:
        value, stats = loss_fn(*args)
        return 1.01 * value, stats

    return other


# ------------------------------------------------------------------------ what is wrong where ranks share a sequence


class _OwnSums:
    """A reduce-scatter that leaves each rank what it has of its own part: nobody's gradients are added up."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **_: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _broken(defect: str) -> Any:
    """Return the class of a trainer that does something wrong on ranks that share a sequence."""

    class Broken(models.policy_class(TINY)):  # type: ignore[misc]
        def share_sequences(self, group: Any) -> None:
            super().share_sequences(group)
            self.sharing, evened = group, group.evened
            if defect == "own keys alone":
                group.evened = lambda *row: cut(*evened(*row))

            def cut(input_ids: torch.Tensor, cu_seqlens: torch.Tensor, lengths: tuple[int, ...]) -> Any:
                half = len(input_ids) // group.size
                return input_ids, torch.arange(0, len(input_ids) + 1, half), (half,) * group.size

        def hidden_states(self, batch: Any) -> torch.Tensor:
            found: torch.Tensor = super().hidden_states(batch)
            swaps = defect == "rows of one rank swapped" and self.sharing.rank == 1
            return found.flip(0) if swaps else found

        def on_weights_materialized(self) -> None:
            super().on_weights_materialized()
            if defect == "gradients not added up":
                for module in self.modules():
                    if isinstance(module, FSDPModule):
                        module.set_custom_reduce_scatter(_OwnSums())

    return Broken


class OnOneDevice(NamedTuple):
    """The setup of the case of a long sequence on a host, its batches, and what the engine computes on one device."""

    setup: Setup
    batches: list[Batch]
    numbers: StepNumbers


@pytest.fixture(scope="module")
def on_one_device() -> OnOneDevice:
    setup = train_steps.Setup(["cpu:0", "cpu:1"], TINY, torch.float32, tokens=256, warm_up=1, recomputes=True)
    batches = [packed_batch(TINY.vocabulary, [setup.tokens], seed=0)] * 2
    numbers = train_steps.engine_steps(setup._replace(device_names=["cpu:0"]), batches).numbers
    return OnOneDevice(setup, batches, numbers)


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        pytest.param("own keys alone", "log-probs are ", marks=pytest.mark.slow),
        pytest.param("", "", marks=pytest.mark.slow),
        pytest.param("rows of one rank swapped", "log-probs are ", marks=pytest.mark.slow),
        pytest.param("gradients not added up", "log-probs are .*; the norm of gradients is ", marks=pytest.mark.slow),
    ],
)
def test_a_defect_of_what_ranks_exchange_is_found(
    defect: str, said: str, on_one_device: OnOneDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, batches, expected = on_one_device
    monkeypatch.setattr(train_steps, "policy", lambda *args: models.policy(*args, _broken(defect)))
    found = train_steps.engine_steps(setup, batches, sequence_parallel_size=2).numbers
    allowed = tolerance(TINY, torch.float32, setup.tokens)
    with pytest.raises(AssertionError, match=said) if defect else contextlib.nullcontext():
        expect_same(found, expected, allowed)


class _Swapped(models.policy_class(TINY)):  # type: ignore[misc]
    """A trainer that gives each token the state of another one."""

    def hidden_states(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = super().hidden_states(batch)
        return found.flip(0)


@pytest.mark.parametrize("is_right", [True, False])
def test_float8_is_as_near_as_its_roundings_come_to(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.ModelShape("", 256, 512, 2, 4, 2, 512, head_size=64)
    setup = train_steps.Setup(["cpu:0"], model, torch.bfloat16, tokens=64, warm_up=0, recomputes=False)
    batches = [packed_batch(model.vocabulary, [32] * 2, seed=0)]
    expected = train_steps.engine_steps(setup, batches).numbers
    if not is_right:
        monkeypatch.setattr(train_steps, "policy", lambda *args: models.policy(*args, _Swapped))
    found = train_steps.engine_steps(setup, batches, compute_dtype="float8").numbers
    assert not torch.equal(found.before_T, expected.before_T)
    with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match="log-probs are "):
        expect_same(found, expected, tolerance(model, torch.bfloat16, 32, float8=True))


@pytest.mark.slow
def test_several_devices_are_also_shown_with_blocks_kept_and_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = training._setup

    def of_two(*args: Any) -> Any:
        return setup(*args)._replace(device_names=["cpu:0", "cpu:1"])

    monkeypatch.setattr(training, "_setup", of_two)
    *others, kept, alone = load_cases()["train/dense_1.5b"].prepare(get_device("cpu")).contenders
    assert [(one.implementation, one.params["devices"]) for one in (kept, alone)] == [
        ("engine, blocks kept", 2),
        ("engine on one device", 1),
    ]
    for one in (others[1], kept):  # the losses of the engine with and without are compared
        one.check(one.run())


@pytest.mark.slow
def test_the_loop_of_context_parallelism_trains_on_what_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has the whole sequence; torch's ring attention, which cuts it, has no kernel of a host."""
    from rlcore.bench.cases import parallel  # transformers is there

    monkeypatch.setattr(parallel, "context_parallel", lambda mesh, **_: contextlib.nullcontext())
    setup = train_steps.Setup(["cpu:0"], TINY, torch.float32, tokens=256, warm_up=1, recomputes=True)
    batches = [packed_batch(TINY.vocabulary, [setup.tokens], seed=0)] * 2
    engine = train_steps.engine_steps(setup, batches)
    loop = train_steps.plain_steps(parallel._Ring, setup, batches)
    expect_same(loop.numbers, engine.numbers, tolerance(TINY, torch.float32, setup.tokens))
    assert len(loop.seconds) == len(engine.seconds) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_plain_loop_of_deepspeed_trains_on_what_the_engine_does(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEEPSPEED.is_dir():
        monkeypatch.syspath_prepend(str(DEEPSPEED))
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed; `make test-slow` does it")
    from rlcore.bench.cases import zero  # transformers is there

    setup = train_steps.Setup(["cpu:0"], TINY, torch.float32, tokens=256, warm_up=1, recomputes=False)
    batches = [packed_batch(TINY.vocabulary, [32] * 8, seed) for seed in range(2)]
    engine = train_steps.engine_steps(setup, batches, executor="deepspeed", stage=stage)
    plain = train_steps.plain_steps({2: zero._ZeroLoop2, 3: zero._ZeroLoop3}[stage], setup, batches, launcher="process")
    expect_same(plain.numbers, engine.numbers, tolerance(TINY, torch.float32, 32))
    assert len(plain.seconds) == len(engine.seconds) == 1


@pytest.mark.slow
def test_a_model_that_is_read_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    materialize = pytest.importorskip("rlcore.bench.cases.materialize")
    work = load_cases()["train/materialize"].prepare(get_device("cpu"))
    try:
        done = work.contenders[0].run()
        sums, grown = done.result
        with pytest.raises(AssertionError, match="a parameter sums up to"):
            work.contenders[0].check(done._replace(result=([sums[0] + 1, *sums[1:]], grown)))
    finally:
        work.close()
    assert materialize._NUM_RUNS > 1


@pytest.mark.parametrize("grown_mib", [0, 200, 400])
def test_offload_that_keeps_host_memory_is_refused(grown_mib: int) -> None:
    work = load_cases()["offload/training"].prepare(get_device("cpu"))
    host_bytes = [1 << 30, 10 << 30, 10 << 30, (10 << 30) + (grown_mib << 20)]
    done = trainer_offload._Learned([2.0, 1.5, 1.2, 1.0], [1 << 30] * 4, host_bytes, 1.0)
    for contender in work.contenders:
        if grown_mib < 300:  # 2 % are 205
            contender.check(done)
        else:
            with pytest.raises(AssertionError, match="host memory grew: "):
                contender.check(done)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_offload_that_brings_other_values_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore.engines.offload.device_to_host import DeviceToHost

    complete = DeviceToHost.complete

    def spoil(self: DeviceToHost, chunk: Any) -> None:
        chunk.block.tensor[:4] += 1
        complete(self, chunk)

    monkeypatch.setattr(DeviceToHost, "complete", spoil)
    trainer = load_cases()["offload/trainer"].prepare(get_device("cpu")).contenders[0]
    with pytest.raises(AssertionError, match="other values came back"):
        trainer.check(trainer.run())
    training_work = load_cases()["offload/training"].prepare(get_device("cpu"))
    without, moved = training_work.contenders
    without.check(without.run())
    with pytest.raises(AssertionError, match=r"the losses are .* and without offload"):
        moved.check(moved.run())
