"""The result of a check, and a runner that keeps a failing check from ending the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.deadline import outcomes_within
from rlcore.errors import one_line

Status = Literal["OK", "WARN", "FAIL"]
CHECK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The outcome of a check function; ``fix`` is the command or the advice where something is wrong."""

    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A line of the report: the outcome of a named check."""

    check: str
    status: Status
    found: str
    fix: str = ""


def ok(found: str) -> CheckVerdict:
    return CheckVerdict("OK", found)


def warn(found: str, fix: str) -> CheckVerdict:
    return CheckVerdict("WARN", found, fix)


def fail(found: str, fix: str) -> CheckVerdict:
    return CheckVerdict("FAIL", found, fix)


def run_check(
    name: str, check: Callable[..., CheckVerdict], *arguments: Any, timeout_s: float = CHECK_TIMEOUT_S
) -> CheckResult:
    """Run a check with a deadline. A check that raises, calls ``sys.exit`` or hangs has failed."""
    (outcome,) = outcomes_within(timeout_s, [functools.partial(check, *arguments)])
    error = outcome.error
    verdict = outcome.get() if error is None else fail(f"the check itself failed: {one_line(error)}", "")
    return CheckResult(name, verdict.status, verdict.found, verdict.fix)
