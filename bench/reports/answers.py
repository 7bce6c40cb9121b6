"""The first table of the report: how fast runs are for reinforcement learning, what limits them, how they compare."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlcore.bench.compare import difference, disturbance
from rlcore.bench.record import CaseResult, Record
from rlcore.bench.reports.summary import is_ours, median, outcomes, peer_comparisons, unit
from rlcore.bench.reports.tables import ResultTable
from rlcore.bench.reports.text import count, rate, seconds, words

PHASES = ("generate", "old_logprob", "update", "sync", "switch", "reward")
"""The parts of rl/step; "the rest" follows them."""
NOT_MEASURED = "not measured"
_TARGETS = "targets met"
_ANY_NUMBER = {"devices": 0}
"""Sizes that may differ where results are set against each other: more devices are another machine."""


@dataclass(frozen=True, slots=True)
class ReportRun:
    """One record of a report."""

    name: str
    record: Record
    usd_per_hour: float | None = None
    """The price of one device."""

    def first(self, case: str, metric: str = "time", *, of_ours: bool = False) -> CaseResult | None:
        """Return the first result of a case that passed and has the metric."""
        found = (one for one in self.record.passed() if one.name == case and one.has(metric))
        return next((one for one in found if is_ours(one) or not of_ours), None)

    @property
    def step(self) -> CaseResult | None:
        """Return the result of a whole step of reinforcement learning with all its phases, as ``rl/step`` has it."""
        step = self.first("rl/step", "trained_tokens")
        is_whole = step is not None and all(map(step.has, PHASES))
        return step if is_whole and step and isinstance(step.params.get("devices", 1), int) else None


class _Cell(NamedTuple):
    text: str
    value: float | None = None
    """The number, where it can be set against that of another run."""
    result: CaseResult | None = None
    """The result that has the number; its samples say what chance does. None: measured once."""

    @property
    def params(self) -> Mapping[str, int | float | str]:
        return self.result.params if self.result else {}


Question = Callable[[ReportRun], _Cell | None]


def answers(runs: Sequence[ReportRun]) -> ResultTable:
    """Return a row for each question and a column for each run; the others are set against the first run."""
    rows = []
    for label, question in _QUESTIONS.items():
        cells = [question(run) for run in runs]
        if any(cells):
            absent = _Cell("none set for it" if label == _TARGETS else NOT_MEASURED)
            has_models = len({cell.params["model"] for cell in cells if cell and "model" in cell.params}) > 1
            first = cells[0], runs[0]
            pairs = zip(cells, runs, strict=True)
            rows.append([label, *(_shown(cell or absent, run, first, has_models) for cell, run in pairs)])
    return ResultTable(["", *(f"{run.name}: {run.record.device_name}" for run in runs)], rows)


def _shown(cell: _Cell, run: ReportRun, first: tuple[_Cell | None, ReportRun], has_models: bool) -> str:
    notes = [str(cell.params["model"])] if has_models and "model" in cell.params else []
    if cell.value is not None and first[0] is not None and first[0].value is not None and run is not first[1]:
        notes.append(_against(cell, cell.value / first[0].value, first[0], (run, first[1])))
    return f"{cell.text} ({', '.join(filter(None, notes))})" if any(notes) else cell.text


def _against(cell: _Cell, ratio: float, first: _Cell, runs: tuple[ReportRun, ReportRun]) -> str:
    """Return how ``cell`` compares with ``first``; a ratio that may be chance alone is left out."""
    if cell.params.get("model") != first.params.get("model"):
        return "other model: not comparable"
    if {**cell.params, **_ANY_NUMBER} != {**first.params, **_ANY_NUMBER}:
        return "other sizes: not comparable"
    is_same_device = runs[0].record.device_name == runs[1].record.device_name
    name = runs[1].name
    if cell.result is None or first.result is None:
        return "" if is_same_device else f"{ratio:.3g} times {name}"
    found = difference(first.result, cell.result)
    reason = disturbance(found, first.result, cell.result) if is_same_device else ""
    if found.is_about_equal(ratio) and not reason:
        return f"about equal to {name}"
    if reason or (found.hides(ratio) and (is_same_device or math.isfinite(found.noise))):
        return ": ".join(filter(None, (f"cannot be told from {name}", reason)))
    return f"{ratio:.3g} times {name}"


# ------------------------------------------------------------------------------------------------- questions


def _metric(form: Callable[[float], str], metric: str, *cases: str, of_ours: bool = False) -> Question:
    """Ask the first of the cases that a run has; ``of_ours`` leaves out the contenders of others."""

    def question(run: ReportRun) -> _Cell | None:
        result = next(filter(None, (run.first(case, metric, of_ours=of_ours) for case in cases)), None)
        return _Cell(form(median(result, metric)), median(result, metric), result) if result else None

    return question


def _bubble(run: ReportRun) -> _Cell | None:
    found = run.first("rl/step", "bubble")
    return _Cell(f"{median(found, 'bubble'):.0%}", None, found) if found else None


def _priced(form: Callable[[float, float], str], number: Callable[[CaseResult, float], float]) -> Question:
    """Return a question about a step and the USD that its devices cost a second; it has no answer without a price."""

    def question(run: ReportRun) -> _Cell | None:
        step, price = run.step, run.usd_per_hour
        if step is None or price is None:
            return None
        value = number(step, price * int(step.params.get("devices", 1)) / 3600)
        return _Cell(form(value, price), value, step)

    return question


def _limiter(run: ReportRun) -> _Cell | None:
    if (step := run.step) is None:
        return None
    longest = max(PHASES, key=lambda name: median(step, name))
    return _Cell(f"{words(longest)}: {median(step, longest) / median(step, 'time'):.0%} of a step", None, step)


def _limit(name: str) -> Question:
    def question(run: ReportRun) -> _Cell | None:
        value = run.record.calibration.limits.get(name) if run.record.calibration else None
        return None if value is None else _Cell(rate(value, unit(name)), value)

    return question


def _ahead(run: ReportRun) -> _Cell | None:
    """Return the geometric mean over all cases in which rlcore and others did the same work."""
    both = [(one.theirs, one.ours) for one in peer_comparisons(run.record)]
    found = sorted(theirs.seconds / ours.seconds for theirs, ours in both if theirs and ours)
    if not found:
        return None
    spread = f"{len(found)} cases: {found[0]:.2f} to {found[-1]:.2f}" if len(found) > 1 else "1 case"
    return _Cell(f"{statistics.geometric_mean(found):.2f} ({spread})")


def _reached(run: ReportRun) -> _Cell | None:
    words = Counter(outcome.word for outcome in outcomes(run.record))
    more = f", {words[NOT_MEASURED]} {NOT_MEASURED}" if words[NOT_MEASURED] else ""
    return _Cell(f"{words['pass']} of {words['pass'] + words['miss']}{more}") if words else None


def _disturbed(run: ReportRun) -> _Cell | None:
    """Count the marks of results, such as throttling or other users of the machine; the caveats say more."""
    passed = run.record.passed()
    kinds = Counter(kind for result in passed for kind in result.kinds_of_marks())
    counts = ", ".join(f"{kind}: {number}" for kind, number in sorted(kinds.items()))
    return _Cell(f"{counts} of {len(passed)} results" if counts else "nothing that was seen")


_QUESTIONS: dict[str, Question] = {
    "one step of RL": _metric(seconds, "time", "rl/step"),
    "tokens trained a second, whole step": _metric(count, "trained_tokens", "rl/step"),
    "steps of RL for a dollar": _priced(
        lambda steps, price: count(steps), lambda step, usd_per_s: 1 / (usd_per_s * median(step, "time"))
    ),
    "USD for a million tokens trained": _priced(
        lambda usd, price: f"{usd:.3g} at {price:g} an hour and device",
        lambda step, usd_per_s: usd_per_s / median(step, "trained_tokens") * 1e6,
    ),
    "longest phase of the step: what limits it": _limiter,
    "bubble: neither sampling, scoring nor training": _bubble,
    "tokens sampled a second": _metric(count, "new_tokens", "rollout/hf", "rl/step"),
    "one train step": _metric(seconds, "time", "train/step"),
    # Of rlcore the first contender: the others trade time for memory, or have uneven lengths.
    "tokens trained a second, trainer alone": _metric(count, "tokens_a_device", "train/dense_1.5b", of_ours=True),
    "matrix products, bfloat16": _limit("product/bfloat16"),
    "memory, read and written": _limit("memory"),
    "fastest peer's time over ours": _ahead,
    _TARGETS: _reached,
    "disturbed by": _disturbed,
}
