"""Where in the model the trainer and the sampler differ: each part's results for the same tokens, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlcore.activations import ROLES, in_order


@dataclass(frozen=True, slots=True)
class PartDifference:
    """The results of one part of the model."""

    name: str
    """Such as "layers.3.attention"."""
    kind: str
    """Such as "attention"."""
    relative: float
    """The norm of the difference over that of the trainer's result."""


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[PartDifference]:
    """Return the parts that both have, with results of one shape, in the order in which they are computed."""
    shared = [name for name in in_order(ours) if name in theirs and ours[name].shape == theirs[name].shape]
    return [_difference(name, ours[name].double(), theirs[name].double()) for name in shared]


def _difference(name: str, ours: Tensor, theirs: Tensor) -> PartDifference:
    apart, norm = float((ours - theirs).norm()), float(ours.norm())
    return PartDifference(name, ROLES[name.rpartition(".")[2]], apart / norm if norm else apart)


def first_difference(parts: Sequence[PartDifference]) -> PartDifference | None:
    """Return the first part that differs at all: what precedes it is equal to the bit."""
    return next((part for part in parts if part.relative > 0), None)


def largest_growth(parts: Sequence[PartDifference]) -> PartDifference | None:
    """Return the part at which the difference grows most over that of the part before."""
    befores = [0.0, *(part.relative for part in parts[:-1])]
    grown = [
        (part.relative - before, part) for before, part in zip(befores, parts, strict=False) if part.relative > before
    ]
    return max(grown, key=lambda one: one[0])[1] if grown else None
