"""The cheapest tile of a product whose logits are merged into statistics: its multiplications, and the rest.

    seconds of a logit = 2 H / rate + rest      whole tiles of rows are computed

A tile of more columns multiplies faster. One of more rows has its statistics done while the tensor cores work: a row is
in one thread instead of several, and nothing waits for neighbours. So short sums (a small hidden size) want tall tiles.
The constants are of an H100; only their proportions matter, and those of an H200 are alike.

Letters: T rows, H hidden size.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class TileShape(NamedTuple):
    """Rows and columns of the logits that a program has at a time."""

    rows: int
    columns: int


class TileCost(NamedTuple):
    """The costs of a logit."""

    rate: float
    """Multiplications and additions a second."""
    rest_s: float
    """Seconds for what is done with a logit when it is there."""


WIDE, TALL = TileShape(128, 256), TileShape(256, 128)
COSTS = {WIDE: TileCost(762e12, 0.42e-12), TALL: TileCost(690e12, 0.0)}
"""Fitted to 16384 x 1024 x 32000, which takes 1.63 and 1.53 ms, and 8192 x 4096 x 151808, 13.9 and 14.7. They then give
3.48 and 3.69 ms for 2048 x 4096 x 151808, measured 3.44 and 3.71; 21.6 and 22.1 for 24576 x 2048 x 151808, measured
22.0 and 23.0."""


def cheapest_tile(T: int, H: int) -> TileShape:
    """Return the tile of a product that keeps nothing but statistics."""
    return min(COSTS, key=lambda tile: cost_of(tile, T, H))


def cost_of(tile: TileShape, T: int, H: int) -> float:
    """Return the seconds for a column of ``T`` rows."""
    cost = COSTS[tile]
    return math.ceil(T / tile.rows) * tile.rows * (2 * H / cost.rate + cost.rest_s)
