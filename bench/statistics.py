"""Whether two sets of samples differ by more than noise, and by how much.

Samples of one process lie closer together than those of two: memory lies elsewhere, neighbours come and go. So the
noise is estimated from rounds (``CaseResult.rounds``), as the spread of their medians; a difference within it is none,
however many samples say so. A slow drift makes a round like the one before it: what they have in common does not get
less by taking more of them. Rounds that a neighbour fell on lie far out; of many they do not count by how far.

Where both sides took turns, what drifts meets both: then the ratios of neighbours in time are looked at, where these
scatter less than the rounds do. What falls on single rounds spoils more turns than rounds.
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
_RUNS_ON_HOST = 0.05
"""What whole runs on a quiet host differ by beside that: rounds lie within a minute, and a machine that is as slow
all through one run shows it in none of them. Of 235 pairs of results of runs minutes apart 7 differed by 4 to 15 %
though the rounds of each agreed; with this one does."""
_BLOCKS = 3
"""Parts of a single process's samples that stand for rounds: they see its drift, not what differs between processes."""
_RESAMPLES = 2000
_MOST_DRAWN = 10_000_000
"""Samples drawn at once: some 80 MB."""
_MANY = 20
"""Rounds of both, or turns, of which some may be left out: of fewer that costs more than it gains, where nobody
disturbs."""
_CUT = 0.2
"""Of many rounds, the share left out at either end."""

_EQUAL = 0.25
"""What two sides that are called equal may differ by at most."""
_LEAST_TURNS = 8
"""With fewer, the test of pairs can tell nothing."""

Rounds = list[list[float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of times b from times a."""

    clock: str
    """The metric that was compared."""
    ratio: float
    """Of the medians, b / a: above 1 b is slower. In turns: the trimmed geometric mean of those of each turn."""
    low: float
    """Of the 99 % interval of the ratio, by bootstrap over rounds and samples, or over turns."""
    high: float
    p: float
    """Mann-Whitney U (in turns Wilcoxon's signed ranks), two-sided: how likely such samples are if nothing differs."""
    noise: float
    """What the rounds of a and b differ by themselves, as a share: a ratio within 1 +- this says nothing."""
    can_tell: bool
    """There are samples enough for the test to find anything; with three against three there are not."""
    turns: int = 0
    """That were compared, one by one; 0: all rounds of one side with all of the other."""

    @property
    def is_significant(self) -> bool:
        return self.p < ALPHA and not self.low <= 1 <= self.high and not self.hides(self.ratio)

    def hides(self, ratio: float) -> bool:
        """Whether chance may make such a ratio."""
        return abs(math.log(ratio)) <= math.log1p(self.noise)

    def is_about_equal(self, ratio: float) -> bool:
        """Whether two sides with such a ratio lie close together even if the noise hides all that it can."""
        return abs(math.log(ratio)) + math.log1p(self.noise) <= math.log1p(_EQUAL)


def difference(a: CaseResult, b: CaseResult) -> Difference:
    """Raises MissingDependencyError without scipy."""
    clock = _clock(a, b)
    all_a, all_b = a.samples(clock), b.samples(clock)
    rounds_a, rounds_b = _rounds(a, all_a), _rounds(b, all_b)
    logs = [_log_medians(rounds_a), _log_medians(rounds_b)]
    turns, noise = _log_ratios(a, b, *logs), _noise(logs, may_last=True)
    took_turns = len(turns) >= _LEAST_TURNS
    if took_turns and _noise([turns], may_last=False) < noise:
        return _by_turns(clock, turns)
    low, high = _interval(rounds_a, rounds_b)
    return Difference(
        clock=clock,
        ratio=statistics.median(all_b) / statistics.median(all_a),
        low=low,
        high=high,
        p=float(_scipy_stats().mannwhitneyu(all_a, all_b).pvalue),
        noise=max(_LEAST, noise) if took_turns else _between_runs(a, b, clock, noise),
        can_tell=2 / math.comb(len(all_a) + len(all_b), len(all_a)) < ALPHA,
    )


def _by_turns(clock: str, log_ratios: Any) -> Difference:
    generator, count = np.random.default_rng(0), len(log_ratios)
    drawn = log_ratios[generator.integers(count, size=(_RESAMPLES, count))]
    low, high = np.exp(np.quantile(_trimmed_means(drawn), [ALPHA / 2, 1 - ALPHA / 2]))
    return Difference(
        clock=clock,
        ratio=float(np.exp(_trimmed_means(log_ratios))),
        low=float(low),
        high=float(high),
        p=float(_scipy_stats().wilcoxon(log_ratios).pvalue) if log_ratios.any() else 1.0,
        noise=max(_LEAST, _noise([log_ratios], may_last=False)),
        can_tell=True,
        turns=count,
    )


def _log_ratios(a: CaseResult, b: CaseResult, log_a: Any, log_b: Any) -> Any:
    """[turns]: of b over a. A turn ends as soon as it has as many rounds of both; what is left over is in none."""
    if len(a.rounds_at) != len(log_a) or len(b.rounds_at) != len(log_b):
        return np.zeros(0)
    of_a, of_b = ([*zip(side.rounds_at, log, strict=True)] for side, log in ((a, log_a), (b, log_b)))
    rounds = sorted([(at, -1, log) for at, log in of_a] + [(at, 1, log) for at, log in of_b])
    found, signs, logs = [], [], []
    for _, sign, log in rounds:
        signs.append(sign)
        logs.append(log)
        if sum(signs) == 0:
            found.append(2 * float(np.dot(signs, logs)) / len(signs))
            signs, logs = [], []
    return np.array(found)


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


def _between_runs(a: CaseResult, b: CaseResult, clock: str, noise: float) -> float:
    """``noise`` of the rounds, and what they do not show of two runs that took no turns."""
    is_on_device = clock == "device_time"
    if min(len(a.rounds), len(b.rounds)) <= 1:
        return max(_ONE_PROCESS_ON_DEVICE if is_on_device else _ONE_PROCESS, noise)
    return max(_LEAST, noise) if is_on_device else math.hypot(_RUNS_ON_HOST, noise)


def _log_medians(rounds: Rounds) -> Any:
    return np.log([statistics.median(one) for one in rounds])


def _noise(logs: list[Any], *, may_last: bool) -> float:
    """By how much the means of so many log medians, or log ratios, differ by chance alone in all but ALPHA of the
    cases: two from each other, or one from 0.

    The means are trimmed, their variance is that of Yuen's test: from the deviations of winsorised rounds.
    """
    total = sum(map(len, logs))
    cuts = [_cut(len(side), total) for side in logs]
    kept = [len(side) - 2 * cut for side, cut in zip(logs, cuts, strict=True)]
    freedom = sum(kept) - len(kept)
    if freedom == 0:
        return math.inf  # one round of one sample each: nothing is known about chance
    apart = [_winsorised(side, cut) for side, cut in zip(logs, cuts, strict=True)]
    apart = [side - side.mean() for side in apart]
    variance = sum(float(side @ side) for side in apart) / freedom
    # What a round has of the one before it, the whole run has.
    lasting = max(0.0, sum(float(side[1:] @ side[:-1]) for side in apart) / freedom) if may_last else 0.0
    error = math.sqrt(variance * sum(1 / count for count in kept) + 2 * lasting)
    return math.expm1(float(_scipy_stats().t.ppf(1 - ALPHA / 2, freedom)) * error)


def _cut(count: int, total: int) -> int:
    """How many of ``count`` are left out at either end."""
    return int(_CUT * count) if total >= _MANY else 0


def _winsorised(values: Any, cut: int) -> Any:
    """The ``cut`` lowest and highest are as high as their neighbours."""
    ordered = np.sort(values)
    return np.clip(values, ordered[cut], ordered[len(ordered) - 1 - cut])


def _trimmed_means(values: Any) -> Any:
    """Over the last dimension."""
    count = values.shape[-1]
    cut = _cut(count, count)
    return np.sort(values)[..., cut : count - cut].mean(-1)


def _interval(a: Rounds, b: Rounds) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    logs = _resampled(b, generator) - _resampled(a, generator)
    low, high = np.exp(np.quantile(logs, [ALPHA / 2, 1 - ALPHA / 2]))
    return float(low), float(high)


def _resampled(side: Rounds, generator: np.random.Generator) -> Any:
    """[resamples]: of samples drawn from rounds drawn from all rounds."""
    at_once = max(1, min(_RESAMPLES, _MOST_DRAWN // (len(side) * max(map(len, side)))))
    return np.concatenate(
        [
            _log_medians_of_drawn(side, min(at_once, _RESAMPLES - begun), generator)
            for begun in range(0, _RESAMPLES, at_once)
        ]
    )


def _log_medians_of_drawn(side: Rounds, count: int, generator: np.random.Generator) -> Any:
    size = max(map(len, side))
    drawn = np.stack([np.asarray(one)[generator.integers(len(one), size=(count, size))] for one in side])
    chosen = generator.integers(len(side), size=(count, len(side)))
    return np.log(np.median(drawn[chosen, np.arange(count)[:, None]].reshape(count, -1), axis=1))


def _scipy_stats() -> Any:
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingDependencyError("scipy", needed_for="comparing runs", extra="bench") from error
