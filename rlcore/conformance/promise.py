"""The promises of an executor: the methods of its abstract class, and a mark that names those which a test is about."""

from __future__ import annotations

from typing import Literal

import pytest

Kind = Literal["train", "inference"]
CLASSES: dict[Kind, str] = {"train": "TrainExecutor", "inference": "InferenceExecutor"}
ROUTES = ("local", "direct", "packed", "collective")
_EVERY = ("build", "onload", "offload", "meta", "memory_report", *(f"sync_call ({route})" for route in ROUTES), "close")
METHODS: dict[Kind, tuple[str, ...]] = {
    "train": (
        *_EVERY,
        "train_step",
        "evaluate",
        "score",
        "module",
        "state_dict",
        "load_state_dict",
        "save",
        "end_save",
        "load",
        "export",
        "several workers",
    ),
    "inference": (
        *_EVERY,
        "check_prompts",
        "generate",
        "submit",
        "collect",
        "abort",
        "pause",
        "resume",
        "read_weights",
        "take_weights",
    ),
}
"""The methods by which a run is reported, and what a method does by several ways."""
ALWAYS: dict[Kind, tuple[str, ...]] = {"train": ("build", "train_step"), "inference": ("build", "generate")}
"""An executor without these is none."""


def promise(contract: str, *methods: str) -> pytest.MarkDecorator:
    """Mark a test by what the executor promises, a sentence, and by the methods that keep it, the first of them most.

    A test that fails is reported with both.
    """
    assert all(any(method in known for known in METHODS.values()) for method in methods), methods
    return pytest.mark.promise(contract, *methods)


def by_route(contract: str) -> pytest.MarkDecorator:
    """Parametrize a test by the argument ``route``, which is what each of its cases is about."""
    cases = [pytest.param(route, marks=promise(contract, f"sync_call ({route})")) for route in ROUTES]
    return pytest.mark.parametrize("route", cases)
