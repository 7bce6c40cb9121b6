"""The blow of a fault in one step: whom it meets, and at which moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlcore.chaos.engines import Engines
from rlcore.engines.weight_sync.channels.peers import WorkerPeers

_LATEST_S = 0.25
"""Moments are drawn from this time after the start of a step; most steps of so small a model end within it."""
_CALLS_OF_A_SYNC = 30
"""Roughly; those by small buckets have more, others fewer."""


@dataclass
class Strike:
    """One fault in one step."""

    engines: Engines
    step: str
    draw: random.Random
    words: str = ""
    """The deed and its moment, in words."""
    rank: int = 0
    device: str = ""
    """The device of the worker that was struck. A worker of another engine may share its process."""
    has_struck: bool = False

    @property
    def engine(self) -> Any:
        """The engine that the step uses; for those that use both, one of them."""
        uses = {"generate": "infer", "sync": "either", "close": "either", "offload": "either"}.get(self.step, "train")
        chosen = self.draw.choice(["train", "infer"]) if uses == "either" else uses
        return self.engines.train if chosen == "train" else self.engines.infer

    def victim(self) -> Any:
        engine = self.engine
        worker = self.draw.choice(engine.executors[0].workers)
        self.rank, self.device = worker.context.rank, worker.context.device_name
        self.words = f"rank {worker.context.rank} of {engine.label}"
        return worker

    def act(self) -> None:
        self.has_struck = True

    @contextlib.contextmanager
    def at_a_moment(self, act: Callable[[], None]) -> Iterator[None]:
        """Inside, ``act`` comes once: at a point of the step, or after some time."""
        if self.step == "sync" and self.draw.random() < 0.6:
            with self._before_a_call(self.draw.randrange(_CALLS_OF_A_SYNC), act):
                yield
            return
        if self.step in ("save_in_background", "close") and self.draw.random() < 0.6:
            self.words += " when a save has begun" if self.step != "close" else " just before it"
            self.engines.between = partial(self._do, act)
            try:
                yield
            finally:
                self.engines.between = lambda: None
            return
        delay_s = self.draw.random() * _LATEST_S
        self.words += f" after {delay_s:.3f} s"
        with soon(delay_s, partial(self._do, act)):
            yield

    def _do(self, act: Callable[[], None]) -> None:
        self.has_struck = True
        act()

    @contextlib.contextmanager
    def _before_a_call(self, number: int, act: Callable[[], None]) -> Iterator[None]:
        real = WorkerPeers.call
        numbers = itertools.count()

        def call(peers: WorkerPeers, method: str, *arguments: Any) -> list[Any]:
            if next(numbers) == number:
                self.words += f" before call {number} of the sync, {method}()"
                self._do(act)
            return real(peers, method, *arguments)

        WorkerPeers.call = call  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            WorkerPeers.call = real  # type: ignore[method-assign]
            if not self.has_struck:
                self.words += " after it"
                self._do(act)


@contextlib.contextmanager
def soon(delay_s: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(delay_s, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
