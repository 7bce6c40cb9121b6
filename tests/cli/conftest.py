"""The command in processes that begin with torch imported, or called here, after which the log is as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.warm import run_warm


@pytest.fixture
def run_python() -> Any:
    return run_warm


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    logger = logging.getLogger("rlcore")
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
