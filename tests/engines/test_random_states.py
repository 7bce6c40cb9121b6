"""The random states of a worker as a checkpoint holds them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from rlcore.engines.checkpoints.random_states import random_states, random_states_of, setter_of_random_states
from rlcore.registry import get_device


class Saved(NamedTuple):
    """Stands for a tensor in a file."""

    tensor: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.tensor


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(before)


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_gaussian_numbers_go_on_where_they_were(num_drawn: int) -> None:
    """They come in pairs: Python keeps the second of one until it is asked for."""
    device = get_device("cpu")
    random.seed(7)
    for _ in range(num_drawn):
        random.gauss(0, 1)
    saved = {name: Saved(state) for name, state in random_states(device).items()}
    expected = [*(random.gauss(0, 1) for _ in range(5)), torch.rand(()).item()]
    for num_drawn_since in (0, 1):
        random.seed(8)
        for _ in range(num_drawn_since):
            random.gauss(0, 1)
        setter_of_random_states(saved, random_states_of(device), device)()  # type: ignore[arg-type]
        assert [*(random.gauss(0, 1) for _ in range(5)), torch.rand(()).item()] == expected
