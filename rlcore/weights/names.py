"""Comparison of the named tensors of two sources that should belong to one model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

_SHOWN = 5  # of each kind: a wrong model differs in thousands


class Shaped(Protocol):
    @property
    def shape(self) -> Iterable[int]: ...


def mismatch(own: Mapping[str, Shaped], given: Mapping[str, Shaped]) -> str:
    """Return how ``given`` differs from ``own`` in names and shapes, for an error; "" if it does not."""
    kinds = {
        "missing": own.keys() - given.keys(),
        "unexpected": given.keys() - own.keys(),
        "of other shapes": {
            f"{name} {list(given[name].shape)} for {list(own[name].shape)}"
            for name in own.keys() & given.keys()
            if own[name].shape != given[name].shape
        },
    }
    return "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)


def listed(names: Collection[str]) -> str:
    """Return names for an error; of many the first ones."""
    shown = ", ".join(sorted(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
