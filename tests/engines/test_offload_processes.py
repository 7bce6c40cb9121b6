"""``rlcore.swap`` between engines on one device whose workers share no process: byte credits, failures, deaths."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch

import rlcore
from rlcore.engines.fsdp2.executor import Fsdp2Executor
from rlcore.engines.offload.host_arena import arena_of
from rlcore.errors import DeviceError, RlcoreError, WorkerDiedError, WorkerError
from rlcore.ops import ppo_clip
from tests.engines.ask import ask
from tests.engines.train_policy import adamw_policy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import this file

pytestmark = pytest.mark.slow  # two processes, each with a model of transformers

VOCAB = 21


class Event(NamedTuple):
    """A storage was freed or made, or could not be."""

    process: int
    grown: int
    total: int
    was_refused: bool


class SmallDevice:
    """A limit on the bytes of storages that processes have together, as if they shared a small device."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def reset(self, used: int, limit: int) -> None:
        self.log.write_text(json.dumps([limit, used]) + "\n")

    def install(self, patch: pytest.MonkeyPatch, dies_after: int | None = None) -> None:
        """In this process, until ``patch`` is undone."""
        from rlcore.engines.offload import host_arena as arena
        from rlcore.engines.offload import transfer

        for module in (arena, transfer):
            patch.setattr(module, "BLOCK_BYTES", 4096)
        resize = getattr(torch.UntypedStorage, "plain_resize_", torch.UntypedStorage.resize_)
        num_grown = 0

        def limited(storage: torch.UntypedStorage, nbytes: int) -> Any:
            nonlocal num_grown
            grown = nbytes - storage.nbytes()
            num_grown += grown > 0
            if num_grown == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            with self.log.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                first, *lines = file.read().splitlines()
                limit, used = json.loads(first)
                if lines:
                    used = json.loads(lines[-1])[2]
                is_refused = grown > 0 and used + grown > limit
                file.write(json.dumps([os.getpid(), grown, used if is_refused else used + grown, is_refused]) + "\n")
                if is_refused:
                    raise torch.OutOfMemoryError("the small device is full")
                return resize(storage, nbytes)

        patch.setattr(torch.UntypedStorage, "plain_resize_", resize, raising=False)
        patch.setattr(torch.UntypedStorage, "resize_", limited)

    def events(self) -> list[Event]:
        return [Event(*json.loads(line)) for line in self.log.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(adamw_policy(Qwen2ForCausalLM, lr=1e-2)):  # type: ignore[misc]
        def install(self, small: Any, dies_after: int | None = None) -> None:
            small.install(pytest.MonkeyPatch(), dies_after)

        def trim(self) -> None:
            arena_of(rlcore.get_device("cpu")).trim()

        def process(self) -> int:
            return os.getpid()

        def fail_at_copy(self, number: int) -> None:
            """The copy of that number fails, once."""
            memory = rlcore.get_device("cpu").memory
            copy_batch, left = memory.copy_batch, [number]

            def fail(*args: Any) -> None:
                left[0] -= 1
                if not left[0]:
                    raise RuntimeError("a copy failed, planted")
                copy_batch(*args)

            memory.copy_batch = fail

    return Policy


Make = Callable[..., rlcore.TrainEngine]


@pytest.fixture(scope="module")
def make(policy: Any, qwen2_folder: Path, short_runtime_folder: Path) -> Iterator[Make]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(Fsdp2Executor, "owns_process", True)

        def build(device: str = "cpu") -> rlcore.TrainEngine:
            patch.setenv("RLCORE_RUNTIME", str(short_runtime_folder))
            with rlcore.meta_device():
                module = policy.from_pretrained(qwen2_folder)
            return stack.enter_context(rlcore.TrainEngine(module)).build(devices=device, timeout_s=300)

        yield build


class Pair(NamedTuple):
    here: rlcore.TrainEngine
    away: rlcore.TrainEngine
    bytes_each: int


@pytest.fixture(scope="module")
def two(make: Make) -> tuple[rlcore.TrainEngine, rlcore.TrainEngine]:
    first, second = make(), make()
    assert ask_module(first, "process") != ask_module(second, "process")
    return first, second


@pytest.fixture
def pair(two: tuple[rlcore.TrainEngine, rlcore.TrainEngine], small: SmallDevice) -> Pair:
    """The first on the device, the second in host memory, both trained the same number of times."""
    here, away = two
    for engine in two:
        ask_module(engine, "install", small)
        engine.onload()
        train(engine)
    nbytes = sum(tag["device_bytes"] for tag in here.memory_report()[0]["tags"].values())
    away.offload()
    small.reset(nbytes, 2 * nbytes)
    return Pair(here, away, nbytes)


@pytest.fixture
def small(tmp_path: Path) -> SmallDevice:
    made = SmallDevice(tmp_path / "device.log")
    made.reset(0, 1 << 30)
    return made


def train(engine: rlcore.TrainEngine) -> float:
    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(VOCAB, (4, 12), generator=generator),
        "old_logprobs": torch.full((4, 12), -3.0),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]),
    }
    return engine.train_batch(batch, ppo_clip())["loss"]


def ask_module(engine: rlcore.TrainEngine, method: str, *args: Any) -> Any:
    """Of its module, wherever its weights are."""
    return ask(engine, f"module.{method}", *args)[0]


LARGEST = 64 * 32 * 4
"""Bytes of the largest storage; the device has room for one beside the larger set."""


def test_two_processes_change_places_on_a_device_that_holds_one(pair: Pair, small: SmallDevice) -> None:
    here, away, nbytes = pair
    losses: dict[rlcore.TrainEngine, list[float]] = {here: [], away: []}
    host, are_both_at_work = [], []
    for _ in range(4):
        small.reset(nbytes, nbytes + LARGEST)
        reports = rlcore.swap(out=[(here, ())], in_=[(away, ())])
        assert set(here.state.values()) == {"offloaded"} and set(away.state.values()) == {"loaded"}
        assert sum(one.freed_device_bytes for (one,) in reports.out[0].values()) == nbytes
        assert sum(one.moved_bytes for (one,) in reports.in_[0].values()) == nbytes
        events = small.events()
        assert not any(event.was_refused for event in events), "nobody tried to take what was not there"
        assert events[-1].total == nbytes
        leaves, comes = ask_module(here, "process"), ask_module(away, "process")
        first_taken = next(i for i, event in enumerate(events) if event.process == comes and event.grown > 0)
        last_freed = max(i for i, event in enumerate(events) if event.process == leaves and event.grown < 0)
        are_both_at_work.append(first_taken < last_freed)
        losses[away].append(train(away))
        here, away = away, here
        host.append(sum(tag["host_bytes"] for tag in away.memory_report()[0]["tags"].values()))
    assert any(are_both_at_work), "unless others have the processors, each time"
    assert max(host) - min(host) <= 4096, "host memory is level, to a block"
    one, other = losses.values()
    assert one == other, "the same values came back to both"


def test_a_device_that_is_too_small_leaves_everything_where_it_was(pair: Pair, small: SmallDevice) -> None:
    here, away, nbytes = pair
    small.reset(nbytes, nbytes + LARGEST)
    with pytest.raises(
        DeviceError, match=r"has no memory for \d+ bytes that come back: .* full; .* Nothing has moved: everything is"
    ):
        rlcore.swap(out=[(here, "weights")], in_=[(away, ())])  # the rest of the first leaves no room
    assert any(event.process == ask_module(away, "process") and event.grown > 0 for event in small.events()), (
        "it had begun"
    )
    assert_as_before(pair, small)


@pytest.mark.parametrize("side", ["here", "away"])
def test_a_copy_that_fails_halfway_is_undone_on_both_sides(pair: Pair, small: SmallDevice, side: str) -> None:
    ask_module(getattr(pair, side), "fail_at_copy", 9)
    small.reset(pair.bytes_each, pair.bytes_each + LARGEST)
    with pytest.raises(WorkerError, match="a copy failed, planted") as raised:
        rlcore.swap(out=[(pair.here, ())], in_=[(pair.away, ())])
    assert "Nothing has moved: everything is where it was" in raised.value.__notes__
    assert any(event.grown > 0 for event in small.events()), "it had begun"
    assert_as_before(pair, small)


def test_host_memory_that_does_not_do_is_said_before_anything_moves(pair: Pair, small: SmallDevice) -> None:
    ask_module(pair.here, "trim")
    ask(pair.here, "reserve_host_memory", 4096, None)
    try:
        with pytest.raises(DeviceError, match=r"host_memory_bytes is 4096 bytes, .* Nothing has moved"):
            rlcore.swap(out=[(pair.here, ())], in_=[(pair.away, ())])
        assert small.events() == []
    finally:
        ask(pair.here, "reserve_host_memory", 1 << 30, None)
    assert_as_before(pair, small)


def assert_as_before(pair: Pair, small: SmallDevice) -> None:
    here, away, nbytes = pair
    assert set(here.state.values()) == {"loaded"} and set(away.state.values()) == {"offloaded"}
    small.reset(nbytes, 2 * nbytes)
    found = [train(here)]
    away.onload()
    assert found == [train(away)], "with the same values"


def test_the_users_own_process_takes_turns_with_another(
    pair: Pair, small: SmallDevice, policy: Any, qwen2_folder: Path
) -> None:
    with rlcore.meta_device():
        module = policy.from_pretrained(qwen2_folder)
    with rlcore.TrainEngine(module) as inline, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fsdp2Executor, "owns_process", False)
        inline.build(devices="cpu", launcher="inline")
        expected = train(inline)
        inline.offload()
        small.install(patch)
        small.reset(pair.bytes_each, pair.bytes_each + LARGEST)
        rlcore.swap(out=[(pair.here, ())], in_=[(inline, ())])
        assert not any(event.was_refused for event in small.events())
        train(inline)
        rlcore.swap(out=[(inline, ())], in_=[(pair.here, ())])
        assert not any(event.was_refused for event in small.events())
    assert expected
    small.reset(pair.bytes_each, 2 * pair.bytes_each)
    pair.away.onload()
    assert train(pair.here) == train(pair.away)


def test_a_death_halfway_leaves_the_other_whole(pair: Pair, small: SmallDevice, tmp_path: Path) -> None:
    here, victim, _ = pair
    here.save(tmp_path / "checkpoint")
    ask_module(victim, "install", small, 10)
    small.reset(pair.bytes_each, 2 * pair.bytes_each)  # which does not forget what the dead had
    with pytest.raises(WorkerDiedError, match="killed by SIGKILL") as raised:
        rlcore.swap(out=[(here, ())], in_=[(victim, ())])
    assert any("could not be undone for the train engine" in note for note in raised.value.__notes__)
    assert set(here.state.values()) == {"loaded"}
    with pytest.raises(RlcoreError):
        victim.onload()
    victim.restart().load(tmp_path / "checkpoint")
    assert train(here) == train(victim), "with the values that it had before"


@pytest.mark.gpu
def test_two_processes_change_places_on_a_gpu(make: Make) -> None:
    here, away = engines = make("cuda:0"), make("cuda:0")
    losses: dict[rlcore.TrainEngine, list[float]] = {engine: [train(engine)] for engine in engines}
    away.offload()
    for _ in range(6):
        reports = rlcore.swap(out=[(here, ())], in_=[(away, ())])
        assert all(one.pinned for (one,) in reports.out[0].values() if one.moved_bytes)
        assert all(tag["device_bytes"] == 0 for tag in here.memory_report()[0]["tags"].values())
        losses[away].append(train(away))
        here, away = away, here
    one, other = losses.values()
    assert one == other, "the same values came back to both"
