"""The smaller programs begin with torch imported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.warm import run_warm


@pytest.fixture
def run_python() -> Any:
    return run_warm
