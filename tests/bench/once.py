"""Registered cases that run once, in this process."""

from __future__ import annotations

from rlcore.bench.case import load_cases
from rlcore.bench.measurement.measure import Sampling, run_case
from rlcore.bench.record import CaseResult
from rlcore.registry import get_device

ONCE = Sampling(min_samples=1, max_samples=1, max_warmup=1)


def run_once(name: str, device: str = "cpu") -> list[CaseResult]:
    return run_case(load_cases()[name], get_device(device), ONCE)
