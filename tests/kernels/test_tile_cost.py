from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from rlcore.bench.record import CaseResult, read
from rlcore.kernels.linear import tile_cost
from rlcore.kernels.linear.tile_cost import TALL, WIDE, TileCost, TileShape, cheapest_tile

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CASE = "kernels/tile_shapes"
SHAPES = {"wide": WIDE, "tall": TALL}
NEAR = 1.02
"""About what two runs of one kernel differ by."""


def recorded() -> dict[str, dict[tuple[int, int], dict[TileShape, float]]]:
    """Seconds by device, by T and H, by shape, in the records of the repository."""
    found: dict[str, dict[tuple[int, int], dict[TileShape, float]]] = {}
    for path in sorted(RESULTS.glob("tiles-*.json")):
        record = read(path)
        for one in record.passed():
            if one.name == CASE:
                sizes = int(one.params["T"]), int(one.params["H"])
                found.setdefault(record.device_name, {}).setdefault(sizes, {})[SHAPES[one.implementation]] = time(one)
    return found


def time(result: CaseResult) -> float:
    return median(result.samples("device_time") if result.has("device_time") else result.samples("time"))


def losses() -> dict[str, float]:
    """The chosen tile's time, as a multiple of the fastest tile's, by device and sizes."""
    return {
        f"{device}, T {T}, H {H}": times[cheapest_tile(T, H)] / min(times.values())
        for device, by_size in recorded().items()
        for (T, H), times in by_size.items()
    }


def test_the_tile_that_the_model_chooses_is_as_fast_as_any_in_the_record() -> None:
    found = losses()
    assert len(found) >= 6
    assert {where: loss for where, loss in found.items() if loss > NEAR} == {}


@pytest.mark.parametrize("rest_s", [0.0, 4e-12], ids=["nothing beside the product", "too much"])
def test_another_model_would_be_found_out(rest_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tile_cost.COSTS, WIDE, TileCost(tile_cost.COSTS[WIDE].rate, rest_s))
    assert max(losses().values()) > NEAR


def test_few_rows_are_not_filled_up() -> None:
    assert cheapest_tile(128, 512) == WIDE != cheapest_tile(256, 512)
