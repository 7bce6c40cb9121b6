"""The items of a dataloader, whatever it raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlcore.rollout.item_source import ItemSource


class Interrupted:
    """Twelve items; the generator that gives them is interrupted at these, once each."""

    def __init__(self, *at: int) -> None:
        self._at = set(at)

    def __iter__(self) -> Iterator[int]:
        for item in range(12):
            if item in self._at:
                self._at.remove(item)
                raise KeyboardInterrupt
            yield item


class Places(Interrupted):
    """The same, which keeps its place by itself, as torchdata's ``StatefulDataLoader`` does."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        for item in list(range(12))[self.place :]:
            if item in self._at:
                self._at.remove(item)
                raise KeyboardInterrupt
            self.place += 1
            yield item
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Survives:
    """Its iterators go on after an error, as torch's of several workers do, and each has another order."""

    num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return SurvivingPass(list(range(12))[:: -1 if self.num_passes > 1 else 1], fails=self.num_passes == 1)


class SurvivingPass:
    def __init__(self, items: list[int], *, fails: bool) -> None:
        self._items, self._fails = items, fails

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._fails and len(self._items) == 5:
            self._fails = False
            raise KeyboardInterrupt
        if not self._items:
            raise StopIteration
        return self._items.pop(0)


def taken(source: ItemSource, count: int) -> list[Any]:
    """Return so many items; Ctrl-C is ignored."""
    found: list[Any] = []
    while len(found) < count:
        try:
            found += source.take()
        except KeyboardInterrupt:
            continue
    return found


@pytest.mark.parametrize("loader", [Interrupted(7), Interrupted(0, 7, 8, 11), Places(0, 7, 8, 11), Survives()])
def test_ctrl_c_in_a_dataloader_takes_none_and_repeats_none(loader: Any) -> None:
    """It ends a generator for good, which is not the end of the items."""
    source = ItemSource()
    source.use(loader)
    assert taken(source, 12) == list(range(12))
    assert sorted(taken(source, 12)) == list(range(12))


def test_an_iterator_that_was_interrupted_has_ended() -> None:
    source = ItemSource()
    source.use(iter(Interrupted(3)))
    assert taken(source, 3) == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        source.take()
    with pytest.raises(ValueError, match="has no items left: an iterator has one pass; give a list"):
        source.take()


@pytest.mark.parametrize("has_place", [True, False])
def test_a_dataloader_that_cannot_continue_once_continues_at_the_next_call(has_place: bool) -> None:
    class Away(Places):
        is_away = True

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.is_away:
                self.is_away = False
                raise OSError("planted: the data server is away")
            super().load_state_dict(state)

    class AwayToo(Interrupted):
        is_away = True

        def __iter__(self) -> Iterator[int]:
            if self.is_away:
                self.is_away = False
                raise OSError("planted: the data server is away")
            return super().__iter__()

    source, state = ItemSource(), {"num_taken": 5, "loader": {"place": 5} if has_place else None}
    source.load_state_dict(state)
    loader: Any = Away() if has_place else AwayToo()
    with pytest.raises(OSError, match="planted"):
        source.use(loader)
    assert not source.is_used and source.state_dict() == state
    source.use(loader)
    assert source.take() == [5]
