"""Whether two sets of samples differ by more than noise, and by how much.

Samples of one process lie closer together than those of two: memory lies elsewhere, neighbours come and go. So the
noise is estimated from rounds (``CaseResult.rounds``), as the spread of their medians; a difference within it is none,
however many samples say so. A slow drift makes a round like the one before it: what they have in common does not get
less by taking more of them. Rounds that a neighbour fell on lie far out; of many they do not count by how far.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.bench.result import CaseResult
from rlcore.errors import MissingDependencyError

ALPHA = 0.01
"""How often chance alone may seem to be a difference, by either test."""
_LEAST = 0.01
"""A ratio that nobody acts on."""
_ONE_PROCESS = 0.1
"""What processes differ by, where there was but one a side to tell: on quiet hosts a few per cent each."""
_ONE_PROCESS_ON_DEVICE = 0.03
"""The same by a device's own clock."""
_BLOCKS = 3
"""Parts of a single process's samples that stand for rounds: they see its drift, not what differs between processes."""
_RESAMPLES = 2000
_MANY = 10
"""Rounds of which some may be left out: of fewer that costs more than it gains, where nobody disturbs."""
_CUT = 0.2
"""Of many rounds, the share left out at either end."""

Rounds = list[list[float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of times b from times a."""

    clock: str
    """The metric that was compared."""
    ratio: float
    """Of the medians, b / a: above 1 b is slower."""
    low: float
    """Of the 99 % interval of the ratio, by bootstrap over rounds and samples."""
    high: float
    p: float
    """Mann-Whitney U, two-sided: how likely such samples are if nothing differs."""
    noise: float
    """What the rounds of a and b differ by themselves, as a share: a ratio within 1 +- this says nothing."""

    can_tell: bool
    """There are samples enough for the test to find anything; with three against three there are not."""

    @property
    def is_significant(self) -> bool:
        return self.p < ALPHA and not self.low <= 1 <= self.high and abs(math.log(self.ratio)) > math.log1p(self.noise)


def difference(a: CaseResult, b: CaseResult) -> Difference:
    """Raises MissingDependencyError without scipy."""
    clock = _clock(a, b)
    all_a, all_b = a.samples(clock), b.samples(clock)
    rounds_a, rounds_b = _rounds(a, all_a), _rounds(b, all_b)
    low, high = _interval(rounds_a, rounds_b)
    return Difference(
        clock=clock,
        ratio=statistics.median(all_b) / statistics.median(all_a),
        low=low,
        high=high,
        p=float(_scipy_stats().mannwhitneyu(all_a, all_b).pvalue),
        noise=max(_least(a, b, clock), _noise(rounds_a, rounds_b)),
        can_tell=2 / math.comb(len(all_a) + len(all_b), len(all_a)) < ALPHA,
    )


def _clock(a: CaseResult, b: CaseResult) -> str:
    """The device's own; on a host that others used meanwhile the processors' time, which they advance less. One that
    does not tell of every sample is none: its samples cannot be told apart by rounds."""
    is_shared = any(mark.startswith("shared") for mark in [*a.marks, *b.marks])
    clocks = ["device_time", *["processor_time"] * is_shared]
    return next((clock for clock in clocks if _tells_all(a, clock) and _tells_all(b, clock)), "time")


def _tells_all(result: CaseResult, clock: str) -> bool:
    return result.has(clock) and len(result.samples(clock)) == len(result.samples("time"))


def _rounds(result: CaseResult, samples: list[float]) -> Rounds:
    """The samples of each process."""
    several = result.rounds if len(result.rounds) > 1 else None
    sizes = several or [len(part) for part in np.array_split(samples, min(_BLOCKS, len(samples)))]
    ends = np.cumsum(sizes)
    return [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def percentile(samples: Sequence[float], percent: float) -> float:
    return float(np.percentile(samples, percent))


def _least(a: CaseResult, b: CaseResult, clock: str) -> float:
    if min(len(a.rounds), len(b.rounds)) > 1:
        return _LEAST
    return _ONE_PROCESS_ON_DEVICE if clock == "device_time" else _ONE_PROCESS


def _noise(a: Rounds, b: Rounds) -> float:
    """By how much the means of so many rounds' log medians differ, by chance alone, in all but ALPHA of the cases.

    The means are trimmed, their variance is that of Yuen's test: from the deviations of winsorised rounds.
    """
    logs = [np.log([statistics.median(one) for one in side]) for side in (a, b)]
    cuts = [int(_CUT * len(side)) if len(side) >= _MANY else 0 for side in logs]
    kept = [len(side) - 2 * cut for side, cut in zip(logs, cuts, strict=True)]
    freedom = sum(kept) - len(kept)
    if freedom == 0:
        return math.inf  # one round of one sample each: nothing is known about chance
    apart = [_winsorised(side, cut) for side, cut in zip(logs, cuts, strict=True)]
    apart = [side - side.mean() for side in apart]
    variance = sum(float(side @ side) for side in apart) / freedom
    # What a round has of the one before it, the whole run has.
    lasting = max(0.0, sum(float(side[1:] @ side[:-1]) for side in apart) / freedom)
    error = math.sqrt(variance * sum(1 / count for count in kept) + 2 * lasting)
    return math.expm1(float(_scipy_stats().t.ppf(1 - ALPHA / 2, freedom)) * error)


def _winsorised(values: Any, cut: int) -> Any:
    """The ``cut`` lowest and highest are as high as their neighbours."""
    ordered = np.sort(values)
    return np.clip(values, ordered[cut], ordered[len(ordered) - 1 - cut])


def _interval(a: Rounds, b: Rounds) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    logs = _log_medians(b, generator) - _log_medians(a, generator)
    low, high = np.exp(np.quantile(logs, [ALPHA / 2, 1 - ALPHA / 2]))
    return float(low), float(high)


def _log_medians(side: Rounds, generator: np.random.Generator) -> Any:
    """[resamples]: of samples drawn from rounds drawn from all rounds."""
    size = max(map(len, side))
    drawn = np.stack([np.asarray(one)[generator.integers(len(one), size=(_RESAMPLES, size))] for one in side])
    chosen = generator.integers(len(side), size=(_RESAMPLES, len(side)))
    return np.log(np.median(drawn[chosen, np.arange(_RESAMPLES)[:, None]].reshape(_RESAMPLES, -1), axis=1))


def _scipy_stats() -> Any:
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingDependencyError("scipy", needed_for="comparing runs", extra="bench") from error
