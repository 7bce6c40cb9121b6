from __future__ import annotations

import math
import re

import pytest
import torch

from rlcore.errors import InvalidInputError

pytest.importorskip("triton", reason="triton has no build for this platform")

from rlcore.kernels.linear import tile_budget
from rlcore.kernels.linear.tile_budget import budget_of, free_bytes, rows_scored_at_once, strip_fitting

V = 151936
NUM_TILES = math.ceil(V / 256)


def taken(num_rows: int, num_columns: int, rows_at_once: int) -> int:
    """Bytes of exponentials and the peaks of their tiles, and of three statistics of each tile of a run of rows."""
    kept = num_rows * (2 * num_columns + 4 * math.ceil(num_columns / 256))
    return kept + 12 * NUM_TILES * min(rows_at_once, num_rows)


@pytest.mark.parametrize("num_rows", [1, 127, 4096, 8192, 32768, 65537])
@pytest.mark.parametrize("budget", [2**28, 2**29, 2**30, 3 * 2**30])
def test_a_strip_and_the_statistics_beside_it_fill_the_budget_and_no_more(num_rows: int, budget: int) -> None:
    columns, rows = strip_fitting(num_rows, V, budget)
    assert columns == V or (columns > 0 and columns % 256 == 0)
    assert 0 < rows <= num_rows
    assert taken(num_rows, columns, rows) <= budget
    assert columns == V or taken(num_rows, columns + 256, rows) > budget


def test_all_exponentials_are_kept_where_the_budget_holds_them() -> None:
    assert strip_fitting(8192, V, 3 * 2**30) == (V, 8192)


@pytest.mark.parametrize("num_rows", [1, 100, 4096, 65537])
def test_the_least_budget_that_an_error_names_is_enough(num_rows: int) -> None:
    with pytest.raises(InvalidInputError, match=r"the least is \d+") as caught:
        strip_fitting(num_rows, V, min(num_rows, 900) * 500)
    least = int(re.findall(r"the least is (\d+)", str(caught.value))[0])
    assert taken(num_rows, *strip_fitting(num_rows, V, least)) <= least
    with pytest.raises(InvalidInputError, match=f"the least is {least}"):
        strip_fitting(num_rows, V, least - 1)


@pytest.mark.parametrize("num_rows", [0, 1, 4096, 65537])
@pytest.mark.parametrize("budget", [400_000, 2**26, 2**30])
def test_scores_alone_need_statistics_alone(num_rows: int, budget: int) -> None:
    rows = rows_scored_at_once(num_rows, V, budget)
    assert rows > 0 and taken(num_rows, 0, rows) <= budget


@pytest.mark.parametrize(
    ("free", "num_rows", "expected"),
    [
        (None, 8192, 2**30),
        (80 * 2**30, 8192, 2**30),
        (4 * 2**30, 8192, 2**30),
        (3 * 2**30, 8192, 3 * 2**28),
        (2**30, 8192, 300 * 2**20),
        (0, 8192, 300 * 2**20),
        (0, 2**17, 8 * 2**17 * 516),  # eight tiles of each row
        (0, 2**20, 2**30),
    ],
)
def test_a_budget_that_nobody_gave_falls_where_the_device_is_short(
    free: int | None, num_rows: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_budget, "free_bytes", lambda device: free)
    budget = budget_of(None, num_rows, torch.device("cuda", 0))
    assert budget == expected
    columns, _ = strip_fitting(num_rows, V, budget)
    assert columns >= 256
    assert budget_of(12345, num_rows, torch.device("cuda", 0)) == 12345


def test_what_the_cache_of_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        is_capturing = False
        mem_get_info = staticmethod(lambda device: (1000, 9000))
        memory_stats = staticmethod(
            lambda device: {"reserved_bytes.all.current": 700, "allocated_bytes.all.current": 300}
        )

        @classmethod
        def is_current_stream_capturing(cls) -> bool:
            return cls.is_capturing

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert free_bytes(torch.device("cuda", 0)) == 1400
    monkeypatch.setattr(Module, "is_capturing", True)
    assert free_bytes(torch.device("cuda", 0)) is None, "a graph is not asked for what it would never ask again"
    assert free_bytes(torch.device("cpu")) is None
