from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.kernels import triton_target as target
from rlcore.kernels.dispatch import Query, choose

triton = pytest.importorskip("triton", reason="triton has no build for this platform")


INTERPRETED = ["interpreted_triton.py", "interpreted_scans.py", "interpreted_limits.py", "test_strided_copy.py"]
INTERPRETED += ["test_quantized_copy.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_pass_under_the_interpreter(name: str, run_python: Callable[..., Any]) -> None:
    tests = str(Path(__file__).with_name(name))
    result = run_python(["-m", "pytest", "-q", tests], env={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_device_that_triton_does_not_build_for_is_refused_with_the_reason() -> None:
    choice = choose("token_logprob", Query("cpu", torch.float32, 0, 10))
    refused = dict(choice.refused)
    assert choice.implementation == "chunked"
    assert refused["triton"].startswith("triton builds for ") and refused["triton"].endswith(", not for 'cpu'")


@pytest.fixture
def _choosing_anew() -> Iterator[None]:
    for cache in (choose, target._absence_here):
        cache.cache_clear()
    yield
    for cache in (choose, target._absence_here):
        cache.cache_clear()


@pytest.mark.usefixtures("_choosing_anew")
def test_without_triton_the_refusal_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )
    refused = dict(choose("token_logprob", Query("cpu", torch.float32, 0, 10)).refused)
    assert refused["triton"] == "the package 'triton' is not installed; run: pip install triton"
