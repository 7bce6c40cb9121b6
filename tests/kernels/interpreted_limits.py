"""Rows in Triton where the device limits its programs, on the CPU under TRITON_INTERPRET=1: see interpreted_triton.py.

test_triton.py runs this file in a process of its own; pytest does not collect it by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from rlcore.kernels import triton_programs as programs
from rlcore.kernels.token.triton_rows import gradient_tile, statistics_tile
from rlcore.registry import registry
from rlcore.types import ProgramLimits
from tests.kernels.interpreted_triton import assert_matches_float64, random_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy warns of inf - inf


@pytest.fixture(autouse=True)
def _limited_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spec, plugin = registry().devices["cpu"]
    limited = dataclasses.replace(spec, program_limits=ProgramLimits(tile_bytes=1023, num_programs=2))
    monkeypatch.setitem(registry().devices, "cpu", (limited, plugin))
    programs.limits.cache_clear()
    assert (statistics_tile("cpu"), gradient_tile("cpu")) == ({"LANES": 1, "RUN": 16}, {"BLOCK": 16})
    yield
    programs.limits.cache_clear()


# one launch; three rows in two launches; more columns than a tile; rows that do not flatten
@pytest.mark.parametrize("shape", [(1, 17), (3, 7), (5, 70), (2, 3, 33)], ids=str)
def test_rows_in_several_launches_of_small_tiles_match_float64(shape: tuple[int, ...]) -> None:
    logits, targets = random_logits(*shape)
    assert_matches_float64(logits, targets)
    keep_mask = torch.rand(logits.shape) < 0.5
    keep_mask.scatter_(-1, targets[..., None], True)
    assert_matches_float64(logits.mT.contiguous().mT, targets, keep_mask=keep_mask, temperature=0.7)
