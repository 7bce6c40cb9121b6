"""Two runs side by side: what differs in machine and software first, then each result, then what it costs.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlcore.atomic import resolved
from rlcore.bench.record import CROWDED, CaseResult, Record, identity
from rlcore.errors import InvalidInputError, MissingDependencyError

Verdict = Literal["about equal", "faster", "slower", "cannot tell", "not comparable"]
_WORSE = ("fail", "oom")
_USELESS = 1.0
"""A noise from which on nothing was compared: twice the time would not be seen."""
NOTES = ("hw_notes", "sw_notes")
"""Facts that whoever ran it gave: they may explain a difference, and make none."""
_OTHERS = 0.15
"""By how much the shares of the host that others used may differ between two runs that are compared by its clocks."""
ALPHA = 0.01
"""How often chance alone may seem to be a difference, by either test."""
_LEAST = 0.01
"""A ratio that nobody acts on."""
_ONE_PROCESS = 0.1
"""The difference of processes, where there was but one a side to tell: on quiet hosts a few per cent each."""
_ONE_PROCESS_ON_BUSY_HOST = 1.0
"""The same where others used the host meanwhile: it may have had half a core throughout."""
_ONE_PROCESS_ON_DEVICE = 0.03
"""The same by a device's own clock."""
_RUNS_ON_HOST = 0.05
"""The difference of whole runs on a quiet host beside that: rounds lie within a minute, and a machine that is as slow
all through one run shows it in none of them. Of 235 pairs of results of runs minutes apart 7 differed by 4 to 15 %
though the rounds of each agreed; with this one does."""
_RUNS_ON_BUSY_HOST = 0.15
"""The same where others used the host meanwhile. Of 760 pairs of quick runs of the same work on two busy cores 8 were
taken for a change without it, and none with it; a planted 1.3x was seen in 19 of 20."""
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


# --------------------------------------------------------------------------- the difference of two sets of samples


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
    rounds = [_log_rounds(*side) for side in zip((a, b), samples, strict=True)]
    sides = [np.array([np.median(part) for part in parts]) for parts in rounds]
    turns, chance = _log_ratios(a, b, *sides), _chance(sides, may_last=True, least=_scatter(rounds))
    took_turns = len(turns) >= _LEAST_TURNS
    if took_turns and (chance_of_turns := _chance([turns], may_last=False, least=0.0)) < chance:
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
    """Return the clock to compare by: the device's own where there is one.

    On a host that others used meanwhile it is the processors' time, which they disturb less. A clock without a value
    for every sample is not compared: its samples cannot be assigned to rounds.
    """
    clocks = ["device_time", *["processor_time"] * _is_shared(a, b)]
    return next((clock for clock in clocks if _tells_all(a, clock) and _tells_all(b, clock)), "time")


def _tells_all(result: CaseResult, clock: str) -> bool:
    return result.has(clock) and len(result.samples(clock)) == len(result.samples("time"))


def _log_rounds(result: CaseResult, samples: list[float]) -> list[Any]:
    """Return the logarithms of the samples of each process."""
    ends = np.cumsum(result.rounds)[:-1] if len(result.rounds) > 1 else min(_BLOCKS, len(samples))
    return np.array_split(np.log(samples), ends)


def _scatter(sides: list[list[Any]]) -> float:
    """Return the variance of the median of a round, as the samples within rounds have it.

    Three rounds may agree by chance though a neighbour came and went in each of them.
    """
    parts = [part for rounds in sides for part in rounds if len(part) > 1]
    return float(np.mean([math.pi / 2 * part.var(ddof=1) / len(part) for part in parts])) if parts else 0.0


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


def _between_runs(a: CaseResult, b: CaseResult, clock: str, chance: float) -> float:
    """``chance`` of the rounds, and what they do not show of two runs that took no turns."""
    is_of_one_process = min(len(a.rounds), len(b.rounds)) <= 1
    if clock == "device_time":
        return max(_ONE_PROCESS_ON_DEVICE if is_of_one_process else _LEAST, chance)
    if _is_shared(a, b):
        return max(_ONE_PROCESS_ON_BUSY_HOST, chance) if is_of_one_process else math.hypot(_RUNS_ON_BUSY_HOST, chance)
    return max(_ONE_PROCESS, chance) if is_of_one_process else math.hypot(_RUNS_ON_HOST, chance)


def _is_shared(a: CaseResult, b: CaseResult) -> bool:
    """Return whether others used the host, or the device, while one of them was measured."""
    return any(mark.startswith("shared") for mark in [*a.marks, *b.marks])


def _trimmed(number: int) -> float:
    return _TRIMMED if number >= _MANY else 0.0


def _chance(sides: list[Any], *, may_last: bool, least: float) -> float:
    """Return the share by which means of log medians, or log ratios, differ by chance in all but ALPHA of the cases.

    Two sides differ from each other, one side from 0. The means are trimmed, so that their variance is that of Yuen's
    test: it comes from winsorised rounds, and is at least ``least``. scipy has that test, but not for rounds that
    depend on the one before.
    """
    stats, trimmed = _scipy_stats(), _trimmed(sum(map(len, sides)))
    kept = [len(side) - 2 * int(trimmed * len(side)) for side in sides]
    freedom = sum(kept) - len(kept)
    if freedom == 0:
        return math.inf  # one round of one sample each: nothing is known about chance
    winsorised = [np.asarray(stats.mstats.winsorize(side, (trimmed, trimmed))) for side in sides]
    apart = [side - side.mean() for side in winsorised]
    variance = max(least, sum(float(side @ side) for side in apart) / freedom)
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


# ------------------------------------------------------------------------------------------------------ two runs


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """One contender of one case in both runs, b against a."""

    case: str
    implementation: str
    params: Mapping[str, int | float | str]
    verdict: Verdict
    reason: str = ""
    """The reason why it is not comparable, or why nothing can be said whatever the noise."""
    is_of_one: bool = False
    """Only one of the runs has it."""
    is_regression: bool = False
    """Slower, or it passed before."""
    median_a: float | None = None
    """Seconds, by the clock that was compared."""
    median_b: float | None = None
    difference: Difference | None = None
    """It is there even if the verdict is "cannot tell"."""
    cost_ratio: float | None = None
    """The ratio of the prices of one run, b / a."""
    usd_per_million_tokens: tuple[float, float] | None = None
    """The costs of a and b, where the case counts tokens."""
    marks: tuple[str, ...] = ()
    """That either run carries."""


@dataclass(frozen=True, slots=True)
class Comparison:
    name_a: str
    name_b: str
    differences: dict[str, tuple[str, str]]
    """Machine, versions, driver, commit, environment: name -> (a, b), where they differ."""
    is_same_device: bool
    is_same_code: bool
    """Both runs are of one commit without changes."""
    rows: list[ComparedResult] = field(default_factory=list)

    @property
    def statement(self) -> str:
        """The sentence that says what the ratios compare."""
        if self.rows and all(row.is_of_one for row in self.rows):
            return (
                "Nothing can be compared, nor a price be used: no result of one run has the case, implementation and "
                f"sizes of one of the other, such as its number of devices. rlcore bench report {self.name_a} "
                f"{self.name_b} sets them side by side."
            )
        if self.is_same_device and self.is_same_code:
            return "Both runs are of the same commit and kind of device: a ratio is chance, or what is listed above."
        if self.is_same_device:
            return "Both runs are of the same kind of device: a ratio is the effect of what differs above."
        return (
            "The runs are of different devices: a ratio compares whole stacks (device, host, driver, libraries), "
            "not the devices alone."
        )

    @property
    def regressions(self) -> list[ComparedResult]:
        return [row for row in self.rows if row.is_regression]

    @property
    def compared(self) -> list[ComparedResult]:
        """The rows of which something can be said: at least that neither side took twice the time."""
        return [row for row in self.rows if row.difference and row.difference.noise <= _USELESS and not row.reason]

    @property
    def geometric_mean(self) -> float | None:
        """The mean of the ratios of which more is known than that chance may make them."""
        ratios = [row.difference.ratio for row in self.rows if row.difference and row.verdict != "cannot tell"]
        logs = [math.log(ratio) for ratio in ratios]
        return math.exp(statistics.fmean(logs)) if logs else None


def compare(a: Record, b: Record, *, names: tuple[str, str], prices: Mapping[str, float] | None = None) -> Comparison:
    """Compare run b with run a.

    Args:
        names: of the runs, as in ``prices``.
        prices: USD an hour for one device.

    Raises:
        InvalidInputError: a price for a run of another name.
        MissingDependencyError: scipy is not installed.
    """
    prices = prices or {}
    price_a, price_b = (prices.get(name) for name in names)
    ratio = price_b / price_a if price_a and price_b else None
    results_a, results_b = ({identity(result): result for result in record.cases} for record in (a, b))
    rows = []
    for key in dict.fromkeys([*results_a, *results_b]):
        row = _row(results_a.get(key), results_b.get(key), ratio, (price_a, price_b))
        if row is not None:
            rows.append(row)
    return Comparison(*names, what_differs(a, b), a.device_name == b.device_name, _is_same_code(a, b), rows)


def _is_same_code(a: Record, b: Record) -> bool:
    commits = {commit for record in (a, b) for commit in [record.commit, *(call.commit for call in record.calls)]}
    (commit, *others) = commits
    return not others and commit is not None and not commit.endswith("-modified")


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the default names of runs: those of their files; where two are the same, the paths as they are given.

    Raises:
        InvalidInputError: a file is given twice.
    """
    for number, path in enumerate(paths):
        if resolved(path) in (resolved(earlier) for earlier in paths[:number]):
            raise InvalidInputError(f"{path} is given twice; name each record once")
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def parse_prices(given: list[str], names: list[str]) -> dict[str, float]:
    """``NAME=USD`` an hour and device; raises InvalidInputError naming what is wrong."""
    prices = {}
    for text in given:
        name, _, value = text.rpartition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = math.nan
        if name not in names or not 0 < prices[name] < math.inf:
            raise InvalidInputError(
                f"--price must be NAME=USD an hour and device, with one of the names {', '.join(names)}, got {text!r}"
            )
    return prices


def what_differs(a: Record, b: Record) -> dict[str, tuple[str, str]]:
    """Return the facts that may explain a difference, the most telling first."""
    facts_a, facts_b = _facts(a), _facts(b)
    names = dict.fromkeys([*facts_a, *facts_b])
    pairs = {name: (facts_a.get(name, "absent"), facts_b.get(name, "absent")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _facts(record: Record) -> dict[str, str]:
    system = record.system
    return {
        "device": record.device_name,
        "devices": str(system.accelerators_per_node),
        "device memory": str(system.accelerator_memory_capacity_bytes),
        **system.other_software_stack,
        **dict(sorted(record.dependencies.items())),
        "rlcore": record.rlcore,
        "commit": record.commits(),
        "python": system.python,
        "operating system": system.operating_system,
        "processor": system.host,
        "host threads": str(record.num_threads),
        "kind of run": record.effort,
        **{f"${name}": value for name, value in sorted(record.environment.items())},
        **{name: note for name in NOTES if (note := getattr(system, name))},
    }


def _row(
    a: CaseResult | None, b: CaseResult | None, price_ratio: float | None, prices: tuple[float | None, float | None]
) -> ComparedResult | None:
    one = a or b
    assert one is not None
    if a is None or b is None:
        where = "the second" if a is None else "the first"
        return ComparedResult(
            one.name, one.implementation, one.params, "not comparable", f"only in {where}", is_of_one=True
        )
    if a.status != "pass" or b.status != "pass":
        if a.status == b.status:
            return None  # neither has a number; nothing has changed
        reason = f"{a.status} -> {b.status}: {(b.reason or a.reason).partition(chr(10))[0]}"
        is_worse = a.status == "pass" and b.status in _WORSE
        return ComparedResult(a.name, a.implementation, a.params, "not comparable", reason, is_regression=is_worse)
    found = difference(a, b)
    verdict, reason = _verdict(found, a, b)
    medians = [statistics.median(result.samples(found.clock)) for result in (a, b)]
    return ComparedResult(
        a.name,
        a.implementation,
        a.params,
        verdict,
        reason,
        is_regression=verdict == "slower",
        median_a=medians[0],
        median_b=medians[1],
        difference=found,
        cost_ratio=None if price_ratio is None else found.ratio * price_ratio,
        usd_per_million_tokens=_costs(a, b, prices),
        marks=tuple(dict.fromkeys([*a.marks, *b.marks])),
    )


def _verdict(found: Difference, a: CaseResult, b: CaseResult) -> tuple[Verdict, str]:
    """Return what can be said of b beside a, and why nothing can where that is not the noise."""
    if not found.can_tell:
        return "cannot tell", "too few samples"
    if reason := disturbance(found, a, b):
        return "cannot tell", reason
    if found.is_significant:
        return "slower" if found.ratio > 1 else "faster", ""
    return "about equal" if found.is_about_equal(found.ratio) else "cannot tell", ""


def disturbance(found: Difference, a: CaseResult, b: CaseResult) -> str:
    """Return words if others kept the host much busier in one of the runs, or left it no processor, else "".

    Threads that wait for each other then take many times as long, by any clock of the host. So this makes differences,
    and hides those that there are. Where turns were compared it met both.
    """
    if found.clock == "device_time" or found.turns:
        return ""
    if CROWDED in (*a.marks, *b.marks):
        return CROWDED.removeprefix("shared: ")
    shares = [(result.telemetry.host_share_of_others if result.telemetry else None) or 0.0 for result in (a, b)]
    if abs(shares[0] - shares[1]) <= _OTHERS:
        return ""
    return f"others used {shares[0]:.0%} of the host's processors, and then {shares[1]:.0%}"


def _costs(a: CaseResult, b: CaseResult, prices: tuple[float | None, float | None]) -> tuple[float, float] | None:
    rates = [_tokens_per_s(result) for result in (a, b)]
    found = [
        price * int(result.params.get("devices", 1)) / 3600 / rate * 1e6
        for result, rate, price in zip((a, b), rates, prices, strict=True)
        if rate and price
    ]
    return (found[0], found[1]) if len(found) == 2 else None


def _tokens_per_s(result: CaseResult) -> float | None:
    """Return the rate of all devices together."""
    found = [metric.samples for metric in result.metrics if metric.unit == "token/s"]
    return statistics.median(found[0]) if found else None
