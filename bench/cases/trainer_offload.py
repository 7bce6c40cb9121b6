"""A train engine with its optimizer leaves its device and comes back; and it learns the same with that as without."""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.models import QWEN_1_5B, QWEN_7B, TINY, ModelShape, packed_batch, policy, policy_class
from rlcore.bench.cases.offload import Link, Moved, Way, bit_sums, fill_moments, room_of_host
from rlcore.bench.cases.timing import Measured, proc_bytes, self_timed
from rlcore.device import Device
from rlcore.engines.offload.group import optimizer_tensors
from rlcore.engines.offload.host_arena import BLOCK_BYTES, arena_of
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip

_HOST_SHARE = 0.8
"""The share of what the control group leaves."""
_CYCLES = 4
_STATE_BYTES = 12
"""Bytes of a parameter and the two moments of Adam, in float32."""

_LAYERS_IN_TRAINING = 8
_TRAINING_CYCLES = 20
_SAME_MEMORY = 1.01
_SAME_HOST_MEMORY = 1.02
_HOST_SLACK_BYTES = 64 << 20
"""Memory that a process of this size takes and gives back by itself, which is more than a share of a small one."""
_TRAINING_TOKENS, _HOST_TRAINING_TOKENS = 4096, 128


def _policy(dense: ModelShape, device: Device) -> Any:
    class Filled(policy_class()):  # type: ignore[misc]
        def fill_optimizer(self) -> None:
            fill_moments(self.optimizer)

        def sums(self) -> list[int]:
            return bit_sums([*self.parameters(), *optimizer_tensors([self.optimizer])])

        def repeat_exactly(self) -> None:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for
            torch.use_deterministic_algorithms(True)  # warn_only would leave attention's backward as it is

    return policy(dense, torch.bfloat16, device.type, Filled)


# ------------------------------------------------------------------------------------------- how fast it moves


class _Cycles(NamedTuple):
    first: Moved
    steady: list[Moved]
    sums: tuple[list[int], list[int]]
    """Before the first, after the last."""


def _fitting(device: Device) -> ModelShape:
    """Return the 7B, with fewer layers where the host has no memory for it."""
    if device.spec.is_host:
        return TINY
    layers = QWEN_7B.layers
    while layers > 1 and _num_bytes(dataclasses.replace(QWEN_7B, layers=layers)) > _HOST_SHARE * room_of_host():
        layers -= 1
    return dataclasses.replace(QWEN_7B, layers=layers)


def _num_bytes(dense: ModelShape) -> int:
    embedding = 0 if dense.is_tied else dense.hidden * dense.vocabulary
    return _STATE_BYTES * (dense.num_multiplied + embedding)


def _prepare_trainer(device: Device) -> Work:
    dense = _fitting(device)
    dense.config()  # transformers is there

    def run() -> Measured:
        gc.collect()
        arena_of(device).trim()
        link = Link(device)
        module = _policy(dense, device)
        state = _STATE_BYTES * sum(parameter.numel() for parameter in module.parameters())
        reserved = state + state // 1000 + len(TrainEngine.tags) * BLOCK_BYTES  # the last block of a tag is not full
        engine = TrainEngine(module)
        with engine.build(devices=device.name, compute_dtype="bfloat16", reserve_host_bytes=reserved):
            engine.call("fill_optimizer")
            before = engine.call("sums")[0]
            arena_of(device).wait()
            (first_use, first), *later = (_cycle(engine, link) for _ in range(1 + _CYCLES))
            expect(not first_use, "the host memory was not there when it was needed")
            done = _Cycles(first, [moved for _, moved in later], (before, engine.call("sums")[0]))
        seconds = statistics.median(one.out.seconds + one.back.seconds for one in done.steady)
        return Measured(done, seconds, _quantities(done))

    def check(done: _Cycles) -> None:
        expect(done.sums[0] == done.sums[1], "other values came back")
        moved = {done.first.out.nbytes, *(one.out.nbytes for one in done.steady)}
        expect(moved == {one.back.nbytes for one in done.steady}, f"unequal moves: {moved}")

    params: dict[str, int | float | str] = {"model": dense.name, "layers": dense.layers, "cycles": _CYCLES}
    return Work((self_timed("engine", run, check),), params, num_runs=1)


def _cycle(engine: TrainEngine, link: Link) -> tuple[bool, Moved]:
    """Return whether the move out took new host memory, and both moves. Tags move one after the other."""
    rates = link.rates()
    out, back = ([one for workers in move().values() for one in workers] for move in (engine.offload, engine.onload))
    return any(report.first_use for report in out), Moved(Way.of(out), Way.of(back), rates)


def _quantities(done: _Cycles) -> dict[str, Quantity]:
    found = {"moved": Quantity(done.first.out.nbytes, "B")}
    for at, way in enumerate(("to_host", "to_device")):
        found[f"{way}_of_link"] = Quantity(statistics.median(one.of_link[at] for one in done.steady), "1")
        found[f"first_{way}_of_link"] = Quantity(done.first.of_link[at], "1")
        found[f"link_{way}"] = Quantity(statistics.median(one.link[at] for one in done.steady), "B/s")
    return found


# -------------------------------------------------------------------------------------------- what it changes


class _Learned(NamedTuple):
    losses: list[float]
    device_bytes: list[int]
    """Allocated after each step."""
    host_bytes: list[int]
    """Bytes resident in the process after each step."""
    seconds: float


def _learned(dense: ModelShape, device: Device, batch: dict[str, torch.Tensor], *, moves: bool) -> _Learned:
    gc.collect()
    engine = TrainEngine(_policy(dense, device))
    losses, on_device, on_host = [], [], []
    started = time.perf_counter()
    with engine.build(devices=device.name, compute_dtype="float32" if device.spec.is_host else "bfloat16"):
        engine.call("repeat_exactly")
        try:
            for _ in range(_TRAINING_CYCLES):
                losses.append(engine.train_batch(batch, ppo_clip())["loss"])
                if moves:
                    engine.offload()
                    engine.onload()
                on_device.append(device.memory.stats().allocated_bytes)
                on_host.append(proc_bytes("self/status", "VmRSS"))
        finally:
            torch.use_deterministic_algorithms(False)
    return _Learned(losses, on_device, on_host, time.perf_counter() - started)


def _prepare_training(device: Device) -> Work:
    is_host = device.spec.is_host
    dense = TINY if is_host else dataclasses.replace(QWEN_1_5B, layers=_LAYERS_IN_TRAINING)
    dense.config()
    tokens = _HOST_TRAINING_TOKENS if is_host else _TRAINING_TOKENS
    batch = packed_batch(dense.vocabulary, [tokens // 2, tokens // 4, tokens // 4], seed=0)
    expected: list[float] = []

    def check(done: _Learned) -> None:
        expected.extend(done.losses if not expected else ())
        expect(done.losses == expected, f"the losses are {done.losses}, and without offload {expected}")
        expect(len(set(expected)) > 1, "nothing was learned")
        # The first step makes the optimizer's states; a block of torch's allocator may be a little larger than asked.
        grown = max(done.device_bytes[1:]) / done.device_bytes[1]
        expect(is_host or grown <= _SAME_MEMORY, f"device memory grew: {done.device_bytes}")
        most = _SAME_HOST_MEMORY * done.host_bytes[1] + _HOST_SLACK_BYTES
        expect(done.host_bytes[-1] <= most, f"host memory grew: {done.host_bytes}")

    return Work(
        (
            Contender(
                "no offload", lambda: _learned(dense, device, batch, moves=False), check, seconds=attrgetter("seconds")
            ),
            Contender(
                "offload after each step",
                lambda: _learned(dense, device, batch, moves=True),
                check,
                seconds=attrgetter("seconds"),
                quantities=lambda done: {
                    "device_memory_last_to_second": Quantity(done.device_bytes[-1] / done.device_bytes[1], "1"),
                    "host_memory_last_to_second": Quantity(done.host_bytes[-1] / done.host_bytes[1], "1"),
                },
            ),
        ),
        {"model": dense.name, "layers": dense.layers, "steps": _TRAINING_CYCLES, "tokens": tokens},
        num_runs=1,
    )


cases = (
    Case(
        "offload/trainer",
        "a 7B train engine with Adam states leaves and comes back: first with reserved memory, then steadily",
        _prepare_trainer,
        effort="full",
        estimate_s=60.0,
    ),
    Case(
        "offload/training",
        "20 steps with all tags offloaded after each: the same losses and memory as without",
        _prepare_training,
        estimate_s=30.0,
    ),
)
