"""A train engine with its optimizer leaves its device and comes back; and it learns the same with that as without."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.bench.case import Case, Contender, Quantity, Work, expect
from rlcore.bench.cases.dense_model import QWEN_1_5B, QWEN_7B, TINY, Dense, policy, policy_class
from rlcore.bench.cases.offload import Link, room_of_host
from rlcore.device import Device
from rlcore.engines.offload.group import optimizer_tensors
from rlcore.engines.offload.host_arena import BLOCK_BYTES, arena_of
from rlcore.engines.train import TrainEngine
from rlcore.kernels.losses.policy import ppo_clip
from rlcore.types import OffloadReport
from rlcore.weights.shards import local_part

_HOST_SHARE = 0.8
"""Of what the control group leaves."""
_CYCLES = 4
_STATE_BYTES = 12
"""Of a parameter and the two moments of Adam, in float32."""

_LAYERS_IN_TRAINING = 8
_TRAINING_CYCLES = 20
_SAME_MEMORY = 1.01
_SAME_HOST_MEMORY = 1.02
_HOST_SLACK_BYTES = 64 << 20
"""What a process of this size takes and gives back by itself, which is more than a share of a small one."""
_TRAINING_TOKENS, _HOST_TRAINING_TOKENS = 4096, 128


def _policy(dense: Dense, device: Device) -> Any:
    class Filled(policy_class()):  # type: ignore[misc]
        def fill_optimizer(self) -> None:
            """As after a step, without one."""
            for parameter in self.parameters():
                moments = {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.ones((), device=parameter.device), **moments}

        def sums(self) -> list[int]:
            with torch.no_grad():
                return torch.stack([tensor.view(torch.int32).sum() for tensor in self._tensors()]).tolist()

        def _tensors(self) -> Iterator[Tensor]:
            for tensor in (*self.parameters(), *optimizer_tensors([self.optimizer])):
                if tensor.numel() > 1:
                    yield local_part(tensor.detach())

        def repeat_exactly(self) -> None:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for
            torch.use_deterministic_algorithms(True)  # warn_only would leave attention's backward as it is

    return policy(dense, torch.bfloat16, device.type, Filled)


# ------------------------------------------------------------------------------------------- how fast it moves


class _Moved(NamedTuple):
    out: OffloadReport
    in_: OffloadReport
    link: tuple[float, float]
    """Bytes a second to the host and to the device, measured just before."""

    @property
    def of_link(self) -> tuple[float, float]:
        rates = [report.moved_bytes / report.seconds for report in (self.out, self.in_)]
        return rates[0] / self.link[0], rates[1] / self.link[1]


class _Cycles(NamedTuple):
    first: _Moved
    steady: list[_Moved]
    sums: tuple[list[int], list[int]]
    """Before the first, after the last."""


def _fitting(device: Device) -> Dense:
    """The 7B, with fewer layers where the host has no room for it."""
    if device.spec.is_host:
        return TINY
    layers = QWEN_7B.layers
    while layers > 1 and _num_bytes(dataclasses.replace(QWEN_7B, layers=layers)) > _HOST_SHARE * room_of_host():
        layers -= 1
    return dataclasses.replace(QWEN_7B, layers=layers)


def _num_bytes(dense: Dense) -> int:
    embedding = 0 if dense.is_tied else dense.hidden * dense.vocabulary
    return _STATE_BYTES * (dense.num_multiplied + embedding)


def _prepare_trainer(device: Device) -> Work:
    dense = _fitting(device)
    dense.config()  # transformers is there

    def run() -> _Cycles:
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
            first, *steady = (_cycle(engine, link) for _ in range(1 + _CYCLES))
            return _Cycles(first, steady, (before, engine.call("sums")[0]))

    def check(done: _Cycles) -> None:
        expect(done.sums[0] == done.sums[1], "other values came back")
        expect(not done.first.out.first_use, "the host memory was not there when it was needed")
        moved = {done.first.out.moved_bytes, *(one.out.moved_bytes for one in done.steady)}
        expect(moved == {one.in_.moved_bytes for one in done.steady}, f"unequal moves: {moved}")

    contender = Contender(
        implementation="engine",
        run=run,
        check=check,
        seconds=lambda done: statistics.median(one.out.seconds + one.in_.seconds for one in done.steady),
        quantities=_quantities,
    )
    return Work(
        contenders=(contender,),
        params={"model": dense.name, "layers": dense.layers, "cycles": _CYCLES},
        num_runs=1,
    )


def _cycle(engine: TrainEngine, link: Link) -> _Moved:
    rates = link.rates()
    out, in_ = (_joined(move()) for move in (engine.offload, engine.onload))
    return _Moved(out, in_, rates)


def _joined(reports: dict[str, list[OffloadReport]]) -> OffloadReport:
    """Tags leave one after the other."""
    every = [report for of_workers in reports.values() for report in of_workers]
    return OffloadReport(
        moved_bytes=sum(report.moved_bytes for report in every),
        freed_device_bytes=sum(report.freed_device_bytes for report in every),
        seconds=sum(report.seconds for report in every),
        pinned=all(report.pinned for report in every if report.moved_bytes),
        first_use=any(report.first_use for report in every),
    )


def _quantities(done: _Cycles) -> dict[str, Quantity]:
    to_host, to_device = (statistics.median(one.of_link[way] for one in done.steady) for way in range(2))
    return {
        "moved": Quantity(done.first.out.moved_bytes, "B"),
        "to_host_of_link": Quantity(to_host, "1"),
        "to_device_of_link": Quantity(to_device, "1"),
        "first_to_host_of_link": Quantity(done.first.of_link[0], "1"),
        "first_to_device_of_link": Quantity(done.first.of_link[1], "1"),
        "link_to_host": Quantity(statistics.median(one.link[0] for one in done.steady), "B/s"),
        "link_to_device": Quantity(statistics.median(one.link[1] for one in done.steady), "B/s"),
    }


# -------------------------------------------------------------------------------------------- what it changes


class _Learned(NamedTuple):
    losses: list[float]
    device_bytes: list[int]
    """Allocated after each step."""
    host_bytes: list[int]
    """Resident in the process after each step."""
    seconds: float


def _prepare_training(device: Device) -> Work:
    is_host = device.spec.is_host
    dense = TINY if is_host else dataclasses.replace(QWEN_1_5B, layers=_LAYERS_IN_TRAINING)
    dense.config()
    tokens = _HOST_TRAINING_TOKENS if is_host else _TRAINING_TOKENS
    batch = _batch(dense, tokens)
    expected: list[float] = []

    def run(*, moves: bool) -> _Learned:
        gc.collect()
        engine = TrainEngine(_policy(dense, device))
        losses, on_device, on_host = [], [], []
        started = time.perf_counter()
        with engine.build(devices=device.name, compute_dtype="float32" if is_host else "bfloat16"):
            engine.call("repeat_exactly")
            try:
                for _ in range(_TRAINING_CYCLES):
                    losses.append(engine.train_batch(batch, ppo_clip())["loss"])
                    if moves:
                        engine.offload()
                        engine.onload()
                    on_device.append(device.memory.stats().allocated_bytes)
                    on_host.append(_resident_bytes())
            finally:
                torch.use_deterministic_algorithms(False)
        return _Learned(losses, on_device, on_host, time.perf_counter() - started)

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
        contenders=(
            Contender(implementation="no offload", run=lambda: run(moves=False), check=check, seconds=_seconds),
            Contender(
                implementation="offload after each step",
                run=lambda: run(moves=True),
                check=check,
                seconds=_seconds,
                quantities=lambda done: {
                    "device_memory_last_to_second": Quantity(done.device_bytes[-1] / done.device_bytes[1], "1"),
                    "host_memory_last_to_second": Quantity(done.host_bytes[-1] / done.host_bytes[1], "1"),
                },
            ),
        ),
        params={"model": dense.name, "layers": dense.layers, "steps": _TRAINING_CYCLES, "tokens": tokens},
        num_runs=1,
    )


def _seconds(done: _Learned) -> float:
    return done.seconds


def _batch(dense: Dense, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths: Sequence[int] = (tokens // 2, tokens // 4, tokens // 4)
    return {
        "input_ids": torch.randint(dense.vocabulary, (tokens,), generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "old_logprobs": torch.full((tokens,), -float(torch.tensor(dense.vocabulary).log())),
        "advantages": torch.randn(tokens, generator=generator),
    }


def _resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


trainer_case = Case(
    name="offload/trainer",
    description="a 7B train engine with Adam states leaves and comes back: first with reserved memory, then steadily",
    prepare=_prepare_trainer,
    effort="full",
    estimate_s=60.0,
)
training_case = Case(
    name="offload/training",
    description="20 steps with all tags offloaded after each: the same losses and memory as without",
    prepare=_prepare_training,
    estimate_s=30.0,
)
