"""The load of experts as numbers: of layers of different sizes, and of none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rlcore.engines.executors.expert_load import ExpertLoad
from rlcore.routing.routers import Router


def load_of(*counts: list[int]) -> dict[str, float]:
    """Return the metrics of layers that have counted so much."""
    routers = [Router("", layer, nn.Identity(), len(row), 1, nn.Identity()) for layer, row in enumerate(counts)]
    load = ExpertLoad(routers, torch.device("cpu"))
    for own, row in zip(load._counts, counts, strict=True):
        own[: len(row)] += torch.tensor(row)
    return {name.removeprefix("expert_load/"): float(value) for name, value in load.joined().items()}


def test_a_smaller_layer_lacks_no_experts_and_one_without_tokens_does_not_count() -> None:
    assert load_of([3, 3], [0, 0, 0]) == pytest.approx({"max_over_mean": 1.0, "entropy": 1.0, "unused": 0.0})
    entropy = (1 + 1.5 * math.log(2) / math.log(4)) / 2
    assert load_of([3, 3], [4, 2, 2, 0], [0, 0, 0]) == pytest.approx(
        {"max_over_mean": 2.0, "entropy": entropy, "unused": 1 / 6}
    )


def test_where_nothing_was_counted_there_is_no_number() -> None:
    assert all(math.isnan(value) for value in load_of([0, 0]).values())
