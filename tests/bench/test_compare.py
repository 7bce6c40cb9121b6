"""What chance does is no change, what is a change is found, and what differs between machines is said first."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.stats import ttest_ind
from typer.testing import CliRunner

from rlcore.bench.compare import Difference, compare, difference, parse_prices, run_names
from rlcore.bench.record import CROWDED, CaseResult, Metric, Record, Telemetry, read, write
from rlcore.bench.reports.tables import noise_told
from rlcore.bench.run import PLANS
from rlcore.cli.bench import bench
from rlcore.errors import InvalidInputError

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
NAMES = ("before", "after")


def timed(
    name: str, generator: np.random.Generator, *, median: float = 0.01, drift: float = 0.01, rounds: int = 5, n: int = 6
) -> CaseResult:
    """Samples that scatter by 1 %, in rounds that scatter by ``drift``."""
    centres = median * np.exp(generator.normal(0, drift, rounds))
    samples = (centres[:, None] * np.exp(generator.normal(0, 0.01, (rounds, n)))).flatten().tolist()
    metrics = [Metric(name="time", unit="s", samples=samples)]
    return CaseResult(name=name, implementation="x", status="pass", params={}, metrics=metrics, rounds=[n] * rounds)


def failed(name: str, status: Any) -> CaseResult:
    return CaseResult(name=name, implementation="x", status=status, params={}, reason="it broke\nhere")


def record(*cases: CaseResult, **system: Any) -> Record:
    found = read(RESULTS / "startup-cpu.json")
    return msgspec.structs.replace(found, cases=list(cases), system=msgspec.structs.replace(found.system, **system))


# ------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize("drift", [pytest.param(0.001, marks=pytest.mark.slow), 0.03])
def test_equal_runs_are_about_equal_in_at_least_95_percent_whatever_the_noise(drift: float) -> None:
    generator = np.random.default_rng(1)
    found = [
        difference(timed("a", generator, drift=drift), timed("a", generator, drift=drift)).is_significant
        for _ in range(150)
    ]
    assert sum(found) <= 0.05 * len(found)


def by_device(result: CaseResult) -> CaseResult:
    metric = Metric(name="device_time", unit="s", samples=result.samples("time"))
    return msgspec.structs.replace(result, metrics=[*result.metrics, metric])


@pytest.mark.parametrize(("slowdown", "drift"), [(1.10, 0.02), pytest.param(1.03, 0.003, marks=pytest.mark.slow)])
def test_planted_slowdown_is_found_with_30_samples(slowdown: float, drift: float) -> None:
    """10 % under the noise of a quiet host, 3 % under that of an accelerator by its own clock."""
    generator = np.random.default_rng(2)
    pairs = [[timed("a", generator, drift=drift, median=0.01 * factor) for factor in (1, slowdown)] for _ in range(100)]
    found = [difference(*(map(by_device, pair) if slowdown < 1.1 else pair)) for pair in pairs]
    assert sum(one.is_significant and one.low <= slowdown <= one.high for one in found) >= 90


def test_planted_30_percent_are_found_between_two_quick_runs() -> None:
    """Samples scatter by 10 % and processes by 4.5 %: three rounds would find half of them."""
    generator, plan = np.random.default_rng(7), PLANS["quick"]
    found = dict.fromkeys((1.0, 1.3), 0)
    for slowdown, _ in itertools.product(found, range(100)):
        sides = []
        for factor in (1.0, slowdown):
            centres = 0.01 * factor * np.exp(generator.normal(0, 0.045, plan.rounds))
            samples = centres[:, None] * np.exp(generator.normal(0, 0.1, (plan.rounds, plan.sampling.max_samples)))
            sides.append(of_rounds(samples))
        found[slowdown] += difference(*sides).is_significant
    assert found[1.0] <= 2 and found[1.3] >= 90


def of_rounds(samples: Any) -> CaseResult:
    """``samples`` are [rounds, samples of a process]."""
    metrics = [Metric(name="time", unit="s", samples=samples.flatten().tolist())]
    rounds = [samples.shape[1]] * len(samples)
    return CaseResult(name="a", implementation="x", status="pass", params={}, metrics=metrics, rounds=rounds)


def test_the_interval_is_that_of_99_percent() -> None:
    """With few rounds, of which none resembles the one before it: Student's interval of the means' difference."""
    logs = np.array([0.0, 0.02, 0.0, 0.02, 0.0]), np.array([0.11, 0.10, 0.11, 0.10, 0.11])
    sides = []
    for each in logs:
        metrics = [Metric(name="time", unit="s", samples=np.exp(each).repeat(4).tolist())]
        case = CaseResult(name="a", implementation="x", status="pass", params={}, metrics=metrics, rounds=[4] * 5)
        sides.append(case)
    found = difference(*sides)
    low, high = ttest_ind(*reversed(logs)).confidence_interval(0.99)
    assert math.log(found.high / found.low) == pytest.approx(high - low)


def test_whole_runs_on_a_host_differ_though_their_rounds_agree() -> None:
    generator = np.random.default_rng(25)
    a, shifted = (timed("a", generator, drift=0.002, median=0.01 * factor) for factor in (1.0, 1.045))
    assert not difference(a, shifted).is_significant
    assert difference(by_device(a), by_device(shifted)).is_significant
    assert 0.05 <= difference(a, shifted).noise < 0.06
    a, shifted = (timed("a", generator, drift=0.002, median=0.01 * factor) for factor in (1.0, 1.12))
    busy = msgspec.structs.replace(a, marks=["shared: others used the host's processors"])
    assert difference(a, shifted).is_significant and not difference(busy, shifted).is_significant
    assert 0.15 <= difference(busy, shifted).noise < 0.16


def test_many_samples_of_one_process_do_not_outvote_noise_between_processes() -> None:
    generator = np.random.default_rng(3)
    a, b = (timed("a", generator, drift=0.05, n=100, rounds=3) for _ in range(2))
    found = difference(a, b)
    assert found.p * 1e6 < 1 and not found.is_significant
    assert found.noise > 0.05


def drifting(generator: np.random.Generator, rounds: int = 12, n: int = 3) -> CaseResult:
    """On a machine that gets slower and faster by some per cent within minutes: a random walk."""
    samples = 0.01 * np.exp(np.cumsum(generator.normal(0, 0.004, rounds * n)))
    metrics = [Metric(name="time", unit="s", samples=samples.tolist())]
    return CaseResult(name="a", implementation="x", status="pass", params={}, metrics=metrics, rounds=[n] * rounds)


def test_more_rounds_on_a_machine_that_drifts_slowly_prove_nothing() -> None:
    generator = np.random.default_rng(11)
    found = [difference(drifting(generator), drifting(generator)) for _ in range(100)]
    assert sum(one.is_significant for one in found) <= 25  # 50 if rounds were taken for independent


def interrupted(generator: np.random.Generator, *, median: float = 0.01, rounds: int = 30) -> CaseResult:
    """A neighbour fell on every seventh round, which then took half as long again or several times as long."""
    hits = (generator.random(rounds) < 1 / 7) * generator.exponential(0.7, rounds)
    samples = (median * np.exp(generator.normal(0, 0.04, rounds) + hits)).tolist()
    metrics = [Metric(name="time", unit="s", samples=samples)]
    return CaseResult(name="a", implementation="x", status="pass", params={}, metrics=metrics, rounds=[1] * rounds)


@pytest.mark.parametrize(("slowdown", "low", "high"), [pytest.param(1.0, 0, 5, marks=pytest.mark.slow), (1.1, 80, 100)])
def test_rounds_that_a_neighbour_fell_on_hide_no_slowdown_and_make_none(slowdown: float, low: int, high: int) -> None:
    generator = np.random.default_rng(13)
    found = [difference(interrupted(generator), interrupted(generator, median=0.01 * slowdown)) for _ in range(100)]
    assert low <= sum(one.is_significant for one in found) <= high


def in_turns(
    generator: np.random.Generator, *, slowdown: float, walk: float, rounds: int = 15, n: int = 2, per_turn: int = 1
) -> tuple[CaseResult, CaseResult]:
    """Both on one machine that gets slower or faster by ``walk`` meanwhile; samples and processes scatter by 0.5 %.

    Who begins alternates, ``per_turn`` rounds at a time.
    """
    order = [side for turn in range(rounds // per_turn) for side in ((0, 1), (1, 0))[turn % 2] for _ in range(per_turn)]
    drift = np.cumsum(generator.normal(0, walk / math.sqrt(2 * rounds), len(order)))
    samples: tuple[list[float], list[float]] = ([], [])
    for side, now in zip(order, drift, strict=True):
        centre = now + generator.normal(0, 0.005) + side * math.log1p(slowdown)
        samples[side].extend((0.01 * np.exp(centre + generator.normal(0, 0.005, n))).tolist())
    found = [
        CaseResult(
            name="a",
            implementation="x",
            status="pass",
            params={},
            metrics=[Metric(name="time", unit="s", samples=samples[side])],
            rounds=[n] * rounds,
            rounds_at=[float(at) for at, taken in enumerate(order) if taken == side],
        )
        for side in (0, 1)
    ]
    return found[0], found[1]


@pytest.mark.parametrize("doubt", [{"p": 0.02}, {"low": 0.99}, {"noise": 0.6}], ids=str)
def test_a_difference_counts_if_either_test_and_the_noise_leave_no_doubt(doubt: dict[str, float]) -> None:
    """Seven of eight turns that agree are such a p, with an interval that the eighth leaves above 1."""
    sure = Difference("time", ratio=1.5, low=1.3, high=1.7, p=0.008, noise=0.1, can_tell=True)
    assert sure.is_significant and not replace(sure, **doubt).is_significant


@pytest.mark.parametrize(
    ("rounds", "n", "walk"),
    [
        (15, 2, 0.05),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((10, 3, 0.0), (10, 3, 0.05), (15, 2, 0.0), (15, 2, 0.02), (30, 1, 0.0), (30, 1, 0.05))
        ),
    ],
)
def test_in_turns_3_percent_are_found_with_30_samples_while_the_machine_drifts_by_more(
    rounds: int, n: int, walk: float
) -> None:
    generator = np.random.default_rng(21)
    same, slower = (
        [difference(*in_turns(generator, slowdown=slowdown, walk=walk, rounds=rounds, n=n)) for _ in range(60)]
        for slowdown in (0.0, 0.03)
    )
    assert sum(one.turns == rounds for one in [*same, *slower]) >= (100 if walk else 0)
    assert sum(one.is_significant for one in same) <= 1
    assert sum(one.is_significant and one.low <= 1.03 <= one.high for one in slower) >= 54


@pytest.mark.slow
def test_without_the_times_of_its_rounds_a_drifting_machine_hides_3_percent() -> None:
    """What taking turns is worth."""
    generator = np.random.default_rng(22)
    pairs = [in_turns(generator, slowdown=0.03, walk=0.05) for _ in range(40)]
    untold = [[msgspec.structs.replace(side, rounds_at=[]) for side in pair] for pair in pairs]
    assert sum(difference(*pair).is_significant for pair in untold) <= 12
    assert {difference(*pair).turns for pair in untold} == {0}


@pytest.mark.parametrize(("per_turn", "turns"), [(1, 20), (2, 10), (4, 0)])
def test_turns_are_of_as_many_rounds_of_both_and_fewer_than_8_are_none(per_turn: int, turns: int) -> None:
    a, b = in_turns(np.random.default_rng(23), slowdown=0.1, walk=0.05, rounds=20, per_turn=per_turn)
    found = difference(a, b)
    assert found.turns == turns
    if turns:
        assert found.is_significant and found.ratio == pytest.approx(1.1, abs=0.01)
    back = difference(b, a)
    assert back.turns == turns and back.ratio == pytest.approx(1 / found.ratio)


@pytest.mark.parametrize(("slowdown", "low", "high"), [(1.0, 0, 2), (1.1, 50, 60)])
def test_turns_that_a_neighbour_fell_on_hide_no_slowdown_and_make_none(slowdown: float, low: int, high: int) -> None:
    generator = np.random.default_rng(27)
    pairs = [[interrupted(generator, median=0.01 * factor) for factor in (1.0, slowdown)] for _ in range(60)]
    at = [[2.0 * round_ + side for round_ in range(30)] for side in (0, 1)]
    pairs = [[msgspec.structs.replace(side, rounds_at=at[n]) for n, side in enumerate(pair)] for pair in pairs]
    assert low <= sum(difference(*pair).is_significant for pair in pairs) <= high


def test_runs_one_after_the_other_took_no_turns_and_a_run_is_equal_to_itself() -> None:
    a, b = in_turns(np.random.default_rng(24), slowdown=0.0, walk=0.05, rounds=20)
    later = msgspec.structs.replace(b, rounds_at=[at + 1000.0 for at in b.rounds_at])
    assert (difference(a, b).turns, difference(a, later).turns) == (20, 0)
    itself = difference(a, a)
    assert (itself.ratio, itself.p, itself.is_significant) == (1.0, 1.0, False)


def test_processes_differ_and_one_a_side_does_not_tell_by_how_much() -> None:
    generator = np.random.default_rng(12)
    a, slower, slow = (timed("a", generator, rounds=1, n=30, median=0.01 * factor) for factor in (1.0, 1.06, 1.5))
    assert (difference(a, slower).is_significant, difference(a, slow).is_significant) == (False, True)
    assert difference(a, slower).noise == 0.1
    on_device = [with_clock(one, "device_time", [], 0.01 * factor) for one, factor in ((a, 1.0), (slower, 1.06))]
    assert difference(*on_device).noise == 0.03


def test_a_single_sample_says_nothing() -> None:
    one = CaseResult(
        name="a", implementation="x", status="pass", params={}, metrics=[Metric(name="time", unit="s", samples=[1.0])]
    )
    ten = msgspec.structs.replace(one, metrics=[Metric(name="time", unit="s", samples=[10.0])])
    found = difference(one, ten)
    assert (found.ratio, found.is_significant, found.can_tell) == (10.0, False, False)
    (row,) = compared(record(one), record(ten)).rows
    assert (row.verdict, row.reason, row.is_regression) == ("cannot tell", "too few samples", False)


@pytest.mark.parametrize(("n", "can_tell"), [(1, False), (3, False), (4, False), (5, True), (30, True)])
def test_three_samples_against_three_can_never_tell(n: int, can_tell: bool) -> None:
    generator = np.random.default_rng(10)
    a, b = timed("a", generator, rounds=1, n=n), timed("a", generator, rounds=1, n=n, median=1.0)
    assert difference(a, b).can_tell is can_tell


def with_clock(result: CaseResult, name: str, marks: list[str], seconds: float = 1.0) -> CaseResult:
    metric = Metric(name=name, unit="s", samples=[seconds] * len(result.samples("time")))
    return msgspec.structs.replace(result, metrics=[*result.metrics, metric], marks=marks)


@pytest.mark.parametrize(
    ("clock", "marks", "used"),
    [
        ("device_time", [], "device_time"),
        ("processor_time", [], "time"),
        ("processor_time", ["throttled: x"], "time"),
        ("processor_time", ["shared: others used the host's processors"], "processor_time"),
    ],
)
def test_clock_is_the_devices_own_and_on_a_shared_host_that_of_its_processors(
    clock: str, marks: list[str], used: str
) -> None:
    generator = np.random.default_rng(4)
    a, b = timed("a", generator), timed("a", generator)
    assert difference(with_clock(a, clock, []), with_clock(b, clock, marks)).clock == used
    assert difference(with_clock(a, clock, marks), b).clock == "time"  # only one of them has it


@pytest.mark.parametrize(
    ("share", "shown"), [(0.0123, "1.2%"), (1.0, "100.0%"), (41.8, "over 100%"), (math.inf, "unknown")]
)
def test_noise_is_shown_as_far_as_it_says_something(share: float, shown: str) -> None:
    assert noise_told(share) == shown


def test_clock_that_does_not_tell_of_every_sample_is_not_compared() -> None:
    generator = np.random.default_rng(4)
    marks = ["shared: others used the host's processors"]
    a, b = (with_clock(timed("a", generator), "processor_time", marks) for _ in range(2))
    (time, short) = b.metrics
    short = msgspec.structs.replace(short, samples=short.samples[1:])
    assert difference(a, b).clock == "processor_time"
    assert difference(a, msgspec.structs.replace(b, metrics=[time, short])).clock == "time"


# ----------------------------------------------------------------------------------------------- two records


def compared(a: Record, b: Record, **prices: float) -> Any:
    return compare(a, b, names=NAMES, prices=prices)


def test_rows_have_verdicts_and_only_the_slower_is_a_regression() -> None:
    generator = np.random.default_rng(5)
    names = ("same", "slower", "faster")
    a = record(*(timed(name, generator) for name in names))
    b = record(
        *(timed(name, generator, median=0.01 * factor) for name, factor in zip(names, (1, 1.3, 0.7), strict=True))
    )
    found = compared(a, b)
    assert {row.case: row.verdict for row in found.rows} == {
        "same": "about equal",
        "slower": "slower",
        "faster": "faster",
    }
    assert [row.case for row in found.regressions] == ["slower"]
    assert found.geometric_mean == pytest.approx((1.3 * 0.7) ** (1 / 3), rel=0.03)


@pytest.mark.parametrize("factor", [2.0, 1.0])
@pytest.mark.parametrize("shares", [(0.4, 0.8), (0.4, 0.5), (None, 0.1)])
def test_a_host_that_others_left_less_of_makes_no_regression_and_hides_none(
    shares: tuple[float | None, float], factor: float
) -> None:
    generator = np.random.default_rng(13)
    a, b = (
        msgspec.structs.replace(timed("a", generator, median=median), telemetry=Telemetry(host_share_of_others=share))
        for median, share in zip((0.01, 0.01 * factor), shares, strict=True)
    )
    found = compared(record(a), record(b))
    (row,) = found.rows
    told = "slower" if factor > 1 else "about equal"
    assert row.verdict == ("cannot tell" if shares == (0.4, 0.8) else told)
    assert row.is_regression == (row.verdict == "slower")
    if shares == (0.4, 0.8):
        assert row.reason == "others used 40% of the host's processors, and then 80%"
        assert row.difference is not None and found.geometric_mean is None and found.compared == []
    clocks = [with_clock(one, "device_time", [], 0.01 * by) for one, by in ((a, 1.0), (b, factor))]
    assert compared(*map(record, clocks)).rows[0].verdict == told  # a device does not mind
    pair = in_turns(generator, slowdown=factor - 1, walk=0.05)
    turns = [msgspec.structs.replace(side, telemetry=one.telemetry) for side, one in zip(pair, (a, b), strict=True)]
    (row,) = compared(*map(record, turns)).rows
    assert row.difference.turns and row.verdict == told, "what one met, both met"


def test_a_host_without_a_free_processor_tells_nothing_unless_both_took_turns() -> None:
    generator = np.random.default_rng(13)
    a, b = (timed("a", generator, median=median) for median in (0.01, 0.02))
    crowded = msgspec.structs.replace(b, marks=[CROWDED])
    for pair in ((a, crowded), (crowded, a), (crowded, crowded)):
        (row,) = compared(*map(record, pair)).rows
        assert (row.verdict, row.reason) == ("cannot tell", "others left no processor of the host free")
    turns = (msgspec.structs.replace(one, marks=[CROWDED]) for one in in_turns(generator, slowdown=1.0, walk=0.05))
    assert compared(*map(record, turns)).rows[0].verdict == "slower"


def test_rounds_that_agree_by_chance_are_no_surer_than_their_samples() -> None:
    """A neighbour comes and goes within rounds; the medians of one run's rounds all had it, those of the other none."""
    quiet, busy = [1.0, 1.0, 1.0, 1.6, 1.6], [1.0, 1.0, 1.6, 1.6, 1.6]
    a, b = (
        msgspec.structs.replace(
            timed("a", np.random.default_rng(1), rounds=3, n=5),
            metrics=[Metric(name="time", unit="s", samples=3 * samples)],
        )
        for samples in (quiet, busy)
    )
    (row,) = compared(record(a), record(b)).rows
    assert row.verdict == "cannot tell" and row.difference.noise > 0.6


def on_host(
    generator: np.random.Generator, *, is_busy: bool, median: float, name: str, rounds: int = 3, n: int = 5
) -> CaseResult:
    """A run by the processors' clock: neighbours came for some rounds, or stayed for all of them."""
    drift, lasting, scatter = (0.10, 0.05, 0.05) if is_busy else (0.01, 0.015, 0.01)
    centres = generator.normal(0, lasting) + generator.normal(0, drift, rounds)
    samples = (median * np.exp(centres[:, None] + generator.normal(0, scatter, (rounds, n)))).flatten().tolist()
    metrics = [Metric(name=clock, unit="s", samples=samples) for clock in ("time", "processor_time")]
    marks = ["shared: others used the host's processors"] * is_busy
    return CaseResult(
        name=name, implementation="x", status="pass", params={}, metrics=metrics, rounds=[n] * rounds, marks=marks
    )


@pytest.mark.parametrize(("is_busy", "rounds"), [(False, 3), (True, 3), (True, 1)])
def test_planted_30_percent_are_found_in_20_of_20_and_on_a_busy_host_that_or_cannot_be_told(
    is_busy: bool, rounds: int
) -> None:
    generator = np.random.default_rng(41)
    verdicts: dict[str, list[str]] = {"planted": [], "same": [], "also": []}
    for _ in range(20):
        a, b = (
            record(*(
                on_host(generator, is_busy=is_busy, median=factor if name == "planted" else 1.0, name=name,
                        rounds=rounds, n=15 // rounds)
                for name in verdicts
            ))
            for factor in (1.0, 1.3)
        )  # fmt: skip
        for row in compared(a, b).rows:
            verdicts[row.case].append(row.verdict)
    undecided = {"cannot tell"} if is_busy else set()
    assert verdicts["planted"].count("slower") >= {(False, 3): 20, (True, 3): 1, (True, 1): 0}[is_busy, rounds]
    assert set(verdicts["planted"]) <= {"slower"} | undecided
    assert {*verdicts["same"], *verdicts["also"]} <= {"about equal"} | undecided


def test_mean_of_the_ratios_is_of_those_that_are_more_than_chance() -> None:
    generator = np.random.default_rng(42)
    a, b = (
        record(timed("steady", generator), timed("wild", generator, drift=0.5, median=median))
        for median in (0.01, 0.02)
    )
    found = compared(a, b)
    assert [row.verdict for row in found.rows] == ["about equal", "cannot tell"]
    assert found.geometric_mean == pytest.approx(1.0, abs=0.05)


def test_what_has_no_number_says_why_and_what_broke_is_a_regression() -> None:
    generator = np.random.default_rng(6)
    a = record(
        timed("broke", generator), timed("gone", generator), failed("mended", "fail"), failed("never", "blocked")
    )
    b = record(failed("broke", "oom"), timed("mended", generator), failed("never", "blocked"), timed("new", generator))
    found = {row.case: (row.reason, row.is_regression) for row in compared(a, b).rows}
    assert found == {
        "broke": ("pass -> oom: it broke", True),
        "gone": ("only in the first", False),
        "mended": ("fail -> pass: it broke", False),
        "new": ("only in the second", False),
    }


def test_nobody_says_equal_where_twice_the_time_would_not_be_seen() -> None:
    generator = np.random.default_rng(14)
    (row,) = compared(*(record(timed("a", generator, drift=1.0, rounds=3)) for _ in range(2))).rows
    assert (row.verdict, row.is_regression) == ("cannot tell", False)


@pytest.mark.parametrize(
    ("ratio", "drift", "verdict"),
    [(1.0, 0.01, "about equal"), (1.43, 0.2, "cannot tell"), (1.0, 0.15, "cannot tell"), (1.43, 0.01, "slower")],
)
def test_what_noise_hides_is_not_called_equal(ratio: float, drift: float, verdict: str) -> None:
    a = timed("a", np.random.default_rng(14), drift=drift)
    times = [sample * ratio for sample in a.samples("time")]
    b = msgspec.structs.replace(a, metrics=[Metric(name="time", unit="s", samples=times)])
    found = compared(record(a), record(b))
    assert [row.verdict for row in found.rows] == [verdict]
    assert found.compared == found.rows, "twice the time would have been seen"


def test_medians_are_of_the_clock_that_was_compared() -> None:
    generator = np.random.default_rng(15)
    a, b = (with_clock(timed("a", generator), "device_time", [], seconds) for seconds in (1.0, 2.0))
    (row,) = compared(record(a), record(b)).rows
    assert (row.median_a, row.median_b, row.difference.ratio) == (1.0, 2.0, 2.0)


def test_runs_are_called_by_their_files_and_by_folders_where_those_are_equal() -> None:
    assert run_names([Path("x/a.json"), Path("b.json")]) == ["a", "b"]
    assert run_names([Path("x/a.json"), Path("y/a.json")]) == ["x/a.json", "y/a.json"]
    assert run_names([Path("a.json"), Path("a.txt")]) == ["a.json", "a.txt"]
    assert run_names([Path("."), Path("/")]) == [".", "/"]
    with pytest.raises(InvalidInputError, match=r"^x/../b.json is given twice; name each record once$"):
        run_names([Path("b.json"), Path("a.json"), Path("x/../b.json")])


def test_other_sizes_are_other_results() -> None:
    generator = np.random.default_rng(7)
    a, b = timed("a", generator), msgspec.structs.replace(timed("a", generator), params={"T": 4})
    found = compared(record(a), record(b))
    assert [row.reason for row in found.rows] == ["only in the first", "only in the second"]
    assert found.statement.startswith("Nothing can be compared, nor a price be used: no result of one run has the case")
    assert found.statement.endswith("rlcore bench report before after sets them side by side.")


def test_differences_of_versions_and_driver_are_listed_and_stacks_are_called_stacks() -> None:
    a = record(other_software_stack={"driver": "580"}, accelerator_model_name="one GPU")
    b = msgspec.structs.replace(a, dependencies=a.dependencies | {"torch": "9.9"}, commit=None, environment={"X": "1"})
    b = msgspec.structs.replace(b, system=msgspec.structs.replace(b.system, other_software_stack={"driver": "590"}))
    found = compared(a, b)
    assert list(found.differences)[:2] == ["driver", "torch"]
    assert found.differences["driver"] == ("580", "590")
    assert found.differences["$X"] == ("absent", "1")
    assert found.differences["commit"][1] == "unknown"
    assert "same kind of device" in found.statement
    other = compared(a, record(accelerator_model_name="another GPU"))
    assert other.statement.startswith("The runs are of different devices: a ratio compares whole stacks")
    assert next(iter(other.differences)) == "device"


def test_prices_give_cost_ratios_and_dollars_a_token() -> None:
    generator = np.random.default_rng(8)
    tokens = Metric(name="new_tokens", unit="token/s", samples=[1000.0])
    one = timed("a", generator)
    a = msgspec.structs.replace(one, metrics=[*one.metrics, tokens], params={"devices": 2})
    (row,) = compared(record(a), record(a), before=2.0, after=3.0).rows
    assert row.cost_ratio == pytest.approx(1.5)
    assert row.usd_per_million_tokens == pytest.approx((2 * 2 / 3600 / 1000 * 1e6, 3 * 2 / 3600 / 1000 * 1e6))
    (row,) = compared(record(a), record(a)).rows
    assert (row.cost_ratio, row.usd_per_million_tokens) == (None, None)


@pytest.mark.parametrize("text", ["before", "before=", "before=free", "before=0", "before=inf", "other=2", "=2"])
def test_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^--price must be NAME=USD .* before, after, got "):
        parse_prices([text], list(NAMES))
    assert parse_prices(["before=2.5", "after=3"], list(NAMES)) == {"before": 2.5, "after": 3.0}


# ----------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    generator = np.random.default_rng(9)
    write(record(timed("a", generator), timed("b", generator)), tmp_path / "before.json")
    write(record(timed("a", generator, median=0.02), timed("b", generator)), tmp_path / "after.json")
    write(record(timed("a", generator), accelerator_model_name="a GPU"), tmp_path / "gpu.json")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(bench, ["compare", *arguments])


def test_command_prints_ratios_and_what_they_compare(command: Callable[..., Any]) -> None:
    shown = command("before.json", "after.json", "--price", "before=2", "--price", "after=1")
    assert shown.exit_code == 0
    assert "1 about equal, 0 faster, 1 slower" in shown.stdout
    assert "of the same commit and kind of device" in shown.stdout and "cost ratio" in shown.stdout
    assert re.search(r"^What is less than the noise was not seen: .*% at best, .*% at worst\.$", shown.stdout, re.M)
    rows = json.loads(command("before.json", "after.json", "--json").stdout)[0]["rows"]
    assert [row["verdict"] for row in rows] == ["slower", "about equal"]


def test_command_says_that_both_took_turns_and_what_was_noted(command: Callable[..., Any], tmp_path: Path) -> None:
    a, b = in_turns(np.random.default_rng(26), slowdown=0.0, walk=0.02)
    write(record(a, hw_notes="three other jobs"), tmp_path / "a.json")
    write(record(b), tmp_path / "b.json")
    shown = command("a.json", "b.json").stdout
    assert "\nBoth took turns at 1 results (15 or more): the ratio is the mean of each turn's.\n" in shown
    assert re.search(r"^hw_notes +three other jobs +absent *$", shown, re.M)
    assert "took turns" not in command("before.json", "after.json").stdout


def test_command_counts_what_one_run_alone_has_and_shows_contenders_that_are_gone(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    generator = np.random.default_rng(3)
    theirs = msgspec.structs.replace(timed("a", generator), implementation="a peer")
    write(record(timed("a", generator), theirs, timed("new/x", generator)), tmp_path / "more.json")
    shown = command("before.json", "more.json").stdout
    assert re.search(r"^a +a peer +.*not comparable: only in the second$", shown, re.M)
    assert not re.search("^(b|new/x) ", shown, re.M)
    assert "\nNot shown: 2 results of cases, or of sizes, that one run alone has (b, new).\n" in shown


def test_command_gates_on_a_regression_of_the_same_device(command: Callable[..., Any]) -> None:
    assert command("before.json", "after.json", "--fail-on-regression").exit_code == 1
    assert command("after.json", "before.json", "--fail-on-regression").exit_code == 0
    stacks = command("before.json", "gpu.json", "--fail-on-regression")
    assert stacks.exit_code == 1 and "takes runs of the same kind of device" in str(stacks.exception)
    assert "compare takes two records or more, got 1" in str(command("before.json").exception)


def test_gate_does_not_open_where_nothing_could_be_compared(command: Callable[..., Any], tmp_path: Path) -> None:
    write(record(timed("c", np.random.default_rng(1))), tmp_path / "other.json")
    for name in ("short.json", "same.json"):
        write(record(timed("a", np.random.default_rng(1), rounds=1, n=1)), tmp_path / name)
    pairs = {("other.json", "before.json"): "Not shown: 3 results", ("short.json", "same.json"): "unknown"}
    for names, word in pairs.items():
        shown = command(*names, "--fail-on-regression")
        assert shown.exit_code == 1 and word in shown.stdout
        assert str(shown.exception).startswith("--fail-on-regression found no result that both runs have")


@pytest.mark.parametrize(
    ("commits", "told"),
    [
        (("a", "a"), "of the same commit"),
        (("a", "b"), "same kind of device: a ratio is the effect"),
        (("a-modified", "a-modified"), "same kind of device: a ratio is the effect"),
        ((None, None), "same kind of device: a ratio is the effect"),
    ],
)
def test_two_runs_of_the_same_commit_are_called_that(commits: tuple[str | None, str | None], told: str) -> None:
    found = [msgspec.structs.replace(record(), commit=commit, calls=[]) for commit in commits]
    assert told in compare(found[0], found[1], names=NAMES).statement
