"""The random states of a worker as a checkpoint holds them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy
import pytest
import torch

from rlcore.engines.checkpoints.damage import DamageError
from rlcore.engines.checkpoints.random_states import random_states, random_states_of, setter_of_random_states
from rlcore.registry import get_device


class Saved(NamedTuple):
    """Stands for a tensor in a file."""

    tensor: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.tensor


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, of_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(before)
    numpy.random.set_state(of_numpy)


def saved_states() -> dict[str, Saved]:
    return {name: Saved(state) for name, state in random_states(get_device("cpu")).items()}


def put_back(saved: dict[str, Saved], workers: str = "1 cpu worker") -> None:
    setter_of_random_states(saved, workers, get_device("cpu"))()  # type: ignore[arg-type]


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


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
def test_numpy_goes_on_where_it_was(num_drawn: int) -> None:
    """Its Gaussian numbers come in pairs, too."""
    numpy.random.seed(7)
    for _ in range(num_drawn):
        numpy.random.normal()
    saved = saved_states()
    expected = [*numpy.random.normal(size=5).tolist(), numpy.random.rand()]
    for num_drawn_since in (0, 1):
        numpy.random.seed(8)
        for _ in range(num_drawn_since):
            numpy.random.normal()
        put_back(saved)
        assert [*numpy.random.normal(size=5).tolist(), numpy.random.rand()] == expected


def test_at_another_number_of_workers_numpy_starts_anew() -> None:
    saved = saved_states()
    put_back(saved, "2 cpu workers")
    first = numpy.random.rand()
    put_back(saved, "2 cpu workers")
    assert numpy.random.rand() == first, "from the seed of the checkpoint"


def test_a_program_without_numpy_and_one_with_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is changed; a checkpoint from before numpy's state was kept leaves it alone."""
    own = numpy.random.get_bit_generator()
    saved = saved_states()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        without = saved_states()
        before = numpy.random.get_bit_generator().state
        put_back(saved)
        assert numpy.random.get_bit_generator().state == before
    finally:
        numpy.random.set_bit_generator(own)
    put_back(without)
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert saved_states().keys() == without.keys() == {name for name in saved if "numpy" not in name}


@pytest.mark.parametrize("wrong", [torch.arange(625), torch.arange(10), torch.full((625,), -1)])
def test_what_is_no_state_of_numpy_is_refused(wrong: torch.Tensor) -> None:
    expected, saved = numpy.random.get_state()[1].tolist(), saved_states()
    with pytest.raises(DamageError, match="it holds no state of a generator"):
        put_back(saved | {"rank-0-numpy": Saved(wrong + (wrong >= 0))})
    assert numpy.random.get_state()[1].tolist() == expected
