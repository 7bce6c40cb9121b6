"""The answer in one table: how fast for reinforcement learning, what limits it, how machines compare."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlcore.bench.bars import verdicts
from rlcore.bench.compare import device_of
from rlcore.bench.limits import unit
from rlcore.bench.result import CaseResult, Record
from rlcore.bench.rivals import advantages, is_ours
from rlcore.bench.statistics import difference
from rlcore.bench.text import count, rate, seconds

_ANY_NUMBER = {"devices": 0}
"""Sizes that may differ where results are set against each other: more devices are another machine."""
PHASES = ("generate", "old_logprob", "update", "sync", "switch", "reward")
"""Of rl/step; "the rest" follows them."""
_BARS = "bars met"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    record: Record
    usd_per_hour: float | None = None
    """For one device."""


@dataclass(frozen=True, slots=True)
class Headline:
    label: str
    cells: list[str]


class _Cell(NamedTuple):
    text: str
    value: float | None = None
    """Where it can be set against that of another run."""
    params: Mapping[str, int | float | str] = {}
    """Only values of the same sizes are set against each other."""
    result: CaseResult | None = None
    """That it was taken from, whose samples say what chance does."""


def headlines(runs: Sequence[Run]) -> list[Headline]:
    """One row a question, one cell a run; the first run is what others are set against."""
    questions: dict[str, Callable[[Run], _Cell | None]] = {
        "one step of RL": lambda run: _cell(run, "rl/step", "time", seconds),
        "tokens trained a second, whole step": lambda run: _cell(run, "rl/step", "trained_tokens", count),
        "steps of RL for a dollar": _steps_for_a_dollar,
        "USD for a million tokens trained": _cost,
        "longest phase of the step: what limits it": _limiter,
        "bubble: neither sampling, scoring nor training": lambda run: _cell(
            run, "rl/step", "bubble", "{:.0%}".format, is_compared=False
        ),
        "tokens sampled a second": lambda run: (
            _cell(run, "rollout/hf", "new_tokens", count) or _cell(run, "rl/step", "new_tokens", count)
        ),
        "one train step": lambda run: _cell(run, "train/step", "time", seconds),
        "tokens trained a second, trainer alone": _trained_alone,
        "matrix products, bfloat16": lambda run: _limit(run, "product/bfloat16"),
        "memory, read and written": lambda run: _limit(run, "memory"),
        "fastest peer's time over ours": _ahead,
        _BARS: _reached,
        "disturbed by": _disturbed,
    }
    found = []
    for label, question in questions.items():
        cells = [question(run) for run in runs]
        if any(cells):
            absent = _Cell("none set for it" if label == _BARS else NOT_MEASURED)
            has_models = len({cell.params["model"] for cell in cells if cell and "model" in cell.params}) > 1
            pairs = [(cell or absent, run) for cell, run in zip(cells, runs, strict=True)]
            found.append(Headline(label, [_shown(*pair, (cells[0], runs[0]), has_models) for pair in pairs]))
    return found


def _shown(cell: _Cell, run: Run, first: tuple[_Cell | None, Run], has_models: bool) -> str:
    told = [str(cell.params["model"])] if has_models and "model" in cell.params else []
    if cell.value is not None and first[0] is not None and first[0].value is not None and run is not first[1]:
        told.append(_against(cell, cell.value / first[0].value, first[0], (run, first[1])))
    return f"{cell.text} ({', '.join(filter(None, told))})" if any(told) else cell.text


def _against(cell: _Cell, ratio: float, first: _Cell, runs: tuple[Run, Run]) -> str:
    """What may be said of ``cell`` and ``first``: a number that noise alone may make is none."""
    if cell.params.get("model") != first.params.get("model"):
        return "other model: not comparable"
    if {**cell.params, **_ANY_NUMBER} != {**first.params, **_ANY_NUMBER}:
        return "other sizes: not comparable"
    is_same_device = device_of(runs[0].record) == device_of(runs[1].record)
    name = runs[1].name
    if cell.result is None or first.result is None:  # measured once
        return "" if is_same_device else f"{ratio:.3g} times {name}"
    found = difference(first.result, cell.result)
    if found.is_about_equal(ratio):
        return f"about equal to {name}"
    if found.hides(ratio) and (is_same_device or math.isfinite(found.noise)):
        return f"cannot be told from {name}"
    return f"{ratio:.3g} times {name}"


def find(record: Record, case: str) -> CaseResult | None:
    return next((result for result in record.cases if result.name == case and result.status == "pass"), None)


def median(result: CaseResult, metric: str) -> float:
    return statistics.median(result.samples(metric))


def words(name: str) -> str:
    return name.replace("_", " ")


def _cell(run: Run, case: str, metric: str, form: Callable[[float], str], *, is_compared: bool = True) -> _Cell | None:
    result = find(run.record, case)
    if result is None or not result.has(metric):
        return None
    value = median(result, metric)
    return _Cell(form(value), value if is_compared else None, result.params, result)


def _trained_alone(run: Run) -> _Cell | None:
    """By the first contender of ours, as the others cost time to save memory or have uneven lengths."""
    cases = (case for case in run.record.cases if case.name == "train/dense_1.5b" and case.status == "pass")
    result = next((case for case in cases if is_ours(case) and case.has("tokens_a_device")), None)
    if result is None:
        return None
    value = median(result, "tokens_a_device")
    return _Cell(count(value), value, result.params, result)


def find_step(record: Record) -> CaseResult | None:
    """Of reinforcement learning, where it is told by phase and on how many devices, as ``rl/step`` does."""
    step = find(record, "rl/step")
    is_whole = step is not None and all(map(step.has, [*PHASES, "trained_tokens"]))
    return step if is_whole and step is not None and isinstance(step.params.get("devices", 1), int) else None


def _usd_per_s(run: Run, step: CaseResult) -> float | None:
    return None if run.usd_per_hour is None else run.usd_per_hour * int(step.params.get("devices", 1)) / 3600


def _steps_for_a_dollar(run: Run) -> _Cell | None:
    step = find_step(run.record)
    if step is None or (usd_per_s := _usd_per_s(run, step)) is None:
        return None
    steps = 1 / (usd_per_s * median(step, "time"))
    return _Cell(count(steps), steps, step.params, step)


def _cost(run: Run) -> _Cell | None:
    step = find_step(run.record)
    if step is None or (usd_per_s := _usd_per_s(run, step)) is None:
        return None
    usd = usd_per_s / median(step, "trained_tokens") * 1e6
    return _Cell(f"{usd:.3g} at {run.usd_per_hour:g} an hour and device", usd, step.params, step)


def _limiter(run: Run) -> _Cell | None:
    step = find_step(run.record)
    if step is None:
        return None
    phases = {name: median(step, name) for name in PHASES}
    longest = max(phases, key=phases.__getitem__)
    return _Cell(f"{words(longest)}: {phases[longest] / median(step, 'time'):.0%} of a step")


def _limit(run: Run, name: str) -> _Cell | None:
    value = run.record.calibration.limits.get(name) if run.record.calibration else None
    return None if value is None else _Cell(rate(value, unit(name)), value)


def _ahead(run: Run) -> _Cell | None:
    """Over all cases in which ours and others did the same work."""
    found = sorted(advantages(run.record))
    if not found:
        return None
    told = f"{len(found)} cases: {found[0]:.2f} to {found[-1]:.2f}" if len(found) > 1 else "1 case"
    return _Cell(f"{statistics.geometric_mean(found):.2f} ({told})")


def _reached(run: Run) -> _Cell | None:
    words = Counter(verdict.word for verdict in verdicts(run.record))
    measured = words["pass"] + words["miss"]
    more = f", {words['not measured']} not measured" if words["not measured"] else ""
    return _Cell(f"{words['pass']} of {measured}{more}") if words else None


def _disturbed(run: Run) -> _Cell | None:
    """Whether the numbers may be too bad for reasons that lie outside the machine, or in how it is cooled; the caveats
    say more."""
    passed = [result for result in run.record.cases if result.status == "pass"]
    marks = Counter(kind for result in passed for kind in {mark.partition(":")[0] for mark in result.marks})
    told = ", ".join(f"{kind}: {number}" for kind, number in sorted(marks.items()))
    return _Cell(f"{told} of {len(passed)} results" if told else "nothing that was seen")
