"""Work is cut so that no launch has more programs, and no program more bytes, than the device takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from rlcore.errors import InvalidInputError
from rlcore.kernels.triton_programs import GridSlice, columns, launches, limits
from rlcore.registry import registry
from rlcore.types import ProgramLimits

SMALL = ProgramLimits(tile_bytes=1000, num_programs=10)


@pytest.fixture
def limited_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spec, plugin = registry().devices["cpu"]
    monkeypatch.setitem(registry().devices, "cpu", (dataclasses.replace(spec, program_limits=SMALL), plugin))
    limits.cache_clear()
    yield
    limits.cache_clear()


def test_limits_are_those_that_the_device_states() -> None:
    assert limits("cpu") is None
    assert limits("no such device") is None
    assert limits("npu") == ProgramLimits(tile_bytes=96 * 1024, num_programs=65_535, has_float64=False)


@pytest.mark.parametrize("num_programs", [1, 10, 100_000_000])
def test_a_device_without_limits_gets_one_launch(num_programs: int) -> None:
    assert list(launches(num_programs, "cpu")) == [GridSlice(num_programs, None)]


def test_no_programs_are_no_launch() -> None:
    assert list(launches(0, "cpu")) == []


@pytest.mark.usefixtures("limited_cpu")
@pytest.mark.parametrize(
    ("num_programs", "expected"),
    [
        (0, []),
        (10, [(10, None)]),
        (11, [(10, 0), (1, 10)]),
        (30, [(10, 0), (10, 10), (10, 20)]),
    ],
)
def test_launches_hold_all_programs_in_order(num_programs: int, expected: list[GridSlice]) -> None:
    assert list(launches(num_programs, "cpu")) == expected


@pytest.mark.parametrize(("column_bytes", "expected"), [(1, 512), (10, 64), (15, 64), (16, 32), (1000, 1)])
def test_a_tile_has_as_many_columns_as_fit(column_bytes: int, expected: int) -> None:
    assert columns(SMALL, column_bytes) == expected


@pytest.mark.parametrize("wrong", [{"tile_bytes": 0}, {"num_programs": 1.5}])
def test_limits_are_whole_numbers(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match=rf"ProgramLimits.{next(iter(wrong))} must be a whole number"):
        ProgramLimits(**{"tile_bytes": 1, "num_programs": 1} | wrong)
