"""A store on another host that answers nothing, as over a link that is down: there are no notes, and nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlcore.collectives import rendezvous as module
from rlcore.collectives.rendezvous import Rendezvous


class SilentStore:
    def __init__(self) -> None:
        self.asked, self.told, self.end = 0, 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        return self.end.wait()

    def set(self, key: str, text: str) -> None:
        self.told += 1


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    store = SilentStore()
    yield store
    store.end.set()


def test_notes_of_a_store_that_does_not_answer_are_none(silent: SilentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    found: Any = Rendezvous.__new__(Rendezvous)
    found.rank, found.store, found.infos, found._folder = 0, silent, {}, None
    found._is_elsewhere, found._is_cut = True, False
    began = time.monotonic()
    assert [found.read("failed"), found.read("failed")] == [{}, {}]
    found.write("failed", "why")
    assert (silent.asked, silent.told) == (1, 0), "the thread that asks has the lock of the store"
    assert time.monotonic() - began < 5
