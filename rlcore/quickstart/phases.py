"""The seconds of each phase of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rlcore.quickstart.output import PHASES


class Phases:
    """``with phases("train"): ...`` adds to ``phases.seconds["train_s"]``."""

    def __init__(self) -> None:
        self.seconds = {f"{name}_s": 0.0 for name in PHASES}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[f"{name}_s"] += time.perf_counter() - started
