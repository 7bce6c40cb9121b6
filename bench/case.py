"""A benchmark is a question, the work that answers it, and the check without which there is no number.

``prepare`` makes the inputs on the device; each contender does the same work in another way; its check
compares what it returned with a reference, in the run that is timed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

from rlcore.bench.record import Effort
from rlcore.device import Device
from rlcore.errors import BenchError
from rlcore.registry import registry, resolve
from rlcore.settings import Settings


class Quantity(NamedTuple):
    """A value that a run found besides its time."""

    value: float | Sequence[float]
    """Positive; several where the run tells ``Contender.seconds`` of each of its steps."""
    unit: str
    """Such as "s" or "token/s"; "1" for a share."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work of a case."""

    implementation: str
    """The name of what ran: of an operator that of the registered implementation, also where none was asked for."""
    run: Callable[[], Any]
    """Does the work once. What is queued on the device is waited for by the runner."""
    check: Callable[[Any], None]
    """Takes what ``run`` returned; raises AssertionError when it is wrong."""
    _: KW_ONLY
    seconds: Callable[[Any], float | Sequence[float]] | None = None
    """The seconds taken, from what ``run`` returned, where it measures itself; else the runner's clock. A run of
    several steps returns the seconds of each step, and each is a sample."""
    quantities: Callable[[Any], Mapping[str, Quantity]] | None = None
    """Other values that are recorded of each timed run, by metric name, from what ``run`` returned."""
    params: Mapping[str, int | float | str] = field(default_factory=dict)
    """Beside those of the work, where contenders differ in size."""
    limits: Mapping[str, int] | None = None
    """Instead of those of the work."""
    most_runs: int | None = None
    """The most of the work's ``num_runs``: for one that takes much longer than the others."""


@dataclass(frozen=True, slots=True)
class Work:
    """The result of ``Case.prepare``: inputs are on the device, nothing has run."""

    contenders: tuple[Contender, ...]
    params: Mapping[str, int | float | str]
    """Sizes and dtypes; results are comparable only where these are equal."""
    _: KW_ONLY
    flops: int | None = None
    """Operations one run cannot do without; None where that means nothing."""
    bytes: int | None = None
    """Bytes of device memory that one run cannot avoid to read and write; None where that means nothing."""
    limits: Mapping[str, int] | None = None
    """The need of one run for each measured limit (``Calibration.limits``), such as {"to_device/pinned": nbytes}.
    None: ``flops`` of products of ``params["dtype"]``, ``bytes`` of the device's memory."""
    close: Callable[[], None] | None = None
    """Called when all is measured: ends what ``prepare`` started."""
    num_runs: int | None = None
    """Exactly so many runs, each timed and checked, none to warm up: for a whole program that takes minutes.
    None: the runner warms up and samples as ``Sampling`` says."""
    runs_on: Literal["host", "stream", "device"] = "device"
    """The device that ``run`` uses. "host": none; it is timed as on a host, whatever the device. "stream": all work is
    queued on the device's current stream or ordered behind that; ``device_time`` is then without the time to queue it,
    and would be too short for work elsewhere. "device": anything."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question that a number answers."""

    name: str
    """Such as "kernels/token_logprob"; unique among the registered cases."""
    description: str
    """One line: what is measured."""
    prepare: Callable[[Any], Work]
    """Takes the device of ``rlcore.get_device``. Raises UnsupportedError where the device cannot do this."""
    _: KW_ONLY
    effort: Effort = "standard"
    """The least kind of run that has it: "quick" are seconds, "full" minutes."""
    estimate_s: float = 10.0
    """A round of it, before anybody has measured that here."""
    device_estimate_s: float | None = None
    """The same on an accelerator, where it takes much longer: sizes are larger, and what compiles does so in the first
    round."""
    timeout_s: float = 600.0
    """After which a round of it counts as hung."""


def expect(is_right: bool, wrong: str) -> None:
    """Raise AssertionError with ``wrong``; unlike ``assert`` also under ``python -O``, and in these words alone."""
    if not is_right:
        raise AssertionError(wrong)


def load_cases() -> dict[str, Case]:
    """Return all registered cases by name.

    A path from which no case can be had does not take the others down: it is a case of that name, which fails with the
    reason wherever it is run.

    Raises:
        BenchError: with ``RLCORE_STRICT_PLUGINS=1``, at the first path from which no case can be had.
    """
    cases: dict[str, Case] = {}
    for path, plugin in registry().benchmarks.items():
        try:
            found = {case.name: case for case in _resolved(path)}
            if twice := found.keys() & cases.keys():
                raise BenchError(f"repeats the name {min(twice)!r}")
        except Exception as error:  # a plugin's code; whoever runs the case sees the error
            wrong = BenchError(f"benchmark case {path!r} of plugin {plugin!r} {error}")
            if Settings.from_env().strict_plugins:
                raise wrong from error
            found = {path: _broken(path, wrong)}
        cases |= found
    return dict(sorted(cases.items()))


_NAME = re.compile(r"[^\s/]+(/[^\s/]+)*")


def _resolved(path: str) -> Sequence[Case]:
    """Return the case at a path, or all of a sequence of cases."""
    try:
        found = resolve(path)
    except Exception as error:
        raise BenchError(f"cannot be imported: {type(error).__name__}: {error}") from error
    cases = found if isinstance(found, (list, tuple)) else (found,)
    for case in cases:
        if not isinstance(case, Case):
            raise BenchError(f"is no bench.case.Case: {case!r}")
        if not _NAME.fullmatch(case.name):
            raise BenchError(f"has the name {case.name!r}; a name is words with slashes between, such as 'mine/add'")
    return cases


def _broken(path: str, error: BenchError) -> Case:
    def prepare(device: Device) -> Work:
        raise error

    return Case(name=path, description=str(error), prepare=prepare, effort="quick", estimate_s=0.1)


def select_cases(names: list[str]) -> list[Case]:
    """Return the cases called ``names``, in that order; "kernels" means all in that folder, no name means all.

    Raises:
        BenchError: a name that no case has.
    """
    cases = load_cases()
    chosen: dict[str, Case] = {}
    for name in names or list(cases):
        matching = {known: case for known, case in cases.items() if known == name or known.startswith(f"{name}/")}
        if not matching:
            folders = list(dict.fromkeys(known.partition("/")[0] for known in cases))
            close = difflib.get_close_matches(name, [*cases, *folders], n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are folders {', '.join(folders)}"
            raise BenchError(f"no benchmark case {name!r}; {hint}; rlcore bench list shows all")
        chosen |= matching
    return list(chosen.values())
