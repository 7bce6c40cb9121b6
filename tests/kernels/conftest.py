"""Fresh memory is poisoned: an element that an operator leaves unwritten shows up as NaN.

Random numbers are the same in each run of a test, whatever ran before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(True)

        return made

    with torch.device("cpu"):  # at its first use a context remembers for ever which functions make tensors
        torch.empty(0)
    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoning(Tensor.new_empty))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
