"""In a run of tests each micro-benchmark runs once, as a test. Measured: ``make bench-micro``."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark: pip install 'rlcore[bench]'")

from rlcore.bench.pytest_plugin import benchmark_on

__all__ = ["benchmark_on"]


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, benchmark: Any) -> Any:
    benchmark.disabled = not request.config.getoption("benchmark_only")
    return benchmark
