from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.kernels.dispatch import Query, choose

triton = pytest.importorskip("triton", reason="triton has no build for this platform")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["interpreted_triton.py", "interpreted_scans.py", "interpreted_limits.py", "test_strided_copy.py"]
)
def test_kernels_pass_under_the_interpreter(name: str, run_python: Callable[..., Any]) -> None:
    tests = Path(__file__).with_name(name)
    result = run_python(["-m", "pytest", "-q", str(tests)], env={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_device_that_triton_does_not_build_for_is_refused_with_the_reason() -> None:
    choice = choose("token_logprob", Query("cpu", torch.float32, 0, 10))
    refused = dict(choice.refused)
    assert choice.implementation == "chunked"
    assert refused["triton"].startswith("triton builds for ") and refused["triton"].endswith(", not for 'cpu'")


def test_without_triton_the_refusal_says_how_to_get_it(run_python: Callable[..., Any]) -> None:
    code = (
        "import importlib.util, torch\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "from rlcore.kernels.dispatch import Query, choose\n"
        "print(dict(choose('token_logprob', Query('cpu', torch.float32, 0, 10)).refused)['triton'])"
    )
    assert "pip install" in run_python(code).stdout
