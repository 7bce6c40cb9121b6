"""The cases of the machine and of the engines: they pass on a host, say what it cannot do, and refuse wrong results."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from once import run_once

from rlcore.bench.case import load_cases
from rlcore.bench.cases import attention, collectives, memory, product, reinforcement
from rlcore.bench.cases.collectives import bus_factor
from rlcore.bench.record import CaseResult
from rlcore.registry import get_device


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(product, "_HOST_SIZES", ((32, 48, 64), (64, 64, 64)))
    monkeypatch.setattr(product, "_HOST_SUSTAINED", (64, 64, 64))
    monkeypatch.setattr(product, "_SUSTAINED_S", 0.2)
    monkeypatch.setattr(product, "_WINDOW_S", 0.05)
    monkeypatch.setattr(memory, "_HOST_BYTES", 1 << 20)
    monkeypatch.setattr(attention, "_HOST_LENGTHS", (64,))
    monkeypatch.setattr(collectives, "_ITERATIONS", 2)
    yield


def metrics(result: CaseResult) -> dict[str, float]:
    return {metric.name: metric.samples[-1] for metric in result.metrics}


def passed(name: str) -> list[CaseResult]:
    results = run_once(name)
    assert [(result.status, result.reason) for result in results] == [("pass", "")] * len(results)
    return results


def refuses(name: str, position: int, spoil: Any) -> None:
    """The contender passes its own check, and no more once ``spoil`` has been at it."""
    work = load_cases()[name].prepare(get_device("cpu"))
    try:
        contender = work.contenders[position]
        output = contender.run()
        contender.check(output)
        with pytest.raises(AssertionError):
            contender.check(spoil(output))
    finally:
        if work.close:
            work.close()


# ---------------------------------------------------------------------------------------------- the machine


def test_products_are_measured_by_size_and_dtype_and_a_wrong_one_is_refused() -> None:
    results = passed("product/sweep")
    assert [(result.params["N"], result.params["dtype"]) for result in results] == [
        (N, dtype) for dtype in ("float32", "float16", "bfloat16") for N in (48, 64)
    ]
    assert results[0].limits == {"product/float32": 2 * 32 * 48 * 64}
    for position in (0, 5):
        refuses("product/sweep", position, lambda output: output.mul_(1.5))


def test_products_that_would_take_minutes_are_said_to_be_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_rate", lambda device, smallest: 1.5e5 if smallest.dtype == torch.float16 else 1e12)
    results = run_once("product/sweep")
    assert [result.status for result in results] == ["pass", "pass", "blocked", "blocked", "pass", "pass"]
    assert results[3].reason.endswith(
        "a product of 524,288 operations in float16 here is not supported: at the 0.0 GFLOP/s of the smallest one it "
        "would take 3.5 s, and a sweep has none of more than 1 s"
    )


def test_sustained_product_gives_the_first_and_the_last_window() -> None:
    (result,) = passed("product/sustained")
    found = metrics(result)
    assert found["last_of_first"] == pytest.approx(found["last_window"] / found["first_window"])


def test_windows_of_a_device_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = itertools.accumulate([0.0, *[0.001] * 100, *itertools.repeat(0.002, 100)])  # 0.1 s, then 0.2 s
    monkeypatch.setattr(product, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    monkeypatch.setattr(product, "_SUSTAINED_S", 0.299)
    contender = load_cases()["product/sustained"].prepare(get_device("cpu")).contenders[0]
    done = contender.run()
    found = {name: quantity.value for name, quantity in contender.quantities(done).items()}
    flops = 2 * 64**3
    assert found == pytest.approx({"first_window": flops / 0.001, "last_window": flops / 0.002, "last_of_first": 0.5})
    assert contender.seconds is not None and 0.001 <= contender.seconds(done) <= 0.002


def test_bandwidth_counts_the_bytes_of_each_way_and_refuses_what_was_not_written() -> None:
    results = passed("memory/bandwidth")
    assert {result.implementation: result.params["bytes"] for result in results} == {
        "copy": 2 << 20, "fill": 1 << 20, "triad": 3 << 20, "read": 1 << 20
    }  # fmt: skip
    for position in range(3):
        refuses("memory/bandwidth", position, lambda output: output.add_(1))
    refuses("memory/bandwidth", 3, lambda total: total + 8)


@pytest.mark.parametrize("name", ["copies/to_device", "copies/to_host", "copies/both_ways", "copies/peers"])
def test_copies_are_blocked_on_a_host_with_the_reason(name: str) -> None:
    (result,) = run_once(name)
    assert (result.status, result.metrics) == ("blocked", [])
    assert result.reason.endswith("the device is the host itself")


@pytest.mark.parametrize("name", ["alloc", "to_device", "to_host", "batch_to_device", "batch_to_host"])
def test_host_memory_passes_on_a_host_and_a_copy_that_does_nothing_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_BUFFER_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "_NUM_TENSORS", 5)
    results = passed(f"host_memory/{name}")
    assert [result.limits for result in results if name != "alloc"] == [
        {"memory": 2 * int(result.params["bytes"])} for result in results if name != "alloc"
    ]
    if not name.startswith("to_"):
        return
    for contender in load_cases()[f"host_memory/{name}"].prepare(get_device("cpu")).contenders:
        contender.check(contender.run())
        with monkeypatch.context() as idle:
            idle.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: self)
            with pytest.raises(AssertionError, match=r"^other bytes arrived$"):
                contender.check(contender.run())


class TwoHosts:
    """FAKE: two slots of the host as if they were accelerators with a link. Proves nothing about one."""

    spec = dataclasses.replace(get_device("cpu").spec, is_host=False)

    def count(self) -> int:
        return 2


def test_peer_matrix_has_each_pair_one_way_and_both_ways_and_a_missing_copy_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_PAIR_BYTES", 1 << 12)
    (contender,) = load_cases()["copies/peers"].prepare(TwoHosts()).contenders
    rates = contender.run()
    assert {name: quantity.unit for name, quantity in rates.items()} == dict.fromkeys(
        ("0_to_1", "1_to_0", "0_and_1"), "B/s"
    )
    contender.check(rates)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: self)
    with pytest.raises(AssertionError, match=r"^other bytes arrived$"):
        contender.check(rates)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["copies/to_device", "copies/to_host", "copies/both_ways"])
def test_copies_pass_on_a_gpu(name: str) -> None:
    results = run_once(name, "cuda")
    assert {result.status for result in results} == {"pass"}, results


@pytest.mark.multigpu
def test_peers_and_collectives_pass_on_gpus() -> None:
    for name in ("copies/peers", "collectives/all_reduce"):
        results = run_once(name, "cuda")
        assert {result.status for result in results} == {"pass"}, results


@pytest.mark.parametrize("name", ["attention/forward", "attention/backward"])
def test_attention_passes_and_a_wrong_one_is_refused(name: str) -> None:
    (result,) = passed(name)
    assert result.limits == {"product/float32": (2 * 4 * 64 * 64 * 64 * 7) // (2 if "backward" in name else 7)}
    refuses(name, 0, lambda output: (output[0] * 1.1, *output[1:]))
    if name == "attention/backward":
        refuses(name, 0, lambda output: (output[0], output[1].roll(1, 2), *output[2:]))


@pytest.mark.parametrize("name", ["packed_attention/one_long_forward", "packed_attention/one_long"])
def test_one_long_sequence_passes_and_a_wrong_one_is_refused(name: str) -> None:
    results = passed(name)
    assert "per_sequence" in [result.implementation for result in results]
    backward = name == "packed_attention/one_long"
    assert results[0].limits == {"product/float32": (2 * 4 * 256 * 256 * 64 * 7) // (2 if backward else 7)}
    refuses(name, 0, lambda output: (output[0].roll(1, 1), *output[1:]))  # heads of the others
    if backward:
        for wrong in (1, 2, 3):
            refuses(name, 0, lambda found, at=wrong: tuple(x * (1.1 if i == at else 1.0) for i, x in enumerate(found)))


@pytest.mark.gpu
def test_each_kernel_takes_one_long_sequence_on_a_gpu() -> None:
    results = run_once("packed_attention/one_long", "cuda")
    assert {result.status for result in results} == {"pass"}, results
    assert {"per_sequence", "SDPA, flash", "SDPA, cuDNN"} < {result.implementation for result in results}


# ---------------------------------------------------------------------------------------------- collectives


OPS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_collective_passes_over_gloo(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_SMALL", (12, 4800))
    monkeypatch.setattr(collectives, "_HOST_RANKS", 3)
    results = passed(f"collectives/{op}")
    assert [result.implementation for result in results] == ["gloo"] * 2
    found = metrics(results[1])
    assert results[1].params == {"op": op, "devices": 3, "dtype": "float32", "bytes": 4800}
    assert found["algorithm_bandwidth"] == pytest.approx(4800 / found["time"])
    assert found["bus_bandwidth"] == pytest.approx(found["algorithm_bandwidth"] * bus_factor(op, 3))
    assert found["p99"] >= found["time"] and found["slowest_to_fastest_rank"] >= 1


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(op, 4) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")] == [
        1.5, 0.75, 0.75, 0.75, 1.0
    ]  # fmt: skip


class Ranks:
    """FAKE: two ranks that say how long they took, and of what they received whether it was right."""

    def __init__(self, *are_right: bool) -> None:
        self.are_right = are_right

    def call(self, method: str, calls: Any) -> list[tuple[list[float], bool]]:
        return list(zip(([0.1, 0.2], [0.3, 0.1]), self.are_right, strict=True))

    def stop(self) -> None: ...


@pytest.mark.parametrize(("are_right", "reason"), [((True, False), "[1]"), ((False, False), "[0, 1]")])
def test_wrong_collective_is_refused(
    are_right: tuple[bool, bool], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "start_workers", lambda *_, **__: Ranks(*are_right))
    assert {(result.status, result.reason) for result in run_once("collectives/all_reduce")} == {
        ("fail", f"AssertionError: a wrong result arrived at rank {reason}")
    }


def test_of_a_collective_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "start_workers", lambda *_, **__: Ranks(True, True))
    for result in passed("collectives/all_reduce"):
        found = metrics(result)
        assert found["time"] == pytest.approx(0.25)  # of 0.3 and 0.2
        assert found["bus_bandwidth"] == pytest.approx(int(result.params["bytes"]) / 0.25)


# -------------------------------------------------------------------------------------------------- engines


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_train_step_passes_and_a_step_without_a_gradient_is_refused() -> None:
    (result,) = passed("train/step")
    assert result.params["tokens"] == 16 * 4 * 4 + (24 + 12 + 6 + 3) * 4
    refuses("train/step", 0, lambda found: found | {"grad_norm": 0.0})
    refuses("train/step", 0, lambda found: found | {"loss": float("nan")})


@pytest.mark.filterwarnings("default")
def test_rollout_counts_tokens_and_refuses_missing_ones() -> None:
    (result,) = passed("rollout/hf")
    assert metrics(result)["new_tokens"] > 1
    refuses("rollout/hf", 0, lambda done: (done[0][:-1], done[1]))


@pytest.mark.filterwarnings("default")
def test_step_by_phase_adds_up_and_one_out_of_sync_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # what others have of the processor does not count
    (result,) = passed("rl/step")
    found = metrics(result)
    phases = {name: found[name] for name in reinforcement.PHASES}
    assert 0.9 * found["time"] < sum(phases.values()) <= found["time"]
    useful = sum(phases[name] for name in ("generate", "old_logprob", "update"))
    assert found["bubble"] == pytest.approx(1 - useful / found["time"])
    assert found["new_tokens"] * found["generate"] == pytest.approx(found["trained_tokens"] * found["time"])
    refuses("rl/step", 0, lambda done: done._replace(result=0.5))
    refuses("rl/step", 0, lambda done: done._replace(result=0.0))
