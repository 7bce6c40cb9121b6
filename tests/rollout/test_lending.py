"""The trainer's devices are lent to a sampler while the trainer waits, and are back before it goes on."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import rlcore
from rlcore.engines.residency import State
from rlcore.engines.sampling.hf.executor import HfExecutor
from rlcore.errors import InvalidInputError, StateError, SyncError
from rlcore.ops import decoupled_ppo, group_advantage
from rlcore.quickstart.model import quickstart_model
from rlcore.quickstart.policy import policy_class
from rlcore.quickstart.run import SMALL
from rlcore.rollout import LentDevices, RolloutController, SingleTurn, fleet
from tests.model_rounding import logprob_rounding
from tests.rollout.simulated_engine import SimulatedEngine, SimulatedTrainer
from tests.rollout.test_rollout_controller import Steps, never_held_up, until


class Trainer(SimulatedTrainer):
    """A trainer with all that ``LentDevices`` asks of one."""

    is_built = True
    devices = ("cpu:0",)

    def __init__(self) -> None:
        super().__init__()
        self.num_changes = 0
        self.state = {"weights": State.LOADED}
        self.onloaded: list[str] = []
        """What came back by itself, without a move of the sampler."""

    def onload(self, *tags: str) -> None:
        self.onloaded += tags


class Guest(SimulatedEngine):
    is_built = True
    devices = ("cpu:0",)
    state: ClassVar[dict[str, State]] = {"weights": State.OFFLOADED}
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Lent(LentDevices):
    """A lender that moves nothing, and notes what would move."""

    moves: list[str]
    fails = False

    def __init__(self, train: Any, infer: Any, **options: Any) -> None:
        super().__init__(train, infer, **options)
        self.moves = []

    def _move_sampler_in(self, version: int) -> None:
        self.moves.append("in")
        if self.fails:
            raise SyncError("planted")
        self.infer.version = version  # type: ignore[misc]

    def _move_trainer_in(self) -> None:
        assert self.infer._is_paused, "the sampler stands still before anything moves"  # type: ignore[attr-defined]
        self.moves.append("back")


def controller(lent: Lent, engine: SimulatedEngine, **options: Any) -> RolloutController:
    options = {"batch_size": 8, "max_staleness": 0, "max_in_flight": 2} | options
    return RolloutController(engine, Steps(), lent=lent, **options)  # type: ignore[arg-type]


def test_what_waits_for_room_goes_to_the_lent_devices_which_are_back_when_the_wait_ends() -> None:
    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.02)
    with controller(lent, engine) as rollout:
        items = [30] * 8
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        for step in range(3):
            batch = rollout.prepare_batch(items, timeout_s=60)
            assert lent.moves == ["in", "back"] * (step + 1) and guest._is_paused
            assert len(batch["rewards"]) == 8 and int(batch["versions"].max()) == step
            trainer.num_changes += 1  # it trains
            rollout.update_weights(trainer)  # type: ignore[arg-type]
        stats = rollout.stats
    # Eight requests of 30 steps, two at a time: the engine alone would have had all.
    assert guest._next_number > 0 and engine._next_number + guest._next_number >= 24
    assert lent.num_lent == 3 and stats.lent > 0 and "; lent to samplers " in str(stats)
    assert (stats.given, stats.tokens_discarded, stats.requests_moved) == (24, 0, 0)
    assert trainer.synced == [1, 1, 1, 1], "a weight update leaves the lent engine out"


def test_requests_stay_with_the_lent_engine_and_go_on_when_it_is_lent_again() -> None:
    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.01)
    with controller(lent, engine, batch_size=2, max_staleness=1, max_in_flight=1) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        numbers = [rollout.submit(steps) for steps in (20, 400, 20, 20)]
        first = rollout.wait(2, timeout_s=60)
        held = guest.num_under_way
        rollout.update_weights(trainer)  # type: ignore[arg-type]
        second = rollout.wait(2, timeout_s=60)
        assert sorted(one.number for one in (*first, *second)) == numbers
        assert rollout.stats.tokens_discarded == 0 and held <= 1


def test_devices_that_are_lent_serve_the_version_of_then_not_that_of_the_waits_begin() -> None:
    """Another thread may update the weights during a wait."""
    trainer, guest, engine = Trainer(), Guest(), SimulatedEngine()
    is_lent, collect = threading.Event(), engine.collect

    def collect_when_lent(timeout_s: float | None = None) -> Any:
        assert is_lent.wait(60)
        return collect(timeout_s)

    class Updated(Lent):
        def due_in_s(self, *given: Any) -> float:
            if not self.moves:
                engine.version = 1
                rollout.set_version(1)
            return super().due_in_s(*given)

        def _move_sampler_in(self, version: int) -> None:
            super()._move_sampler_in(version)
            is_lent.set()

    engine.collect = collect_when_lent  # type: ignore[method-assign]
    for wait in (lambda: rollout.prepare_batch([1], timeout_s=60), lambda: rollout.rollout_batch([1], timeout_s=60)):
        engine.version = 0
        is_lent.clear()
        lent = Updated(trainer, guest, after_s=0.0)
        with controller(lent, engine, batch_size=1, max_staleness=1) as rollout:
            lent.note_synced(trainer)
            wait()
            assert lent.moves == ["in", "back"] and guest.version == 1


def test_nothing_is_lent_while_the_trainer_has_other_weights_than_the_samplers() -> None:
    trainer, guest, engine = Trainer(), Guest(), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.0)
    with controller(lent, engine, max_staleness=1) as rollout:
        items = [20] * 8
        rollout.prepare_batch(items, timeout_s=60)
        assert lent.moves == [], "the samplers never had its weights"
        rollout.update_weights(trainer)  # type: ignore[arg-type]
        trainer.num_changes += 1
        rollout.prepare_batch(items, timeout_s=60)
        assert lent.moves == [], "it has trained since"


def test_a_move_that_fails_ends_the_lending_and_the_trainer_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    trainer, guest, engine = Trainer(), Guest(), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.0)
    lent.fails = True
    with controller(lent, engine) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        items = [20] * 8
        for _ in range(2):
            rollout.prepare_batch(items, timeout_s=60)
            rollout.update_weights(trainer)  # type: ignore[arg-type]
    assert lent.moves == ["in", "back"] and lent.num_lent == 0
    assert "the trainer's devices are not lent any more: planted" in caplog.text


def test_an_error_and_a_deadline_bring_the_trainer_back_too() -> None:
    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.01)
    with controller(lent, engine) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            rollout.prepare_batch([10_000] * 8, timeout_s=0.1)
        assert lent.moves == ["in", "back"] and guest._is_paused
        with pytest.raises(TimeoutError):
            rollout.rollout_batch([10_000] * 8, timeout_s=0.1)
        assert lent.moves == ["in", "back"] * 2
    assert not guest._is_paused and guest.num_under_way == 0, "the engine is the caller's again"


def test_a_lent_engine_that_stops_answering_is_closed_and_its_requests_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet, "_LOOK_S", 0.01)
    is_closed = threading.Event()

    class Stopped(Guest):
        def collect(self, timeout_s: float | None = None) -> Any:
            assert is_closed.wait(60)
            raise StateError("its worker was ended")

        def close(self) -> None:
            is_closed.set()

    trainer, guest, engine = Trainer(), Stopped(), SimulatedEngine(step_s=0.001)
    lent, items = Lent(trainer, guest, after_s=0.0), [50] * 4
    with controller(lent, engine, batch_size=4, max_in_flight=1, unhealthy_after_s=0.1) as rollout:
        never_held_up(rollout, 0)
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        for _ in range(2):
            assert len(rollout.prepare_batch(items, timeout_s=30)["rewards"]) == 4
            rollout.update_weights(trainer)  # type: ignore[arg-type]
        assert is_closed.is_set() and rollout.stats.requests_moved == 1
    assert lent.moves == ["in"] and trainer.onloaded == ["weights"] and lent.num_lent == 1
    assert "lent sampler is taken out: lent sampler has not answered for" in caplog.text
    assert "the trainer's devices are not lent any more: lent sampler has been taken out" in caplog.text


def test_a_lent_engine_that_has_died_is_lent_to_no_more() -> None:
    class Dies(Guest):
        def collect(self, timeout_s: float | None = None) -> Any:
            raise RuntimeError("planted")

    trainer, guest, engine = Trainer(), Dies(), SimulatedEngine(step_s=0.001)
    lent, items = Lent(trainer, guest, after_s=0.0), [20] * 4
    with controller(lent, engine, batch_size=4, max_in_flight=1) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        for _ in range(3):
            rollout.prepare_batch(items, timeout_s=60)
            rollout.update_weights(trainer)  # type: ignore[arg-type]
    assert lent.num_lent == 1 and guest.is_closed and trainer.onloaded == ["weights"]


def test_an_engine_that_cannot_leave_is_closed_and_the_trainer_comes_back() -> None:
    class Stays(Lent):
        def _move_trainer_in(self) -> None:
            raise StateError("planted")

    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent, items = Stays(trainer, guest, after_s=0.0), [20] * 8
    with controller(lent, engine) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        assert len(rollout.prepare_batch(items, timeout_s=60)["rewards"]) == 8
    assert guest.is_closed and trainer.onloaded == ["weights"]


def test_what_a_lent_engine_had_goes_elsewhere_when_a_later_move_fails() -> None:
    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.01)
    with controller(lent, engine, batch_size=2, max_staleness=1, max_in_flight=1) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        numbers = [rollout.submit(steps) for steps in (20, 200, 20, 20)]
        first = rollout.wait(2, timeout_s=60)
        assert guest.num_under_way == 1
        lent.fails = True
        rollout.update_weights(trainer)  # type: ignore[arg-type]
        second = rollout.wait(2, timeout_s=5)
        assert sorted(one.number for one in (*first, *second)) == numbers
        assert rollout.stats.requests_moved == 1 and lent.moves == ["in", "back"] * 2
    assert not guest._is_paused and guest.num_under_way == 0 and not guest.is_closed


def test_ctrl_c_while_the_engine_is_held_moves_nothing_before_it_stands_still() -> None:
    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.0)
    with controller(lent, engine, batch_size=1, max_staleness=4, max_in_flight=1) as rollout:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        for steps in (20, 10**9, 20):
            rollout.submit(steps)
        driver = rollout._fleet._guest
        assert driver is not None

        def interrupted() -> None:
            del driver.await_pause  # type: ignore[union-attr]
            raise KeyboardInterrupt

        driver.await_pause = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            rollout.wait(1, timeout_s=60)
        assert lent.moves == ["in"]
        rollout.wait(1, timeout_s=60)
        assert lent.moves == ["in", "back"], "the engine stood still"


def test_the_end_of_any_call_brings_the_trainer_back_and_others_that_wait_then_lend_no_more() -> None:
    """The program goes on in the thread of that call, and may train."""
    may_move = threading.Event()

    class Slow(Lent):
        def _move_sampler_in(self, version: int) -> None:
            begun.set()
            assert may_move.wait(60)
            super()._move_sampler_in(version)

    begun = threading.Event()
    trainer, guest, engine = Trainer(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Slow(trainer, guest, after_s=0.0)
    with controller(lent, engine, batch_size=1, max_staleness=4) as rollout, ThreadPoolExecutor() as threads:
        rollout.update_weights(trainer, version=0)  # type: ignore[arg-type]
        rollout.submit(400)
        waiting = threads.submit(rollout.wait, 1, 60)
        assert begun.wait(60)
        evaluating = threads.submit(rollout.evaluate, [1])
        with pytest.raises(TimeoutError):
            evaluating.result(0.05)  # the devices are on their way to the other
        may_move.set()
        assert len(evaluating.result(60)) == 1 and lent.moves == ["in", "back"]
        assert len(waiting.result(60)) == 1 and lent.moves == ["in", "back"], "nor were they lent again"


@pytest.mark.parametrize("how", ["update_weights", "generation_paused"])
def test_weights_are_updated_with_the_trainer_at_home_though_another_thread_waits(how: str) -> None:
    class Noting(Trainer):
        def sync_weights(self, engines: Any, *, version: int) -> str:
            later.append(threads.submit(rollout.evaluate, [1]))  # it may lend nothing before this is over
            time.sleep(0.02)
            at_home.append(lent.moves == ["in", "back"])
            return super().sync_weights(engines, version=version)

    at_home: list[bool] = []
    later: list[Any] = []
    trainer, guest, engine = Noting(), Guest(step_s=0.001), SimulatedEngine(step_s=0.001)
    lent = Lent(trainer, guest, after_s=0.0)
    with controller(lent, engine, batch_size=1, max_staleness=4) as rollout, ThreadPoolExecutor() as threads:
        lent.note_synced(trainer)
        rollout.submit(400)
        waiting = threads.submit(rollout.wait, 1, 60)
        until(lambda: lent.num_lent and not guest._is_paused)
        if how == "update_weights":
            rollout.update_weights(trainer)  # type: ignore[arg-type]
        else:
            with rollout.generation_paused() as engines:
                assert guest._is_paused
                trainer.sync_weights(engines, version=1)
                rollout.set_version(1)
        assert at_home == [True] and len(waiting.result(60)) == 1 and len(later[0].result(60)) == 1


def test_wrong_engines_are_refused() -> None:
    trainer, guest = Trainer(), Guest()
    guest.devices = ("cpu:0", "cpu:1")  # type: ignore[assignment]
    with pytest.raises(InvalidInputError, match=r"the trainer's devices, cpu:0, and .* is on cpu:1 too; build it with"):
        Lent(trainer, guest)
    guest.is_built = False
    with pytest.raises(StateError, match="LentDevices takes engines that are built"):
        Lent(trainer, guest)
    with pytest.raises(InvalidInputError, match=r"RolloutController\(lent=\) needs max_in_flight="):
        RolloutController(SimulatedEngine(), Steps(), batch_size=1, lent=Lent(trainer, Guest()))  # type: ignore[arg-type]
    lent = Lent(trainer, Guest())
    with pytest.raises(InvalidInputError, match=r"lends to an engine of its own, and this one is among those of infer"):
        controller(lent, lent.infer)  # type: ignore[arg-type]


def test_a_lent_engine_has_one_controller_at_a_time() -> None:
    lent = Lent(Trainer(), Guest())
    for _ in range(2):
        with controller(lent, SimulatedEngine()):
            for another in (lambda: controller(lent, SimulatedEngine()), lambda: controller(None, lent.infer)):  # type: ignore[arg-type]
                with pytest.raises(StateError, match="another RolloutController has this inference engine"):
                    another()


def test_an_engine_has_no_more_than_max_in_flight() -> None:
    engine = SimulatedEngine(step_s=0.0005)
    most = 0
    collect = engine.collect

    def counted(timeout_s: float | None = None) -> Any:
        nonlocal most
        most = max(most, engine.num_under_way)
        return collect(timeout_s)

    engine.collect = counted  # type: ignore[method-assign]
    with RolloutController(engine, Steps(), batch_size=12, max_in_flight=3) as rollout:  # type: ignore[arg-type]
        assert len(rollout.rollout_episodes([5] * 12, timeout_s=60)) == 12
    assert most == 3


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    yield quickstart_model(seed=0, cache=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "can_swap"), [("hf", True), ("hf", False), pytest.param("vllm", False, marks=pytest.mark.vllm)]
)
def test_real_engines_change_places_and_the_trainer_learns_the_same(
    executor: str, can_swap: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler of its own and one on the trainer's device, whose tokens are as the trainer scores them."""
    with rlcore.meta_device():
        module = policy_class(model).from_pretrained(model)
    workflow = SingleTurn(lambda data, text: float(len(text)), {"n": 4, "max_tokens": 24, "ignore_eos": True})
    items = [{"prompt": f"{a:02d}+{b:02d}="} for a in range(4) for b in range(4)]
    with (
        rlcore.TrainEngine(module) as train,
        rlcore.InferenceEngine(model) as own,
        rlcore.InferenceEngine(model, executor=executor) as guest,
    ):
        is_on_gpu = executor == "vllm" and torch.cuda.is_available()  # whose vLLM runs nowhere else
        train.build(devices="cuda:0" if is_on_gpu else "cpu:0", launcher="inline")
        own.build(devices="cuda:0" if is_on_gpu else "cpu:1", launcher="inline", dtype="float32")
        launcher = "inline" if executor == "hf" else None  # vLLM has a process of its own
        guest.build(colocate_with=train, launcher=launcher, dtype="float32", **SMALL.get(executor, {}))
        monkeypatch.setattr(HfExecutor, "can_swap", can_swap)
        lent = LentDevices(train, guest, after_s=0.0)
        assert guest.state["weights"] is State.OFFLOADED
        with RolloutController(own, workflow, batch_size=16, max_staleness=0, max_in_flight=4, lent=lent) as rollout:
            rollout.update_weights(train, version=0)
            for step in range(3):
                batch = rollout.prepare_batch(items, timeout_s=300)
                assert train.state == dict.fromkeys(train.tags, State.LOADED)
                assert lent.num_lent == step + 1 and guest.version == step
                difference = (train.forward_logprobs(batch) - batch["rollout_logprobs"]).abs().max()
                assert difference < logprob_rounding(model, num_tokens=32)
                advantages = group_advantage(batch["rewards"], group=batch["group"])
                batch |= {"advantages": advantages, "old_logprobs": train.forward_logprobs(batch)}
                assert torch.isfinite(torch.tensor(train.train_batch(batch, decoupled_ppo())["grad_norm"]))
                rollout.update_weights(train)
            assert rollout.stats.lent > 0 and rollout.stats.given == 48


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_real_guest_that_is_killed_or_stopped_leaves_the_trainer_its_devices(
    number: signal.Signals, model: Path
) -> None:
    """It is in a process of its own; what it had under way goes to the other sampler."""
    with rlcore.meta_device():
        module = policy_class(model).from_pretrained(model)
    workflow = SingleTurn(lambda data, text: 1.0, {"n": 4, "max_tokens": 100, "ignore_eos": True})
    items = [{"prompt": f"{a:02d}+{b:02d}="} for a in range(4) for b in range(4)]
    with (
        rlcore.TrainEngine(module) as train,
        rlcore.InferenceEngine(model) as own,
        rlcore.InferenceEngine(model) as guest,
    ):
        train.build(devices="cpu:0", launcher="inline")
        own.build(devices="cpu:1", launcher="inline", dtype="float32")
        guest.build(devices="cpu:0", launcher="process", dtype="float32")
        process_id = guest.executors[0].workers[0].process_id
        lent = LentDevices(train, guest, after_s=0.0)
        options: dict[str, Any] = {"batch_size": 16, "max_staleness": 0, "max_in_flight": 2, "unhealthy_after_s": 3.0}
        with RolloutController(own, workflow, lent=lent, **options) as rollout, ThreadPoolExecutor() as threads:
            rollout.update_weights(train, version=0)
            preparing = threads.submit(rollout.prepare_batch, items, 120)
            driver = rollout._fleet._guest
            until(lambda: driver and driver._under_way)
            os.kill(process_id, number)
            for _ in range(2):
                assert len(preparing.result(120)["rewards"]) == 64
                assert train.state == dict.fromkeys(train.tags, State.LOADED)
                rollout.update_weights(train)
                preparing = threads.submit(rollout.prepare_batch, items, 120)
            preparing.result(120)
            assert lent.num_lent == 1 and rollout.stats.requests_moved == 2
