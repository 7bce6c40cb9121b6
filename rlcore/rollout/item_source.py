"""``ItemSource``: the items of a dataloader, over and over, with a place to continue from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlcore.errors import InvalidInputError, StateError

_END = object()


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
        self._is_end_doubtful = False
        """The dataloader has raised something, which ends a generator for good: it is not at its end."""
        self._state: Mapping[str, Any] = {"num_taken": 0, "loader": None}
        """Where to begin once ``use`` has named the dataloader."""

    @property
    def is_used(self) -> bool:
        return self._loader is not None

    def use(self, dataloader: Iterable[Any]) -> None:
        """Take items of ``dataloader`` from now on. Where that raises, nothing has changed.

        Raises:
            InvalidInputError: it cannot be iterated over.
            StateError: it is another one than before.
        """
        if self._loader is None:
            if not isinstance(dataloader, Iterable) or isinstance(dataloader, str | bytes | Mapping):
                raise InvalidInputError(
                    f"prepare_batch() takes a dataloader, or a list of items, got {dataloader!r:.200}"
                )
            self._continue(dataloader, self._state)
        if self._loader is not dataloader:
            raise StateError(
                "prepare_batch() was called with another dataloader before; give the same object each time"
            )

    def take(self) -> list[Any]:
        """Return the next element's items: those of a list, or the element itself.

        What the dataloader raises, and Ctrl-C in it, takes none: the next call goes on at the same place.
        """
        for _ in range(2):
            while (element := self._next()) is not _END:
                self._num_taken += 1
                items = list(element) if isinstance(element, list | tuple) else [element]
                if items:
                    return items
            self._iterator, self._num_taken = None, 0
        why = " left: an iterator has one pass; give a list" if isinstance(self._loader, Iterator) else ""
        raise InvalidInputError(f"the dataloader of prepare_batch() has no items{why}")

    def state_dict(self) -> dict[str, Any]:
        if self._loader is None:
            return dict(self._state)
        own = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        return {"num_taken": self._num_taken, "loader": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, once ``use`` has named the dataloader."""
        self._state = state

    def _next(self) -> Any:
        """Return the next element of this pass, or ``_END``."""
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            element = next(self._iterator, _END)
        except BaseException:  # Ctrl-C too
            self._is_end_doubtful = True
            raise
        if element is _END and self._is_end_doubtful:
            self._continue(self._loader, self.state_dict())
            return self._next()
        self._is_end_doubtful = False
        return element

    def _continue(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Take elements of ``loader`` from the place of ``state`` on."""
        iterator = None
        if state["loader"] is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(state["loader"])
        else:
            iterator = iter(loader)
            for _ in range(state["num_taken"]):
                next(iterator, None)
        self._loader, self._iterator, self._num_taken = loader, iterator, state["num_taken"]
        self._is_end_doubtful = False
