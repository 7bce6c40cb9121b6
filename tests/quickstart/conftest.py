"""Runs in processes that begin with all imported that others have written."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.warm import run_warm

OF_OTHERS = (
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
)


@pytest.fixture
def run_python() -> Any:
    return functools.partial(run_warm, modules=OF_OTHERS)
