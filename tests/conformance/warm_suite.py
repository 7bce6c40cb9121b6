"""A plugin for runs of the suites in processes of their own: workers of engines begin with what they import there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.warm import ENGINES, warm, warm_workers


@pytest.fixture(scope="session", autouse=True)
def _warm_workers() -> Iterator[None]:
    warm(*ENGINES)  # before any test counts processes
    with warm_workers():
        yield
