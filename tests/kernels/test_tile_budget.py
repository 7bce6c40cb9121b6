from __future__ import annotations

import math
import re

import pytest

from rlcore.errors import InvalidInputError

pytest.importorskip("triton", reason="triton has no build for this platform")

from rlcore.kernels.linear.tile_budget import rows_scored_at_once, strip_fitting

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
