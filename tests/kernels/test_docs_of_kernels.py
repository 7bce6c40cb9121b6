"""The code of docs/kernels.md runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accuracy import assert_as_accurate
from tests.kernels.plain import linear_scores

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(blocks) == 7
    whole = names["linear_logprob"](names["hidden"], names["weight"], names["targets"], with_entropy=True)
    exact = linear_scores(names["hidden"].double(), names["weight"].double(), targets=names["targets"])
    assert_as_accurate(list(names["found"]), list(whole), exact)
    assert names["mine"].grad.any() and names["weight"].grad.any() and names["sharded"].grad.full_tensor().any()
