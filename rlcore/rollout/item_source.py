"""``ItemSource``: the items of a dataloader, over and over, with a place to continue from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlcore.errors import InvalidInputError, StateError


class ItemSource:
    """Takes elements of one dataloader; begins again at its end.

    A dataloader with ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``) keeps its place by
    itself. For another one the elements of the current pass are counted, and skipped after ``load_state_dict``: it must
    have the same order again, which torch's ``DataLoader(shuffle=True)`` has not.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._num_taken = 0
        self._state: Mapping[str, Any] | None = None

    @property
    def is_used(self) -> bool:
        return self._loader is not None

    def use(self, dataloader: Iterable[Any]) -> None:
        """Take items of ``dataloader`` from now on.

        Raises:
            InvalidInputError: it cannot be iterated over.
            StateError: it is another one than before.
        """
        if self._loader is None:
            if not isinstance(dataloader, Iterable) or isinstance(dataloader, str | bytes | Mapping):
                raise InvalidInputError(
                    f"prepare_batch() takes a dataloader, or a list of items, got {dataloader!r:.200}"
                )
            self._loader = dataloader
            self._continue()
        if self._loader is not dataloader:
            raise StateError(
                "prepare_batch() was called with another dataloader before; give the same object each time"
            )

    def take(self) -> list[Any]:
        """Return the next element's items: those of a list, or the element itself."""
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            for element in self._iterator:
                self._num_taken += 1
                items = list(element) if isinstance(element, list | tuple) else [element]
                if items:
                    return items
            self._iterator, self._num_taken = None, 0
        why = " left: an iterator has one pass; give a list" if isinstance(self._loader, Iterator) else ""
        raise InvalidInputError(f"the dataloader of prepare_batch() has no items{why}")

    def state_dict(self) -> dict[str, Any]:
        if self._loader is None and self._state is not None:
            return dict(self._state)
        own = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        return {"num_taken": self._num_taken, "loader": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, once ``use`` has named the dataloader."""
        self._state = state

    def _continue(self) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        if state["loader"] is not None and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state["loader"])
            self._num_taken = state["num_taken"]
            return
        self._iterator = iter(self._loader)
        for _ in range(state["num_taken"]):
            next(self._iterator, None)
        self._num_taken = state["num_taken"]
