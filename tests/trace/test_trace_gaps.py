"""A timeline says why devices are idle: it was made so that the causes and times are known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlcore.trace.advice import advice
from rlcore.trace.events import read_trace
from rlcore.trace.gaps import PROGRAM, DeviceTimeline, device_timelines
from rlcore.trace.phases import MeasuredSteps
from tests.trace.made_trace import SAMPLER, TRAINER, MadeProgram, colocated

LIMITS = {"to_device/pinned": 55e9, "to_host/pinned": 50e9, "product/bfloat16": 100e12, "memory": 4e12}


def milliseconds(device: DeviceTimeline) -> dict[str, int]:
    """Return the milliseconds of all gaps by cause; idle and busy times must be all of the device's time."""
    sums: Counter[str] = Counter()
    for gap in device.gaps:
        sums[gap.cause] += gap.end_ns - gap.begin_ns
    idle = sum(sums.values())
    busy = sum(end - begin for begin, end in device.busy)
    assert idle + busy == device.busy[-1][1] - device.busy[0][0]
    return {cause: round(found / 1e6) for cause, found in sums.items()}


def test_a_device_waits_for_copies_syncs_and_the_program(tmp_path: Path) -> None:
    colocated(tmp_path, steps=2)
    (device,) = device_timelines(read_trace(tmp_path), LIMITS)
    assert device.name == "cuda:0"
    assert milliseconds(device) == {
        "the program: rewards": 100,
        PROGRAM: 100,
        "onload optimizer": 400,
        "offload optimizer": 100,  # that of the second step comes after the last call that computes
        "the weight sync": 50,
    }
    details = {gap.cause: gap.detail for gap in device.gaps}
    assert details["onload optimizer"] == "onload of optimizer: 10.4 GB at 52 GB/s, 95% of the link's 55 GB/s"
    assert details["the weight sync"] == "the weight sync, by local: 2 GB at 40 GB/s"


def test_a_device_waits_for_another_and_for_calls_on_their_way(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path, way_ms=2)
    made.program.engine(TRAINER, "train", ["cuda:0"])
    made.program.engine(SAMPLER, "inference", ["cuda:1"])
    made.call("train_step", TRAINER, "cuda:0", 0, 100)
    made.call("generate", SAMPLER, "cuda:1", 100, 400)
    made.call("train_step", TRAINER, "cuda:0", 400, 500)
    made.call("generate", SAMPLER, "cuda:1", 500, 600)
    trainer, sampler = device_timelines(read_trace(tmp_path))
    assert milliseconds(trainer) == {"arguments and results of train_batch": 4, "generate on cuda:1": 300}
    # A thread that never calls the device's engine explains nothing; here one thread calls both.
    assert milliseconds(sampler) == {"arguments and results of generate": 4, "train_batch on cuda:0": 100}


def test_what_a_rollout_says_explains_who_waits(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path)
    made.call("train_step", TRAINER, "cuda:0", 0, 100)
    made.call("train_step", TRAINER, "cuda:0", 300, 400)
    made.call("collect", SAMPLER, "cuda:1", 0, 20)
    made.call("collect", SAMPLER, "cuda:1", 23, 40)  # so soon that it is the same work
    made.call("collect", SAMPLER, "cuda:1", 90, 110)
    made.program.write(lane="trainer", name="wait", at=round(100e6), end=round(250e6))
    made.program.write(lane="trainer", name="sync", at=round(50e6), end=round(90e6))
    trainer, sampler = device_timelines(read_trace(tmp_path))
    assert milliseconds(trainer) == {"episodes": 150, PROGRAM: 50}
    assert [(begin / 1e6, end / 1e6) for begin, end in sampler.busy] == [(0, 40), (90, 110)]
    assert milliseconds(sampler)["the weight sync"] == 40


def test_the_steps_that_tables_are_about(tmp_path: Path) -> None:
    made = colocated(tmp_path, steps=5)
    steps = MeasuredSteps(read_trace(tmp_path))
    assert (len(steps.all), len(steps.measured), steps.seconds) == (5, 3, 1.0)
    made.call("recording", TRAINER, "cuda:0", 3100, 3200)  # the profiler makes this step slower
    steps = MeasuredSteps(read_trace(tmp_path))
    assert [begin for begin, _ in steps.measured] == [2_000_000_000, 4_000_000_000]


def test_without_a_step_of_its_own_the_syncs_of_a_program_end_its_steps(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path)
    for at in (100, 300, 600):
        made.program.span("sync_weights", at, at + 10, "call")
    assert [(end - begin) / 1e6 for begin, end in MeasuredSteps(read_trace(tmp_path)).all] == [200, 300]


def test_what_would_make_a_step_faster(tmp_path: Path) -> None:
    colocated(tmp_path)
    trace = read_trace(tmp_path)
    found = advice(trace, MeasuredSteps(trace), device_timelines(trace, LIMITS), LIMITS)
    best = {one.what: (one.seconds, one.best_s) for one in found}
    assert best["generate"] == pytest.approx((0.3, 200 * 2e9 / 4e12))
    assert best["train_batch"] == pytest.approx((0.25, 6 * 1e9 * 2000 / 100e12))
    assert best["onload optimizer, an engine"] == pytest.approx((0.2, 10.4 / 55))
    assert best["offload optimizer, an engine"] == pytest.approx((0.1, 4.0 / 50))
    assert best["sync_weights"] == pytest.approx((0.05, 2e9 / 2e12))
    assert best["the program: rewards"] == pytest.approx((0.05, 0.0))
    assert "offload, then onload, one after the other" not in best, "a sync lies in between"
    assert [one.saved_s for one in found] == sorted((one.saved_s for one in found), reverse=True)
    assert "48% of" in next(one.how for one in found if one.what == "train_batch")


def test_an_engine_that_cannot_swap_is_not_advised_to(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path)
    made.program.engine(SAMPLER, "inference", ["cuda:0"], can_swap=False)
    made.call("offload", TRAINER, "cuda:0", 0, 100, tag="weights", most_bytes=1, seconds=0.1, pinned=True)
    made.call("onload", SAMPLER, "cuda:0", 100, 200, tag="weights", most_bytes=1, seconds=0.1, pinned=True)
    trace = read_trace(tmp_path)
    found = advice(trace, MeasuredSteps(trace), device_timelines(trace), None)
    assert "offload, then onload, one after the other" not in {one.what for one in found}


def test_without_limits_only_what_needs_none_has_a_number(tmp_path: Path) -> None:
    made = MadeProgram(tmp_path)
    made.program.engine(TRAINER, "train", ["cuda:0"], num_parameters=10)
    made.program.engine(SAMPLER, "inference", ["cuda:1"], weights_bytes=10)
    made.call("generate", SAMPLER, "cuda:1", 0, 300, prompts=1, tokens=1, longest=1)
    made.call("train_step", TRAINER, "cuda:0", 300, 400, tokens=2)
    made.call("offload", TRAINER, "cuda:0", 400, 500, tag="weights", most_bytes=1, seconds=0.1, pinned=True)
    made.call("onload", SAMPLER, "cuda:1", 500, 560, tag="weights", most_bytes=1, seconds=0.06, pinned=False)
    made.call("save", TRAINER, "cuda:0", 560, 660)
    trace = read_trace(tmp_path)
    found = {one.what: one for one in advice(trace, MeasuredSteps(trace), device_timelines(trace), None)}
    assert found["generate"].best_s is None and found["train_batch"].saved_s == 0
    hidden = found["generation and training by turns"]
    assert (hidden.seconds, hidden.best_s) == pytest.approx((0.4, 0.3))
    swapped = found["offload, then onload, one after the other"]
    assert (swapped.seconds, swapped.best_s) == pytest.approx((0.12, 0.06))
    assert "not pinned" in found["onload weights, an engine"].how
    assert found["save"].best_s == 0 and "blocking=False" in found["save"].how
