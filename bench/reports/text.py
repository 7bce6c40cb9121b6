"""Numbers as people read them."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_LONG = 100_000


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def rate(value: float, unit: str) -> str:
    scale, prefix = next((pair for pair in _PREFIXES if value >= pair[0]), _PREFIXES[-1])
    return f"{value / scale:.3g} {prefix}{unit}"


def count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value of a metric with its unit; "1" is a share."""
    if unit == "s":
        return seconds(value)
    if unit == "1":
        return f"{value:.3g}"
    return rate(value, unit) if unit == "B" or "/s" in unit else f"{count(value)} {unit}"


def size(nbytes: int) -> str:
    """Return bytes exactly, in KiB and the like, where that is short."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale and nbytes % scale == 0 and nbytes // scale < _LONG:
            return f"{nbytes // scale} {unit}"
    return rate(nbytes, "B") if nbytes >= 2**20 else f"{nbytes} B"


def words(name: str) -> str:
    return name.replace("_", " ")
