"""The sum of a record: shares of limits, comparisons with peers, targets met, reasons for no number."""

from __future__ import annotations

import functools
import re
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from rlcore.bench.record import Calibration, CaseResult, Record, System
from rlcore.bench.reports.text import quantity
from rlcore.registry import registry

_PEAKS = Path(__file__).parents[1] / "peaks.toml"
_TARGETS = Path(__file__).parents[1] / "targets.toml"


def times(result: CaseResult) -> list[float]:
    """Return the seconds by the device's own clock where there is one, else by the host's."""
    return result.samples("device_time" if result.has("device_time") else "time")


def median(result: CaseResult, metric: str = "") -> float:
    """Return the median of a metric; without a name, that of ``times``."""
    return statistics.median(result.samples(metric) if metric else times(result))


def value_of(result: CaseResult, metric: str) -> float:
    """Return the median that tables and targets show: of "time" that of ``times``."""
    return median(result, "" if metric == "time" else metric)


def p10_p90(samples: Sequence[float]) -> list[float]:
    """Return the tenth and the ninetieth percentile."""
    found: list[float] = np.percentile(samples, (10, 90)).tolist()
    return found


# ---------------------------------------------------------------------------------------------------- limits


class LimitShare(NamedTuple):
    """The share of the limit that takes the longest."""

    limit: str
    value: float
    """1: as fast as that limit was measured to be. More is possible: caches, reductions in the network."""


class Peak(NamedTuple):
    value: float
    source: str
    retrieved: str


def share_of_limit(result: CaseResult, calibration: Calibration | None) -> LimitShare | None:
    """Return None where the result states no need, or none of what it needs was measured here."""
    if result.status != "pass" or calibration is None:
        return None
    known = calibration.limits
    least_s = {name: amount / known[name] for name, amount in result.limits.items() if name in known}
    if not least_s:
        return None
    limit = max(least_s, key=least_s.__getitem__)
    return LimitShare(limit, least_s[limit] / median(result))


def peak(system: System, limit: str) -> Peak | None:
    """Return what the maker's datasheet says of a limit; None where no authority says anything."""
    for device in tomllib.loads(_PEAKS.read_text())["device"]:
        if device["name"] in system.accelerator_model_name and limit in device["peaks"]:
            return Peak(float(device["peaks"][limit]), device["source"], device["retrieved"])
    return None


def unit(limit: str) -> str:
    return "FLOP/s" if limit.startswith("product/") else "B/s"


# ----------------------------------------------------------------------------------------------------- peers

_MACHINE = ("attention", "collectives", "copies", "memory", "product")
"""Folders of cases that measure the machine: their contenders are ways to ask it, and no peers of each other."""
_FLOORS = ("bare products", "copy", "device_copy", "no offload", "one_copy", "plain_copy")
"""Contenders that do only the part that every implementation must do, and compute no result."""
_OURS = ("arena", "arena_reserved", "copy_batch", "engine", "host_alloc", "per_sequence", "plain", "swap", "turn")
"""Contenders of rlcore beside the registered implementations of operators."""


class Fastest(NamedTuple):
    """The fastest result of one kind of contender."""

    seconds: float
    implementation: str

    @classmethod
    def of(cls, results: Iterable[CaseResult]) -> Self | None:
        return min((cls(median(one), one.implementation) for one in results), default=None)


class PeerComparison(NamedTuple):
    """One work that two contenders or more did; all passed."""

    case: str
    results: list[CaseResult]

    @property
    def ours(self) -> Fastest | None:
        return Fastest.of(filter(is_ours, self.results))

    @property
    def theirs(self) -> Fastest | None:
        return Fastest.of(one for one in self.results if not is_ours(one) and not is_floor(one))

    @property
    def floor(self) -> Fastest | None:
        return Fastest.of(filter(is_floor, self.results))


def peer_comparisons(record: Record) -> list[PeerComparison]:
    """Return the works, by case, that rlcore and somebody else did, or that have a floor."""
    works: dict[tuple[object, ...], list[CaseResult]] = {}
    for result in record.passed():
        if not is_of_machine(result):
            works.setdefault((result.name, *sorted(result.params.items())), []).append(result)
    found = [PeerComparison(results[0].name, results) for results in works.values()]
    return sorted((one for one in found if one.ours and (one.theirs or one.floor)), key=lambda one: one.case)


def is_of_machine(result: CaseResult) -> bool:
    return result.name.partition("/")[0] in _MACHINE


def is_floor(result: CaseResult) -> bool:
    return result.implementation in _FLOORS and not is_of_machine(result)


def is_ours(result: CaseResult) -> bool:
    name = result.implementation.partition(",")[0]
    return name in _OURS or any(name == one.name for entries in registry().ops.values() for one in entries)


# --------------------------------------------------------------------------------------------------- targets

Selector = Mapping[str, int | float | str]
"""The "implementation" of a result, and any of its params."""


class ResultTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound that results are meant to keep on a device; has exactly one of ``at_most`` and ``at_least``."""

    case: str
    of: Selector
    metric: str = "time"
    """"time" is by the device's own clock where there is one."""
    at_most: float | None = None
    at_least: float | None = None
    times_that_of: Selector | None = None
    """The result of the same case that the limit is a multiple of; None: the limit is in the metric's unit."""
    device: str
    """A part of the accelerator's name."""
    source: str

    @property
    def limit(self) -> float:
        limit = self.at_most if self.at_least is None else self.at_least
        assert limit is not None
        return limit


class TargetOutcome(NamedTuple):
    """One target and one result."""

    target: ResultTarget
    result: CaseResult | None
    """None: the case ran and gave no number for it."""
    value: float | None

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        target = self.target
        is_met = self.value <= target.limit if target.at_least is None else self.value >= target.limit
        return "pass" if is_met else "miss"

    def cells(self) -> list[str]:
        """Return the row under ``TARGET_COLUMNS``."""
        target = self.target
        known = {"time": "s"} if self.result is None else {one.name: one.unit for one in self.result.metrics}
        unit = "1" if target.times_that_of else known.get(target.metric, "1")
        sense = "at most" if target.at_least is None else "at least"
        base = f" times that of {_named(target.times_that_of)}" if target.times_that_of else ""
        return [
            target.case,
            _named(target.of),
            f"{target.metric} {sense} {quantity(target.limit, unit)}{base}",
            "" if self.value is None else quantity(self.value, unit),
            self.word,
            target.source,
        ]


TARGET_COLUMNS = ("case", "implementation", "target", "measured", "", "source")


def _named(selector: Selector) -> str:
    params = [f"{key} {value}" for key, value in selector.items() if key != "implementation"]
    return ", ".join([str(selector["implementation"]), *params])


@functools.cache
def targets() -> tuple[ResultTarget, ...]:
    sets = tomllib.loads(_TARGETS.read_text())["set"]
    found = [one | {"source": each["source"], "device": each["device"]} for each in sets for one in each["targets"]]
    return tuple(msgspec.convert(found, list[ResultTarget]))


def outcomes(record: Record, known: Sequence[ResultTarget] | None = None) -> list[TargetOutcome]:
    """Return one outcome for each target of the record's device and each result that the target is about.

    Targets of cases that the record skipped or lacks are left out. ``known`` is ``targets()`` where it is None.
    """
    by_case = record.by_case()
    found = []
    for target in targets() if known is None else known:
        results = by_case.get(target.case, []) if target.device in record.system.accelerator_model_name else []
        if any(result.status != "skipped" for result in results):
            found += _outcomes(target, results)
    return found


def _outcomes(target: ResultTarget, results: list[CaseResult]) -> list[TargetOutcome]:
    chosen = [one for one in selected(results, target.of) if one.has(target.metric)]
    base = 1.0
    if target.times_that_of is not None:
        bases = [one for one in selected(results, target.times_that_of) if one.has(target.metric)]
        if len(bases) != 1:
            chosen = []  # nothing, or which of them?
        else:
            base = value_of(bases[0], target.metric)
    found = [TargetOutcome(target, one, value_of(one, target.metric) / base) for one in chosen]
    return found or [TargetOutcome(target, None, None)]


def selected(results: Iterable[CaseResult], selector: Selector) -> list[CaseResult]:
    """Return those that passed and have every value of the selector."""
    wanted = selector.items()
    return [one for one in results if one.status == "pass" and wanted <= one.identity_values().items()]


# ------------------------------------------------------------------------------------------ without a number

_CLASS_NAME = re.compile(r"^(?:\w+\.)*[A-Z]\w+: (?=.* )")
"""Before a sentence; "KeyError: 'T'" would say nothing without it."""
_UNSUPPORTED = " is not supported: "
_LONGEST = 110


def shortened(reason: str, implementation: str) -> str:
    """Return the first line without the class of the error and what was asked for, in at most 110 characters.

    Where several implementations have a reason each, that of ``implementation`` is taken.
    """
    line = _CLASS_NAME.sub("", reason.partition("\n")[0])
    line = line.partition(_UNSUPPORTED)[2] or line
    mine = f"{implementation.partition(',')[0]}: "
    line = next((part.removeprefix(mine) for part in line.split("; ") if part.startswith(mine)), line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
