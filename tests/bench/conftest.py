"""Modules of this folder that tests and their child processes share can be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def settings_of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """For real vLLM on the CPU. It compiles a part of its sampler, which takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCORE_RUNTIME", str(tmp_path_factory.mktemp("r")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield patch
