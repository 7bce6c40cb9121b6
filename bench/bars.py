"""What results are meant to reach on a certain device (``bars.toml``), and whether those of a record do."""

from __future__ import annotations

import functools
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlcore.bench.limits import times
from rlcore.bench.result import CaseResult, Record
from rlcore.bench.text import quantity

_BARS = Path(__file__).with_name("bars.toml")

Selector = Mapping[str, int | float | str]
"""Of a result: its "implementation", and any of its params."""


class Bar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of ``at_most`` and ``at_least``."""

    case: str
    what: Selector
    metric: str = "time"
    """"time" is by the device's own clock where there is one."""
    at_most: float | None = None
    at_least: float | None = None
    times: Selector | None = None
    """The result of the same case that the limit is a multiple of; None: the limit is in the metric's unit."""
    device: str
    """A part of the accelerator's name."""
    source: str

    @property
    def limit(self) -> float:
        limit = self.at_most if self.at_least is None else self.at_least
        assert limit is not None
        return limit

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.at_least is None else value >= self.limit


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one bar and one result."""

    bar: Bar
    result: CaseResult | None
    """None: the case ran and gave no number for it."""
    value: float | None

    @property
    def word(self) -> str:
        if self.value is None:
            return "not measured"
        return "pass" if self.bar.is_met(self.value) else "miss"

    def cells(self) -> list[str]:
        """Of ``HEADER``."""
        known = {"time": "s"} if self.result is None else {one.name: one.unit for one in self.result.metrics}
        unit = "1" if self.bar.times else known.get(self.bar.metric, "1")
        sense = "at most" if self.bar.at_least is None else "at least"
        other = f" times that of {_named(self.bar.times)}" if self.bar.times else ""
        return [
            self.bar.case,
            _named(self.bar.what),
            f"{self.bar.metric} {sense} {quantity(self.bar.limit, unit)}{other}",
            "" if self.value is None else quantity(self.value, unit),
            self.word,
            self.bar.source,
        ]


def _named(what: Selector) -> str:
    params = [f"{key} {value}" for key, value in what.items() if key != "implementation"]
    return ", ".join([str(what["implementation"]), *params])


HEADER = ("case", "implementation", "bar", "measured", "", "source")


@functools.cache
def bars() -> tuple[Bar, ...]:
    sets = tomllib.loads(_BARS.read_text())["set"]
    found = [bar | {"source": each["source"], "device": each["device"]} for each in sets for bar in each["bars"]]
    return tuple(msgspec.convert(found, list[Bar]))


def verdicts(record: Record, known: Sequence[Bar] | None = None) -> list[Verdict]:
    """Of every bar (of ``bars.toml`` where ``known`` is None) that holds for the record's device and whose case it has,
    for each result that the bar is about."""
    by_case: dict[str, list[CaseResult]] = {}
    for result in record.cases:
        by_case.setdefault(result.name, []).append(result)
    found = []
    for bar in bars() if known is None else known:
        results = [] if bar.device not in record.system.accelerator_model_name else by_case.get(bar.case, [])
        if any(result.status != "skipped" for result in results):
            found += _verdicts(bar, results)
    return found


def _verdicts(bar: Bar, results: list[CaseResult]) -> list[Verdict]:
    of = [result for result in results if _is(result, bar.what, bar.metric)]
    base = [result for result in results if bar.times is not None and _is(result, bar.times, bar.metric)]
    if bar.times is not None and len(base) != 1:
        of = []  # nothing, or which of them?
    unit = _median(base[0], bar.metric) if base else 1.0
    return [Verdict(bar, one, _median(one, bar.metric) / unit) for one in of] or [Verdict(bar, None, None)]


def _is(result: CaseResult, what: Selector, metric: str) -> bool:
    facts = {**result.params, "implementation": result.implementation}
    return result.status == "pass" and result.has(metric) and all(facts.get(key) == what[key] for key in what)


def _median(result: CaseResult, name: str) -> float:
    return statistics.median(times(result) if name == "time" else result.samples(name))
