"""Two runs side by side: what differs in machine and software first, then each result, then what it costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlcore.bench.record import CaseResult, Record, identity
from rlcore.bench.statistics import Difference, difference
from rlcore.errors import InvalidInputError

Verdict = Literal["about equal", "faster", "slower", "cannot tell", "too few samples", "not comparable"]
_WORSE = ("fail", "oom")
_USELESS = 1.0
"""A noise from which on nothing was compared: twice the time would not be seen."""
NOTES = ("hw_notes", "sw_notes")
"""Facts that whoever ran it gave: they may explain a difference, and make none."""
_OTHERS = 0.15
"""By how much the shares of the host that others used may differ between two runs that are compared by its clocks."""


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """One contender of one case in both runs, b against a."""

    case: str
    implementation: str
    params: Mapping[str, int | float | str]
    verdict: Verdict
    reason: str = ""
    """Why it is not comparable."""
    is_of_one: bool = False
    """Only one of the runs has it."""
    is_regression: bool = False
    """Slower, or it passed before."""
    median_a: float | None = None
    """Seconds, by the clock that was compared."""
    median_b: float | None = None
    difference: Difference | None = None
    """Also where it is not comparable because the machine was not as busy."""
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
        undecided = ("too few samples", "not comparable")
        return [
            row
            for row in self.rows
            if row.difference and row.difference.noise <= _USELESS and row.verdict not in undecided
        ]

    @property
    def geometric_mean(self) -> float | None:
        """The mean of all ratios that can be compared."""
        logs = [math.log(row.difference.ratio) for row in self.rows if row.difference and not row.reason]
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
    """Return the default names of runs: those of their files, with folders where the names are the same.

    Raises:
        InvalidInputError: a file is given twice.
    """
    for number, path in enumerate(paths):
        if path.resolve() in (earlier.resolve() for earlier in paths[:number]):
            raise InvalidInputError(f"{path} is given twice; name each record once")
    stems = [path.stem for path in paths]
    return stems if len(set(stems)) == len(stems) else [str(path.with_suffix("")) for path in paths]


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
        "processor": f"{system.host_processor_model_name}, {system.host_processor_core_count} cores",
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
    verdict: Verdict = "about equal" if found.is_about_equal(found.ratio) else "cannot tell"
    verdict = verdict if found.can_tell else "too few samples"
    disturbance = ""
    if found.is_significant:
        verdict = "slower" if found.ratio > 1 else "faster"
        disturbance = "" if found.clock == "device_time" else _disturbance(a, b)
    if disturbance:
        verdict = "not comparable"
    medians = [statistics.median(result.samples(found.clock)) for result in (a, b)]
    return ComparedResult(
        a.name,
        a.implementation,
        a.params,
        verdict,
        disturbance,
        is_regression=verdict == "slower",
        median_a=medians[0],
        median_b=medians[1],
        difference=found,
        cost_ratio=None if price_ratio is None else found.ratio * price_ratio,
        usd_per_million_tokens=_costs(a, b, prices),
        marks=tuple(dict.fromkeys([*a.marks, *b.marks])),
    )


def _disturbance(a: CaseResult, b: CaseResult) -> str:
    """Return words if others kept the host much busier in one of the runs, else "".

    Threads that wait for each other then take many times as long, by any clock.
    """
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
