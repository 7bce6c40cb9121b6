"""Steps that give the same bits each time: torch's deterministic algorithms, in force while a step runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlcore.engines._torch_private import inductor_as_it_is

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Without it torch refuses products on NVIDIA's GPUs while its algorithms are deterministic; read at the first one."""


def prepare_deterministic() -> None:
    """Set what has to be set before the first product of this process, unless the user has."""
    os.environ.setdefault(*_WORKSPACE)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Inside, torch takes deterministic algorithms, and raises RuntimeError for an operator that has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    with inductor_as_it_is():
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # it would write all memory twice
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = fills
