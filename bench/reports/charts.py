"""The geometry of curves over two logarithmic axes, in pixels; the report's template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, WIDTH - 24, 10, HEIGHT - 40
_MOST_TICKS = 5
_PREFIXES = (
    (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"),
)  # fmt: skip

Point = tuple[float, float]


class Line(NamedTuple):
    name: str
    points: Sequence[Point]


class Curves(NamedTuple):
    """Everything that the template draws."""

    ticks: list[tuple[float, str]]
    """Places on the horizontal axis, and their texts."""
    levels: list[tuple[float, str]]
    """The same on the vertical axis."""
    lines: list[Line]


def curves(lines: Sequence[Line]) -> Curves:
    """Return the lines in pixels; every value is positive."""
    xs, ys = (sorted({point[axis] for line in lines for point in line.points}) for axis in (0, 1))
    levels = _round_values(ys[0], ys[-1])
    across, up = _Scale(xs[0], xs[-1], LEFT, RIGHT), _Scale(levels[0], levels[-1], BOTTOM, TOP)
    return Curves(
        [(across(x), _short(x)) for x in xs[:: math.ceil(len(xs) / _MOST_TICKS)]],
        [(up(level), _short(level)) for level in levels],
        [Line(line.name, [(across(x), up(y)) for x, y in sorted(line.points)]) for line in lines],
    )


class _Scale:
    """Maps values to pixels, by their logarithms."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return round(self._start + self._length * (math.log(value) - self._low) / self._span, 1)


def _round_values(low: float, high: float) -> list[float]:
    """Return values from at most ``low`` to at least ``high``: 1, 2, 5, 10 ..., or powers of ten for a long span."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if high / low < 30 else (1,)
    values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    first = max(i for i, value in enumerate(values) if value <= low * 1.001)
    last = min(i for i, value in enumerate(values) if value >= high * 0.999 and i > first)
    step = math.ceil((last - first) / (_MOST_TICKS - 1))
    return (
        [*values[first:last:step], values[last]] if (last - first) % step == 0 else values[first : last + step : step]
    )


def _short(value: float) -> str:
    if value < 10_000 and value == int(value):
        return str(int(value))
    if value == int(value) and int(value).bit_count() == 1:  # sizes in bytes and tokens
        return f"{value / 2**20:g}Mi" if value >= 2**20 else f"{value / 1024:g}Ki"
    scale, letter = next((pair for pair in _PREFIXES if value >= pair[0] * 0.999), _PREFIXES[-1])
    return f"{value / scale:.3g}{letter}"
