"""The difference of two sets of samples, and whether it is more than noise.

Samples of one process lie closer together than those of two: memory lies elsewhere, neighbours come and go. So the
noise is estimated from rounds (``CaseResult.rounds``), as the spread of their medians. A difference within it is none,
however many samples there are. A slow drift makes a round like the one before it, and more rounds do not reduce what
they have in common. Rounds that a neighbour disturbed are outliers: of many rounds, their distance does not count.

Where both sides took turns, a drift meets both. Then the ratios of neighbours in time are compared, where these scatter
less than the rounds do. A disturbance of single rounds spoils more turns than rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.bench.record import CaseResult
from rlcore.errors import MissingDependencyError

ALPHA = 0.01
"""How often chance alone may seem to be a difference, by either test."""
_LEAST = 0.01
"""A ratio that nobody acts on."""
_ONE_PROCESS = 0.1
"""The difference of processes, where there was but one a side to tell: on quiet hosts a few per cent each."""
_ONE_PROCESS_ON_DEVICE = 0.03
"""The same by a device's own clock."""
_RUNS_ON_HOST = 0.05
"""The difference of whole runs on a quiet host beside that: rounds lie within a minute, and a machine that is as slow
all through one run shows it in none of them. Of 235 pairs of results of runs minutes apart 7 differed by 4 to 15 %
though the rounds of each agreed; with this one does."""
_BLOCKS = 3
"""Parts of a single process's samples that stand for rounds: they see its drift, not what differs between processes."""
_MANY = 20
"""Rounds of both, or turns, from which on the extremes are trimmed: of fewer, trimming costs more than it gains."""
_TRIMMED = 0.2
"""The share of many rounds that is trimmed at either end."""
_EQUAL = 0.25
"""The most that two sides that are called equal may differ by."""
_LEAST_TURNS = 8
"""With fewer, the test of pairs can tell nothing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The times of b beside those of a."""

    clock: str
    """The metric that was compared."""
    ratio: float
    """The ratio of the medians, b / a: above 1 b is slower. In turns: the trimmed geometric mean of those of each."""
    low: float
    """The lower end of the 99 % interval of the ratio (Yuen's test of the logarithms of rounds, or of turns)."""
    high: float
    p: float
    """Mann-Whitney U (in turns Wilcoxon's signed ranks), two-sided: how likely such samples are if nothing differs."""
    noise: float
    """The share that chance makes a and b differ by: a ratio within 1 +- this says nothing."""
    can_tell: bool
    """There are samples enough for the test to find anything; with three against three there are not."""
    turns: int = 0
    """How many turns were compared; 0: all rounds of one side with all of the other."""

    @property
    def is_significant(self) -> bool:
        return self.p < ALPHA and not self.low <= 1 <= self.high and not self.hides(self.ratio)

    def hides(self, ratio: float) -> bool:
        """Return whether chance may make such a ratio."""
        return abs(math.log(ratio)) <= math.log1p(self.noise)

    def is_about_equal(self, ratio: float) -> bool:
        """Return whether two sides with such a ratio lie close together even if the noise hides all that it can."""
        return abs(math.log(ratio)) + math.log1p(self.noise) <= math.log1p(_EQUAL)


def difference(a: CaseResult, b: CaseResult) -> Difference:
    """Raises MissingDependencyError without scipy."""
    stats, clock = _scipy_stats(), _clock(a, b)
    samples = a.samples(clock), b.samples(clock)
    sides = [_log_medians(*side) for side in zip((a, b), samples, strict=True)]
    turns, chance = _log_ratios(a, b, *sides), _chance(sides, may_last=True)
    took_turns = len(turns) >= _LEAST_TURNS
    if took_turns and (chance_of_turns := _chance([turns], may_last=False)) < chance:
        p = float(stats.wilcoxon(turns).pvalue) if turns.any() else 1.0
        ratio = math.exp(stats.trim_mean(turns, _trimmed(len(turns))))
        noise, can_tell, compared = max(_LEAST, chance_of_turns), True, len(turns)
        chance = chance_of_turns
    else:
        p = float(stats.mannwhitneyu(*samples).pvalue)
        ratio = statistics.median(samples[1]) / statistics.median(samples[0])
        noise = max(_LEAST, chance) if took_turns else _between_runs(a, b, clock, chance)
        can_tell, compared = 2 / math.comb(sum(map(len, samples)), len(samples[0])) < ALPHA, 0
    low, high = ratio / (1 + chance), ratio * (1 + chance)
    return Difference(clock, ratio, low, high, p, noise, can_tell, compared)


def _clock(a: CaseResult, b: CaseResult) -> str:
    """The device's own; on a host that others used meanwhile the processors' time, which they advance less.

    A clock that does not tell of every sample is not compared: its samples cannot be assigned to rounds.
    """
    is_shared = any(mark.startswith("shared") for mark in [*a.marks, *b.marks])
    clocks = ["device_time", *["processor_time"] * is_shared]
    return next((clock for clock in clocks if _tells_all(a, clock) and _tells_all(b, clock)), "time")


def _tells_all(result: CaseResult, clock: str) -> bool:
    return result.has(clock) and len(result.samples(clock)) == len(result.samples("time"))


def _log_medians(result: CaseResult, samples: list[float]) -> Any:
    """[rounds]: the logarithms of the medians of each process."""
    ends = np.cumsum(result.rounds)[:-1] if len(result.rounds) > 1 else min(_BLOCKS, len(samples))
    return np.log([np.median(part) for part in np.array_split(samples, ends)])


def _log_ratios(a: CaseResult, b: CaseResult, log_a: Any, log_b: Any) -> Any:
    """[turns]: b over a. A turn ends as soon as it has as many rounds of both; the rest is in no turn."""
    if len(a.rounds_at) != len(log_a) or len(b.rounds_at) != len(log_b):
        return np.zeros(0)
    rounds = [(at, -1, log) for at, log in zip(a.rounds_at, log_a, strict=True)]
    rounds += [(at, 1, log) for at, log in zip(b.rounds_at, log_b, strict=True)]
    found, signs, logs = [], [], []
    for _, sign, log in sorted(rounds):
        signs.append(sign)
        logs.append(log)
        if sum(signs) == 0:
            found.append(2 * float(np.dot(signs, logs)) / len(signs))
            signs, logs = [], []
    return np.array(found)


def percentile(samples: Sequence[float], percent: float) -> float:
    return float(np.percentile(samples, percent))


def _between_runs(a: CaseResult, b: CaseResult, clock: str, chance: float) -> float:
    """``chance`` of the rounds, and what they do not show of two runs that took no turns."""
    is_on_device = clock == "device_time"
    if min(len(a.rounds), len(b.rounds)) <= 1:
        return max(_ONE_PROCESS_ON_DEVICE if is_on_device else _ONE_PROCESS, chance)
    return max(_LEAST, chance) if is_on_device else math.hypot(_RUNS_ON_HOST, chance)


def _trimmed(number: int) -> float:
    return _TRIMMED if number >= _MANY else 0.0


def _chance(sides: list[Any], *, may_last: bool) -> float:
    """The share that the means of log medians, or log ratios, differ by chance alone in all but ALPHA of the cases.

    Two sides differ from each other, one side from 0. The means are trimmed, so that their variance is that of Yuen's
    test: it comes from winsorised rounds. scipy has that test, but not for rounds that depend on the one before.
    """
    stats, trimmed = _scipy_stats(), _trimmed(sum(map(len, sides)))
    kept = [len(side) - 2 * int(trimmed * len(side)) for side in sides]
    freedom = sum(kept) - len(kept)
    if freedom == 0:
        return math.inf  # one round of one sample each: nothing is known about chance
    winsorised = [np.asarray(stats.mstats.winsorize(side, (trimmed, trimmed))) for side in sides]
    apart = [side - side.mean() for side in winsorised]
    variance = sum(float(side @ side) for side in apart) / freedom
    # What a round has in common with the one before it, the whole run has.
    lasting = max(0.0, sum(float(side[1:] @ side[:-1]) for side in apart) / freedom) if may_last else 0.0
    error = math.sqrt(variance * sum(1 / count for count in kept) + 2 * lasting)
    return math.expm1(float(stats.t.ppf(1 - ALPHA / 2, freedom)) * error)


def _scipy_stats() -> Any:
    try:
        import scipy.stats
    except ImportError as error:
        raise MissingDependencyError("scipy", needed_for="comparing runs", extra="bench") from error
    return scipy.stats
