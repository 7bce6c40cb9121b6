"""Charts as inline SVG. Colours are classes (``s0`` to ``s6``), which the page gives in light and dark.

Okabe and Ito's colours can be told apart by the colour-blind; lines differ in their marks as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 24, 10, 40
_COLOURS = 7
_MOST_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]


def bar(share: float, colour: int) -> str:
    """A horizontal bar of ``share`` of its width; what is more than 1 is cut, for the text says it."""
    width = 100 * min(1.0, max(0.0, share))
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="10"/>'
        f'<rect class="s{colour % _COLOURS}" width="{width:.2f}" height="10"/></svg>'
    )


def stack(parts: Sequence[float]) -> str:
    """A bar of parts one behind the other, in the colours of their order."""
    total, at, found = sum(parts) or 1.0, 0.0, []
    for colour, part in enumerate(parts):
        width = 100 * part / total
        found.append(f'<rect class="s{colour % _COLOURS}" x="{at:.2f}" width="{width:.2f}" height="10"/>')
        at += width
    return (
        '<svg class="bar tall" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(found)}</svg>"
    )


def curves(lines: Sequence[Line], *, x_title: str, y_title: str) -> str:
    """Lines over two logarithmic axes; every value is positive."""
    xs, ys = (sorted({point[axis] for line in lines for point in line.points}) for axis in (0, 1))
    across = _Scale(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT)
    levels = _round_values(ys[0], ys[-1])
    up = _Scale(levels[0], levels[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(level):.1f}" y2="{up(level):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 5}" y="{up(level) + 3.5:.1f}" text-anchor="end">{_short(level)}</text>'
        for level in levels
    ]
    parts += [
        f'<text class="tick" x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_short(x)}</text>'
        for x in xs[:: math.ceil(len(xs) / _MOST_TICKS)]
    ]
    for colour, line in enumerate(lines):
        at = [(across(x), up(y)) for x, y in sorted(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline class="l{colour % _COLOURS}" points="{path}"/>')
        parts += [_dot(x, y, colour) for x, y in at]
    title = f"{y_title} over {x_title}: {', '.join(line.name for line in lines)}"
    return (
        f'<svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}"
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{escape(x_title)}</text></svg>"
    )


class _Scale:
    """Maps values to pixels, by their logarithms."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + self._length * (math.log(value) - self._low) / self._span


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


def _dot(x: float, y: float, colour: int) -> str:
    kind = f'class="s{colour % _COLOURS}"'
    if colour % 3 == 1:
        return f'<rect {kind} x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
    if colour % 3 == 2:
        return f'<path {kind} d="M{x:.1f} {y - 4:.1f}L{x + 4:.1f} {y + 3:.1f}H{x - 4:.1f}Z"/>'
    return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def legend_mark(colour: int) -> str:
    """The mark of a line or of a part of a stack, for the text beside it."""
    return f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true">{_dot(5, 5, colour)}</svg>'


def square(colour: int) -> str:
    return (
        f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true"><rect class="s{colour % _COLOURS}" width="10" '
        'height="10"/></svg>'
    )


def _short(value: float) -> str:
    if value < 10_000 and value == int(value):
        return str(int(value))
    if value == int(value) and int(value).bit_count() == 1:  # sizes in bytes and tokens
        return f"{value / 2**20:g}Mi" if value >= 2**20 else f"{value / 1024:g}Ki"
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{letter}"
    for scale, letter in ((1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if value >= scale * 0.999:
            return f"{value / scale:.3g}{letter}"
    return f"{value / 1e-9:.3g}n"
