"""The smaller programs begin with torch and transformers imported."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.warm import ENGINES, run_warm


@pytest.fixture
def run_python() -> Any:
    return functools.partial(run_warm, modules=ENGINES)
